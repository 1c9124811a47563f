"""The table of kernels: which kernel, launched by which line, for how long.

A :class:`~piecegraph.provenance.launch.KernelProfile` comes in; a table goes out that can be sorted, filtered, asked
for the kernels of a module or line, and looked into: row, its sites, their instances, their stacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self, get_args

from piecegraph.base.patterns import line_matches, module_matches, name_matches, op_matches, parse_line
from piecegraph.errors import SelectionError
from piecegraph.provenance.launch import How, KernelProfile, Launch
from piecegraph.provenance.tables.rows import Row, Site, make_rows

SORTS: dict[str, Callable[[Row], float | int | str]] = {
    "total": lambda row: -row.total,
    "instances": lambda row: -row.num_instances,
    "avg": lambda row: -row.times.average,
    "med": lambda row: -row.times.median,
    "min": lambda row: -row.times.shortest,
    "max": lambda row: -row.times.longest,
    "stddev": lambda row: -row.times.deviation,
    "kernel": lambda row: row.kernel,
    "call": lambda row: row.shown_call,
    "module": lambda row: row.module,
    "line": lambda row: str(row.line or ""),
    "phase": lambda row: row.phase,
    "how": lambda row: row.how,
    "group": lambda row: ",".join(row.groups),
}
"""What a table can be sorted by: numbers from the largest, words from A."""

_LISTED = 12
"""How many values an error lists."""

Test = Callable[[Row, Site], bool]


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of the time of a whole profile is attributed, and how; microseconds."""

    num_launches: int
    total: float
    with_line: float
    with_module: float
    unattributed: float
    by_how: tuple[tuple[How, float], ...]
    """Only what there is, strongest first."""
    span: float
    """From the first start to the last end."""
    busy: float
    """When at least one stream was at work."""

    @property
    def idle(self) -> float:
        return self.span - self.busy


@dataclass(frozen=True, slots=True)
class Table:
    """Kernels and who launched them. All methods return a new table."""

    rows: tuple[Row, ...]
    coverage: Coverage
    """Of the whole profile, whatever rows are shown."""
    device: str = ""
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """The time of the rows that are here."""
        return math.fsum(row.total for row in self.rows)

    @property
    def is_whole(self) -> bool:
        """Whether nothing was filtered out."""
        return sum(row.num_instances for row in self.rows) == self.coverage.num_launches

    def sort(self, by: str = "total") -> Self:
        """Sort by a column; rows that are equal stay in their order."""
        if by not in SORTS:
            raise SelectionError(
                "PG711", f"there is no column {by!r} to sort by", hint=f"take one of {', '.join(SORTS)}"
            )
        return replace(self, rows=tuple(sorted(self.rows, key=SORTS[by])))  # type: ignore[arg-type] # one type a column

    def filter(
        self, *, module: str | None = None, op: str | None = None, kernel: str | None = None, line: str | None = None
    ) -> Self:
        """Only what matches everything that is given. A row keeps only the sites and times that match.

        Args:
            module: a glob; it may begin at any part of a path and means everything below: ``layers.*.mlp``. The empty
                text means what belongs to no module.
            op: a glob for the call, or for any op that was fused into it.
            kernel: a glob for the short name.
            line: ``file.py`` or ``file.py:12``, for the lines that the table shows and those of other fused ops.

        Raises:
            SelectionError: if nothing matches; it lists what there is.
        """
        tests: dict[str, Test] = {}
        if module is not None:
            tests[f"module={module!r}"] = _in_module(module)
        if op is not None:
            tests[f"op={op!r}"] = lambda _, site: any(op_matches(one, op) for one in _ops(site))
        if kernel is not None:
            tests[f"kernel={kernel!r}"] = lambda row, _: name_matches(row.kernel, kernel)
        if line is not None:
            tests[f"line={line!r}"] = _at_line(parse_line(line))
        return self._keep(tests)

    def of(self, *, module: str | None = None, line: str | None = None) -> Self:
        """All kernels that a module or a line launches, itself or through what it calls.

        Args:
            module: as for :meth:`filter`.
            line: ``file.py`` or ``file.py:12``, anywhere on the stack.

        Raises:
            SelectionError: if it launches nothing; it lists what there is.
        """
        if (module is None) == (line is None):
            raise SelectionError("PG713", "of() takes a module or a line", hint="give one of them; filter() takes both")
        if module is not None:
            return self._keep({f"module={module!r}": _in_module(module)})
        assert line is not None
        return self._keep({f"line={line!r}": _below_line(parse_line(line))})

    def _keep(self, tests: Mapping[str, Test]) -> Self:
        if not self.rows:
            return self
        rows = _matching(self.rows, list(tests.values()), self.coverage.total)
        if not rows:
            raise self._nothing_matches(tests)
        return replace(self, rows=rows)

    def _nothing_matches(self, tests: Mapping[str, Test]) -> SelectionError:
        alone = [name for name, test in tests.items() if not _matching(self.rows, [test], self.coverage.total)]
        asked = alone[0] if alone else " and ".join(tests)
        column = asked.partition("=")[0] if alone else "kernel"
        return SelectionError(
            "PG712",
            f"no kernel matches {asked}",
            why=f"the table has {_list(self._values(column))}",
            hint="globs take * and ?; a line is written as file.py:12" if alone else "each matches something by itself",
        )

    def _values(self, column: str) -> Iterable[str]:
        for row in self.rows:
            if column == "op":
                yield from _ops(row.sites[0])
            else:
                yield str({"module": row.module, "kernel": row.kernel, "line": row.line or ""}[column])


