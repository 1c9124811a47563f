"""Which ranges of a thread are open at a moment, and how much of an op's time is its own.

A range is open from its start up to, but not at, its end; one without a duration is open at its start. Of two open
ranges the one that began later is the inner one; if they began together, the shorter one; then an op is inside a Python
function, that inside a module, that inside an annotation; then the later one in the file. Ranges may overlap without
one being inside the other, as annotations do.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from piecegraph.provenance.profile.timeline import ThreadRanges


@dataclass(frozen=True, slots=True)
class Moment:
    """A time to look at."""

    number: int
    time: float
    innermost: int | None = None
    """The start of this range is meant: what is inside it does not count."""


def open_ranges(thread: ThreadRanges, moments: Sequence[Moment]) -> Iterator[tuple[int, list[int]]]:
    """For each moment its number and the ranges open then, outermost first; in any order of moments."""
    starts, durations = thread.starts, thread.durations
    order = _from_outer_to_inner(thread, _touched(thread, moments))
    begins = array("d", [starts[index] for index in order])
    wanted = {moment.innermost for moment in moments} - {None}
    positions = {index: position for position, index in enumerate(order) if index in wanted}

    def position(moment: Moment) -> int:
        if moment.innermost is None:
            return bisect_right(begins, moment.time)
        return positions[moment.innermost] + 1

    still_open: list[int] = []
    num_begun = 0
    # Where more ranges have begun it is later, so that what is dropped once is never needed again.
    for begun, time, number in sorted((position(moment), moment.time, moment.number) for moment in moments):
        still_open += order[num_begun:begun]
        num_begun = begun
        still_open = [at for at in still_open if starts[at] + durations[at] > time or starts[at] == time]
        yield number, still_open


def _touched(thread: ThreadRanges, moments: Iterable[Moment]) -> list[int]:
    """The ranges with a moment in them: few of them, where Python functions were recorded."""
    times = array("d", sorted({moment.time for moment in moments}))
    if not times:
        return []
    last = times[-1]
    touched = []
    for index, (start, duration) in enumerate(zip(thread.starts, thread.durations, strict=True)):
        if start <= last:
            time = times[bisect_left(times, start)]
            if time < start + duration or time == start:
                touched.append(index)
    return touched


def _from_outer_to_inner(thread: ThreadRanges, indices: list[int]) -> list[int]:
    # Stable sorts by one column each need far less memory than one sort by tuples.
    indices.sort(key=thread.kinds.__getitem__)
    indices.sort(key=thread.durations.__getitem__, reverse=True)
    indices.sort(key=thread.starts.__getitem__)
    return indices


def own_times(thread: ThreadRanges) -> Iterator[tuple[int, float]]:
    """Each op of a thread and its time without that of the ops that it calls, in the order of their start."""
    starts, durations = thread.starts, thread.durations
    order = _from_outer_to_inner(thread, [index for index in range(len(thread)) if thread.is_op(index)])
    in_calls = dict.fromkeys(order, 0.0)
    callers: list[int] = []
    for op in order:
        while callers and starts[callers[-1]] + durations[callers[-1]] <= starts[op]:
            callers.pop()
        if callers:
            caller_end = starts[callers[-1]] + durations[callers[-1]]
            in_calls[callers[-1]] += min(durations[op], caller_end - starts[op])
        callers.append(op)
    for op in order:
        yield op, durations[op] - in_calls[op]
