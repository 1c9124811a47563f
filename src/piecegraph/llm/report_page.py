"""How a language model is run, as a page to share."""

from __future__ import annotations

import dataclasses

from piecegraph.base.environment import describe_environment
from piecegraph.base.events import EventLog
from piecegraph.base.plan import count_pieces
from piecegraph.engine.tree import weight_bytes
from piecegraph.llm.report import decisions_of, stats_of_llm
from piecegraph.llm.run.step import StepCounts
from piecegraph.llm.startup import Started
from piecegraph.report.content import Bar, DataTable, PlanStrip, Report, run_figures


def report_of_llm(name: str, started: Started, events: EventLog) -> Report:
    """Everything that was decided, and what it cost."""
    stats = stats_of_llm(started, events)
    graphs = sum(entry.num_bytes for entry in started.engine.forward.library.recorded)
    memory = {"weights": weight_bytes(started.loaded.model), "cache": started.cache_bytes}
    memory |= {"states": started.state_bytes, "graphs": graphs}
    steps = started.engine.counts
    return Report(
        title=f"How {name} runs",
        about=f"{stats['model']} on {stats['device']}, {stats['dtype']}",
        figures=run_figures("step", steps.num_steps, steps.num_replays, events, sum(started.stages.values())),
        plans=(PlanStrip("", f"the decoder: {count_pieces(started.model.steps)}", tuple(started.model.steps)),),
        tables=_step_tables(steps),
        startup=(Bar("", tuple(started.stages.items())),),
        memory=(Bar("", tuple((part, float(number)) for part, number in memory.items() if number)),),
        decisions=tuple(decisions_of(started)),
        losses=events.distinct,
        machine=describe_environment(),
        data={"plans": [{"steps": [dataclasses.asdict(step) for step in started.model.steps]}], "stats": stats},
    )


def _step_tables(counts: StepCounts) -> tuple[DataTable, ...]:
    rows = tuple(
        (
            kind,
            *(f"{number:,}" for number in (one.num_steps, one.num_replays, one.num_larger, one.num_tokens)),
            f"{one.num_padding / (one.num_tokens + one.num_padding):.0%}",
        )
        for kind, one in counts.kinds.items()
        if one.num_steps
    )
    head = ("steps of kind", "number", "replayed", "in a larger size than the best", "tokens", "padding")
    return (DataTable("Steps", head, rows),) if rows else ()
