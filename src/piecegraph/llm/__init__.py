"""Language models of transformers, run as they are through the tape: paged cache, continuous batching, sampling.

:class:`piecegraph.LLM` is all that most need. The names here are for those who bring a scheduler of their own, or
change ours, and run its steps with ``LLM.forward``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from piecegraph.base.extras import require_extra

require_extra("llm", ["transformers"], "language models need it")

_HOMES = {
    "Chunk": "piecegraph.llm.run.results",
    "Completion": "piecegraph.llm.run.results",
    "PagedCache": "piecegraph.llm.cache.paged",
    "Request": "piecegraph.llm.run.request",
    "SamplingParams": "piecegraph.llm.run.sampling_params",
    "Scheduler": "piecegraph.llm.run.scheduler",
    "SchedulerLimits": "piecegraph.llm.run.scheduler",
    "StepPlan": "piecegraph.llm.run.step",
    "StepResult": "piecegraph.llm.run.results",
    "StructuredOutputsParams": "piecegraph.llm.run.structured",
    "Work": "piecegraph.llm.run.step",
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
    "StructuredOutputsParams",
    "Work",
]

if TYPE_CHECKING:
    from piecegraph.llm.cache.paged import PagedCache
    from piecegraph.llm.run.request import Request
    from piecegraph.llm.run.results import Chunk, Completion, StepResult
    from piecegraph.llm.run.sampling_params import SamplingParams
    from piecegraph.llm.run.scheduler import Scheduler, SchedulerLimits
    from piecegraph.llm.run.step import StepPlan, Work
    from piecegraph.llm.run.structured import StructuredOutputsParams


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'piecegraph.llm' has no attribute {name!r}")
    from piecegraph.base.progress import timed_import

    return getattr(timed_import(_HOMES[name], of="piecegraph.llm.llm"), name)


def __dir__() -> list[str]:
    return __all__
