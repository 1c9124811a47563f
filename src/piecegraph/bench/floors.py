"""What no mode can undercut: the time of its kernels alone, and that of reading the weights once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from piecegraph.bench.config import Cell
from piecegraph.bench.result import Floor, Phase
from piecegraph.bench.runner import Runner
from piecegraph.provenance.profile.take import profiling


def kernels_ms(run: Callable[[], Any]) -> float:
    """The time in which kernels or copies of a run are at work, as the profiler sees them on the GPU."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints a line when it starts
    with profiling() as profile:
        run()
        torch.cuda.synchronize()
    events: Any = profile.events()
    on_device = (event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation)
    return covered((event.time_range.start, event.time_range.end) for event in on_device) / 1e3


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much all spans cover together: a kernel may begin while the one before it ends, and waits for it then.

    >>> covered([(0, 2), (1, 3), (5, 6), (5, 5.5)])
    4.0
    """
    total, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


def kernels_of(runner: Runner, phase: Phase, cell: Cell, inputs: Any) -> float:
    """Milliseconds of the kernels of one prefill, of one step of decoding, or of one call."""
    found = kernels_ms(lambda: runner.sample_s(phase, inputs))
    if phase != "decode":
        return found
    # Such a sample begins with a prefill.
    of_prefill = kernels_ms(lambda: runner.sample_s("prefill", inputs))
    return max(0.0, found - of_prefill) / (cell.output_len - 1)


def floor(median_ms: float, of_kernels_ms: float | None, read_bytes: int, bytes_s: float | None) -> Floor:
    """Both floors of a row, and how far above the higher of them it is.

    >>> floor(3.0, 2.0, 4_000_000_000, 4e12)
    Floor(kernels_ms=2.0, bandwidth_ms=1.0, ratio=1.5)
    """
    of_bandwidth = None if bytes_s is None else read_bytes / bytes_s * 1e3
    highest = max((each for each in (of_kernels_ms, of_bandwidth) if each is not None), default=0.0)
    ratio = median_ms / highest if highest else None
    return Floor(kernels_ms=of_kernels_ms, bandwidth_ms=of_bandwidth, ratio=ratio)
