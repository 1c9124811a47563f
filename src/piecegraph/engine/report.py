"""``explain()`` and ``stats()``: an engine in, text or numbers out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from piecegraph.base.plan import Cut, SizeKey, count_pieces
from piecegraph.base.progress import all_stages
from piecegraph.base.text import count_of

if TYPE_CHECKING:
    from piecegraph.engine.engine import Engine
    from piecegraph.engine.paths import Paths
    from piecegraph.engine.runner import PlanRunner
    from piecegraph.tape.library import Recorded

_MAX_ROWS = 40
SIZE_HEAD = ("size", "graphs", "eager steps", "seconds", "MiB")


def explain_engine(engine: Engine) -> str:
    """Everything there is to say about how calls are run."""
    lines = [f"piecegraph: {engine.subject.name}"]
    if not engine.plans:
        lines.append("no plan yet: it is made at the first call, or by capture()")
    for number, runner in enumerate(engine.plans):
        lines += ["", *_explain_plan(f"plan {number}" if len(engine.plans) > 1 else "plan", runner)]
    counted = f"{count_of(engine.num_calls, 'call')}, {engine.num_replays} replayed, coverage {_coverage(engine):.1%}"
    lines += ["", "calls", f"  {counted}"]
    lines += ["", "fallbacks and other losses"]
    lines += [f"  {times} x {event}" for event, times in engine.events.distinct] or ["  none"]
    return "\n".join(lines)


def stats_of(engine: Engine) -> dict[str, Any]:
    """The same as numbers, ready for JSON."""
    return {
        "calls": engine.num_calls,
        "replayed": engine.num_replays,
        "coverage": _coverage(engine),
        "compiles": engine.planner.num_compiles,
        "events": engine.events.counts,
        "losses": [
            {"code": event.code, "subject": event.subject, "reason": event.reason, "count": times}
            for event, times in engine.events.distinct
        ],
        "plans": [_plan_stats(runner) for runner in engine.plans],
    }


def _coverage(engine: Engine) -> float:
    return engine.num_replays / engine.num_calls if engine.num_calls else 0.0


def _plan_stats(runner: PlanRunner) -> dict[str, Any]:
    plan = runner.plan
    return {
        "frontend": plan.frontend,
        "device": plan.device,
        "mode": plan.mode,
        "pieces": len(plan.pieces),
        "distinct_pieces": plan.num_distinct,
        "cuts": len(cuts_of(runner)),
        "seconds": stages_of(runner),
        "sizes": {
            name: {
                "graphs": size.num_graphs,
                "eager_steps": size.num_eager_steps,
                "seconds": size.seconds,
                "bytes": size.num_bytes,
            }
            for name, size in recorded_sizes(runner)
        },
        "paths": {
            str(key): {
                "recorded": len(paths.paths),
                "replays": [path.num_replays for path in paths.paths],
                "left": paths.num_left,
                "given_up": paths.given_up is not None,
            }
            for key, paths in runner.paths.items()
        },
    }


def recorded_sizes(runner: PlanRunner) -> list[tuple[str, Recorded[SizeKey]]]:
    """What was recorded, by size, and by path where there are several."""
    rows = [(str(size.key), size) for size in runner.library.recorded]
    for key, paths in runner.paths.items():
        for number, path in enumerate(paths.paths):
            rows += [(f"{key} path {number}" if number else str(key), size) for size in path.library.recorded]
    return rows


def _explain_plan(title: str, runner: PlanRunner) -> list[str]:
    plan = runner.plan
    lines = [
        f"{title}: {plan.frontend} front end, {plan.device}, mode {plan.mode}",
        *(f"  input   {shown}" for shown in plan.inputs),
        *(f"  size    {dim}" for dim in plan.size_dims),
        "  built   " + ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in stages_of(runner).items()),
        f"  steps   {count_steps(runner)}",
    ]
    lines += _table(("#", "what", "ops", "key or reason", "line"), _step_rows(runner))
    lines += ["", "  recorded sizes"]
    recorded = [size_row(name, size) for name, size in recorded_sizes(runner)]
    lines += _table(SIZE_HEAD, recorded) if recorded else ["    none"]
    if runner.paths:
        lines += ["", "  what the host reads", *map(_explain_paths, runner.paths.values())]
    lines += ["", "  decisions", *(f"    {decision}" for decision in (*plan.decisions, *runner.decisions))]
    return lines


def stages_of(runner: PlanRunner) -> dict[str, float]:
    """What a plan took until now; all stages together are the time that calls have waited for it."""
    tuned = runner.library.tune_seconds
    later = {"kernels": tuned, "record": runner.seconds - tuned}
    return all_stages({**dict(runner.plan.seconds), **later}, of="piecegraph.api")


def cuts_of(runner: PlanRunner) -> Sequence[Cut]:
    """The cuts of a plan; those of a function that runs as it is are known once it was recorded."""
    followed = [path.cuts for paths in runner.paths.values() for path in paths.paths]
    return runner.plan.cuts or getattr(runner.body, "cuts", ()) or next(iter(followed), ())


def count_steps(runner: PlanRunner) -> str:
    """Pieces and cuts in words."""
    plan, cuts = runner.plan, count_of(len(cuts_of(runner)), "cut")
    if plan.frontend == "breakable":
        return f"the function as it is, {cuts}"
    return f"{count_pieces(plan.steps)}, {cuts}"


def _step_rows(runner: PlanRunner) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for step in runner.plan.steps or cuts_of(runner):
        if isinstance(step, Cut):
            rows.append((str(step.index), f"cut {step.op}", "", step.reason, str(step.source or "")))
        else:
            rows.append(
                (str(step.index), f"piece ({step.backend})", str(step.num_ops), step.key[:8], str(step.first or ""))
            )
    return rows


def _explain_paths(paths: Paths) -> str:
    if paths.given_up is not None:
        return f"    size {paths.size}: {paths.given_up.event.reason}"
    replays = ", ".join(str(path.num_replays) for path in paths.paths)
    recorded = f"{count_of(len(paths.paths), 'path')} recorded, replayed {replays or 0} times"
    return f"    size {paths.size}: {recorded}; a tape was left {paths.num_left} times"


def size_row(name: str, size: Recorded[SizeKey]) -> tuple[str, ...]:
    """Under :data:`SIZE_HEAD`."""
    return (
        name,
        str(size.num_graphs),
        str(size.num_eager_steps),
        f"{size.seconds:.3f}",
        f"{size.num_bytes / 2**20:.1f}",
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Aligned columns; the middle of a long table is left out, and said so."""
    shown = [tuple(row) for row in rows]
    widths = [max(len(row[i]) for row in (header, *shown)) for i in range(len(header))]
    lines = [
        "    " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *shown)
    ]
    if len(lines) <= _MAX_ROWS + 1:
        return lines
    half = _MAX_ROWS // 2
    return [*lines[: half + 1], f"    ... {len(lines) - 1 - 2 * half} more ...", *lines[-half:]]
