"""Shared by the tests of benchmarks."""

from __future__ import annotations

import pytest

from piecegraph.base.progress import Progress
from piecegraph.bench.config import resolve
from piecegraph.bench.result import BenchResult
from piecegraph.bench.run import run


@pytest.fixture(scope="session")
def measured() -> BenchResult:
    """A real run: two cells, what needs no compiler, and what a CPU does not have."""
    config, decisions = resolve(
        "tiny", batch_sizes=(1, 3), input_lens=(20,), output_len=4, repeats=3,
        modes=("full", "breakable", "eager", "reduce-overhead"), device="cpu",
    )  # fmt: skip
    return run(config, decisions, Progress(False))
