"""A result for people: as text, and as files by their suffix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from piecegraph.base.plan import Decision
from piecegraph.base.progress import STAGES
from piecegraph.bench.result import BenchResult, Row, Timing
from piecegraph.errors import InputError

_HEADER = (
    *("batch", "input", "phase", "mode", "ms", "p10", "p90"),
    *("tokens/s", "x eager", "x floor", "coverage", "padding", "GiB"),
)
_NUM_LABELS = 4
"""Columns that are no figures."""


def aligned(rows: Iterable[Sequence[str]], num_labels: int = 1) -> str:
    """Rows as columns of text: labels to the left, figures to the right.

    >>> print(aligned([("mode", "ms"), ("eager", "12.5")]))
    mode     ms
    eager  12.5
    """
    kept = [tuple(row) for row in rows]
    widths = [max(len(row[i]) for row in kept) for i in range(len(kept[0]))]
    lines = (
        "  ".join(
            cell.ljust(width) if i < num_labels else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in kept
    )
    return "\n".join(line.rstrip() for line in lines)


def config_table(decisions: Sequence[Decision]) -> str:
    """What will be measured: printed before anything runs."""
    return aligned([(each.subject, each.choice, each.reason) for each in decisions], num_labels=3)


def as_text(result: BenchResult) -> str:
    """The rows, what did not run as asked, and the start-up of each mode."""
    parts = [aligned([_HEADER, *_cells(result)], _NUM_LABELS)]
    if result.losses:
        parts.append("not as asked\n" + "\n".join(f"  {loss}" for loss in result.losses))
    parts.append("start-up, seconds\n" + aligned(_startup(result)))
    parts.append(_machine_line(result))
    return "\n\n".join(parts)


def as_markdown(result: BenchResult) -> str:
    """The same for a page."""
    parts = [f"# piecegraph bench {_escaped(result.model)}", _machine_line(result)]
    settings = [(each.subject, each.choice, each.reason) for each in result.config]
    parts.append(_table([("setting", "value", "why"), *settings], num_labels=3))
    parts.append(_table([_HEADER, *_cells(result)], _NUM_LABELS))
    if result.losses:
        parts.append("Not as asked:\n\n" + "\n".join(f"- {_escaped(loss)}" for loss in result.losses))
    parts.append("Start-up, seconds:\n\n" + _table(_startup(result), num_labels=1))
    return "\n\n".join(parts) + "\n"


def as_html(result: BenchResult) -> str:
    """A report to share: one file without references to others."""
    from piecegraph.report.bench import bench_report
    from piecegraph.report.page import to_html

    return to_html(bench_report(asdict(result)))


WRITERS: dict[str, Callable[[BenchResult], str]] = {
    ".json": BenchResult.to_json,
    ".md": as_markdown,
    ".html": as_html,
}
"""What writes a file, by its suffix. A further format is one more entry."""


def check_output(path: Path, suffixes: Iterable[str] = WRITERS) -> None:
    """Raise now what would fail behind a long run."""
    if path.suffix not in suffixes:
        hint = f"end its name with one of {', '.join(suffixes)}"
        raise InputError("PG601", f"{path} cannot be written", why="its suffix names no format", hint=hint)
    if not path.parent.is_dir():
        raise InputError("PG601", f"{path} cannot be written", why="there is no such folder", hint="make it first")


def write(result: BenchResult, path: Path) -> None:
    """Write a file in the format that its suffix names."""
    try:
        path.write_text(WRITERS[path.suffix](result), encoding="utf-8")
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise InputError("PG601", f"{path} cannot be written", why=why) from error


def _cells(result: BenchResult) -> Iterable[tuple[str, ...]]:
    eager = {row.key[1:]: row.timing for row in result.rows if row.mode == "eager"}
    return [_row_cells(row, eager.get(row.key[1:])) for row in result.rows]


def _row_cells(row: Row, eager: Timing | None) -> tuple[str, ...]:
    labels = (str(row.batch_size), str(row.input_len), row.phase, row.mode)
    timing = row.timing
    if timing is None:
        return (*labels, row.verdict.state, *("-",) * (len(_HEADER) - _NUM_LABELS - 1))
    times = (timing.median_ms, timing.p10_ms, timing.p90_ms)
    return (
        *labels,
        *(f"{ms:.3f}" for ms in times),
        f"{row.tokens_s:,.0f}",
        _shown(eager.median_ms / timing.median_ms if eager else None, "{:.2f}"),
        _shown(row.floor.ratio, "{:.2f}"),
        _shown(row.coverage, "{:.0%}"),
        _shown(row.padding, "{:.1%}"),
        _shown(row.memory_bytes / 2**30 if row.memory_bytes is not None else None, "{:.2f}"),
    )


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _startup(result: BenchResult) -> list[tuple[str, ...]]:
    stages = [stage for stage in STAGES if any(stage in each.stages_s for each in result.startup)]
    rows = [("mode", *stages, "total")]
    for each in result.startup:
        seconds = (_shown(each.stages_s.get(stage), "{:.2f}") for stage in stages)
        rows.append((each.mode, *seconds, f"{sum(each.stages_s.values()):.2f}"))
    return rows


def _machine_line(result: BenchResult) -> str:
    machine, versions = result.machine, result.machine.environment
    parts = [
        machine.device,
        f"torch {versions['torch']}",
        f"Python {versions['python']}",
        f"machine {machine.fingerprint}",
    ]
    return ", ".join(parts)


def _table(rows: Iterable[Sequence[str]], num_labels: int) -> str:
    header, *others = [[_escaped(cell) for cell in row] for row in rows]
    rule = ["---" if i < num_labels else "--:" for i in range(len(header))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *others))


def _escaped(text: str) -> str:
    """Names are anybody's: no table, tag or line of a page may begin in one."""
    for special in "\\|*_`[]":
        text = text.replace(special, f"\\{special}")
    return text.replace("<", "&lt;").replace(">", "&gt;").replace("\n", " ")
