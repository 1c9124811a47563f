"""Timing a callable: single runs, from the call to the finished result."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from piecegraph.bench.result import Timing


@dataclass(frozen=True, slots=True)
class Effort:
    """How often something is run."""

    warmup_s: float = 0.3
    repeats: int = 60

    def __str__(self) -> str:
        return f"medians of {self.repeats} runs after {self.warmup_s} s of warm-up"


_USUAL = Effort()
QUICK = Effort(0.0, 5)
"""For a run of a benchmark that only shows that it works."""


def measure(run: Callable[[], Any], effort: Effort = _USUAL) -> Timing:
    """Time single runs from call to finished result: the device is waited for before and after each one.

    Warm-up is by time, so that caches and clocks have settled; garbage collection is off, as in ``timeit``.
    """
    start = time.perf_counter()
    while time.perf_counter() - start < effort.warmup_s:
        run()
        wait()
    with collection_off():
        return Timing.of([seconds_of(run) * 1e3 for _ in range(effort.repeats)])


def seconds_of(run: Callable[[], Any]) -> float:
    """Of one run; the device is idle before it."""
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def wait() -> None:
    """Until the device is done, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextlib.contextmanager
def collection_off() -> Iterator[None]:
    """Garbage is collected before, not inside."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
