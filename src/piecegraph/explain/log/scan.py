"""One pass over logs: ordinary lines are observed, tracebacks are gathered stream by stream and resolved when they end.

In come lines, out comes one :class:`Evidence` for each run.

Note [Runs]: logs are appended to. A run ends where another one begins behind a failure: where a launcher or an engine
says that it starts, where the first line of the run stands again, if it stood nowhere else before, or where Python
cannot read the program. A first line that stands again may be a late process's of the same run: the evidence says so,
and who knows what an echo is decides.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace

from piecegraph.explain.evidence import Evidence, Process
from piecegraph.explain.log.above import lines_above
from piecegraph.explain.log.beginnings import FirstLine, never_started
from piecegraph.explain.log.clock import latest_seconds
from piecegraph.explain.log.collected import CollectedRun
from piecegraph.explain.log.deaths import tells_death
from piecegraph.explain.log.failures import find_failures
from piecegraph.explain.log.json_records import unwrapped
from piecegraph.explain.log.lines import Line, PrefixReader
from piecegraph.explain.log.observations import (
    ERROR_WORDS,
    Watched,
    has_any,
    is_start,
    milestone_of,
    vocabulary_of,
    watched_in,
    words_in,
)
from piecegraph.explain.log.syntax import kind_of
from piecegraph.explain.log.tail import Tail
from piecegraph.explain.log.torn import folded_at
from piecegraph.explain.log.usual import NUM_LINES, is_caught, usual_lines

MAX_STREAM_LINES = 20_000
"""A stream is resolved when it holds as many lines, even if it goes on."""
MAX_SEARCHED_LINES = 10_000
"""So many lines of processes that differ are reconstructed; behind them exceptions are counted."""
MAX_READ_PARTS = 50_000
"""So many heads and frames of tracebacks are read. Of more, all but the end is counted: see :class:`Tail`."""
QUIET_LINES = 200
"""A traceback has ended when as many lines without a part of one have passed ..."""
PATIENCE_LINES = 5000
"""... or as many in which only other streams had one."""
LINES_BEHIND_A_PART = 8
"""That a process prints before the next part: the source, marks under it, a message. Where many processes take turns,
those of all of them have to pass.
"""
MAX_GATHERED_LINES = 60_000
"""Of all streams together; the fullest is resolved when there are more."""

OPENING = (
    *('File "', "(most recent call", "Process ", "Exception i", " above exception"),
    *(
        "Fatal Python error",
        "Windows fatal exc",
        "terminate called after",
        "panicked at",
        "--- Logging error",
        " In[",
        "mIn[",
    ),
    *("ray::", "-- Process ", "= FAILURES =", "= ERRORS ="),
    *("File /", "File ~", "mFile ", "\u2771"),
)
"""A line that is, or announces, a part of a traceback holds one of these."""


_BARE_FRAME = re.compile(r'^\s*File "[^"]+", line \d+\s*$')
"""A frame outside of any function, as a SyntaxError has it."""


@dataclass(slots=True)
class _Stream:
    """The lines of one process that may belong to tracebacks."""

    lines: list[Line] = field(default_factory=list)
    latest: int = 0
    """The line number of the latest part of a traceback."""
    clock: list[tuple[int, int | None]] = field(default_factory=list)
    """The lines at which tracebacks begin, and when they were printed."""


class Scanner:
    """Feed it the lines of logs, then ask for the evidence.

    Several logs are taken for one run, each written by its own process; one log may hold several runs.
    """

    def __init__(
        self,
        *,
        is_one_log: bool = True,
        is_known_issue: Callable[[str], Hashable] = lambda line: False,
        known_issue_words: Iterable[str] = (),
    ) -> None:
        """Make one.

        Args:
            is_one_log: whether all lines come from one log, which may hold several runs.
            is_known_issue: which known issues are recognised by a line outside of tracebacks.
            known_issue_words: every such line holds one of these.
        """
        self._is_one_log, self._is_known_issue = is_one_log, is_known_issue
        self._known_words = tuple(known_issue_words)
        self._finished: list[Evidence] = []
        self._sources: list[str] = []
        self._label = ""
        self._number = 0
        self._run = CollectedRun()
        self._reader = PrefixReader()
        self._streams: dict[Process, _Stream] = {}
        self._num_searched = self._num_read = 0
        self._tail: Tail | None = None
        self._watched = Watched()  # the words in the present block
        self._known: tuple[str, ...] = ()
        self._errors: tuple[str, ...] = ()
        self._opening: tuple[str, ...] = ()
        self._num_counted = 0  # up to here lines are counted as those of a run
        self._before = ""  # the line before the present one
        self._block: list[str] = []
        self._block_first = 0  # the number of its first line
        self._fold = 0  # the width at which a terminal folded the lines; 0 if none did
        self._folded = ""
        self._first_line = FirstLine()

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
        self._label, self._number, self._num_counted = label, 0, 0
        self._block, self._block_first = [], 0
        self._before, self._fold, self._folded, self._first_line = "", 0, "", FirstLine()
        self._reader = PrefixReader()

    def feed(self, lines: list[str]) -> None:
        """The next lines of the log."""
        whole = "\n".join(lines)
        if '{"' in whole:
            lines = [unwrapped(line) for line in lines]
            whole = "\n".join(lines)
        vocabulary = vocabulary_of(whole)
        self._opening = words_in(whole, vocabulary, OPENING)
        outside = whole  # of tracebacks, whose sources may hold any word
        if 'File "' in self._opening:
            outside = "\n".join(line for line in lines if not line.startswith(("    ", '  File "')))
        self._fold = self._fold or (folded_at(lines) if 'File "' in self._opening else 0)
        self._first_line.note(lines, OPENING)
        self._watched = watched_in(outside, vocabulary, (self._first_line.text,) if self._first_line.text else ())
        self._known = words_in(outside, vocabulary, self._known_words)
        self._errors = () if self._run.failures else words_in(whole, vocabulary, ERROR_WORDS)
        above = self._block[-NUM_LINES:]
        self._block, self._block_first = [*above, *lines], self._number + 1 - len(above)
        for at, raw in enumerate(lines):
            if self._num_read > MAX_READ_PARTS:
                self._pass_by(lines[at:])
                break
            self._number += 1
            if self._fold:
                if len(raw) == self._fold:
                    self._folded += raw
                    continue
                raw, self._folded = self._folded + raw, ""
            if self._streams or has_any(raw, self._opening) or self._is_worth_observing(raw):
                self._look_at(raw)
            elif raw[:1] in ("[", "("):
                self._reader.note(raw)
            self._before = raw
        self._count_lines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "").rpartition("\n")[2]
        if last:
            self._run.seen.last_line = (last, self._number)

    def finish(self) -> tuple[Evidence, ...]:
        """The evidence of every run, in order."""
        self._read_tail()
        self._close_streams()
        self._collect_processes()
        self._end_run()
        return tuple(self._finished)

    def _count_lines(self) -> None:
        self._run.num_lines += self._number - self._num_counted
        self._num_counted = self._number

    def _look_at(self, raw: str) -> None:
        is_worth_observing = self._is_worth_observing(raw)
        for process, line in self._reader.read(self._number, raw):
            self._gather(process, line)
            if not is_worth_observing or kind_of(line.text) == "frame":
                continue
            if not line.text.startswith("    "):
                self._observe(process, line, raw)
            elif not self._streams:  # else it is the source of a frame
                if tells_death(line.text):
                    self._observe(process, line, raw)
                else:
                    self._run.seen.keep_error(line, raw)
        if self._streams and not self._number % QUIET_LINES:
            self._close_streams(only_quiet=True)

    def _pass_by(self, lines: list[str]) -> None:
        """Observe lines of a log of which no more tracebacks are read."""
        if self._tail is None:
            self._tail = Tail()
            for process, stream in self._streams.items():
                if sum(kind_of(line.text) == "header" for line in stream.lines) > 1:
                    self._resolve(stream, process, is_open=True)
            self._streams.clear()  # what is unfinished ends in the lines that are passed by, and is counted there
        self._tail.add(self._number + 1, lines)
        for raw in lines:
            self._number += 1
            if raw[:2] != "  " and self._is_worth_observing(raw):
                for process, line in self._reader.read(self._number, raw):
                    self._observe(process, line, raw)

    def _is_worth_observing(self, raw: str) -> bool:
        return has_any(raw, self._known) or self._may_say_something(raw)

    def _may_say_something(self, raw: str) -> bool:
        if has_any(raw, self._watched.all) or self._run.seen.is_listing(self._number):
            return True
        return bool(self._errors) and not self._streams and not self._run.failures and has_any(raw, self._errors)

    def _gather(self, process: Process, line: Line) -> None:
        is_part = has_any(line.text, OPENING)
        named = self._named(process)
        stream = self._streams.get(named)
        latest = stream.lines[-1:] if stream is not None else []  # none, if all of them were resolved
        if latest and is_part and _BARE_FRAME.match(line.text) and not _is_inside(latest[0]):
            self._close_streams()  # what comes is the end of a process that never started: see Note [Runs]
            stream = None
        if stream is None and is_part:
            stream = self._streams[named] = _Stream()
            # A logger may have announced the traceback in the line above.
            stream.lines += [
                above
                for who, above in self._reader.read(line.number - 1, self._before)
                if who == process and above.record
            ]
        if stream is not None:
            stream.lines.append(line)
            if is_part:
                stream.latest = self._number
                self._num_read += 1
                if kind_of(line.text) == "header" or not stream.clock:
                    stream.clock.append((line.number, self._seconds(line.number)))
                    self._keep_usual(line.number)
            if len(stream.lines) >= MAX_STREAM_LINES:
                stream.lines = self._resolve(stream, named, is_open=True)

    def _named(self, process: Process) -> Process:
        """The process, with the log it writes where there are several."""
        return replace(process, label=f"{self._label} {process.label}".rstrip()) if self._label else process

    def _seconds(self, number: int) -> int | None:
        """When a line of the present block was printed."""
        return latest_seconds(self._block, number - self._block_first)

    def _keep_usual(self, number: int) -> None:
        """Remember what stands above a traceback or the end of the run; logs of several processes have no one end."""
        at = number - self._block_first
        if self._is_one_log and 0 < at <= len(self._block):
            self._run.keep_usual(usual_lines(self._block, at, number))

    def _lines_above(self, number: int) -> tuple[tuple[str, int | None], ...]:
        return lines_above(
            self._block,
            number - self._block_first,
            self._block_first,
            lambda at, raw: self._reader.read(at, raw)[-1][1].text,
        )

    def _observe(self, process: Process, line: Line, raw: str) -> None:
        if self._may_say_something(raw):
            self._take_note(process, line, raw)
        found = has_any(line.text, self._known) and self._is_known_issue(line.text)
        if found:
            self._run.keep_known_issue(found, line)

    def _take_note(self, process: Process, line: Line, raw: str) -> None:
        seen = self._run.seen
        watched = self._watched
        milestone = milestone_of(line.text, line.number) if has_any(line.text, watched.mark) else None
        is_begun = milestone is not None and (milestone.phase, milestone.state) == ("init", "begun")
        is_sure = is_begun or (has_any(line.text, watched.start) and is_start(line.text))
        has_failed = bool(self._run.failures or seen.deaths)
        is_again = self._first_line.is_again(raw, has_failed=has_failed or bool(self._streams))
        if self._is_one_log and (is_sure or is_again):
            self._close_streams()
            if self._run.failures or seen.deaths:
                self._end_run(may_go_on=not is_sure)
                seen = self._run.seen
        if milestone is not None:
            seen.keep(replace(milestone, process=self._named(process)))
        seen.observe(line, raw, self._named(process), watched, self._lines_above)

    def _close_streams(self, *, only_quiet: bool = False) -> None:
        latest = max((stream.latest for stream in self._streams.values()), default=0)
        turns = LINES_BEHIND_A_PART * len(self._streams)
        is_quiet = not only_quiet or self._number - latest >= max(QUIET_LINES, turns)
        for process, stream in list(self._streams.items()):
            if is_quiet or self._number - stream.latest >= max(PATIENCE_LINES, turns):
                del self._streams[process]
                self._resolve(stream, process)
        if sum(len(stream.lines) for stream in self._streams.values()) > MAX_GATHERED_LINES:
            process, fullest = max(self._streams.items(), key=lambda item: len(item[1].lines))
            fullest.lines = self._resolve(fullest, process, is_open=True)

    def _resolve(self, stream: _Stream, process: Process, *, is_open: bool = False) -> list[Line]:
        """Resolve a stream; what is left of an open one, because it is not complete, comes back."""
        lines = stream.lines
        may_search = self._num_searched < MAX_SEARCHED_LINES
        found = find_failures(lines, process, may_search=may_search, is_open=is_open)
        if any(failure.certainty == "reconstructed" for failure in found.failures):
            self._num_searched += len(lines)
            if not may_search:
                self._run.notes["interleaved tracebacks were too many to reconstruct all: exceptions were counted"] += 1
        for failure in found.failures:
            if self._is_one_log and never_started(failure) and self._run.failures.has_other_than(failure):
                self._end_run(at=failure.line)
            begun = bisect.bisect_right(stream.clock, failure.line or 0, key=lambda entry: entry[0])
            seconds = stream.clock[begun - 1][1] if begun else None
            self._run.add_failure(
                replace(failure, clock_s=seconds, last_line=failure.line, is_caught=is_caught(failure))
            )
        self._run.add_rest(found)
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

    def _end_run(self, at: int | None = None, *, may_go_on: bool = False) -> None:
        self._collect_processes()
        self._keep_usual(at or self._number + 1)
        self._count_lines()
        self._finished.append(self._run.evidence(tuple(self._sources)))
        self._run = CollectedRun(first_line=at or self._number, may_go_on=may_go_on)


def _is_inside(line: Line) -> bool:
    """Whether a line may be a part of a traceback that goes on."""
    return line.text.startswith(" ") or bool(kind_of(line.text))
