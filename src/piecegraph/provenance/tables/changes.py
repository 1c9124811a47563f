"""What changed from one table to another: rows of one place matched with each other, the largest change first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from piecegraph.provenance.names import family
from piecegraph.provenance.tables.rows import Row
from piecegraph.provenance.tables.table import Table

ChangeState = Literal["new", "gone", "changed"]


@dataclass(frozen=True, slots=True)
class Change:
    """The same work before and after; rows that differ only in how they were attributed are taken together."""

    before: tuple[Row, ...]
    """Empty if it is new."""
    after: tuple[Row, ...]
    """Empty if it is gone."""

    @property
    def state(self) -> ChangeState:
        return "changed" if self.before and self.after else "new" if self.after else "gone"

    @property
    def row(self) -> Row:
        """Whose place is shown: the row after, if there is one."""
        return (self.after or self.before)[0]

    @property
    def kernel(self) -> str:
        """Both names, if another kernel does the work now."""
        names = dict.fromkeys(row.kernel for row in (*self.before[:1], *self.after[:1]))
        return " -> ".join(names)

    @property
    def before_total(self) -> float:
        return math.fsum(row.total for row in self.before)

    @property
    def after_total(self) -> float:
        return math.fsum(row.total for row in self.after)

    @property
    def delta(self) -> float:
        """Microseconds; negative if it got faster."""
        return self.after_total - self.before_total

    @property
    def before_instances(self) -> int:
        return sum(row.num_instances for row in self.before)

    @property
    def after_instances(self) -> int:
        return sum(row.num_instances for row in self.after)

    @property
    def delta_instances(self) -> int:
        return self.after_instances - self.before_instances


@dataclass(frozen=True, slots=True)
class Diff:
    """Two tables compared."""

    changes: tuple[Change, ...]
    """The largest first; what took the same time with as many launches is left out."""
    num_equal: int
    before_total: float
    after_total: float
    device: str = ""
    """Of the table after."""


Key = Callable[[Row], tuple[object, ...]]


def diff(before: Table, after: Table) -> Diff:
    """Compare two tables.

    Rows are matched by kernel, call, module and line; by phase too if both tables have the same phases. What is left
    is matched without the line, which moves when a file is edited, and then by the family of the kernel, since a
    library may choose another variant; both only where one row on each side is meant.
    """
    phases = [{row.phase for row in table.rows} for table in (before, after)]

    def phase(row: Row) -> str:
        return row.phase if phases[0] == phases[1] else ""

    def place(row: Row) -> tuple[object, ...]:
        return (row.shown_call, row.module, row.line and (row.line.file, row.line.line), phase(row))

    old, new = (_gather(table.rows, lambda row: (row.kernel, *place(row))) for table in (before, after))
    pairs = [(old.pop(key), new.pop(key)) for key in list(old) if key in new]
    looser: tuple[Key, ...] = (
        lambda row: (row.kernel, row.shown_call, row.module, phase(row)),
        lambda row: (family(row.kernel), *place(row)),
    )
    for key_of in looser:
        pairs += _pair_single(old, new, key_of)
    pairs += [(rows, ()) for rows in old.values()] + [((), rows) for rows in new.values()]
    changes = [Change(*pair) for pair in pairs]
    differing = [change for change in changes if change.delta or change.delta_instances]
    differing.sort(key=lambda change: -abs(change.delta))
    return Diff(tuple(differing), len(changes) - len(differing), before.total, after.total, after.device)


Gathered = dict[tuple[object, ...], tuple[Row, ...]]


def _gather(rows: Iterable[Row], key_of: Key) -> Gathered:
    gathered: Gathered = {}
    for row in rows:
        gathered[key_of(row)] = (*gathered.get(key_of(row), ()), row)
    return gathered


def _pair_single(old: Gathered, new: Gathered, key_of: Key) -> list[tuple[tuple[Row, ...], tuple[Row, ...]]]:
    """Take out of both what a looser key matches, one entry with one entry."""
    olds, news = (_gather((rows[0] for rows in gathered.values()), key_of) for gathered in (old, new))
    pairs = []
    for key, old_rows in olds.items():
        new_rows = news.get(key, ())
        if len(old_rows) == len(new_rows) == 1:
            pairs.append((_take(old, old_rows[0]), _take(new, new_rows[0])))
    return pairs


def _take(gathered: Gathered, first: Row) -> tuple[Row, ...]:
    """Take out the entry that begins with this row."""
    return gathered.pop(next(key for key, rows in gathered.items() if rows[0] is first))
