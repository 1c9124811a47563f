"""Rows of a table of kernels: what one kernel costs, launched from one place in the model.

Note [One row, one place]
    Layers are folded: ``layers.3.mlp`` and ``layers.4.mlp`` are one row, and each is a site of that row. A kernel that
    two lines launch is two rows, and so is one that was attributed in two ways: a row never claims more than holds for
    all its launches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from piecegraph.base.origin import LaunchCall, Origin
from piecegraph.base.plan import SourceLine
from piecegraph.provenance.launch import How, Launch
from piecegraph.provenance.names import fold_layers, short


@dataclass(frozen=True, slots=True)
class Times:
    """How long launches took; microseconds."""

    total: float
    num_instances: int
    average: float
    median: float
    shortest: float
    longest: float
    deviation: float
    """Of a sample; 0 for a single launch."""


@dataclass(frozen=True, slots=True)
class Site:
    """One place that launched a row's kernel, with everything it launched."""

    op: str
    origins: tuple[Origin, ...]
    """All of them, the main one first; empty if nothing is known."""
    instances: tuple[Launch, ...]
    groups: tuple[str, ...] = ()
    """The groups its launches belong to."""

    @property
    def module(self) -> str:
        """The exact path, with the numbers of layers."""
        return self.origins[0].module if self.origins else ""

    @property
    def line(self) -> SourceLine | None:
        return self.origins[0].line if self.origins else None

    @property
    def stack(self) -> tuple[SourceLine, ...]:
        """Of the main origin, outermost first."""
        return self.origins[0].stack if self.origins else ()

    @property
    def total(self) -> float:
        return math.fsum(launch.duration for launch in self.instances)


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel from one place. See Note [One row, one place]."""

    kernel: str
    """The short name."""
    call: str
    """The op, or the compiled kernel, that launched it; empty if that is not known."""
    module: str
    """With layer numbers folded."""
    line: SourceLine | None
    phase: str
    how: How
    share: float
    """Percent of the time of all launches of the profile, also in a table of a part of them."""
    times: Times
    sites: tuple[Site, ...]
    """The longest first."""

    @property
    def total(self) -> float:
        return self.times.total

    @property
    def num_instances(self) -> int:
        return self.times.num_instances

    @property
    def instances(self) -> tuple[Launch, ...]:
        return tuple(launch for site in self.sites for launch in site.instances)

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(label for site in self.sites for label in site.groups))

    @property
    def num_more_origins(self) -> int:
        """How many ops besides the main one were fused into it."""
        return max(max(len(site.origins) - 1, 0) for site in self.sites)

    @property
    def shown_call(self) -> str:
        """The call for a reader: of a compiled kernel the op it mainly stands for, and how many others."""
        origins = self.sites[0].origins
        op = origins[0].op if origins and self.call == self.kernel else self.call
        return f"{op} +{self.num_more_origins}" if self.num_more_origins else op

    def narrowed(self, sites: tuple[Site, ...], whole: float) -> Row:
        """The row with some of its sites only; ``whole`` is the time of the whole profile."""
        times = measure(launch.duration for site in sites for launch in site.instances)
        return replace(self, sites=sites, times=times, share=percent(times.total, whole))


def percent(part: float, whole: float) -> float:
    """100 for all of it; 0 if there is nothing to have a part of."""
    return 100 * part / whole if whole > 0 else 0.0


def measure(durations: Iterable[float]) -> Times:
    """The statistics that tables of kernels show.

    >>> measure([1.0, 3.0])
    Times(total=4.0, num_instances=2, average=2.0, median=2.0, shortest=1.0, longest=3.0, deviation=1.4142135623730951)
    """
    values = list(durations)
    total = math.fsum(values)
    average = total / len(values)
    squares = math.fsum((value - average) ** 2 for value in values)
    deviation = math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else 0.0
    return Times(total, len(values), average, statistics.median(values), min(values), max(values), deviation)


def shown_name(launch: Launch) -> str:
    """What a row calls a launch."""
    if launch.kind == "kernel":
        return short(launch.name)
    return launch.name or launch.kind.capitalize()


def make_rows(launches: Sequence[Launch], groups: Mapping[int, str]) -> tuple[Row, ...]:
    """The rows of these launches, those with the most time first."""
    whole = math.fsum(launch.duration for launch in launches)
    rows: dict[tuple[object, ...], list[Site]] = {}
    for site in _make_sites(launches, groups):
        first, line = site.instances[0], site.line
        place = (site.op, fold_layers(site.module), line and (line.file, line.line), first.phase, first.how)
        rows.setdefault((shown_name(first), *place), []).append(site)
    made = [_make_row(sites, whole) for sites in rows.values()]
    return tuple(sorted(made, key=lambda row: -row.total))


def _make_row(sites: list[Site], whole: float) -> Row:
    ordered = tuple(sorted(sites, key=lambda site: -site.total))
    site, first = ordered[0], ordered[0].instances[0]
    times = measure(launch.duration for site in ordered for launch in site.instances)
    share = percent(times.total, whole)
    name, module = shown_name(first), fold_layers(site.module)
    return Row(name, site.op, module, site.line, first.phase, first.how, share, times, ordered)


def _make_sites(launches: Sequence[Launch], groups: Mapping[int, str]) -> list[Site]:
    # Replays share their calls, and a call with all its stacks is slow to hash: each object is hashed once.
    places: dict[int, int] = {}
    numbered: dict[tuple[str, tuple[Origin, ...]], int] = {}

    def place_of(call: LaunchCall | None) -> int:
        if call is None:
            return -1
        if id(call) not in places:
            places[id(call)] = numbered.setdefault((call.op, call.origins), len(numbered))
        return places[id(call)]

    found: dict[tuple[str, str, How, int], list[Launch]] = {}
    for launch in launches:
        found.setdefault((shown_name(launch), launch.phase, launch.how, place_of(launch.call)), []).append(launch)
    sites = []
    for instances in found.values():
        call = instances[0].call
        labels = tuple(dict.fromkeys(groups[one.instance] for one in instances if one.instance in groups))
        op, origins = (call.op, call.origins) if call is not None else ("", ())
        sites.append(Site(op, origins, tuple(instances), labels))
    return sites