def tabulate(profile: KernelProfile, groups: Mapping[int, str] | None = None) -> Table:
    """The table of a profile.

    Args:
        profile: what ran.
        groups: from :attr:`Launch.instance <piecegraph.provenance.launch.Launch.instance>` to the label of a group.
    """
    rows = make_rows(profile.launches, groups or {})
    return Table(rows, cover(profile.launches), profile.device, profile.notes)


def cover(launches: Sequence[Launch]) -> Coverage:
    """How much of these launches is attributed, and how much of the time nothing ran."""

    def time_of(test: Callable[[Launch], object]) -> float:
        return math.fsum(launch.duration for launch in launches if test(launch))

    by_how: dict[How, list[float]] = {}
    for launch in launches:
        by_how.setdefault(launch.how, []).append(launch.duration)
    intervals = [(launch.start, launch.start + launch.duration) for launch in launches]
    return Coverage(
        num_launches=len(launches),
        total=time_of(lambda _: True),
        with_line=time_of(lambda one: one.call and one.call.origins and one.call.origins[0].line),
        with_module=time_of(lambda one: one.call and one.call.origins and one.call.origins[0].module),
        unattributed=time_of(lambda one: one.call is None or one.how == "none"),
        by_how=tuple((how, math.fsum(by_how[how])) for how in get_args(How) if how in by_how),
        span=max(end for _, end in intervals) - min(start for start, _ in intervals) if intervals else 0.0,
        busy=_busy(intervals),
    )


def _busy(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union.

    >>> _busy([(0, 3), (1, 2), (2.5, 4), (10, 11)])
    5.0
    """
    parts, reached = [], -math.inf
    for start, end in sorted(intervals):
        if end > reached:
            parts.append(end - max(start, reached))
            reached = end
    return math.fsum(parts)


def _matching(rows: Sequence[Row], tests: Sequence[Test], whole: float) -> tuple[Row, ...]:
    kept = []
    for row in rows:
        sites = tuple(site for site in row.sites if all(test(row, site) for test in tests))
        if sites:
            kept.append(row if len(sites) == len(row.sites) else row.narrowed(sites, whole))
    return tuple(kept)


def _in_module(glob: str) -> Test:
    def test(_: Row, site: Site) -> bool:
        return any(module_matches(origin.module, glob) for origin in site.origins) or (not site.origins and not glob)

    return test


def _at_line(wanted: tuple[str, int | None]) -> Test:
    def test(_: Row, site: Site) -> bool:
        return any(origin.line is not None and line_matches(origin.line, wanted) for origin in site.origins)

    return test


def _below_line(wanted: tuple[str, int | None]) -> Test:
    def test(_: Row, site: Site) -> bool:
        return any(line_matches(line, wanted) for origin in site.origins for line in origin.stack)

    return test


def _ops(site: Site) -> list[str]:
    return [site.op, *(origin.op for origin in site.origins)]


def _list(values: Iterable[str]) -> str:
    found = [value for value in dict.fromkeys(values) if value]
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return (", ".join(found[:_LISTED]) + more) or "none"
