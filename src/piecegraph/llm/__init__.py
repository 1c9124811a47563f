"""Language models of transformers, run as they are through the tape: paged cache, continuous batching, sampling.

:class:`piecegraph.LLM` is all that most need. The names here are for those who bring a scheduler of their own, or
change ours, and run its steps with ``LLM.forward``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_HOMES = {
    "Chunk": "piecegraph.llm.results",
    "Completion": "piecegraph.llm.results",
    "PagedCache": "piecegraph.llm.groups",
    "Request": "piecegraph.llm.request",
    "SamplingParams": "piecegraph.llm.request",
    "Scheduler": "piecegraph.llm.scheduler",
    "SchedulerLimits": "piecegraph.llm.scheduler",
    "StepPlan": "piecegraph.llm.step",
    "StepResult": "piecegraph.llm.results",
    "Work": "piecegraph.llm.step",
}

__all__ = [
    "Chunk",
    "Completion",
    "PagedCache",
    "Request",
    "SamplingParams",
    "Scheduler",
    "SchedulerLimits",
    "StepPlan",
    "StepResult",
    "Work",
]

if TYPE_CHECKING:
    from piecegraph.llm.groups import PagedCache
    from piecegraph.llm.request import Request, SamplingParams
    from piecegraph.llm.results import Chunk, Completion, StepResult
    from piecegraph.llm.scheduler import Scheduler, SchedulerLimits
    from piecegraph.llm.step import StepPlan, Work


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'piecegraph.llm' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
