"""The columns of a table or a diff, and how they fit a terminal.

Long names are shortened first, then the least needed columns are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from piecegraph.provenance.show.wording import time_column
from piecegraph.provenance.tables.changes import Change
from piecegraph.provenance.tables.rows import Row

GAP = 2
"""Spaces between columns."""

Shortened = Literal["never", "start", "middle", "end"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column and what may be done to it where there is no room."""

    title: str
    cells: tuple[str, ...]
    is_number: bool = False
    shortened: Shortened = "never"
    """Where its cells may be shortened. A path keeps its end, a size its beginning, a kernel's name both."""
    least: int = 0
    """How many characters must be left of a cell that is shortened."""
    leave: int = 0
    """Columns with 1 are left out first, then those with 2, and so on; those with 0 never."""

    @property
    def head(self) -> str:
        """The title; over numbers, which are short, a word a line."""
        return self.title.replace(" ", "\n") if self.is_number else self.title

    @property
    def width(self) -> int:
        return max(map(len, (*self.head.split("\n"), *self.cells)))


def table_columns(rows: Sequence[Row]) -> list[Column]:
    """What a reader sees of these rows."""
    unit, totals = time_column([row.total for row in rows])
    average_unit, averages = time_column([row.times.average for row in rows])
    return [
        Column("Time %", tuple(f"{row.share:.1f}" for row in rows), is_number=True),
        Column(f"Total ({unit})", totals, is_number=True),
        Column("Inst", tuple(f"{row.num_instances:,}" for row in rows), is_number=True, leave=6),
        Column(f"Avg ({average_unit})", averages, is_number=True, leave=3),
        Column("Kernel", tuple(row.kernel for row in rows), shortened="middle", least=20),
        *_place_columns(rows),
        Column("Phase", tuple(row.phase for row in rows), shortened="end", least=10, leave=2),
        Column("How", tuple(row.how for row in rows), leave=1),
        Column("Group", tuple(",".join(row.groups) for row in rows), shortened="start", least=6, leave=4),
    ]


def diff_columns(changes: Sequence[Change]) -> list[Column]:
    """What a reader sees of these changes."""
    times = [[change.delta, change.before_total, change.after_total] for change in changes]
    unit, cells = time_column([time for triple in times for time in triple])
    _, deltas = time_column([time for triple in times for time in triple], signed=True)
    rows = [change.row for change in changes]
    counts = [(change.before_instances, change.after_instances) for change in changes]
    return [
        Column(f"Change ({unit})", deltas[0::3], is_number=True),
        Column(f"Before ({unit})", cells[1::3], is_number=True, leave=4),
        Column(f"After ({unit})", cells[2::3], is_number=True, leave=3),
        Column("Inst", tuple(f"{a:,}" if a == b else f"{a:,} -> {b:,}" for a, b in counts), is_number=True, leave=6),
        Column("State", tuple(change.state for change in changes), leave=2),
        Column("Kernel", tuple(change.kernel for change in changes), shortened="middle", least=20),
        *_place_columns(rows),
        Column("Phase", tuple(row.phase for row in rows), shortened="end", least=10, leave=1),
    ]


def _place_columns(rows: Sequence[Row]) -> list[Column]:
    return [
        Column("Call", tuple(row.shown_call for row in rows), shortened="start", least=12, leave=5),
        Column("Module", tuple(row.module for row in rows), shortened="start", least=14),
        Column("Python line", tuple(str(row.line or "") for row in rows), shortened="start", least=14, leave=7),
    ]


def fit(columns: list[Column], width: int) -> list[Column]:
    """The columns that have something to say, made to fit the width as far as they can be."""
    kept = [column for column in columns if any(column.cells) or not column.leave]
    while not _can_fit(kept, width) and any(column.leave for column in kept):
        kept.remove(min((column for column in kept if column.leave), key=lambda column: column.leave))
    widths = [column.width for column in kept]
    while sum(widths) + GAP * (len(kept) - 1) > width:
        shortenable = [
            index for index, column in enumerate(kept) if column.shortened != "never" and widths[index] > _least(column)
        ]
        if not shortenable:
            break
        widths[max(shortenable, key=lambda index: widths[index])] -= 1
    return [
        replace(column, cells=tuple(shorten(cell, limit, column.shortened) for cell in column.cells))
        for column, limit in zip(kept, widths, strict=True)
    ]


def shorten(text: str, width: int, where: Shortened) -> str:
    """The text in at most that many characters.

    >>> shorten("model.layers.*.self_attn.q_proj", 20, "start")
    '..*.self_attn.q_proj'
    >>> shorten("nvjet_sm90_tst_64x16_64x16_2x1_v_bz_splitK_TNT", 26, "middle")
    'nvjet_sm90_t..z_splitK_TNT'
    >>> shorten("mixed 4096 tokens of 1 sequence", 16, "end")
    'mixed 4096 tok..'
    """
    if len(text) <= width or where == "never":
        return text
    if where == "start":
        return ".." + text[len(text) - width + 2 :]
    if where == "end":
        return text[: width - 2] + ".."
    head = (width - 2) // 2
    return text[:head] + ".." + text[len(text) - (width - 2 - head) :]


def _least(column: Column) -> int:
    return max(min(column.width, column.least), len(column.title))


def _can_fit(columns: list[Column], width: int) -> bool:
    least = sum(column.width if column.shortened == "never" else _least(column) for column in columns)
    return least + GAP * (len(columns) - 1) <= width
