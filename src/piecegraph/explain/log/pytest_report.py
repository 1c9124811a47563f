"""Failures as pytest reports them, in the words of Python's own tracebacks.

In its long form each function is shown down to the line that failed, marked with ``>``, and the place stands below; in
its short form the place is above the line. Lines that begin with ``E`` are the exception's text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from piecegraph.explain.log.lines import Line
from piecegraph.explain.log.syntax import HEADER_TEXT, LINK_TEXTS, exception_of

MARKS = ("= FAILURES =", "= ERRORS =")
SECTION = re.compile(r"^={3,} (?:FAILURES|ERRORS) ={3,}$")
_OTHER_SECTION = re.compile(r"^={3,} .{1,200} ={3,}$")
_TITLE = re.compile(r"^_{3,} (?P<name>.{1,300}?) _{3,}$")
_CAPTURED = re.compile(r"^-{3,} .{1,100} -{3,}$")
_PLACE = re.compile(
    r"^(?P<file>[^\s:][^:\n]{0,400}\.py):(?P<line>\d+): (?:in (?P<function>.{1,200})|(?P<type>[A-Za-z_][\w.]*))?$"
)
_FUNCTION = re.compile(r"^\s+(?:async )?def (?P<name>\w+)\(")


def is_over(text: str) -> bool:
    """Whether another section of the report begins, or it ends."""
    return _OTHER_SECTION.match(text) is not None


def read_section(lines: Sequence[Line]) -> Iterator[Line]:
    """What stands below the head of a section. What a test printed, and tracebacks in Python's own form, stay."""
    failure, is_captured = _Failure(), False
    for line in lines:
        text = line.text.rstrip()
        if _TITLE.match(text):
            yield from failure.lines()
            failure, is_captured = _Failure(), False
        elif not is_captured and _CAPTURED.match(text):
            yield from failure.lines()
            failure, is_captured = _Failure(), True
        elif is_captured:
            yield line
        elif text in LINK_TEXTS:
            yield from failure.lines()
            yield line
            failure = _Failure()
        else:
            failure.read(line, text)
    yield from failure.lines()


class _Failure:
    """One traceback of a test."""

    def __init__(self) -> None:
        self._all: list[Line] = []
        self._frames: list[Line] = []
        self._message: list[str] = []
        self._type = ""
        self._function = "<module>"
        self._source = ""
        self._is_short = False

    def read(self, line: Line, text: str) -> None:
        """Take a line of it."""
        self._all.append(line)
        place = _PLACE.match(f"{text} " if text.endswith(":") else text)
        if place is not None:
            self._add_frame(line, place)
        elif text.startswith("E  "):
            self._message.append(text[1:].strip())
        elif text.startswith(">"):
            self._source = text[1:].strip()
        elif self._is_short and text.startswith("    ") and not self._source:
            self._source = text.strip()
            self._frames.append(line._replace(text=f"    {self._source}"))
        elif function := _FUNCTION.match(text):
            self._function = function["name"]

    def _add_frame(self, line: Line, place: re.Match[str]) -> None:
        self._is_short = place["function"] is not None
        function = place["function"] or self._function
        self._frames.append(line._replace(text=f'  File "{place["file"]}", line {place["line"]}, in {function}'))
        if self._source and not self._is_short:
            self._frames.append(line._replace(text=f"    {self._source}"))
        self._type, self._function, self._source = place["type"] or "", "<module>", ""

    def lines(self) -> Iterator[Line]:
        """As Python prints it; as they are, if this is no traceback of pytest's."""
        if not self._message or not self._frames:
            yield from self._all
            return
        read = exception_of(self._message[0])
        # An assertion that pytest takes apart is told without its name.
        is_named = read is not None and (not self._type or read[0].rpartition(".")[2] == self._type.rpartition(".")[2])
        name = "" if is_named else f"{self._type or 'AssertionError'}: "
        last = self._frames[-1]
        yield self._frames[0]._replace(text=HEADER_TEXT)
        yield from self._frames
        yield last._replace(text=name + self._message[0])
        yield from (last._replace(text=f"  {part}") for part in self._message[1:])
