"""Results of a benchmark: a table for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from piecegraph.bench.machine import hardware
from piecegraph.bench.result import Timing
from piecegraph.bench.show import aligned


@dataclass(frozen=True)
class Contender:
    """One way of doing the work, and what it took at each size."""

    name: str
    timings: dict[str, Timing]
    notes: dict[str, Any] = field(default_factory=dict)
    """Figures shown beside the timings: build seconds, memory, coverage, fallbacks."""


def table(contenders: Sequence[Contender], *, unit: str = "ms") -> str:
    """Median times with the ratio to the first contender, which is the baseline, and the notes of each."""
    columns = list(dict.fromkeys(size for contender in contenders for size in contender.timings))
    note_names = list(dict.fromkeys(name for contender in contenders for name in contender.notes))
    rows = [[f"p50 {unit} (x baseline)", *columns, *note_names]]
    baseline = contenders[0].timings
    for contender in contenders:
        cells = [_cell(contender.timings.get(size), baseline.get(size)) for size in columns]
        rows.append([contender.name, *cells, *(str(contender.notes.get(name, "-")) for name in note_names)])
    return aligned(rows)


def _cell(timing: Timing | None, baseline: Timing | None) -> str:
    if timing is None:
        return "-"
    return (
        f"{timing.median_ms:.2f} ({baseline.median_ms / timing.median_ms:.2f}x)"
        if baseline
        else f"{timing.median_ms:.2f}"
    )


def save(path: str | Path, contenders: Sequence[Contender]) -> None:
    """Write everything as JSON."""
    document = {"schema": 1, "hardware": hardware(), "contenders": [asdict(contender) for contender in contenders]}
    Path(path).write_text(json.dumps(document, indent=1))
