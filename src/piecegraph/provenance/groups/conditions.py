"""What separates launches of a kernel that come with a group from those that do not.

A split is reported only if it has no exception on either side. Libraries choose kernels by their arguments, so a list
of all grids or shapes would always separate: it counts as a condition only while it is short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from piecegraph.base.origin import Dim3
from piecegraph.provenance.groups.group import Condition

MAX_VALUES = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """Launches of one kernel, as far as a condition can tell them apart."""

    grid: Dim3 | None
    shapes: tuple[str, ...]
    """Of the arguments of their call."""
    times: int


def by_grid_z(member: str, inside: Sequence[Sample], outside: Sequence[Sample]) -> Condition | None:
    """Whether the third dimension of the grid separates: libraries split a sum along it."""
    if not inside or not outside or any(sample.grid is None for sample in (*inside, *outside)):
        return None
    texts = {True: "grid.z > 1", False: "grid.z = 1"}
    sides = [{sample.grid[2] > 1 for sample in side if sample.grid} for side in (inside, outside)]
    if len(sides[0]) != 1 or sides[0] == sides[1] or len(sides[1]) != 1:
        return None
    holds = sides[0].pop()
    return Condition(member, texts[holds], _times(inside), texts[not holds], _times(outside))


def by_value(member: str, inside: Sequence[Sample], outside: Sequence[Sample], min_support: int) -> Condition | None:
    """Whether dtypes, grids or shapes separate, the most telling first."""
    if min(_times(inside), _times(outside)) < min_support:
        return None
    for what, value_of in (("dtype", _dtypes), ("grid", _grid), ("arguments", _shapes)):
        holds = _short_list(value_of, inside, outside)
        if holds:
            return Condition(member, f"{what} {holds}", _times(inside), f"any other {what}", _times(outside))
    return None


def _short_list(value_of: Callable[[Sample], Hashable], inside: Sequence[Sample], outside: Sequence[Sample]) -> str:
    """The values inside, if there are few and none is outside; else empty."""
    within = Counter[Hashable]()
    for sample in inside:
        within[value_of(sample)] += sample.times
    without = {value_of(sample) for sample in outside}
    if None in within or None in without or len(within) > MAX_VALUES or not without.isdisjoint(within):
        return ""
    return " or ".join(str(value) for value, _ in within.most_common())


def _dtypes(sample: Sample) -> str | None:
    return ", ".join(dict.fromkeys(shape.partition("[")[0] for shape in sample.shapes)) or None


def _grid(sample: Sample) -> Dim3 | None:
    return sample.grid


def _shapes(sample: Sample) -> str | None:
    return ", ".join(sample.shapes) or None


def _times(samples: Sequence[Sample]) -> int:
    return sum(sample.times for sample in samples)
