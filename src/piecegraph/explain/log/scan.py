"""One pass over logs: ordinary lines are observed, tracebacks are gathered stream by stream and resolved when they end.

In come lines, out comes one :class:`Evidence` for each run. A run ends where another one begins behind a failure.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from piecegraph.explain.evidence import Evidence, Process
from piecegraph.explain.log.collected import MAX_CALL_CHAINS, CollectedRun
from piecegraph.explain.log.failures import find_failures
from piecegraph.explain.log.lines import Line, PrefixReader
from piecegraph.explain.log.observations import WORDS, has_any, milestone_of, words_in
from piecegraph.explain.log.syntax import HEADER_TEXT, exception_of, kind_of, mask

MAX_STREAM_LINES = 20_000
"""A stream is resolved when it holds as many lines, even if it goes on."""
MAX_SEARCHED_LINES = 10_000
"""So many lines of processes that differ are reconstructed; behind them exceptions are counted."""
MAX_READ_PARTS = 50_000
"""So many heads and frames of tracebacks are read. Of more, all but the end is counted: see :class:`_Tail`."""
TAIL_LINES = 5000
MAX_KINDS = 1000
"""Of exceptions that are counted and not read."""
QUIET_LINES = 200
"""A traceback has ended when as many lines without a part of one have passed ..."""
PATIENCE_LINES = 5000
"""... or as many in which only other streams had one."""
MAX_GATHERED_LINES = 60_000
"""Of all streams together; the fullest is resolved when there are more."""

OPENING = (
    *('File "', "(most recent call", "Process ", "Exception i", " above exception"),
    *("Fatal Python error", "terminate called after", "--- Logging error"),
)
"""A line that is, or announces, a part of a traceback holds one of these."""


@dataclass(slots=True)
class _Stream:
    """The lines of one process that may belong to tracebacks."""

    lines: list[Line] = field(default_factory=list)
    latest: int = 0
    """The line number of the latest part of a traceback."""


class Scanner:
    """Feed it the lines of logs, then ask for the evidence.

    Several logs are taken for one run, each written by its own process; one log may hold several runs.
    """

    def __init__(
        self,
        *,
        is_one_log: bool = True,
        is_known_issue: Callable[[str], object] = lambda line: False,
        known_issue_words: Iterable[str] = (),
    ) -> None:
        """Make one.

        Args:
            is_one_log: whether all lines come from one log, which may hold several runs.
            is_known_issue: whether a known issue is recognised by a line outside of tracebacks.
            known_issue_words: every such line holds one of these.
        """
        self._is_one_log, self._is_known_issue = is_one_log, is_known_issue
        self._words = (*WORDS, *known_issue_words)
        self._finished: list[Evidence] = []
        self._sources: list[str] = []
        self._label = ""
        self._number = 0
        self._run = CollectedRun()
        self._reader = PrefixReader()
        self._streams: dict[Process, _Stream] = {}
        self._num_searched = self._num_read = 0
        self._tail: _Tail | None = None
        self._watched: tuple[str, ...] = ()  # the words in the present block
        self._opening: tuple[str, ...] = ()

    def add_notes(self, notes: Iterable[str]) -> None:
        """Remarks on the logs themselves."""
        self._run.notes.update(notes)

    @property
    def num_failures(self) -> int:
        """How many failures of the present run are resolved, equal ones counted each."""
        return sum(failure.count for failure in self._run.failures.in_order())

    def begin_log(self, name: str, label: str) -> None:
        """What follows is another log; ``label`` names it where there are several."""
        self._read_tail()
        self._close_streams()
        self._collect_processes()
        self._sources.append(name)
        self._label, self._number = label, 0
        self._reader = PrefixReader()

    def feed(self, lines: list[str]) -> None:
        """The next lines of the log."""
        self._opening = words_in("\n".join(lines), OPENING)
        outside = "\n".join(line for line in lines if not line.startswith(("    ", '  File "')))
        self._watched = words_in(outside, self._words)
        for at, raw in enumerate(lines):
            if self._num_read > MAX_READ_PARTS:
                self._pass_by(lines[at:])
                break
            self._number += 1
            if self._streams or has_any(raw, self._opening) or self._is_worth_observing(raw):
                self._look_at(raw)
            elif raw[:1] in ("[", "("):
                self._reader.note(raw)
        self._run.num_lines += len(lines)
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        if last:
            self._run.seen.last_line = (last, self._number)

    def finish(self) -> tuple[Evidence, ...]:
        """The evidence of every run, in order."""
        self._read_tail()
        self._close_streams()
        self._collect_processes()
        self._end_run()
        return tuple(self._finished)

    def _look_at(self, raw: str) -> None:
        is_worth_observing = self._is_worth_observing(raw)
        for process, line in self._reader.read(self._number, raw):
            self._gather(process, line)
            if is_worth_observing and not line.text.startswith("    ") and kind_of(line.text) != "frame":
                self._observe(line, raw)
        if self._streams and not self._number % QUIET_LINES:
            self._close_streams(only_quiet=True)

    def _pass_by(self, lines: list[str]) -> None:
        """Observe lines of a log of which no more tracebacks are read."""
        if self._tail is None:
            self._tail = _Tail()
            for process, stream in self._streams.items():
                if sum(kind_of(line.text) == "header" for line in stream.lines) > 1:
                    self._resolve(stream.lines, process, is_open=True)
            self._streams.clear()  # what is unfinished ends in the lines that are passed by, and is counted there
        self._tail.add(self._number + 1, lines)
        for raw in lines:
            self._number += 1
            if raw[:2] != "  " and self._is_worth_observing(raw):
                for _, line in self._reader.read(self._number, raw):
                    self._observe(line, raw)

    def _is_worth_observing(self, raw: str) -> bool:
        return has_any(raw, self._watched) or self._run.seen.is_listing(self._number)

    def _gather(self, process: Process, line: Line) -> None:
        if self._label:
            process = replace(process, label=f"{self._label} {process.label}".rstrip())
        is_part = has_any(line.text, OPENING)
        stream = self._streams.get(process)
        if stream is None and is_part:
            stream = self._streams[process] = _Stream()
        if stream is not None:
            stream.lines.append(line)
            if is_part:
                stream.latest = self._number
                self._num_read += 1
            if len(stream.lines) >= MAX_STREAM_LINES:
                stream.lines = self._resolve(stream.lines, process, is_open=True)

    def _observe(self, line: Line, raw: str) -> None:
        seen = self._run.seen
        milestone = milestone_of(line.text, line.number)
        if milestone is not None:
            if self._is_one_log and milestone.phase == "init" and milestone.state == "begun":
                self._close_streams()
                if self._run.failures:
                    self._end_run()
                    seen = self._run.seen
            seen.keep(milestone)
        seen.observe(line, raw)
        if len(self._run.known_issue_lines) < MAX_CALL_CHAINS and self._is_known_issue(line.text):
            self._run.known_issue_lines.append((line.text, line.number))

    def _close_streams(self, *, only_quiet: bool = False) -> None:
        latest = max((stream.latest for stream in self._streams.values()), default=0)
        is_quiet = not only_quiet or self._number - latest >= QUIET_LINES
        for process, stream in list(self._streams.items()):
            if is_quiet or self._number - stream.latest >= PATIENCE_LINES:
                del self._streams[process]
                self._resolve(stream.lines, process)
        if sum(len(stream.lines) for stream in self._streams.values()) > MAX_GATHERED_LINES:
            process, fullest = max(self._streams.items(), key=lambda item: len(item[1].lines))
            fullest.lines = self._resolve(fullest.lines, process, is_open=True)

    def _resolve(self, lines: list[Line], process: Process, *, is_open: bool = False) -> list[Line]:
        """Resolve a stream; what is left of an open one, because it is not complete, comes back."""
        may_search = self._num_searched < MAX_SEARCHED_LINES
        found = find_failures(lines, process, may_search=may_search, is_open=is_open)
        if any(failure.certainty == "reconstructed" for failure in found.failures):
            self._num_searched += len(lines)
            if not may_search:
                self._run.notes["interleaved tracebacks were too many to reconstruct all: exceptions were counted"] += 1
        self._run.add(found)
        if found.rest_from is None:
            return []
        place = next(at for at, line in enumerate(lines) if line.number >= found.rest_from)
        return lines[place:]

    def _read_tail(self) -> None:
        """Read the end of a log that was too long to read whole: it tells what the run died of."""
        if self._tail is None:
            return
        tail, self._tail, self._num_read = self._tail, None, 0
        for number, raw in tail.lines():
            for process, line in self._reader.read(number, raw):
                self._gather(process, line)
        self._run.notes.update(tail.notes(MAX_READ_PARTS))

    def _collect_processes(self) -> None:
        named = [Process(self._label)] if self._label else []
        self._run.add_processes((*named, *self._reader.processes))

    def _end_run(self) -> None:
        self._collect_processes()
        self._finished.append(self._run.evidence(tuple(self._sources)))
        self._run = CollectedRun(first_line=self._number)


class _Tail:
    """The end of a log that holds more tracebacks than are read; what comes before it is counted by exception."""

    def __init__(self) -> None:
        self._blocks: deque[tuple[int, list[str]]] = deque()
        self._num_kept = 0
        self._is_under_frame = False
        self._counts: Counter[str] = Counter()

    def add(self, first: int, lines: list[str]) -> None:
        """The next lines, of which the first has this number. Whole blocks are let go: one by one costs too much."""
        self._blocks.append((first, lines))
        self._num_kept += len(lines)
        while self._num_kept - len(self._blocks[0][1]) >= TAIL_LINES:
            _, gone = self._blocks.popleft()
            self._num_kept -= len(gone)
            self._count(gone)

    def lines(self) -> list[tuple[int, str]]:
        """The last lines with their numbers, from the head of a traceback on; call it once, at the end."""
        kept = [numbered for first, lines in self._blocks for numbered in enumerate(lines, first)]
        start = max(0, len(kept) - TAIL_LINES)
        while start < len(kept) and HEADER_TEXT not in kept[start][1]:
            start += 1  # a traceback of which the head was let go would look like another failure
        self._count([raw for _, raw in kept[:start]])
        return kept[start:]

    def notes(self, num_read: int) -> list[str]:
        """What to say about the lines that were let go."""
        total = self._counts.total()
        if not total:
            return []
        text, number = self._counts.most_common(1)[0]
        return [
            f"after {num_read:,} frames, {total:,} further exceptions were counted and not read, "
            f"most often ({number:,}) {text[:100]}; the last {TAIL_LINES:,} lines were read"
        ]

    def _count(self, lines: list[str]) -> None:
        is_under_frame = self._is_under_frame
        for raw in lines:
            if raw[:2] == "  ":
                is_under_frame = True
            elif is_under_frame:
                is_under_frame = False
                if exception_of(raw.rstrip("\r")):
                    text = mask(raw)
                    if text in self._counts or len(self._counts) < MAX_KINDS:
                        self._counts[text] += 1
        self._is_under_frame = is_under_frame
