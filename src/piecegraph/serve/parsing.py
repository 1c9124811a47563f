"""What a model says apart from its answer: tool calls and reasoning, told apart while they stream.

Models mark them each in their own way. transformers has a parser for it, which reads a description of the marks: that
of the tokenizer, the one that transformers keeps for the model's family, or one of ours. Without any, all text is the
answer.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from piecegraph.serve.families import family_template

_TOOL_CALLS = "tool_calls"
_CONTENT = "content"
_NO_CALL = "no_call"


def response_template_of(tokenizer: Any, model: Any) -> dict[str, Any] | None:
    """How a model marks tool calls and reasoning, if that is known."""
    found = getattr(tokenizer, "response_template", None)
    if found is not None:
        return dict(found)
    try:
        from transformers.cli.serving.utils import get_response_template
        from transformers.utils.chat_parsing import ResponseParser  # noqa: F401
    except ImportError:  # an older version
        return None
    known = get_response_template(tokenizer, model)
    return dict(known) if known is not None else family_template(getattr(tokenizer, "chat_template", None))


@dataclass
class ParsedAnswer:
    """An answer in parts."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, delta: dict[str, Any]) -> None:
        self.content += delta.get("content", "")
        self.reasoning += delta.get("reasoning_content", "")
        self.tool_calls += delta.get("tool_calls", [])

    def message(self) -> dict[str, Any]:
        """As a client is given it."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content or None, "refusal": None}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.tool_calls:
            names = ("id", "type", "function")
            found["tool_calls"] = [{name: call[name] for name in names} for call in self.tool_calls]
        else:
            found["content"] = self.content
        return found


class Reader(Protocol):
    """What tells calls and reasoning from an answer."""

    num_calls: int

    def feed(self, text: str) -> list[dict[str, Any]]:
        """What new text adds to the message: each is a ``delta`` of OpenAI's."""

    def finish(self) -> list[dict[str, Any]]:
        """The same, at the end."""


def deltas(reader: Reader | None, text: str, *, is_last: bool) -> list[dict[str, Any]]:
    """What new text of an answer adds to its message; without a reader, all of it is the answer's."""
    if reader is None:
        return [{"content": text}] if text else []
    return [*reader.feed(text), *(reader.finish() if is_last else ())]


class AnswerParser:
    """Reads one answer as it comes.

    Args:
        template: see :func:`response_template_of`.
        prompt: the text before the answer, where a template may have begun it.
        tools: that the model may call; without any, nothing is read as a call.
    """

    def __init__(self, template: dict[str, Any], prompt: str, tools: Sequence[dict[str, Any]]) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._without_calls = {**template, "fields": _without_calls(template["fields"])}
        self._make = ResponseParser
        self._parser: Any = ResponseParser(
            template if tools else self._without_calls, prefix=prompt, tools=list(tools) or None
        )
        # Since the last call, or since the beginning.
        self._before, self._read, self._told = prompt, "", ""
        self._is_broken = False
        self.num_calls = 0

    def feed(self, text: str) -> list[dict[str, Any]]:
        """What new text adds to the message: each is a ``delta`` of OpenAI's."""
        if self._is_broken:
            return [{"content": text}] if text else []
        self._read += text
        try:
            return self._noted(self._deltas(self._parser.feed(text)))
        except (ValueError, KeyError):  # of what is no JSON, and of what JSON lacks
            return self._give_up()

    def finish(self) -> list[dict[str, Any]]:
        """The same, at the end. What was begun and never ended is text."""
        if self._is_broken:
            return []
        try:
            _, events = self._parser.finalize()
            return self._deltas(events)
        except (ValueError, KeyError):  # of what is no JSON, and of what JSON lacks
            return self._give_up()

    def _noted(self, deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if any("tool_calls" in delta for delta in deltas):
            self._before, self._read, self._told = "", "", ""
        else:
            self._told += "".join(delta.get("content", "") for delta in deltas)
        return deltas

    def _give_up(self) -> list[dict[str, Any]]:
        """What is no call, though it began like one, is text, and so is the rest."""
        self._is_broken = True
        plain: Any = self._make(self._without_calls, prefix=self._before)
        events = [*plain.feed(self._read), *plain.finalize()[1]]
        content = "".join(delta.get("content", "") for delta in self._deltas(events))[len(self._told) :]
        return [{"content": content}] if content else []

    def _deltas(self, events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for event in events:
            name, kind = event["field"], event["type"]
            if name == _TOOL_CALLS and kind == "region_close":
                values = event["value"] if isinstance(event["value"], list) else [event["value"]]
                found += [{"tool_calls": [self._call(value)]} for value in values]
            elif name != _TOOL_CALLS and kind == "region_chunk":
                is_said = name in (_CONTENT, _NO_CALL)
                found.append({"content" if is_said else "reasoning_content": event["text"]})
        return found

    def _call(self, value: Any) -> dict[str, Any]:
        function = value.get("function") if isinstance(value, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("no function is named")
        given = function.get("arguments", function.get("parameters", {}))
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        index, self.num_calls = self.num_calls, self.num_calls + 1
        called = {"name": function["name"], "arguments": arguments}
        return {"index": index, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": called}


def _without_calls(fields: dict[str, Any]) -> dict[str, Any]:
    """The same marks, but no calls: their text is the answer's. Where all of an answer is marked, it would be nobody's
    without a field of its own.
    """
    others = {name: spec for name, spec in fields.items() if name != _TOOL_CALLS}
    is_all_marked = all("open" in spec or "open_pattern" in spec for spec in others.values())
    if is_all_marked and _TOOL_CALLS in fields:
        calls = fields[_TOOL_CALLS]
        pattern = calls["open_pattern"].replace("(?P<name>", "(?:")
        others[_NO_CALL] = {"open_pattern": pattern, "close": calls["close"], "content": "text", "repeats": True}
    return others
