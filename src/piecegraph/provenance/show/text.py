"""A table of kernels, or what changed between two, for a terminal."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from piecegraph.provenance.show.columns import GAP, Column, fit
from piecegraph.provenance.show.wording import diff_footer, printable, table_footer, time_column

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from piecegraph.provenance.tables.changes import Change, Diff
    from piecegraph.provenance.tables.rows import Row
    from piecegraph.provenance.tables.table import Table

WIDTH = 140


def table_text(table: Table, *, width: int = WIDTH, limit: int | None = None) -> str:
    """The table as plain text, without a line end at its end.

    Args:
        table: what to show.
        width: how many characters a line may have.
        limit: how many rows to show; all if None.
    """
    return plain_text(table_view(table, width=width, limit=limit), width)


def diff_text(diff: Diff, *, width: int = WIDTH, limit: int | None = None) -> str:
    """The changes as plain text; arguments as for :func:`table_text`."""
    return plain_text(diff_view(diff, width=width, limit=limit), width)


def table_view(table: Table, *, width: int = WIDTH, limit: int | None = None) -> RenderableType:
    """The table for a rich console; arguments as for :func:`table_text`."""
    return _view(table_columns(table.rows[:limit]), table_footer(table, limit), width)


def diff_view(diff: Diff, *, width: int = WIDTH, limit: int | None = None) -> RenderableType:
    """The changes for a rich console; arguments as for :func:`table_text`."""
    return _view(diff_columns(diff.changes[:limit]), diff_footer(diff, limit), width)


def table_columns(rows: Sequence[Row]) -> list[Column]:
    """What a reader sees of these rows."""
    unit, totals = time_column([row.total for row in rows])
    average_unit, averages = time_column([row.times.average for row in rows])
    return [
        Column("Time %", tuple(f"{row.share:.1f}" for row in rows), is_number=True),
        Column(f"Total ({unit})", totals, is_number=True),
        Column("Inst", tuple(f"{row.num_instances:,}" for row in rows), is_number=True, leave=6),
        Column(f"Avg ({average_unit})", averages, is_number=True, leave=3),
        Column("Kernel", tuple(row.kernel for row in rows), cut="middle", least=20),
        *_place_columns(rows),
        Column("Phase", tuple(row.phase for row in rows), cut="end", least=10, leave=2),
        Column("How", tuple(row.how for row in rows), leave=1),
        Column("Group", tuple(",".join(row.groups) for row in rows), cut="start", least=6, leave=4),
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
        Column("Kernel", tuple(change.kernel for change in changes), cut="middle", least=20),
        *_place_columns(rows),
        Column("Phase", tuple(row.phase for row in rows), cut="end", least=10, leave=1),
    ]


def _place_columns(rows: Sequence[Row]) -> list[Column]:
    return [
        Column("Call", tuple(row.shown_call for row in rows), cut="start", least=12, leave=5),
        Column("Module", tuple(row.module for row in rows), cut="start", least=14),
        Column("Python line", tuple(str(row.line or "") for row in rows), cut="start", least=14, leave=7),
    ]


def _view(columns: list[Column], footer: list[str], width: int) -> RenderableType:
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    if not columns[0].cells:
        return Group(*(Text(printable(line)) for line in footer))
    drawn = RichTable(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    fitted = fit(columns, width)
    for column in fitted:
        drawn.add_column(column.head, justify="right" if column.is_number else "left", no_wrap=True, width=column.width)
    for cells in zip(*(column.cells for column in fitted), strict=True):
        # Text, not markup: names of kernels hold square brackets.
        drawn.add_row(*(Text(printable(cell)) for cell in cells))
    return Group(drawn, Text(), *(Text(printable(line), style="dim") for line in footer))


def plain_text(view: RenderableType, width: int) -> str:
    """What a console without colours prints."""
    from rich.console import Console

    file = io.StringIO()
    Console(file=file, width=width + GAP, color_system=None, highlight=False).print(view, soft_wrap=False)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip("\n").split("\n"))
