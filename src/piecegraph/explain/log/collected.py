"""What one run of a log has shown so far, and the :class:`Evidence` that comes of it.

Everything kept is bounded: a log may hold a million tracebacks, most of them equal.
"""

from __future__ import annotations

import signal
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from piecegraph.explain.evidence import (
    Death,
    Evidence,
    Failure,
    FailureKind,
    Frame,
    GroupState,
    LinesAbove,
    Process,
    Raised,
    TreeLine,
)
from piecegraph.explain.log.elastic_table import rows_of_table
from piecegraph.explain.log.failures import StreamFailures
from piecegraph.explain.log.lines import Line
from piecegraph.explain.log.observations import Observations
from piecegraph.explain.log.syntax import mask
from piecegraph.explain.log.usual import UsualLines, went_on

MAX_DISTINCT_FAILURES = 200
"""More are counted and not kept."""
MAX_PROCESSES = 4096
MAX_CALL_CHAINS = 20
MAX_LINES_OF_AN_ISSUE = 3
MAX_USUAL = 1000


class DistinctFailures:
    """Failures that differ in more than their numbers; equal ones are counted.

    Note [One failure printed twice]: a process logs an exception where it catches it, and prints it again where it
    dies of it. The second traceback is the first with frames of callers in front, and is counted as the same failure.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, Failure] = {}
        self._by_place: defaultdict[Hashable, list[Hashable]] = defaultdict(list)
        self.num_not_kept = 0

    def add(self, failure: Failure) -> None:
        key, place = _identity(failure), _innermost(failure)
        if key not in self._kept:
            key = next((other for other in self._by_place[place] if _is_same(self._kept[other], failure)), key)
        known = self._kept.get(key)
        if known is not None:
            self._kept[key] = _merged(known, failure)
        elif len(self._kept) < MAX_DISTINCT_FAILURES:
            self._kept[key] = failure
            self._by_place[place].append(key)
        else:
            self.num_not_kept += failure.count

    def has_other_than(self, failure: Failure) -> bool:
        return any(key != _identity(failure) for key in self._kept)

    def in_order(self) -> tuple[Failure, ...]:
        return tuple(sorted(self._kept.values(), key=lambda failure: failure.line or 0))

    def __bool__(self) -> bool:
        return bool(self._kept)


@dataclass(slots=True)
class CollectedRun:
    """What one run has shown so far."""

    first_line: int = 1
    may_go_on: bool = False
    num_lines: int = 0
    seen: Observations = field(default_factory=Observations)
    failures: DistinctFailures = field(default_factory=DistinctFailures)
    processes: dict[Process, None] = field(default_factory=dict)
    chains: list[tuple[Frame, ...]] = field(default_factory=list)
    num_chains: int = 0
    num_cut_off: int = 0
    tree: tuple[TreeLine, ...] = ()
    known_issue_lines: list[tuple[str, int | None]] = field(default_factory=list)
    known_issues: Counter[Hashable] = field(default_factory=Counter)
    usual: list[UsualLines] = field(default_factory=list)
    """Above tracebacks, and above the end of the run."""
    notes: Counter[str] = field(default_factory=Counter)

    def add_failure(self, failure: Failure) -> None:
        self.failures.add(failure)
        last = failure.chain[-1]
        if last.type.endswith("ChildFailedError"):
            for row in rows_of_table(last.message, failure.line):
                self.seen.keep_exit(row.ended)
                for told in row.failures:
                    self.failures.add(told)

    def add_rest(self, found: StreamFailures) -> None:
        """All but the failures."""
        self.num_chains += len(found.call_chains)
        self.num_cut_off += found.num_cut_off
        self.chains += found.call_chains[: MAX_CALL_CHAINS - len(self.chains)]
        self.tree = self.tree or found.tree
        self.notes.update(found.notes)

    def keep_known_issue(self, found: Hashable, line: Line) -> None:
        """A line by which known issues are recognised: the first few for the same ones, which may come in thousands."""
        self.known_issues[found] += 1
        if self.known_issues[found] <= MAX_LINES_OF_AN_ISSUE:
            self.known_issue_lines.append((line.text, line.number))

    def keep_usual(self, lines: UsualLines) -> None:
        if len(self.usual) < MAX_USUAL:
            self.usual.append(lines)

    def add_processes(self, processes: Iterable[Process]) -> None:
        for process in processes:
            if len(self.processes) < MAX_PROCESSES:
                self.processes[process] = None

    def evidence(self, sources: tuple[str, ...]) -> Evidence:
        seen, notes = self.seen, list(self.notes)[:MAX_CALL_CHAINS]
        if self.failures.num_not_kept:
            notes.append(
                f"more than {MAX_DISTINCT_FAILURES} distinct failures: {self.failures.num_not_kept} further tracebacks "
                "were counted and not kept"
            )
        failures = tuple(replace(one, went_on=went_on(one, self.usual)) for one in self.failures.in_order())
        ranks = (Process(f"rank{rank}", rank=rank) for rank in sorted(seen.ranks))
        return Evidence(
            sources=sources,
            num_lines=self.num_lines,
            first_line=self.first_line,
            may_go_on=self.may_go_on,
            processes=tuple(dict.fromkeys((*self.processes, *seen.workers.values(), *ranks))),
            failures=_with_waits(_with_deaths(failures, tuple(seen.deaths.values())), seen.watchdog.states()),
            milestones=tuple(seen.milestones.values()),
            progress=tuple(seen.progress.values()),
            suggestions=tuple(seen.suggestions.items()),
            memory_signs=tuple(seen.memory_signs),
            artefacts=tuple(_listed(path, names) for path, names in seen.artefacts.items()),
            num_call_chains=self.num_chains,
            num_cut_off=self.num_cut_off,
            call_chains=tuple(self.chains),
            exits=tuple(seen.exits.values()),
            free_memory=seen.free_memory,
            stops=tuple(seen.stops.values()),
            above=tuple(LinesAbove(line, lines) for line, lines in seen.above.items()),
            device_asserts=tuple((text, line) for text, (_, line) in seen.device_asserts.items()),
            xids=tuple(seen.xids.values()),
            error_lines=tuple(dict.fromkeys((*list(seen.errors.values())[:3], *seen.last_errors))),
            group_states=seen.watchdog.states(),
            world_size=seen.watchdog.world_size,
            known_issue_lines=tuple(self.known_issue_lines),
            last_line=seen.last_line,
            tree=self.tree,
            notes=tuple(notes),
        )


def _listed(path: str, names: list[str]) -> str:
    if not names:
        return path
    return f"{path} ({len(names)} files: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


def _with_deaths(failures: tuple[Failure, ...], deaths: Sequence[Death]) -> tuple[Failure, ...]:
    """Failures and deaths in order; a death that an exception tells in its own text is told by that."""
    texts = [raised.message for failure in failures for raised in failure.chain]
    alike: dict[str, list[Death]] = {}
    for death in deaths:
        words = death.text.partition(": ")[2] or death.text
        if not any(words in text or death.text in text for text in texts):
            alike.setdefault(death.name, []).append(death)
    told = [_failure_of(group) for group in alike.values()]
    return tuple(sorted((*failures, *told), key=lambda failure: failure.line or 0))


def _with_waits(failures: tuple[Failure, ...], states: Sequence[GroupState]) -> tuple[Failure, ...]:
    """Collectives that took too long are a failure, also where the exception that follows is not in the log."""
    waits = [state for state in states if state.waited is not None]
    if not waits or any("collective operation timeout" in one.message for failure in failures for one in failure.chain):
        return failures
    named = dict.fromkeys(state.world_rank for state in waits if state.world_rank is not None)
    told = Failure(
        chain=(Raised(type="collective timeout", message=waits[0].text, frames=()),),
        count=len(waits),
        num_writers=len(waits),
        num_unnamed=sum(state.world_rank is None for state in waits),
        processes=tuple(Process(f"rank{rank}", rank=rank) for rank in named),
        line=waits[0].line,
    )
    return tuple(sorted((*failures, told), key=lambda failure: failure.line or 0))


def _failure_of(deaths: Sequence[Death]) -> Failure:
    """Deaths by the same signal. Several lines may tell of one process, so only those with names are counted."""
    first = deaths[0]
    named = tuple(dict.fromkeys(death.process for death in deaths if death.process.label))
    stops = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    kind: FailureKind = "interrupted" if first.signal in stops else "signal"
    if first.signal in (None, signal.SIGKILL):
        kind = "killed"
    return Failure(
        chain=(Raised(type=first.name, message=first.text, frames=()),),
        kind=kind,
        count=max(1, len(named)),
        num_writers=max(1, len(named)),
        processes=named,
        line=first.line,
        death=first,
    )


def _identity(failure: Failure) -> Hashable:
    """Equal for processes that failed alike: without sources, addresses and numbers."""
    return failure.kind, tuple(
        (
            raised.type,
            mask(raised.message.partition("\n")[0]),
            tuple((frame.file, frame.line, frame.function) for frame in raised.frames),
        )
        for raised in failure.chain
    )


def _innermost(failure: Failure) -> Hashable:
    """What two prints of one failure have in common for certain."""
    return tuple(
        (raised.type, mask(raised.message.partition("\n")[0]), tuple((f.file, f.line) for f in raised.frames[-1:]))
        for raised in failure.chain
    )


def _is_same(known: Failure, other: Failure) -> bool:
    """Whether one has nothing but further callers in front: see Note [One failure printed twice]."""
    if {known.kind, other.kind} - {"exception", "logged"} and known.kind != other.kind:
        return False
    return all(_ends_alike(a, b) for a, b in zip(known.chain, other.chain, strict=True))


def _ends_alike(a: Raised, b: Raised) -> bool:
    number = min(len(a.frames), len(b.frames))
    inner = [[(f.file, f.line, f.function) for f in raised.frames[len(raised.frames) - number :]] for raised in (a, b)]
    return number > 0 and inner[0] == inner[1]


def _merged(known: Failure, other: Failure) -> Failure:
    certainties = {known.certainty, other.certainty}
    certainty = next(c for c in ("reconstructed", "unwoven", "printed", "recorded") if c in certainties)
    processes = known.processes
    if len(processes) < MAX_PROCESSES:
        processes = tuple(dict.fromkeys((*processes, *other.processes)))
    lines = [line for line in (known.line, other.line) if line is not None]
    last_lines = [line for line in (known.last_line, other.last_line) if line is not None]
    clocks = [clock for clock in (known.clock_s, other.clock_s) if clock is not None]
    named = {process for process in processes if process.label}
    return replace(
        known,
        kind="exception" if {known.kind, other.kind} == {"exception", "logged"} else known.kind,
        count=known.count + other.count,
        num_writers=max(known.num_writers, other.num_writers, len(named)),
        num_unnamed=known.num_unnamed + other.num_unnamed,
        processes=processes,
        certainty=certainty,
        line=min(lines) if lines else None,
        last_line=max(last_lines) if last_lines else None,
        is_caught=known.is_caught and other.is_caught,
        clock_s=min(clocks) if clocks else None,
    )
