"""``piecegraph bench serve`` against our own server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from piecegraph.base.progress import Progress
from piecegraph.bench.client import Client
from piecegraph.bench.load import as_text, prepare, run_load
from piecegraph.cli.main import group
from tests.cases.serving import Served


def test_a_workload_against_our_own_server(running: Served, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    options = ["--workload", "tiny", "--requests", "12", "--concurrency", "4", "--ignore-eos", "--warm-up", "2"]
    done = CliRunner().invoke(group, ["bench", "serve", running.address, *options, "--json", "-o", str(path)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found == json.loads(path.read_text())
    assert (found["kind"], found["model"], found["num_requests"], found["num_whole"]) == ("bench-serve", "tiny", 12, 12)
    assert found["statuses"] == {"200": 12}
    how = {"concurrency": 1, "rate": None, "ignore_eos": True, "seed": 0}
    sent = prepare(Client(running.address), "tiny", num_requests=12, model=None, **how).bodies()
    assert found["new_tokens"] == sum(body["max_tokens"] for body in sent)
    assert found["prompt_tokens"] >= sum(len(body["prompt"].split()) for body in sent)
    latency = found["latency"]
    assert 0 < latency["first_p50_ms"] <= latency["first_p99_ms"] < latency["seconds"] * 1e3
    # Tokens that a busy machine reads at once have no gap between them.
    assert 0 <= latency["gap_p50_ms"] <= latency["gap_p99_ms"] <= latency["gap_worst_ms"]
    assert latency["gap_worst_ms"] > 0
    assert latency["new_tokens_s"] == pytest.approx(found["new_tokens"] / latency["seconds"])
    assert "pace" in done.stderr


def test_errors_are_counted_by_their_status(running: Served) -> None:
    client = Client(f"{running.address}/v1")
    load = prepare(
        client, "tiny", num_requests=3, model=None, concurrency=2, rate=None, ignore_eos=False, seed=0
    )  # fmt: skip
    result = run_load(replace(load, model="another"), Progress(False))
    assert (result.num_whole, result.statuses, result.latency) == (0, {"404": 3}, None)
    assert "3 x 404" in as_text(result)
