"""Timing a callable: median with p10 and p90 over repeats, after warm-up."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Timing:
    """What repeated runs took."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    repeats: int

    def __str__(self) -> str:
        return f"{self.median_ms:.2f}"


@dataclass(frozen=True, slots=True)
class Effort:
    """How often something is run."""

    warmup_s: float = 0.3
    repeats: int = 60

    def __str__(self) -> str:
        return f"medians of {self.repeats} runs after {self.warmup_s} s of warm-up"


QUICK = Effort(0.0, 5)
"""For a run of a benchmark that only shows that it works."""


def measure_with(effort: Effort, run: Callable[[], Any]) -> Timing:
    return measure(run, warmup_s=effort.warmup_s, repeats=effort.repeats)


def measure(run: Callable[[], Any], *, warmup_s: float = 0.3, repeats: int = 60) -> Timing:
    """Time single runs from call to finished result: the device is waited for before and after each one.

    Warm-up is by time, so that caches and clocks have settled; garbage collection is off, as in ``timeit``.
    """
    start = time.perf_counter()
    while time.perf_counter() - start < warmup_s:
        run()
        _wait()
    times = []
    with _collection_off():
        for _ in range(repeats):
            _wait()
            start = time.perf_counter()
            run()
            _wait()
            times.append((time.perf_counter() - start) * 1e3)
    cuts = statistics.quantiles(times, n=10) if len(times) > 1 else [times[0]] * 9
    return Timing(statistics.median(times), cuts[0], cuts[8], repeats)


@contextlib.contextmanager
def _collection_off() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over the norm of what is expected."""
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm().clamp_min(1e-30))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
