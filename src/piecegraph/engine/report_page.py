"""``report()``: an engine in, a page to share out."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from piecegraph.base.environment import describe_environment
from piecegraph.engine.report import SIZE_HEAD, count_steps, cuts_of, recorded_sizes, size_row, stages_of, stats_of
from piecegraph.engine.tree import weight_bytes
from piecegraph.report.content import Bar, DataTable, PlanStrip, Report, run_figures

if TYPE_CHECKING:
    from piecegraph.engine.engine import Engine
    from piecegraph.engine.runner import PlanRunner


def report_of(engine: Engine) -> Report:
    """Everything there is to say about how calls are run."""
    plans = {f"plan {number}" if len(engine.plans) > 1 else "": plan for number, plan in enumerate(engine.plans)}
    startup = {title: stages_of(plan) for title, plan in plans.items()}
    seconds = sum(sum(stages.values()) for stages in startup.values())
    module = engine.subject.module
    weights = (("weights", float(weight_bytes(module))),) if module is not None else ()
    return Report(
        title=f"How {engine.subject.name} runs",
        about="" if plans else "no plan yet: it is made at the first call, or by capture()",
        figures=run_figures("call", engine.num_calls, engine.num_replays, engine.events, seconds),
        plans=tuple(_strip(title, plan) for title, plan in plans.items()),
        tables=tuple(_size_table(title, plan) for title, plan in plans.items() if recorded_sizes(plan)),
        startup=tuple(Bar(title, tuple(stages.items())) for title, stages in startup.items()),
        memory=tuple(Bar(title, (*weights, *_graph_bytes(plan))) for title, plan in plans.items()),
        decisions=tuple(each for plan in plans.values() for each in (*plan.plan.decisions, *plan.decisions)),
        losses=engine.events.distinct,
        machine=describe_environment(),
        data={"plans": [dataclasses.asdict(plan.plan) for plan in plans.values()], "stats": stats_of(engine)},
    )


def _strip(title: str, runner: PlanRunner) -> PlanStrip:
    plan = runner.plan
    about = f"{plan.frontend} front end, {plan.device}, mode {plan.mode}: {count_steps(runner)}"
    return PlanStrip(title, about, tuple(plan.steps or cuts_of(runner)))


def _size_table(title: str, runner: PlanRunner) -> DataTable:
    rows = tuple(size_row(name, size) for name, size in recorded_sizes(runner))
    return DataTable(f"Recorded sizes of {title}" if title else "Recorded sizes", SIZE_HEAD, rows)


def _graph_bytes(runner: PlanRunner) -> list[tuple[str, float]]:
    return [(f"graphs at {name}", float(size.num_bytes)) for name, size in recorded_sizes(runner) if size.num_bytes]
