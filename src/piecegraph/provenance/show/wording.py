"""The words and numbers that all formats of a table share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from piecegraph.base.text import duration
from piecegraph.provenance.tables.changes import Diff
from piecegraph.provenance.tables.rows import percent
from piecegraph.provenance.tables.table import Table

NOTHING_RAN = "nothing ran while this trace was taken"
AnyRow = TypeVar("AnyRow")
_MS_FROM = 10_000
"""From this many microseconds on, a column of times is in milliseconds."""


def table_footer(table: Table, limit: int | None = None) -> list[str]:
    """What was attributed, how, how long nothing ran, and what a reader must know; ``limit`` rows are shown."""
    coverage = table.coverage
    notes = [f"note: {note}" for note in table.notes]
    if not coverage.num_launches:
        return [NOTHING_RAN, *notes]

    def share(part: float) -> str:
        return f"{percent(part, coverage.total):.1f} %"

    lines = [
        f"{coverage.num_launches:,} launches, {duration(coverage.total)} of {whose_time(table.device)}",
        f"attributed: {share(coverage.with_line)} to a line, {share(coverage.with_module)} to a module, "
        f"{share(coverage.unattributed)} not at all",
        f"how: {', '.join(f'{how} {share(time)}' for how, time in coverage.by_how)}",
        f"idle: {duration(coverage.idle)} of {duration(coverage.span)} ({percent(coverage.idle, coverage.span):.1f} %)",
    ]
    if not table.is_whole:
        lines.insert(1, f"in this table: {duration(table.total)} ({share(table.total)})")
    if hidden := _hidden(table.rows, limit):
        left = math.fsum(row.total for row in hidden)
        lines.insert(0, f"not shown: {len(hidden)} of {len(table.rows)} rows, {duration(left)} ({share(left)})")
    return lines + notes


def diff_footer(diff: Diff, limit: int | None = None) -> list[str]:
    """The totals of both sides; ``limit`` rows are shown."""
    if not diff.changes and not diff.num_equal:
        return [NOTHING_RAN]
    before, after = diff.before_total, diff.after_total
    change = f"{percent(after - before, before):+.1f} %" if before > 0 else "nothing ran before"
    times = f"{duration(before)} before, {duration(after)} after: {change} of {whose_time(diff.device)}"
    lines = [times, f"rows: {len(diff.changes)} differ, {diff.num_equal} are equal"]
    if hidden := _hidden(diff.changes, limit):
        lines.insert(0, f"not shown: {len(hidden)} of {len(diff.changes)} rows")
    return lines


def _hidden(rows: Sequence[AnyRow], limit: int | None) -> Sequence[AnyRow]:
    return rows[len(rows[:limit]) :]


def whose_time(device: str) -> str:
    """What the times of a profile are times of."""
    return "CPU time" if device == "cpu" else "GPU time"


def time_column(times: list[float], *, signed: bool = False) -> tuple[str, tuple[str, ...]]:
    """The unit for a whole column, and its cells.

    >>> time_column([1.5, 20000.0])
    ('ms', ('0.002', '20.000'))
    >>> time_column([1.5, -3.0], signed=True)
    ('us', ('+1.5', '-3.0'))
    """
    sign = "+" if signed else ""
    if max(map(abs, times), default=0.0) >= _MS_FROM:
        return "ms", tuple(f"{time / 1e3:{sign},.3f}" for time in times)
    return "us", tuple(f"{time:{sign},.1f}" for time in times)
