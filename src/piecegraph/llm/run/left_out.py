"""What a chat template leaves out of a conversation without a word.

Note [What a template shows]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Which parts of a message reach the model cannot be told from the words of a template: it may print a message whole, read
it in a macro, or know calls and no role that answers them. So it is tried. Marks are put into what most templates do
not know - tools, calls, what tools and systems say - and the conversation is written with them: a mark that is not in
what was written was left out. Templates also leave out what they know, at some places in a conversation, as their
models were taught (one shows the system's words in the last question only). So a part counts as left out if it is
neither shown where the conversation ends with it, nor where a question follows. Of a template that refuses the
conversation with marks nothing is known, and it is not blamed.

What users and models say is not looked at: every template shows it. Nor is what a model thought, which most leave out
of later turns on purpose, nor a speaker's ``name`` and the ids of calls, which few models were taught to read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2

Write = Callable[[Sequence[Mapping[str, Any]], Sequence[Any] | None], str]
"""Writes messages and tools as a prompt."""

REFUSALS = (jinja2.TemplateError, ValueError, KeyError, TypeError)
"""What templates raise for conversations that they do not take."""

_MARKED_ROLES = ("system", "developer", "tool")
_QUESTION = {"role": "user", "content": "?"}


def left_out(write: Write, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> str | None:
    """The first part that the model would not see: ``tools``, ``messages[2].content``, ``messages[1].tool_calls``; or
    None. See Note [What a template shows].
    """
    marks = _Marks()
    marked = [marks.message(index, message) for index, message in enumerate(messages)]
    marked_tools = None if tools is None else [marks.tool(tool) for tool in tools]
    if not marks.places:
        return None

    def shows(mark: str, some: Sequence[Mapping[str, Any]]) -> bool:
        try:
            return mark in write(some, marked_tools)
        except REFUSALS:
            return True

    try:
        text = write(marked, marked_tools)
    except REFUSALS:
        return None
    for mark, (end, place) in marks.places.items():
        so_far = marked[:end]
        if not (mark in text or (so_far and shows(mark, so_far)) or shows(mark, [*so_far, _QUESTION])):
            return place
    return None


def place_of_call(message: int, call: int) -> str:
    """How a call of a message is named: the first as all of them, for most templates read all or none.

    >>> place_of_call(1, 0), place_of_call(1, 1)
    ('messages[1].tool_calls', 'messages[1].tool_calls[1]')
    """
    return f"messages[{message}].tool_calls" + (f"[{call}]" if call else "")


@dataclass
class _Marks:
    """The marks of a conversation."""

    places: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Of each, how many messages there are up to it, and what is marked."""

    def tool(self, tool: Any) -> Any:
        """All tools have one mark: a template that shows one of them shows all."""
        mark = "zq0qz"
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return tool
        self.places = {mark: (0, "tools"), **self.places}
        named = {**function, "name": function["name"] + mark}
        return {**tool, "function": named} if "function" in tool else named

    def message(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        found, content, calls = dict(message), message.get("content"), message.get("tool_calls")
        if message.get("role") in _MARKED_ROLES and isinstance(content, str) and content.strip():
            found["content"] = content + self._new(index, f"messages[{index}].content")
        if isinstance(calls, Sequence) and not isinstance(calls, str):
            found["tool_calls"] = [
                _marked_call(call, self._new(index, place_of_call(index, number))) for number, call in enumerate(calls)
            ]
        return found

    def _new(self, index: int, place: str) -> str:
        mark = f"zq{len(self.places) + 1}qz"
        self.places[mark] = (index + 1, place)
        return mark


def _marked_call(call: Any, mark: str) -> Any:
    """With a mark at the end of its name and in the place of its values: a template may show some of these alone."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _marked_call(call["function"], mark)}
    marked = {name: _marked(call[name], mark) for name in ("name", "arguments") if name in call}
    return {**call, **marked}


def _marked(value: Any, mark: str) -> Any:
    if isinstance(value, Mapping):
        return {name: _marked(each, mark) for name, each in value.items()}
    if isinstance(value, list):
        return [_marked(each, mark) for each in value]
    return value + mark if isinstance(value, str) else mark
