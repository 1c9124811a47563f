"""The runs of a log: what was taken for two is put together again where the second is but the end of the first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from piecegraph.explain.evidence import Evidence
from piecegraph.explain.log.collected import DistinctFailures
from piecegraph.explain.root_cause import triage

_JOINED = (
    *(
        "processes",
        "milestones",
        "progress",
        "suggestions",
        "memory_signs",
        "artefacts",
        "call_chains",
        "exits",
        "stops",
        "above",
        "group_states",
    ),
    *("device_asserts", "xids", "error_lines", "known_issue_lines", "tree", "notes"),
)
"""What both halves of a run hold several of."""


def join_runs(runs: Iterable[Evidence]) -> tuple[Evidence, ...]:
    """The runs, without those that begin with a late process's first line and hold nothing but echoes."""
    joined: list[Evidence] = []
    for run in runs:
        if joined and run.may_go_on and triage(run).has_only_echoes:
            joined[-1] = _with_end(joined[-1], run)
        else:
            joined.append(run)
    return tuple(joined)


def _with_end(run: Evidence, end: Evidence) -> Evidence:
    failures = DistinctFailures()
    for failure in (*run.failures, *end.failures):
        failures.add(failure)
    both: dict[str, Any] = {name: _once((*getattr(run, name), *getattr(end, name))) for name in _JOINED}
    numbers = ("num_lines", "num_call_chains", "num_cut_off")
    both |= {name: getattr(run, name) + getattr(end, name) for name in numbers}
    return replace(
        run,
        failures=failures.in_order(),
        free_memory=end.free_memory or run.free_memory,
        last_line=end.last_line or run.last_line,
        **both,
    )


def _once(values: Sequence[object]) -> tuple[object, ...]:
    return tuple(dict.fromkeys(values))
