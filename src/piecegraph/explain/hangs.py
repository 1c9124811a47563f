"""A collective that not all ranks joined in time: who waited where, and who is missing, as far as the log proves it.

The watchdog of each rank names the first operation that it waited in too long. Every rank counts the operations of a
group alike, so a rank with a smaller number is behind, and two ranks that entered different ones under one number
called them in another order. A rank that says nothing is missing from the log, which is not to say that it was missing
from the collective: it may have been ended before its own watchdog was due.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from piecegraph.explain.evidence import Collective, Evidence, GroupState
from piecegraph.explain.log.collectives import DEFAULT_GROUP

_POINT_TO_POINT = re.compile(r"SEND|RECV|COALESCED$|^UNKNOWN$")
"""Of which two ranks alone take part, or which are counted apart."""
_SAME_SIZE = re.compile(r"^(?:ALLREDUCE|BROADCAST|_?ALLGATHER(?:_BASE)?|_?REDUCE_SCATTER(?:_BASE)?|REDUCE|BARRIER)$")
"""Of which all ranks give the same number of elements."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Ranks that waited in the same collective."""

    collective: Collective
    ranks: tuple[int, ...]
    ms: int
    """The longest of them."""
    line: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """One process group in which ranks waited too long."""

    group: str
    """Empty if it is all of the job, or if nothing names it."""
    waiting: tuple[Waiting, ...]
    """The one that most ranks waited in first."""
    behind: tuple[Waiting, ...] = ()
    """Those who waited in an earlier one than others."""
    is_mismatch: bool = False
    """Whether two ranks had entered different operations, or sizes that do not fit, under one number."""
    not_entered: tuple[tuple[int, int], ...] = ()
    """Ranks that had not entered it, with the last operation that they had."""
    silent: tuple[int, ...] = ()
    """Ranks of the job of which nothing in the log says where they were."""
    world_size: int | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all ranks of the job waited in the same collective."""
        return len(self.waiting) == 1 and len(self.waiting[0].ranks) == self.world_size


def find_hang(evidence: Evidence) -> Hang | None:
    """The group in which most ranks waited; None where no rank says that it did.

    >>> waited = Collective("ALLREDUCE", 42, 8, 8)
    >>> states = [GroupState(group="default_pg", rank=rank, world_rank=rank, waited=waited) for rank in (0, 1)]
    >>> find_hang(Evidence(sources=("a.log",), group_states=tuple(states), world_size=3)).silent
    (2,)
    """
    groups: dict[str, list[GroupState]] = {}
    for state in evidence.group_states:
        groups.setdefault(state.group, []).append(state)
    waited = [states for states in groups.values() if any(state.waited for state in states)]
    if not waited:
        return None
    states = max(waited, key=lambda group: sum(state.waited is not None for state in group))
    return _hang_of(states, evidence)


def _hang_of(states: Sequence[GroupState], evidence: Evidence) -> Hang:
    waiting = _by_collective(states)
    latest = max((one.collective.number or 0 for one in waiting if _is_counted(one.collective)), default=0)
    ranks = {rank_of(state) for state in states}
    spans_job = _spans_job(states, evidence.world_size)
    known = {process.rank for process in evidence.processes if process.rank is not None}
    job = set(range(evidence.world_size)) if evidence.world_size is not None else known
    return Hang(
        group="" if spans_job else states[0].group,
        waiting=waiting,
        behind=tuple(one for one in waiting if _is_counted(one.collective) and (one.collective.number or 0) < latest),
        is_mismatch=_is_mismatch([one.collective for one in waiting]),
        not_entered=_not_entered(states, waiting),
        silent=tuple(sorted(job - ranks)) if spans_job else (),
        world_size=evidence.world_size if spans_job else None,
    )


def rank_of(state: GroupState) -> int:
    """In the job, if that is known."""
    return state.rank if state.world_rank is None else state.world_rank


def _by_collective(states: Iterable[GroupState]) -> tuple[Waiting, ...]:
    found: dict[Collective, list[GroupState]] = {}
    for state in states:
        if state.waited is not None:
            found.setdefault(state.waited, []).append(state)
    waiting = [
        Waiting(
            collective,
            tuple(sorted({rank_of(state) for state in alike})),
            max(state.waited_ms or 0 for state in alike),
            min((state.line for state in alike if state.line is not None), default=None),
        )
        for collective, alike in found.items()
    ]
    return tuple(sorted(waiting, key=lambda one: (-len(one.ranks), one.ranks)))


def _is_counted(collective: Collective) -> bool:
    return collective.number is not None and not _POINT_TO_POINT.search(collective.op)


def _is_mismatch(collectives: Sequence[Collective]) -> bool:
    counted = [one for one in collectives if _is_counted(one)]
    return any(
        one.number == other.number and (one.op != other.op or _SAME_SIZE.search(one.op) is not None)
        for one in counted
        for other in counted
        if one != other
    )


def _not_entered(states: Sequence[GroupState], waiting: Sequence[Waiting]) -> tuple[tuple[int, int], ...]:
    """Ranks whose own count ends before the first collective that others waited in."""
    first = min((one.collective.number or 0 for one in waiting if _is_counted(one.collective)), default=None)
    return tuple(
        (rank_of(state), state.num_enqueued)
        for state in sorted(states, key=rank_of)
        if first is not None
        and state.waited is None
        and state.num_enqueued is not None
        # A count of what was completed that is ahead is of operations between two ranks, which are counted apart.
        and (state.num_completed or 0) <= state.num_enqueued < first
    )


def _spans_job(states: Sequence[GroupState], world_size: int | None) -> bool:
    """Whether the group is all of the job: torch says so, or its ranks are those of the job, and more than half."""
    if all(state.group == DEFAULT_GROUP for state in states):
        return True
    is_alike = all(state.world_rank in (None, state.rank) for state in states)
    return world_size is not None and is_alike and 2 * len({state.rank for state in states}) > world_size
