"""Two results side by side: a verdict for each row, which a spread that overlaps keeps at "no change"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from piecegraph.bench.result import BenchResult, Row
from piecegraph.bench.show import aligned

Change = Literal["faster", "slower", "no change", "only before", "only after", "no number"]


@dataclass(frozen=True, slots=True)
class RowChange:
    """What became of a row."""

    row: Row
    before_ms: float | None
    after_ms: float | None
    change: Change

    @property
    def ratio(self) -> float | None:
        """After over before."""
        if self.before_ms is None or self.after_ms is None:
            return None
        return self.after_ms / self.before_ms


@dataclass(frozen=True, slots=True)
class ResultChange:
    """What became of all rows."""

    rows: tuple[RowChange, ...]
    notes: tuple[str, ...]
    """Why the two may not be comparable."""

    @property
    def counts(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for each in self.rows:
            found[each.change] = found.get(each.change, 0) + 1
        return found


def compare_results(before: BenchResult, after: BenchResult) -> ResultChange:
    """Rows of the same mode, phase and size."""
    then, now = ({row.key: row for row in result.rows} for result in (before, after))
    rows = tuple(_change(then.get(key), now.get(key)) for key in dict.fromkeys((*then, *now)))
    notes = []
    if before.machine.fingerprint != after.machine.fingerprint:
        machines = f"{before.machine.fingerprint} and {after.machine.fingerprint}"
        notes.append(f"measured on different machines, or with different versions: {machines}")
    if before.model != after.model:
        notes.append(f"of different models: {before.model} and {after.model}")
    return ResultChange(rows, tuple(notes))


def _change(before: Row | None, after: Row | None) -> RowChange:
    row = after or before
    assert row is not None, "a key is of one of them"
    then, now = (each.timing if each is not None else None for each in (before, after))
    change: Change
    if before is None or after is None:
        change = "only after" if before is None else "only before"
    elif then is None or now is None:
        change = "no number"
    elif then.p10_ms <= now.p90_ms and now.p10_ms <= then.p90_ms:
        change = "no change"  # the spreads overlap: either could be the other's
    else:
        change = "faster" if now.median_ms < then.median_ms else "slower"
    return RowChange(row, then.median_ms if then else None, now.median_ms if now else None, change)


def comparison_text(found: ResultChange) -> str:
    """A line for each row, the counts, and what to beware of."""
    header = ("batch", "input", "phase", "mode", "verdict", "before ms", "after ms", "ratio")
    rows = [header, *(_line(each) for each in found.rows)]
    counts = ", ".join(f"{count} {change}" for change, count in found.counts.items())
    return "\n".join([aligned(rows, 5), "", counts, *(f"note: {note}" for note in found.notes)])


def _line(change: RowChange) -> tuple[str, ...]:
    row, values = change.row, (change.before_ms, change.after_ms, change.ratio)
    figures = ("-" if value is None else f"{value:.3f}" for value in values)
    return (str(row.batch_size), str(row.input_len), row.phase, row.mode, change.change, *figures)
