"""A sweep on a GPU: all modes, and what is measured there alone."""

from __future__ import annotations

import pytest

from piecegraph.base.progress import Progress
from piecegraph.bench.config import MODES, resolve
from piecegraph.bench.run import run

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # one of reduce-overhead's
def test_all_modes_are_measured_with_floors_and_memory() -> None:
    config, decisions = resolve("tiny", batch_sizes=(3,), input_lens=(40,), output_len=6, repeats=3, dtype="bfloat16")
    result = run(config, decisions, Progress(False))
    assert {row.mode for row in result.rows} == set(MODES)
    for row in result.rows:
        assert row.verdict.is_timed, f"{row.mode}, {row.phase}: {row.verdict}"
        assert row.timing is not None
        assert row.floor.kernels_ms is not None
        assert row.floor.bandwidth_ms is not None
        assert row.floor.ratio is not None
        assert 0 < row.floor.kernels_ms < row.timing.p90_ms
        assert row.memory_bytes is not None
        assert row.memory_bytes > 0
    for row in result.rows:
        if row.mode in ("breakable", "piecewise", "full"):
            assert (row.coverage, row.fallbacks, row.loss) == (1.0, (), ""), row
