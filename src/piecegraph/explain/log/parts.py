"""Lines split into the parts of tracebacks that a process writes at once.

Note [Parts]: the ``traceback`` module prints one *entry* with one write: the head line, one frame with its source,
the whole text of an exception however long, or the sentence that links two exceptions. So the output of several
processes mixes between entries and not inside them. CPython up to 3.12 prints an exception nobody caught line by
line, so the source line may be torn from its frame: frames are told apart by file, line and function, never by their
source.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from piecegraph.explain.evidence import Frame
from piecegraph.explain.log.deaths import tells_death
from piecegraph.explain.log.lines import Line
from piecegraph.explain.log.syntax import (
    COMMAND_END,
    EXCEPTION_NAME,
    LINK_TEXTS,
    NAMED,
    PartKind,
    exception_of,
    frame_of,
    kind_of,
    mask,
    unmasked,
)

TracebackOrigin = Literal["", "thread", "ignored", "logging", "logged", "original"]
"""``logged``: by a logger, as less than an error. ``original``: another process's, quoted by the exception above."""
MAX_TEXT_LINES = 200
MAX_TABLE_LINES = 10_000
"""A launcher's table holds a traceback of each rank."""
MAX_REPAIRED_LINES = 20_000
"""Longer streams are split once: torn texts in them are lost."""
_MAX_FRAME_LINES = 12
_NEAR_LINES = 6


class TracebackPart(NamedTuple):
    """One write of one process. A tuple, because a log may hold a million."""

    kind: PartKind
    key: Hashable
    """Equal for the same part of another process's traceback: without addresses and numbers."""
    line: int
    end: int
    """The last line of it."""
    text: str = ""
    """Of an exception: all of it. Of a link: ``cause`` or ``context``."""
    frame: Frame | None = None
    name: str = ""
    """Of an exception: its type. Of a header: the worker or process named right in front of it."""
    anchor: str = ""
    """The part of a frame's source that carets point at."""
    origin: TracebackOrigin = ""


@dataclass(frozen=True, slots=True)
class StreamParts:
    """The parts of one stream, and who announced itself there."""

    parts: tuple[TracebackPart, ...]
    names: tuple[str, ...]
    """From multiprocessing's ``Process Process-4:``."""


_GROUP_MARGIN = re.compile(r"^\s+(?:\| ?|\+ (?=Exception Group)|\+(?:-\+)?-{4,}.*$)")
_MIN_MESSAGE = 12
"""Shorter messages may stand in any line by chance."""
_LOG_LINE = re.compile(r"^(?:={8,}|-{20,}|Capturing batches|.*\d+%\||/\S+\.py:\d+: \w*Warning|\s*\[end of output\]$)")
_ORIGINS: tuple[tuple[str, TracebackOrigin], ...] = (
    ("Exception in thread ", "thread"),
    ("Exception ignored in", "ignored"),
    ("Error in atexit", "ignored"),
    ("--- Logging error ---", "logging"),
    ("-- Process ", "original"),
)
_ANNOUNCES = re.compile(r"(?i)fail|error|exception|unable|could not|cannot|can't|traceback")
"""A warning right above a traceback that is about the traceback."""
_USER_CODE = "from user code:"
"""Below it Dynamo quotes the user's frames, as a part of the message."""


def split_parts(lines: Sequence[Line], *, is_open: bool = False) -> StreamParts:
    """Split a stream. Which lines start the text of an exception is learned first: see :func:`_learn_starts`.

    Args:
        is_open: whether the stream goes on, so that its last traceback may be unfinished.
    """
    lines = [_without_margin(line) for line in lines]
    starts = _without_torn(_learn_starts(lines))  # a dict, for its order: pages must not depend on hash seeds
    done = _PartReader(lines, starts).run()
    # Every header has one exception text. Where there are fewer, some were torn by another process's output, or never
    # stood right under a frame and were taken for a part of another's text: give the likeliest such line back.
    if len(lines) > MAX_REPAIRED_LINES:
        return replace(done, parts=_with_settled_sources(done.parts))
    if _num_missing(done, is_open):
        torn = _PartReader(lines, starts, are_torn=True).run()
        done = torn if _count(torn, "text") <= _count(torn, "header") else done
    for _ in range(8):
        missed = _likeliest_missed_start(done.parts) if _num_missing(done, is_open) else None
        if missed is None:
            break
        starts[missed] = None
        done = _PartReader(lines, starts).run()
    return replace(done, parts=_with_settled_sources(done.parts))


