"""Many requests at once: the workload, and what a run of it tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from piecegraph.bench.workloads import WORKLOADS, Workload
from tests.cases.forked import ForkServer

ROOT = Path(__file__).parents[2]


def test_a_workload_depends_on_its_seed_alone() -> None:
    workload = Workload(400, (32, 1024))
    requests = workload.make(1000)
    assert requests == workload.make(1000) != workload.make(1000, seed=1)
    lengths = sorted(len(request.prompt) for request in requests)
    assert 32 <= lengths[0] < 40
    assert 900 < lengths[-1] <= 1024
    assert lengths[200] == pytest.approx((32 * 1024) ** 0.5, rel=0.25), "the middle of the logarithms"
    assert {request.num_new for request in requests} <= set(range(32, 257))
    assert {token for request in requests for token in request.prompt} == set(range(1000))
    assert WORKLOADS["long"].max_model_len == 32768 + 256


def test_passes_are_told(forked: ForkServer) -> None:
    arguments = ["--tiny", "--json", "--arguments", '{"options": {"graph_device": "simulated"}}']
    arguments += ["--http", "--concurrency", "8", "--rate", "200"]
    done = forked.run("benchmarks/serving.py", *arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    first, second = found["passes"]
    assert (found["requests"], found["same_tokens"]) == (24, 1)
    assert found["worst_gap_ratio"] == first["gap_worst_ms"] / second["gap_worst_ms"]
    assert list(found["http"]) == ["HTTP, 8", "HTTP, 200/s"]
    for each in (first, second, *found["http"].values()):
        assert each["new_tokens_s"] == pytest.approx(found["new_tokens"] / each["seconds"])
        assert 0 < each["gap_p50_ms"] <= each["gap_p99_ms"] <= each["gap_worst_ms"] < 1e3 * each["seconds"]
        assert 0 < each["first_p50_ms"] <= each["first_p99_ms"] < 1e3 * each["seconds"]
        assert 0 < each["padding"] < 1
        assert min(each["decode_steps"], each["mixed_steps"]) > 0
        assert each["graphless_steps"] == 0
    assert first["larger_steps"] >= second["larger_steps"]
    assert found["recorded"] > found["recorded_idle"]
    for each in found["http"].values():
        assert each["of_generate"] == each["new_tokens_s"] / second["new_tokens_s"]
        assert each["engine_us_token"] == pytest.approx(each["engine_ms_request"] * 1e3 * 24 / found["new_tokens"])
        assert each["engine_us_token"] > each["apis_us_token"] == each["apis_ms_request"] == 0
        assert 0.5 < each["parts_a_token"] <= 1
        assert 0 < each["client_busy"] < 1
