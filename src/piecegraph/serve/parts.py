"""An answer as a row of parts, each of one kind: what was thought, what is said, which tools are called.

OpenAI's chats have one message with all of it; its newer API and Anthropic's have a list, and tell when each begins and
ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from piecegraph.serve.parsing import Reader, deltas

Kind = Literal["reasoning", "text", "call"]
_FIELDS: dict[str, Kind] = {"reasoning_content": "reasoning", "content": "text"}


@dataclass(eq=False, slots=True)
class Part:
    """Filled in while it is said."""

    kind: Kind
    index: int
    """Among the parts of its answer."""
    text: str = ""
    """Of a call, its arguments."""
    name: str = ""
    """Of the function that is called."""
    number: str = ""
    """Of a call: what tells it from all others."""


Happening = tuple[Literal["begin", "more", "end"], Part, str]
"""A part begins, goes on with a text, or is complete."""


class Parts:
    """The parts of one answer."""

    def __init__(self) -> None:
        self.all: list[Part] = []
        self._open: Part | None = None
        self._space = ""

    def add(self, delta: dict[str, Any]) -> Iterator[Happening]:
        """What a ``delta`` of a chat adds."""
        for field, kind in _FIELDS.items():
            if text := delta.get(field):
                yield from self._say(kind, text)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                self._space = ""
                number = call["id"].removeprefix("call_")
                yield from self._begin(Part("call", len(self.all), name=call["function"]["name"], number=number))
            yield from self._go_on(call["function"]["arguments"])

    def end(self) -> Iterator[Happening]:
        """All is said. There is one part at least."""
        if not self.all:
            yield from self._begin(Part("text", 0))
            yield from self._go_on(self._space)
        yield from self._close()

    def _say(self, kind: Kind, text: str) -> Iterator[Happening]:
        if self._open is None or self._open.kind != kind:
            text, self._space = self._space + text, ""
            if text.isspace():  # between two parts, and none by itself
                self._space = text
                return
            yield from self._begin(Part(kind, len(self.all)))
        yield from self._go_on(text)

    def _begin(self, part: Part) -> Iterator[Happening]:
        yield from self._close()
        self._open = part
        self.all.append(part)
        yield "begin", part, ""

    def _go_on(self, text: str) -> Iterator[Happening]:
        if text and self._open is not None:
            self._open.text += text
            yield "more", self._open, text

    def _close(self) -> Iterator[Happening]:
        if self._open is not None:
            yield "end", self._open, ""
            self._open = None


def happenings(parts: Parts, reader: Reader | None, text: str, *, is_last: bool) -> Iterator[Happening]:
    """What new text of an answer adds to its parts."""
    for delta in deltas(reader, text, is_last=is_last):
        yield from parts.add(delta)
    if is_last:
        yield from parts.end()


def parts_of(reader: Reader | None, text: str) -> list[Part]:
    """The parts of an answer that is there in one."""
    parts = Parts()
    for _ in happenings(parts, reader, text, is_last=True):
        pass
    return parts.all
