"""How a language model is run, as text and as numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

from piecegraph.base.events import EventLog
from piecegraph.base.plan import Cut, Decision, Piece, count_pieces, num_distinct
from piecegraph.base.text import count_of
from piecegraph.llm.run.step import StepCounts
from piecegraph.llm.startup import Started


def explain_llm(started: Started, events: EventLog) -> str:
    """Everything that was decided, and what it cost."""
    stats = stats_of_llm(started, events)
    lines = [f"{stats['model']} on {stats['device']}, {stats['dtype']}"]
    lines += ["", "start-up"]
    lines += [f"  {stage:<22} {seconds:8.2f} s" for stage, seconds in stats["stages"].items()]
    lines.append(f"  {'total':<22} {sum(stats['stages'].values()):8.2f} s")
    lines += [f"  weights: {started.weights}"] if started.weights is not None else []
    lines += ["", "decoder"]
    lines.append(f"  {count_pieces(started.model.steps)}")
    lines += [f"  {count} cuts at {op}: {reason}" for (op, reason), count in _cuts(started).items()]
    lines += ["", "cache", *(f"  {line}" for line in _cache_lines(started))]
    lines += ["", "decisions", *(f"  {decision}" for decision in decisions_of(started))]
    lines += ["", "recorded", *(f"  {line}" for line in _recorded_lines(started))]
    lines += ["", f"steps  {stats['num_steps']}, replayed {stats['num_replays']} ({stats['coverage']:.0%})"]
    lines += [f"  {line}" for line in _step_lines(started.engine.counts)]
    losses = [f"  {count} x {text}" for text, count in _losses(events)]
    lines += ["fallbacks", *(losses or ["  none"])]
    return "\n".join(lines)


def stats_of_llm(started: Started, events: EventLog) -> dict[str, Any]:
    """The same as numbers."""
    model, engine = started.loaded.model, started.engine
    counts, forward = engine.counts, engine.forward
    return {
        "model": type(model).__name__,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "stages": dict(started.stages),
        "weights": _weights(started),
        "num_pieces": sum(isinstance(step, Piece) for step in started.model.steps),
        "num_distinct": num_distinct(started.model.steps),
        "num_compiles": started.model.num_compiles,
        "cache_bytes": started.cache_bytes,
        "state_bytes": started.state_bytes,
        "num_steps": counts.num_steps,
        "num_replays": counts.num_replays,
        "coverage": counts.num_replays / counts.num_steps if counts.num_steps else 0.0,
        "steps": {kind: dataclasses.asdict(of_kind) for kind, of_kind in counts.kinds.items()},
        "num_recorded": len(forward.library.recorded),
        "num_recorded_idle": forward.num_recorded_idle,
        "num_missing": len(forward.missing),
        "fallbacks": dict(_losses(events)),
    }


def _weights(started: Started) -> dict[str, float] | None:
    read = started.weights
    if read is None:
        return None
    rates = {"gb_per_second": read.gb_per_second, "disk_gb_per_second": read.disk_gb_per_second}
    return {**dataclasses.asdict(read), **rates}


def decisions_of(started: Started) -> list[Decision]:
    """Everything that was decided; how steps are recorded is decided anew when a capture fails."""
    forward = started.engine.forward
    return [*started.decisions, *forward.modes.values(), *forward.decisions]


def _cuts(started: Started) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for step in started.model.steps:
        if isinstance(step, Cut):
            key = (step.op, step.reason)
            counts[key] = counts.get(key, 0) + 1
    return counts


def _cache_lines(started: Started) -> list[str]:
    size = started.engine.scheduler.cache.block_size
    lines = [f"{started.cache_bytes / 2**20:,.1f} MiB in blocks of {size} tokens"]
    for group in started.cache_groups:
        window, chunk = f"a window of {group.window}", f"chunks of {group.chunk}"
        reach = window if group.window else chunk if group.chunk else "all tokens"
        lines.append(f"{(group.num_blocks - 1) * size:,} tokens for layers that see {reach}")
    if started.state_bytes:
        num_seqs = count_of(started.limits.max_num_seqs, "sequence")
        lines.append(f"{started.state_bytes / 2**20:,.1f} MiB for the states of {num_seqs}")
    return lines


def _recorded_lines(started: Started) -> list[str]:
    recorded = started.engine.forward.library.recorded
    if not recorded:
        return ["nothing: steps are called directly"]
    lines = []
    for kind in ("decode", "mixed"):
        mine = [entry for entry in recorded if entry.key.bucket.kind == kind]
        if mine:
            sizes = sorted({entry.key.bucket.num_tokens for entry in mine})
            seconds, mib = sum(e.seconds for e in mine), sum(e.num_bytes for e in mine) / 2**20
            shown = ", ".join(map(str, sizes[:4])) + (f", ... {sizes[-1]}" if len(sizes) > 4 else "")
            counts = f"{count_of(len(sizes), 'size')} ({shown}), {count_of(len(mine), 'tape')}"
            lines.append(f"{kind}: {counts} in {seconds:.2f} s, {mib:.0f} MiB")
    forward = started.engine.forward
    num_idle, num_missing = forward.num_recorded_idle, len(forward.missing)
    lines.append(f"{len(recorded) - num_idle} at the start, {num_idle} while idle, {num_missing} not yet")
    return lines


def _step_lines(counts: StepCounts) -> list[str]:
    lines = []
    for kind, of_kind in counts.kinds.items():
        if of_kind.num_steps:
            padding = of_kind.num_padding / (of_kind.num_tokens + of_kind.num_padding)
            line = f"{kind}: {of_kind.num_steps}, {of_kind.num_larger} in a larger size than the best"
            lines.append(f"{line}, {of_kind.num_steps - of_kind.num_replays} without graphs, {padding:.0%} padding")
    return lines


def _losses(events: EventLog) -> list[tuple[str, int]]:
    return [(f"{event.code} {event.subject}: {event.reason}", count) for event, count in events.distinct]
