"""Tracebacks that other printers drew, or that lost their shape on the way, in the words of Python's own.

In come the lines of one stream, out come the same lines as the ``traceback`` module would have printed them, so that
everything behind this knows one form only. Understood are Jupyter's tracebacks (three generations of them), rich's
boxes, Ray's quotations, pytest's reports, tracebacks indented as a whole (pip, rich's log handler), and those that lost
their indentation or their quotes.
A line that is none of these is left as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from piecegraph.explain.log import pytest_report
from piecegraph.explain.log.lines import Line
from piecegraph.explain.log.syntax import EXCEPTION_NAME, HEADER_TEXT, LINK_TEXTS, exception_of, frame_of

_HEAD = HEADER_TEXT.rstrip(":")
_JUPYTER_HEAD = re.compile(rf"^(?P<type>[A-Za-z_][\w.]*?)\s*{re.escape(_HEAD)}\s*$")
_CELL = r"(?:Cell )?In ?\[(?P<cell>[\d ]+)\]"
_JUPYTER_FRAMES = tuple(
    re.compile(pattern)
    for pattern in (
        r"^File (?P<file>\S.*?):(?P<line>\d+)(?:, in (?P<function>.+))?$",
        rf"^(?:Input )?{_CELL}, line (?P<line>\d+)(?:, in (?P<function>.+))?$",
        rf"^(?:Input )?{_CELL}, in (?P<function>.+)$",
        r"^\[(?P<file>[^\]]+)\]\(\S*\) in (?P<function>.+)$",  # Colab makes links of the paths
        r"^(?P<file><ipython-input[^>]*>|\S.*?\.py[x]?) in (?P<function>.+)$",
    )
)
_ARROW = re.compile(r"^-+> ?(?P<line>\d+)(?: (?P<source>.*))?$")
_CONTEXT = re.compile(r"^\s+(?:\d+\b|\(\.\.\.\))")
_SYNTAX_CELL = re.compile(rf"^\s+{_CELL}, line (?P<line>\d+)$")

_VALUES = re.compile(r"^\s+[│└]")
_MAX_STRAY = 40
"""So many lines that are no part of it end Jupyter's traceback: its end was lost."""

_BOX_HEAD = re.compile(rf"^\s*[╭┌+]?[─━-]+ {re.escape(_HEAD)} [─━-]+[╮┐+]?\s*$")
_BOX_FOOT = re.compile(r"^\s*[╰└+][─━-]{3,}")
_BOX_LINE = re.compile(r"^\s*[│┃|] ?(?P<text>.*?)\s*[│┃|]?\s*$")
_BOX_FRAME = re.compile(r"^(?P<file>\S.*?):(?P<line>\d+) in (?P<function>\S+)$|^in (?P<module>\S.*?):(?P<number>\d+)$")
_BOX_PATH = re.compile(r"^(?:/|~|[A-Za-z]:\\|\.{0,2}[\w.-]+/|<)\S")
_BOX_SOURCE = re.compile(r"^[❱>] *(?P<line>\d+) [│┃|]?(?P<source>.*)$")

_INDENTED_HEAD = re.compile(rf"^(?P<indent>[ \t]+){re.escape(HEADER_TEXT)}\s*$")
_RAY = re.compile(r"(?:^\s*|[:,] )ray::\S.* \(pid=\d+")
"""In front of a traceback that Ray brings from another process."""
_BARE_FRAME = re.compile(
    r"^(?P<indent>\s*)File \\?[\"'`“”]?(?P<file>[^\"'`“”,]+?)\\?[\"'`“”]?, line (?P<line>\d+)"
    r"(?:, in (?P<function>.+?))?\s*$"
)


_SCRIPT_HEAD = "Traceback of TorchScript"

_MARKS = ("(most recent call last)", "In[", "ray::", "File /", "File ~", "❱", *pytest_report.MARKS)


def translate(lines: Sequence[Line]) -> Sequence[Line]:
    """The lines in Python's own form."""
    if not any(mark in line.text for line in lines for mark in _MARKS):
        return lines
    return list(_Translator(lines).run())


def _is_exception(text: str, name: str) -> bool:
    """Whether a line is the exception with this name, or any one if the name is not known."""
    if name:
        return text == name or text.startswith(f"{name}: ") or text.rpartition(".")[2].startswith(f"{name}:")
    read = exception_of(text)
    return read is not None and bool(read[1]) and EXCEPTION_NAME.search(read[0]) is not None


