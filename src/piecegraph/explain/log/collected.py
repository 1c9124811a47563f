"""What one run of a log has shown so far, and the :class:`Evidence` that comes of it.

Everything kept is bounded: a log may hold a million tracebacks, most of them equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace

from piecegraph.explain.evidence import Evidence, Failure, Frame, Process, TreeLine
from piecegraph.explain.log.failures import StreamFailures
from piecegraph.explain.log.observations import Observations, exits_of_table
from piecegraph.explain.log.syntax import mask

MAX_DISTINCT_FAILURES = 200
"""More are counted and not kept."""
MAX_PROCESSES = 4096
MAX_CALL_CHAINS = 20


class DistinctFailures:
    """Failures that differ in more than their numbers; equal ones are counted."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Failure] = {}
        self.num_not_kept = 0

    def add(self, failure: Failure) -> None:
        key = _identity(failure)
        known = self._kept.get(key)
        if known is not None:
            self._kept[key] = _merged(known, failure)
        elif len(self._kept) < MAX_DISTINCT_FAILURES:
            self._kept[key] = failure
        else:
            self.num_not_kept += failure.count

    def in_order(self) -> tuple[Failure, ...]:
        return tuple(sorted(self._kept.values(), key=lambda failure: failure.line or 0))

    def __bool__(self) -> bool:
        return bool(self._kept)


@dataclass(slots=True)
class CollectedRun:
    """What one run has shown so far."""

    first_line: int = 1
    num_lines: int = 0
    seen: Observations = field(default_factory=Observations)
    failures: DistinctFailures = field(default_factory=DistinctFailures)
    processes: dict[Process, None] = field(default_factory=dict)
    chains: list[tuple[Frame, ...]] = field(default_factory=list)
    num_chains: int = 0
    tree: tuple[TreeLine, ...] = ()
    known_issue_lines: list[tuple[str, int | None]] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, found: StreamFailures) -> None:
        for failure in found.failures:
            self.failures.add(failure)
            last = failure.chain[-1]
            if last.type.endswith("ChildFailedError"):
                self.seen.exits.extend(exits_of_table(last.message, failure.line))
        self.num_chains += len(found.call_chains)
        self.chains += found.call_chains[: MAX_CALL_CHAINS - len(self.chains)]
        self.tree = self.tree or found.tree
        self.notes.update(found.notes)

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
        ranks = (Process(f"rank{rank}", rank=rank) for rank in sorted(seen.ranks))
        return Evidence(
            sources=sources,
            num_lines=self.num_lines,
            first_line=self.first_line,
            processes=tuple(dict.fromkeys((*self.processes, *seen.workers.values(), *ranks))),
            failures=self.failures.in_order(),
            milestones=tuple(seen.milestones.values()),
            suggestions=tuple(seen.suggestions.items()),
            memory_signs=tuple(seen.memory_signs),
            artefacts=tuple(_listed(path, names) for path, names in seen.artefacts.items()),
            num_call_chains=self.num_chains,
            call_chains=tuple(self.chains),
            exits=tuple(seen.exits),
            free_memory=seen.free_memory,
            error_lines=tuple(seen.errors),
            known_issue_lines=tuple(self.known_issue_lines),
            last_line=seen.last_line,
            tree=self.tree,
            notes=tuple(notes),
        )


def _listed(path: str, names: list[str]) -> str:
    if not names:
        return path
    return f"{path} ({len(names)} files: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


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


def _merged(known: Failure, other: Failure) -> Failure:
    certainties = {known.certainty, other.certainty}
    certainty = next(c for c in ("reconstructed", "unwoven", "printed", "recorded") if c in certainties)
    processes = known.processes
    if len(processes) < MAX_PROCESSES:
        processes = tuple(dict.fromkeys((*processes, *other.processes)))
    lines = [line for line in (known.line, other.line) if line is not None]
    return replace(
        known,
        count=known.count + other.count,
        processes=processes,
        certainty=certainty,
        line=min(lines) if lines else None,
    )
