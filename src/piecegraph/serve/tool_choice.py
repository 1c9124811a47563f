"""Which tools a model may call, or has to, and how what it says is read by that.

Of calls that a client demands, of one tool or of any, the answer is JSON and nothing else, whatever the model. Of one
tool it is the arguments alone; of any, a list of calls, as vLLM has it. The model was told of its tools in its own
words, and reads the calls back in these in the next turn.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from piecegraph.serve.failures import ApiError, unsupported
from piecegraph.serve.parsing import AnswerParser, Reader, arguments_text
from piecegraph.serve.strict_json import read_json

_ANY_ARGUMENTS = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What a client says of tools."""

    functions: Sequence[dict[str, Any]] = ()
    """Each with its name, and description and parameters if there are any."""
    choice: str = "auto"
    """``"none"``, ``"auto"`` or ``"required"``; with ``named``, the last."""
    named: str | None = None
    """The function that is to be called."""
    several: bool = True
    """Whether one answer may call more than once."""
    name_of_several: str = "parallel_tool_calls"
    """What the request calls that,"""
    name_of_strict: str = "tools[{}].function.strict"
    """and that a tool's arguments are kept to their schema."""

    def check(self) -> None:
        """Raise what contradicts itself."""
        names = [function["name"] for function in self.functions]
        if self.named is not None and self.named not in names:
            message = f"tool_choice names {self.named!r}, which is none of the tools"
            raise ApiError(400, message, code="invalid_value", param="tool_choice")
        if self.is_forced and not names:
            raise ApiError(400, "tool_choice demands a call without tools", code="invalid_value", param="tool_choice")
        if self.is_forced or self.choice == "none":
            return
        if not self.several and names:
            raise unsupported(self.name_of_several, "calls are only counted where tool_choice demands one")
        for number, function in enumerate(self.functions):
            if function.get("strict"):
                why = "arguments are only kept to their schema where tool_choice demands a call"
                raise unsupported(self.name_of_strict.format(number), why)

    @property
    def is_forced(self) -> bool:
        """Whether the answer is to be a call."""
        return self.choice == "required"

    @property
    def values(self) -> list[dict[str, Any]]:
        """As chat templates have them."""
        if self.choice == "none":
            return []
        return [{"type": "function", "function": function} for function in self.functions]

    def form(self) -> dict[str, Any] | None:
        """Of the answer, for the engine; None for any."""
        if self.named is not None:
            return one_call(next(each for each in self.functions if each["name"] == self.named))
        return any_calls(self.functions, several=self.several) if self.is_forced else None

    def reader(self, template: dict[str, Any] | None, prompt: str, *, has_form: bool) -> Reader | None:
        """What tells calls and reasoning from the answer; None if all of it is text.

        Args:
            template: how the model marks them, see :func:`~piecegraph.serve.parsing.response_template_of`.
            prompt: the text before the answer.
            has_form: whether the answer is of a given form, and nothing else.
        """
        if self.named is not None:
            return OneCall(self.named)
        if self.is_forced:
            return AnyCalls()
        return None if template is None or has_form else AnswerParser(template, prompt, self.values)


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
    """Reads a list of calls as it comes; each is told when it is complete.

    That it is JSON does not mean that a client can read it: numbers may be larger than any float, and lists deeper in
    each other than a stack. Such a call is text, as in an answer that was not forced, and what follows is read on.
    """

    def __init__(self) -> None:
        self._left = ""
        """What was not told yet."""
        self._depth = 0
        self._is_in_string = self._is_escaped = False
        self.num_calls = 0

    def feed(self, text: str) -> list[dict[str, Any]]:
        """What new text adds to the message."""
        found: list[dict[str, Any]] = []
        for character in text:
            self._left += character
            if self._ends_call(character):
                found.append(self._told(self._left.lstrip("[, ")))
                self._left = ""
        return found

    def finish(self) -> list[dict[str, Any]]:
        """The same, at the end. A call that was cut off is text."""
        return [] if self._left in ("", "]") else [{"content": self._left}]

    def _ends_call(self, character: str) -> bool:
        if self._is_in_string:
            self._is_in_string = self._is_escaped or character != '"'
            self._is_escaped = character == "\\" and not self._is_escaped
            return False
        self._is_in_string = character == '"'
        self._depth += {"{": 1, "}": -1}.get(character, 0)
        return character == "}" and self._depth == 0

    def _told(self, text: str) -> dict[str, Any]:
        try:
            call = read_json(text, last_wins=True)
            told = _call(self.num_calls, call["name"], arguments_text(call["parameters"]))
        except ValueError:
            return {"content": text}
        self.num_calls += 1
        return {"tool_calls": [told]}


def _call(index: int, name: str, arguments: str) -> dict[str, Any]:
    called = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": called}
