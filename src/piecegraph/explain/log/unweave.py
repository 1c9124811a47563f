"""Interleaved tracebacks of processes that all print the same.

Note [Same traceback]: N processes that print the same sequence of parts, interleaved in any way, print every part a
multiple of N times, and a part appears for the first time only after the one before it did. So a sequence without
repetition is simply the order of first appearance; only where a part occurs more than once in the traceback must places
be tried out, which is a search over a handful of readings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from piecegraph.explain.log.likelihood import IMPOSSIBLE, STEP_COST, Likelihood
from piecegraph.explain.log.parts import TracebackPart, representatives
from piecegraph.explain.log.tracebacks import Traceback, num_processes, read_in_order

BEAM = 128
_SIMILAR = 1.0
"""Readings whose cost differs by less are called equally good."""


@dataclass(frozen=True, slots=True)
class SameTraceback:
    """What all of ``count`` processes printed."""

    traceback: Traceback
    count: int
    num_other_readings: int
    """How many other orders of repeated frames explain the log as well."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """A traceback so far, and how many processes have printed how much of it."""

    sequence: tuple[Hashable, ...]
    printed: tuple[int, ...]
    """``printed[k]``: how many processes have printed exactly the first k parts."""
    cost: float
    latest: int
    """How much the process that wrote last has printed: it is a little likelier to go on."""


def unweave(parts: Sequence[TracebackPart]) -> SameTraceback | None:
    """The one traceback, or None if these parts cannot be N copies of one."""
    count = num_processes(parts)
    repeats = _repeats(parts, count)
    if repeats is None:
        return None
    likelihood = Likelihood(parts)
    first = representatives(parts)
    readings = [_Reading((), (count,), 0.0, 0)]
    for part in parts:
        further: dict[tuple[tuple[Hashable, ...], tuple[int, ...]], _Reading] = {}
        for reading in readings:
            for nxt in _continuations(reading, part, repeats, first, likelihood):
                known = further.get((nxt.sequence, nxt.printed))
                if known is None or nxt.cost < known.cost:
                    further[nxt.sequence, nxt.printed] = nxt
        readings = sorted(further.values(), key=lambda reading: reading.cost)[:BEAM]
        if not readings:
            return None
    whole = [
        reading for reading in readings if reading.printed[-1] == count and first[reading.sequence[-1]].kind == "text"
    ]
    if not whole:
        return None
    best = whole[0]
    others = {r.sequence for r in whole if r.cost <= best.cost + _SIMILAR} - {best.sequence}
    tracebacks = read_in_order([first[key] for key in best.sequence])
    assert tracebacks is not None  # of other sequences a step was impossible
    return SameTraceback(tracebacks[0], count, len(others))


def _repeats(parts: Sequence[TracebackPart], count: int) -> dict[Hashable, int] | None:
    """How often each part occurs in the traceback; None if some count refutes that there is one."""
    total = Counter(part.key for part in parts)
    if any(number % count for number in total.values()):
        return None
    return {key: number // count for key, number in total.items()}


def _continuations(
    reading: _Reading,
    part: TracebackPart,
    repeats: dict[Hashable, int],
    first: dict[Hashable, TracebackPart],
    likelihood: Likelihood,
) -> list[_Reading]:
    sequence, printed = reading.sequence, reading.printed
    found = []
    for place, waiting in enumerate(printed):
        if not waiting:
            continue
        if place < len(sequence):
            if sequence[place] == part.key:
                found.append(_advance(reading, place, sequence, 0.0))
        elif sequence.count(part.key) < repeats[part.key]:
            cost = likelihood.cost(first[sequence[-1]] if sequence else None, part)
            if cost < IMPOSSIBLE:
                found.append(_advance(reading, place, (*sequence, part.key), cost - 2 * STEP_COST))
    return found


def _advance(reading: _Reading, place: int, sequence: tuple[Hashable, ...], cost: float) -> _Reading:
    printed = [*reading.printed, 0] if len(sequence) > len(reading.sequence) else list(reading.printed)
    printed[place] -= 1
    printed[place + 1] += 1
    bonus = 0.05 if place == reading.latest else 0.0
    return _Reading(sequence, tuple(printed), reading.cost + cost - bonus, place + 1)