@lru_cache(maxsize=1 << 14)
def _make_frame(file: str, line: int, function: str, source: str) -> Frame:
    return Frame(file, line, function, source)


def _without_margin(line: Line) -> Line:
    """Exception groups are drawn with a margin of bars."""
    if line.text[:1] != " " or ("|" not in line.text and "+" not in line.text):
        return line
    return line._replace(text=_GROUP_MARGIN.sub("", line.text, count=1))


def _learn_starts(lines: Sequence[Line]) -> dict[str, None]:
    """The masked lines that start an exception's text: those seen right under a frame at least once.

    An exception's text may quote others (``NotImplementedError: ...`` inside BackendCompilerFailed), which never stand
    there.
    """
    starts: dict[str, None] = {}
    is_under_frame = False
    for line in lines:
        text = line.text
        kind = kind_of(text)
        if kind == "frame" or kind == "header":
            is_under_frame = True
        elif is_under_frame and not (text.startswith("   ") and text.strip()):
            if exception_of(text):
                starts[mask(text)] = None
            is_under_frame = False
    return starts or _starts_near_frames(lines)


def _starts_near_frames(lines: Sequence[Line]) -> dict[str, None]:
    """Where no exception stands right under a frame, because all are torn: those that stand a few lines below one."""
    starts: dict[str, None] = {}
    latest = -_NEAR_LINES
    for at, line in enumerate(lines):
        if kind_of(line.text) == "frame":
            latest = at
        elif at - latest < _NEAR_LINES:
            read = exception_of(line.text)
            if read is not None and read[1] and EXCEPTION_NAME.search(read[0]):
                starts[mask(line.text)] = None
    return starts


def _messages_of(starts: dict[str, None]) -> list[tuple[re.Pattern[str], str]]:
    """Patterns of the messages and the lines they are from, long ones first: a message may quote a shorter one."""
    messages = {}
    for start in starts:
        _, message = exception_of(start) or ("", "")
        if len(message) >= _MIN_MESSAGE:
            messages[message] = start
    longest_first = sorted(messages.items(), key=lambda item: -len(item[0]))
    return [(re.compile(unmasked(message)), start) for message, start in longest_first]


def _without_torn(starts: dict[str, None]) -> dict[str, None]:
    """Without those that are another process's text behind, or in place of, the own message."""
    read = {start: exception_of(start) or ("", "") for start in starts}
    names = dict.fromkeys(name for name, message in read.values() if message)
    messages = {message for _, message in read.values() if message}

    def is_torn(start: str) -> bool:
        name, message = read[start]
        if not message:
            return name in names
        behind = next((message[len(other) :] for other in names if message.startswith(other)), None)
        return behind is not None and behind.lstrip(": ") in messages

    return {start: None for start in starts if not is_torn(start)}


def _likeliest_missed_start(parts: Sequence[TracebackPart]) -> str | None:
    found: Counter[str] = Counter()
    alike: defaultdict[Hashable, list[list[str]]] = defaultdict(list)
    for part in parts:
        if part.kind == "text":
            alike[part.key].append(part.text.split("\n"))
    for texts in alike.values():
        quoting = Counter(masked for text in texts for masked in {mask(line) for line in text[1:]})
        for masked, number in quoting.items():
            read = exception_of(masked)
            # What most texts of a kind contain is a quotation.
            if read and EXCEPTION_NAME.search(read[0]) and (len(texts) == 1 or number <= len(texts) / 2):
                found[masked] += number
    return found.most_common(1)[0][0] if found else None


