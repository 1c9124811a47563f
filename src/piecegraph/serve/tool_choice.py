"""Calls that a client demands: of one tool, or of any. The answer is then JSON and nothing else, whatever the model.

Of one tool it is the arguments alone; of any, a list of calls, as vLLM has it. The model was told of its tools in its
own words, and reads the calls back in these in the next turn.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

_ANY_ARGUMENTS = {"type": "object"}


def one_call(function: dict[str, Any]) -> dict[str, Any]:
    """The form of the arguments of a function."""
    return {"json": function.get("parameters") or _ANY_ARGUMENTS}


def any_calls(functions: Sequence[dict[str, Any]], *, several: bool) -> dict[str, Any]:
    """The form of a list of calls.

    >>> print(any_calls([{"name": "f"}], several=False)["grammar"])
    start: "[" call "]"
    call: call_0
    call_0: "{\\"name\\": \\"f\\", \\"parameters\\": " %json {"type": "object"} "}"

    Args:
        functions: one of which each calls.
        several: whether there may be more than one call.
    """
    rules = [f"call_{number}" for number in range(len(functions))]
    lines = ['start: "[" call (", " call)* "]"' if several else 'start: "[" call "]"', f"call: {' | '.join(rules)}"]
    for rule, function in zip(rules, functions, strict=True):
        begin = json.dumps(f'{{"name": {json.dumps(function["name"])}, "parameters": ', ensure_ascii=False)
        lines.append(f'{rule}: {begin} %json {json.dumps(function.get("parameters") or _ANY_ARGUMENTS)} "}}"')
    return {"grammar": "\n".join(lines)}


class OneCall:
    """Reads the arguments of a function as they come: all text is theirs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.num_calls = 0

    def feed(self, text: str) -> list[dict[str, Any]]:
        """What new text adds to the message."""
        if not text:
            return []
        if self.num_calls:
            return [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]}]
        self.num_calls = 1
        return [{"tool_calls": [_call(0, self._name, text)]}]

    def finish(self) -> list[dict[str, Any]]:
        """The same, at the end."""
        return []


class AnyCalls:
    """Reads a list of calls as it comes; each is told when it is complete."""

    def __init__(self) -> None:
        self._left = ""
        self.num_calls = 0

    def feed(self, text: str) -> list[dict[str, Any]]:
        """What new text adds to the message."""
        self._left += text
        found: list[dict[str, Any]] = []
        while begun := self._left.lstrip("[, "):
            try:
                call, end = json.JSONDecoder().raw_decode(begun)
            except ValueError:
                break
            found.append({"tool_calls": [_call(self.num_calls, call["name"], json.dumps(call["parameters"]))]})
            self.num_calls += 1
            self._left = begun[end:]
        return found

    def finish(self) -> list[dict[str, Any]]:
        """The same, at the end. A call that was cut off is text."""
        return [] if self._left in ("", "]") else [{"content": self._left}]


def _call(index: int, name: str, arguments: str) -> dict[str, Any]:
    called = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": called}
