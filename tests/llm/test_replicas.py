"""Replicas share out the prompts of a call, and end together. Real processes on gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import piecegraph
from piecegraph.errors import ConfigError
from tests.cases.forked import ForkServer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def job(forked: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    code = "from tests.cases.replica_job import main; main()"
    done = forked.run("-c", code, str(tmp_path_factory.mktemp("models")), cwd=ROOT, seconds=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}


def test_every_rank_of_every_replica_has_the_answers_of_one_model(job: dict[str, Any]) -> None:
    for rank in job["four"]:
        assert rank["code"] == 0, rank["result"]
        assert rank["result"]["calls"] == job["alone"]
    assert "prompts[5]" in job["alone"]["raised"]
    assert job["alone"]["distinct"] == 4, "no two replicas draw the same"


def test_the_first_rank_answers_and_each_tells_its_place(job: dict[str, Any]) -> None:
    found = [rank["result"] for rank in job["four"]]
    assert [each["follows"] for each in found] == [False, True, True, True]
    for number, each in enumerate(found):
        ranks, replicas = each["explain"]
        assert ranks.startswith(f"tensor parallel: rank {number % 2} of 2")
        assert replicas == f"data parallel: replica {number // 2} of 2 (the prompts of each call are shared out)"
        assert each["processors"].startswith("PG108 logits_processors was given to replicas")
        assert each["chunks"] == ([0, 1, 2, 3, 4] if number == 0 else [])


def test_a_rank_that_fails_ends_all_replicas_with_one_report(job: dict[str, Any]) -> None:
    ended = [rank["result"]["ended"] for rank in job["four"]]
    assert ended.pop(2) == "out of order"
    assert ended == ["PG683 rank 2 of 4 failed: a step: RuntimeError: out of order"] * 3
    assert job["stderr"].count("failed on rank 2 of 4") == 1


def test_replicas_of_one_process_have_the_same_weights_and_follow(job: dict[str, Any]) -> None:
    first, second = job["two"]
    assert (first["code"], second["code"]) == (0, 0), (first["result"], second["result"])
    assert first["result"]["answers"] == 5
    assert first["result"]["ranks"] is second["result"]["ranks"] is None
    assert first["result"]["weights"] == second["result"]["weights"]
    assert first["result"]["serve"].startswith("PG681 data_parallel_size is 2: replicas of one job answer calls")
    assert second["result"]["serve"].startswith("PG681 this rank cannot serve")
    wrong = "PG681 data_parallel_size is 3, of 1 rank each: the job has 2 processes. hint: start 3"
    assert first["result"]["size"] == second["result"]["size"] == wrong


def test_a_process_of_its_own_has_no_replicas(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PG681 there are no other ranks"):
        piecegraph.LLM(tmp_path, device="cpu", data_parallel_size=2)
    with pytest.raises(ConfigError, match="PG101 data_parallel_size is 0"):
        piecegraph.LLM(tmp_path, device="cpu", data_parallel_size=0)
