"""What a model says apart from its answer: tool calls and reasoning, told apart while they stream.

Models mark them each in their own way. transformers has a parser for it, which reads a description of the marks: that
of the tokenizer, the one that transformers keeps for the model's family, or one of ours. Without any, all text is the
answer. A call that cannot be read is text, from the beginning of its opening mark to the end of its closing one, or of
the answer; what follows is read on. So what an answer says depends on its text alone, not on how it was cut.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

from piecegraph.serve.families import family_template
from piecegraph.serve.strict_json import read_json

_TOOL_CALLS = "tool_calls"
_CONTENT = "content"
_NO_CALL = "no_call"
_MOST_LEVELS = 200
"""Of lists and objects in each other that a call may have."""


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
        fields = template["fields"] if tools else _without_calls(template["fields"])
        # An answer that is cut off, or lacks a field, is told all the same.
        fields = {name: {**spec, "optional": True} for name, spec in fields.items()}
        self._parser: Any = _calls_or_text()({**template, "fields": fields}, prompt, list(tools) or None)
        self.num_calls = 0

    def feed(self, text: str) -> list[dict[str, Any]]:
        """What new text adds to the message: each is a ``delta`` of OpenAI's."""
        return self._deltas(self._parser.feed(text))

    def finish(self) -> list[dict[str, Any]]:
        """The same, at the end. What was begun and never ended is text."""
        return self._deltas(self._parser.finalize()[1])

    def _deltas(self, events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for event in events:
            name, kind = event["field"], event["type"]
            if name == _TOOL_CALLS and kind == "region_close":
                found += [{"tool_calls": [self._call(function)]} for function in event["value"]]
            elif name != _TOOL_CALLS and kind == "region_chunk":
                is_said = name in (_CONTENT, _NO_CALL)
                found.append({"content" if is_said else "reasoning_content": event["text"]})
        return found

    def _call(self, function: dict[str, str]) -> dict[str, Any]:
        index, self.num_calls = self.num_calls, self.num_calls + 1
        return {"index": index, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


@cache
def _calls_or_text() -> Any:
    """transformers' parser, but what is no call is text.

    Its own raises there, and with that forgets all that it read in the same ``feed``: what an answer said would depend
    on how it was cut. A call that cannot be read has to be told where the parser closes it, for only there it is known
    where its marks begin and end. That takes private methods, the same in transformers 5.17 and 5.22; the tests of
    families fail without them.
    """
    from transformers.utils.chat_parsing import ResponseParser

    class CallsOrText(ResponseParser):
        _prompt_end = _mark_start = 0

        def __init__(self, template: dict[str, Any], prompt: str, tools: list[dict[str, Any]] | None) -> None:
            super().__init__(template, prefix=prompt, tools=tools)
            self._prompt_end = len(self._buffer)

        def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
            super()._open_explicit(events, field, m)
            self._mark_start = m.start()

        def _close_current(self, events: list[dict[str, Any]]) -> None:
            text = self._text_of_call() if self._current == _TOOL_CALLS else None
            closed: list[dict[str, Any]] = []
            try:
                super()._close_current(closed)
                if text is not None:
                    closed[-1]["value"] = _functions(closed[-1]["value"])
            except (ValueError, KeyError, RecursionError):  # of what is no JSON, of what it lacks, of what is too deep
                self._reset_to_implicit()
                closed = [{"type": "region_chunk", "field": _NO_CALL, "text": text}] if text else []
            events += closed

        def _text_of_call(self) -> str:
            """With its marks, unless all that is said is between marks, which are never told then."""
            if self._implicit_name is None:
                return str(self._body)
            return str(self._buffer[max(self._mark_start, self._prompt_end) : self._pos])

    return CallsOrText


def _functions(calls: Any) -> list[dict[str, str]]:
    """The functions that are called between two marks, as a client is given them.

    Raises:
        ValueError: one of them is no call, or there are none; then all of it is text.
    """
    found = [_function(call) for call in (calls if isinstance(calls, list) else [calls])]
    if not found:
        raise ValueError("no function is called")
    return found


def _function(call: Any) -> dict[str, str]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("no function is named")
    given = function.get("arguments", function.get("parameters", {}))
    return {"name": function["name"], "arguments": arguments_text(given)}


def arguments_text(given: Any) -> str:
    """Arguments as a client is given them. Some models write them as a text, and null or nothing for none.

    >>> arguments_text({"x": 1}), arguments_text('{"x":1}'), arguments_text(None)
    ('{"x": 1}', '{"x":1}', '{}')

    Raises:
        ValueError: a client could not read them, or not by name.
    """
    named = read_json(given or "{}", last_wins=True) if isinstance(given, str) else {} if given is None else given
    if not isinstance(named, dict):
        raise ValueError("arguments have no names")
    if _is_too_deep(named):
        raise ValueError("too much is in each other")
    return given if isinstance(given, str) and given else json.dumps(named, ensure_ascii=False, allow_nan=False)


def _is_too_deep(value: Any) -> bool:
    """Python reads as deep as its stack is free, which is not the same wherever an answer is read; this is."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list))]
        level = [each for values in inner for each in values]
    return bool(level)


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