def _with_settled_sources(parts: Sequence[TracebackPart]) -> tuple[TracebackPart, ...]:
    """Every frame with the source that most of its occurrences have: some were torn off or glued together."""
    votes: defaultdict[Hashable, Counter[str]] = defaultdict(Counter)
    for part in parts:
        if part.frame is not None and part.frame.source:
            votes[part.key][part.frame.source] += 1
    settled = {key: vote.most_common(1)[0][0] for key, vote in votes.items()}
    return tuple(
        part
        if part.frame is None or settled.get(part.key, "") == part.frame.source
        else part._replace(frame=replace(part.frame, source=settled[part.key]), anchor="")
        for part in parts
    )


def representatives(parts: Sequence[TracebackPart]) -> dict[Hashable, TracebackPart]:
    """One part for each key, at the place of the first; of exceptions the wording that most have, as some are torn."""
    first: dict[Hashable, TracebackPart] = {}
    wordings: defaultdict[Hashable, Counter[str]] = defaultdict(Counter)
    by_wording: dict[tuple[Hashable, str], str] = {}
    for part in parts:
        first.setdefault(part.key, part)
        if part.kind == "text":
            masked = mask(part.text)
            wordings[part.key][masked] += 1
            by_wording.setdefault((part.key, masked), part.text)
    for key, votes in wordings.items():
        first[key] = first[key]._replace(text=by_wording[key, votes.most_common(1)[0][0]])
    return first


def _num_missing(done: StreamParts, is_open: bool) -> int:
    """How many headers have no exception text, but for one that may still come."""
    is_unfinished = is_open and bool(done.parts) and done.parts[-1].kind != "text"
    return max(0, _count(done, "header") - _count(done, "text") - is_unfinished)


def _count(done: StreamParts, kind: PartKind) -> int:
    return sum(part.kind == kind for part in done.parts)


def _origin_of(header: Line, above: Line) -> TracebackOrigin:
    """What is announced right above a traceback, or in front of it."""
    if header.text.lstrip().startswith("Original "):
        return "original"
    for words, origin in _ORIGINS:
        if above.text.startswith(words):
            return origin
    is_announced = above.is_mild and header.number - above.number <= 1 and _ANNOUNCES.search(above.text) is not None
    return "logged" if header.is_mild or (not header.record and is_announced) else ""


