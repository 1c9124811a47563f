"""Commands of a job with more processes than a model has: its replicas."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from piecegraph.bench.config import resolve
from piecegraph.cli.loading import num_replicas, shared
from piecegraph.cli.main import group
from piecegraph.llm.ranks import group as ranks_group


@pytest.fixture
def _four_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "job", "WORLD_SIZE": "4", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks_group, "start_job", lambda device_type: None)


@pytest.mark.usefixtures("_four_processes")
@pytest.mark.parametrize(
    ("asked", "size", "number"), [(None, 4, 1), (1, 1, 4), (2, 2, 2), (4, 4, 1), (3, 3, 1), (8, 8, 1)]
)
def test_a_model_has_as_many_processes_as_asked_for(asked: int | None, size: int, number: int) -> None:
    assert shared("cpu", asked) == {"tensor_parallel_size": size, "data_parallel_size": number}


def test_a_command_by_itself_has_one_model() -> None:
    assert (shared("cpu", None), shared("cpu", 2), num_replicas(2)) == ({}, {"tensor_parallel_size": 2}, 1)


@pytest.mark.usefixtures("_four_processes")
def test_replicas_are_served_by_ray() -> None:
    done = CliRunner().invoke(group, ["serve", "model", "--tensor-parallel-size", "2", "--device", "cpu"])
    assert done.exit_code == 2
    assert "--tensor-parallel-size 2 leaves 2 replicas, and one is served here: use Ray Serve" in done.stderr


@pytest.mark.usefixtures("_four_processes")
def test_a_benchmark_tells_of_replicas() -> None:
    config, decisions = resolve("tiny", device="cpu", tensor_parallel_size=2)
    assert (config.tensor_parallel_size, config.num_replicas) == (2, 2)
    assert "replicas: 2 (each runs the whole load at once with the others; figures are of the first)" in map(
        str, decisions
    )
    assert resolve("tiny", device="cpu")[0].num_replicas == 1
