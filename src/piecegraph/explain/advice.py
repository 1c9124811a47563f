"""What frameworks print as advice, judged against the evidence."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from piecegraph.explain.evidence import Evidence, Failure, Phase
from piecegraph.explain.frames import layers_of

Fit = Literal["fits", "does not fit", "at a cost", "diagnosis", "not judged"]

_MEMORY = re.compile(
    r"mem-fraction|mem_fraction|max-bs|memory.utilization|ALLOC_CONF|batch.?size|max.?model.?len|memory|max.num.seqs",
    re.I,
)
_COMPILER = re.compile(r"torch.?compile|inductor|dynamo", re.I)
_GRAPHS = re.compile(r"cuda.?graph|enforce.?eager", re.I)
_DIAGNOSIS = re.compile(r"VERBOSE|LAUNCH_BLOCKING|NCCL_DEBUG|TORCH_LOGS|TORCH_USE_CUDA_DSA|DISTRIBUTED_DEBUG")
_SHORTAGE = re.compile(r"(?i)out of ?memory|cannot allocate memory|bad_alloc|No available memory")
_SEGMENTS = re.compile(r"expandable_segments")
_ASKED = re.compile(r"Tried to allocate (?P<number>[\d.]+) (?P<unit>[KMGT]iB)")
_CACHED = re.compile(r"(?P<number>[\d.]+) (?P<unit>[KMGT]iB) is reserved by PyTorch but unallocated")
_SHARED = re.compile(r"(?i)shared.memory|/dev/shm|\bshm\b")
_COMPILE_LAYERS = {"Dynamo", "Inductor", "AOTAutograd", "Triton", "thunder"}


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One piece of advice, judged."""

    text: str
    line: int | None
    fit: Fit
    why: str


def judge_suggestions(evidence: Evidence, root: Failure, phase: Phase | None) -> tuple[Suggestion, ...]:
    """Every suggestion with whether it fits."""
    return tuple(Suggestion(text, line, *_judge(text, evidence, root, phase)) for text, line in evidence.suggestions)


def _memory_shortage(evidence: Evidence, root: Failure) -> str:
    """Where memory is said to have run out; empty if nowhere."""
    for raised in root.chain:
        if _SHORTAGE.search(f"{raised.type}: {raised.message}"):
            return "the exception itself"
    if not evidence.memory_signs:
        return ""
    _, line = evidence.memory_signs[0]
    return f"line {line}" if line is not None else "the record"


def _judge(text: str, evidence: Evidence, root: Failure, phase: Phase | None) -> tuple[Fit, str]:
    layers = set(layers_of(frame for raised in root.chain for frame in raised.frames))
    if _DIAGNOSIS.search(text):
        return "diagnosis", "tells more, mends nothing"
    if _SHARED.search(text) and any(_SHARED.search(raised.message) for raised in root.chain):
        return "fits", "the exception itself names it"
    cached = _cached_and_asked(root) if _SEGMENTS.search(text) else None
    if cached is not None and cached[0] < cached[1]:
        return (
            "does not fit",
            f"less is cached and unused ({cached[0]:.0f} MiB) than was asked for ({cached[1]:.0f} MiB)",
        )
    if _MEMORY.search(text):
        shortage = _memory_shortage(evidence, root)
        if shortage:
            return "fits", f"memory ran out, says {shortage}"
        return "does not fit", "no sign of memory shortage" + _free(evidence)
    if _COMPILER.search(text):
        if layers & _COMPILE_LAYERS:
            return "at a cost", "would go around the failing compiler"
        return "does not fit", "the failure is not in torch.compile"
    if _GRAPHS.search(text):
        if phase == "capture":
            return "at a cost", "would go around the failing capture, and lose its speed"
        return "does not fit", "the failure is not in graph capture"
    return "not judged", ""


def _cached_and_asked(root: Failure) -> tuple[float, float] | None:
    """How many MiB of the process's own memory were unused, and how many it asked for."""
    for raised in root.chain:
        cached, asked = _CACHED.search(raised.message), _ASKED.search(raised.message)
        if cached is not None and asked is not None:
            return _mib(cached), _mib(asked)
    return None


def _mib(found: re.Match[str]) -> float:
    return float(found["number"]) * 1024.0 ** ("KMGT".index(found["unit"][0]) - 1)


def _free(evidence: Evidence) -> str:
    if evidence.free_memory is None:
        return ""
    free, line = evidence.free_memory
    return f": {free} were free" + (f" at line {line}" if line is not None else "")