class _PartReader:
    """One walk over the lines of a stream."""

    def __init__(self, lines: Sequence[Line], starts: dict[str, None], *, are_torn: bool = False) -> None:
        self._lines, self._starts = lines, starts
        self._messages = _messages_of(starts) if are_torn else []
        self._parts: list[TracebackPart] = []
        self._names: list[str] = []
        self._num_waiting = 0  # headers whose exception has not come yet
        self._is_open = False  # whether an exception's text can come: frames or a header were seen

    def run(self) -> StreamParts:
        at = 0
        while at < len(self._lines):
            at = self._step(at)
        return StreamParts(tuple(self._parts), tuple(self._names))

    def _step(self, at: int) -> int:
        line = self._lines[at]
        kind = kind_of(line.text)
        if kind == "frame":
            self._is_open = True
            return self._frame(at)
        if kind == "header":
            self._is_open = True
            self._num_waiting += 1
            self._parts.append(self._header(at))
        elif kind == "link":
            text = LINK_TEXTS[line.text.strip()]
            self._parts.append(TracebackPart("link", ("link", text), line.number, line.number, text))
        elif kind == "named":
            self._names.append(line.text.split()[1].rstrip(":"))
        elif self._is_open and exception_of(line.text) and mask(line.text) in self._starts:
            return self._text(at)
        elif self._num_waiting and self._messages:
            self._parts.extend(self._torn_texts(line))
        return at + 1

    def _torn_texts(self, line: Line) -> list[TracebackPart]:
        """The exceptions whose message stands in a line, whatever was written in between."""
        found, rest = [], line.text
        for pattern, start in self._messages:
            for message in pattern.findall(rest):
                name, _ = exception_of(start) or ("", "")
                text = f"{name}: {message}"
                found.append(TracebackPart("text", ("text", start), line.number, line.number, text, name=name))
            rest = pattern.sub("", rest)
        self._num_waiting = max(0, self._num_waiting - len(found))
        return found

    def _header(self, at: int) -> TracebackPart:
        line = self._lines[at]
        above = self._lines[at - 1] if at else Line(0, "")
        origin = _origin_of(line, above)
        named = NAMED.match(above.text) if above.number == line.number - 1 else None
        return TracebackPart(
            "header",
            ("header", origin == "original"),
            line.number,
            line.number,
            name=named["name"] if named else line.claim,
            origin=origin,
        )

    def _frame(self, at: int) -> int:
        lines, line, end = self._lines, self._lines[at], at + 1
        sources, anchor = [], ""
        while end < len(lines) and end < at + _MAX_FRAME_LINES:
            text = lines[end].text
            if not text.startswith("   "):
                break
            stripped = text.strip()
            if stripped[:1] in ("^", "~") and not stripped.strip("^~"):
                under = lines[end - 1].text
                anchor = anchor or under[len(text) - len(text.lstrip()) : len(text.rstrip())]
            elif stripped and not kind_of(text):
                sources.append(stripped)
            else:
                break
            end += 1
        file, number, function = frame_of(line.text) or ("", 0, "")
        frame = _make_frame(file, number, function, self._own_source(sources))
        self._parts.append(
            TracebackPart("frame", (file, number, function), line.number, lines[end - 1].number, "", frame, "", anchor)
        )
        return end

    def _own_source(self, sources: list[str]) -> str:
        """The source line of the frame being read. Torn frames stand in a row, then their sources do."""
        if len(sources) < 2:
            return sources[0] if sources else ""
        torn = 0
        while len(sources) > torn + 1 and torn < len(self._parts):
            before = self._parts[-1 - torn]
            if before.kind != "frame" or before.frame is None or before.frame.source:
                break
            torn += 1
        for place in range(torn):
            before = self._parts[place - torn]
            assert before.frame is not None
            self._parts[place - torn] = before._replace(frame=replace(before.frame, source=sources[place]))
        return sources[torn]

    def _text(self, at: int) -> int:
        line, end = self._lines[at], at + 1
        is_launcher_table = line.text.rstrip().endswith("ChildFailedError:")
        is_user_code = False
        most = at + (MAX_TABLE_LINES if is_launcher_table else MAX_TEXT_LINES)
        while end < len(self._lines) and end < most:
            nxt = self._lines[end]
            if is_launcher_table:
                if nxt.text.startswith("====") and end > at + 1:
                    end += 1
                    break
            elif is_user_code and nxt.text.strip():
                is_user_code = nxt.text.startswith("  ")
            elif self._ends_text(line, nxt):
                break
            else:
                is_user_code = nxt.text.strip() == _USER_CODE
            end += 1
        body = "\n".join(part.text for part in self._lines[at:end]).rstrip()
        name, _ = exception_of(line.text) or ("", "")
        self._parts.append(
            TracebackPart("text", ("text", mask(line.text)), line.number, self._lines[end - 1].number, body, name=name)
        )
        self._num_waiting = max(0, self._num_waiting - 1)
        self._is_open = self._num_waiting > 0
        return end

    def _ends_text(self, first: Line, line: Line) -> bool:
        if bool(kind_of(line.text)) or line.record != first.record:
            return True
        if _LOG_LINE.match(line.text) or (tells_death(line.text) and not COMMAND_END.search(line.text)):
            return True
        if self._num_waiting > 1 and any(pattern.search(line.text) for pattern, _ in self._messages):
            return True
        return mask(line.text) in self._starts and exception_of(line.text) is not None
