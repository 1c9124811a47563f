"""What one process printed: its exceptions in order, each made of parts.

Read directly from parts that stand in order. Interleaved ones are unwoven (:mod:`unweave`) or reconstructed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from piecegraph.explain.log.parts import TracebackPart

Link = Literal["", "cause", "context"]


@dataclass(frozen=True, slots=True)
class ExceptionParts:
    """One exception with its frames."""

    frames: tuple[TracebackPart, ...]
    text: TracebackPart | None
    """None where the log ends inside of it, or where the frames belong to no exception."""
    link: Link = ""
    header: TracebackPart | None = None

    @property
    def is_call_chain(self) -> bool:
        return self.text is None and self.header is None

    @property
    def end(self) -> int:
        """The line at which it is complete; where a long text ends is not told, as anything may be printed below it."""
        if self.text is not None:
            return self.text.line
        last = self.frames[-1] if self.frames else self.header
        return last.end if last is not None else 0


Traceback = tuple[ExceptionParts, ...]


def key_of(traceback: Traceback) -> Hashable:
    """Equal for processes that print the same."""
    return tuple(
        (one.link, tuple(frame.key for frame in one.frames), one.text.key if one.text else None) for one in traceback
    )


def num_processes(parts: Sequence[TracebackPart]) -> int:
    """How many processes must have written these: each begins with a header that follows no link, and quotes nobody."""
    headers = sum(part.kind == "header" and part.origin != "original" for part in parts)
    return max(1, headers - sum(part.kind == "link" for part in parts))


def read_in_order(parts: Sequence[TracebackPart]) -> list[Traceback] | None:
    """The tracebacks, if each is printed to its end before the next begins; None if they are interleaved."""
    reader = _InOrderReader()
    return reader.finish() if all(map(reader.take, parts)) else None


@dataclass(slots=True)
class _InOrderReader:
    """Follows ``(header frame* text (link header frame* text)*)*``, with headless call chains in between.

    An exception may quote another process's traceback below its own text; what is quoted was raised before it.
    """

    tracebacks: list[Traceback] = field(default_factory=list)
    exceptions: list[ExceptionParts] = field(default_factory=list)
    header: TracebackPart | None = None
    frames: list[TracebackPart] = field(default_factory=list)
    link: Link = ""
    quoting: list[ExceptionParts] = field(default_factory=list)
    """The exceptions that quote the present ones."""

    def take(self, part: TracebackPart) -> bool:
        """Read on; False if the part does not fit."""
        is_inside = self.header is not None or bool(self.frames)
        if part.kind == "frame":
            if not is_inside and not self.link:
                self._close_traceback()
            self.frames.append(part)
        elif part.kind == "text":
            self._close_exception(part)
        elif part.kind == "link":
            if is_inside or self.link or not self.exceptions:
                return False
            self.link = "cause" if part.text == "cause" else "context"
        elif self.header is not None:
            return False
        else:
            if part.origin == "original" and self.exceptions and not self.link:
                self._link_quoting()
                self.quoting, self.exceptions = [*self.exceptions, *self.quoting], []
            elif not self.link:
                self._close_traceback()
            self.header = part
        return True

    def finish(self) -> list[Traceback]:
        self._close_traceback()
        return self.tracebacks

    def _close_exception(self, text: TracebackPart | None) -> None:
        if not self.link and self.exceptions:
            self._end_traceback()
        self.exceptions.append(ExceptionParts(tuple(self.frames), text, self.link, self.header))
        self.header, self.frames, self.link = None, [], ""

    def _close_traceback(self) -> None:
        if self.header is not None or self.frames:
            self._close_exception(None)
        self._end_traceback()
        self.link = ""

    def _link_quoting(self) -> None:
        if self.quoting:
            self.quoting[0] = replace(self.quoting[0], link="cause")

    def _end_traceback(self) -> None:
        if self.exceptions:
            self._link_quoting()
        if self.exceptions or self.quoting:
            self.tracebacks.append((*self.exceptions, *self.quoting))
        self.exceptions, self.quoting = [], []