class _Translator:
    """One walk over a stream; a method for each dialect takes the lines it understands, and says where it stopped."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines
        self._at = 0

    def run(self) -> Iterator[Line]:
        while self._at < len(self._lines):
            line = self._lines[self._at]
            text = line.text
            if "In[" in text and (cell := _SYNTAX_CELL.match(text)):
                self._at += 1
                yield line._replace(text=f'  File "Cell In[{cell["cell"]}]", line {cell["line"]}')
            elif "❱" in text and _BOX_LINE.match(text):
                self._at -= 1  # the head was lost, and this line is inside
                yield from self._box()
            elif text.startswith("File ") and _JUPYTER_FRAMES[0].match(text):
                self._at -= 1
                yield from self._jupyter("")
            elif text.startswith(_SCRIPT_HEAD):
                yield from self._script()
            elif pytest_report.SECTION.match(text):
                yield from self._pytest()
            elif _HEAD not in text:
                self._at += 1
                if "ray::" in text and _RAY.search(text):
                    yield from (line, line._replace(text=f"Original {HEADER_TEXT}"))
                else:
                    yield line
            elif _BOX_HEAD.match(text):
                yield from self._box()
            elif jupyter := _JUPYTER_HEAD.match(text):
                yield from self._jupyter(jupyter["type"])
            elif indented := _INDENTED_HEAD.match(text):
                yield from self._indented(indented["indent"])
            else:
                yield from self._plain()

    def _next(self) -> Line | None:
        """The line after the head of a traceback, and what follows."""
        self._at += 1
        return self._lines[self._at] if self._at < len(self._lines) else None

    def _jupyter(self, name: str) -> Iterator[Line]:
        """A traceback of an exception with this name; without one, if the head was lost."""
        if name:
            yield self._lines[self._at]._replace(text=HEADER_TEXT)
        waiting = ""  # the frame whose line number is told by an arrow further down
        num_stray = 0
        while (line := self._next()) is not None and num_stray < _MAX_STRAY:
            text = line.text.rstrip()
            found = next(filter(None, (pattern.match(text) for pattern in _JUPYTER_FRAMES)), None)
            arrow = _ARROW.match(text)
            if found is not None:
                parts = found.groupdict()
                file = parts.get("file") or f"Cell In[{parts['cell'].strip()}]"
                function = (parts.get("function") or "<module>").partition("(")[0]
                waiting = "" if parts.get("line") else f'  File "{file}", line {{}}, in {function}'
                if not waiting:
                    yield line._replace(text=f'  File "{file}", line {parts["line"]}, in {function}')
            elif arrow is not None:
                if waiting:
                    yield line._replace(text=waiting.format(arrow["line"]))
                    waiting = ""
                if (arrow["source"] or "").strip():
                    yield line._replace(text=f"    {arrow['source'].strip()}")
            elif _is_exception(text, name):
                yield line._replace(text=text)
                self._at += 1
                return
            elif _HEAD in text or text in LINK_TEXTS:
                return
            else:
                num_stray += bool(text) and not _CONTEXT.match(text)

    def _box(self) -> Iterator[Line]:
        if self._at >= 0 and _HEAD in self._lines[self._at].text:
            yield self._lines[self._at]._replace(text=HEADER_TEXT)
        path = ""  # of a frame that is wrapped over several lines
        while (line := self._next()) is not None:
            if _BOX_FOOT.match(line.text):
                self._at += 1
                return
            inside = _BOX_LINE.match(line.text)
            if inside is None:
                return
            text = inside["text"].strip()
            source = _BOX_SOURCE.match(text)
            if source is not None:
                path = ""
                yield line._replace(text=f"    {source['source'].replace('│', ' ').strip()}")
                continue
            frame = _BOX_FRAME.match(path + text) or _BOX_FRAME.match(f"{path} {text}")
            if frame is not None:
                path = ""
                file, number, function = (
                    frame["file"] or "<unknown>",
                    frame["line"] or frame["number"],
                    frame["function"],
                )
                yield line._replace(text=f'  File "{file}", line {number}, in {function or frame["module"]}')
            elif path or _BOX_PATH.match(text):
                path = path + text if len(path) < 600 else ""

    def _indented(self, indent: str) -> Iterator[Line]:
        """A traceback that is indented as a whole; it ends with the first line that is less so."""
        yield self._lines[self._at]._replace(text=HEADER_TEXT)
        width = len(self._lines[self._at].text)
        message: Line | None = None  # a column that is filled up with spaces wraps at words, messages too
        while (line := self._next()) is not None:
            if line.text.strip() and not line.text.startswith(indent):
                break
            line = line._replace(text=line.text[len(indent) :].rstrip())
            read = exception_of(line.text)
            if message is not None and line.text and not line.text.startswith(" "):
                message = message._replace(text=f"{message.text} {line.text}")
                continue
            if message is not None:
                yield message
                message = None
            if read is not None and EXCEPTION_NAME.search(read[0]) and self._is_column(width):
                message = line
            else:
                yield line
        if message is not None:
            yield message

    def _is_column(self, width: int) -> bool:
        """Whether the present line and the next are padded to the width of the head."""
        beside = self._lines[self._at : self._at + 2]
        return width > len(beside[0].text.rstrip()) and all(len(line.text) == width for line in beside)

    def _script(self) -> Iterator[Line]:
        """What TorchScript's interpreter quotes: of its two forms the original code, with the lines it points at."""
        head = self._lines[self._at]
        if "serialized code" not in head.text:
            yield head._replace(text=f"Original {HEADER_TEXT}")
        source: Line | None = None
        while (line := self._next()) is not None and (line.text.startswith(" ") or not line.text.strip()):
            if "serialized code" in head.text:
                continue
            if frame_of(line.text):
                yield line
            elif "<--- HERE" in line.text and source is not None:
                yield source._replace(text=f"    {source.text.strip()}")
            source = line

    def _pytest(self) -> Iterator[Line]:
        """A section of pytest's report, up to the next."""
        first = self._at + 1
        while (line := self._next()) is not None and not pytest_report.is_over(line.text.rstrip()):
            pass
        yield from pytest_report.read_section(self._lines[first : self._at])

    def _loguru(self) -> Iterator[Line]:
        """Frames with blank lines between them, an arrow at one, and the values of variables below the source."""
        while (line := self._next()) is not None:
            text = line.text.rstrip()
            if _VALUES.match(text) or not text:
                continue
            yield line._replace(text=f"  {text[2:]}" if text.startswith("> File ") else text)
            if not text.startswith((" ", "> ")):
                self._at += 1
                return

    def _plain(self) -> Iterator[Line]:
        """Python's own, which may have lost its indentation or its quotes."""
        yield self._lines[self._at]
        beside = [line.text for line in self._lines[self._at + 1 : self._at + 3]]
        if len(beside) == 2 and not beside[0].strip() and beside[1].startswith(("  File ", "> File ")):
            yield from self._loguru()
            return
        has_lost_indent: bool | None = None
        is_source_next = False
        while (line := self._next()) is not None:
            text = line.text
            if _HEAD in text or text.strip() in LINK_TEXTS:
                return
            frame = _BARE_FRAME.match(text)
            if frame is not None:
                if has_lost_indent is None:
                    has_lost_indent = not frame["indent"]
                    if not has_lost_indent and frame_of(text):
                        return  # as it should be
                is_source_next = True
                where = f", in {frame['function']}" if frame["function"] else ""
                yield line._replace(text=f'  File "{frame["file"]}", line {frame["line"]}{where}')
            elif has_lost_indent is None:
                return
            elif text.strip() and not text.strip().strip("^~"):
                continue  # carets that point nowhere any more
            elif not has_lost_indent and text.startswith("   "):
                yield line
            elif has_lost_indent and is_source_next and not self._ends_here(text):
                is_source_next = False
                yield line._replace(text=f"    {text.lstrip()}")
            else:
                return

    def _ends_here(self, text: str) -> bool:
        """Whether a line under a frame is the exception, and not the source of the frame."""
        read = exception_of(text)
        if read is None or not EXCEPTION_NAME.search(read[0]):
            return False
        below = self._lines[self._at + 1].text if self._at + 1 < len(self._lines) else ""
        return not _BARE_FRAME.match(below) and exception_of(below) is None
