"""Weights that go to a GPU through pinned memory, while they are given other places."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import piecegraph
from piecegraph.llm.model import loader, weight_stream
from tests.cases.checkpoints import save_checkpoint

pytestmark = pytest.mark.gpu

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(weight_stream, "_BLOCK", 1000)
    monkeypatch.setattr(weight_stream, "_SMALL", 0)
    save_checkpoint("llama", tmp_path / "llama")
    return tmp_path / "llama"


def read(folder: Path, device: torch.device) -> loader.LoadedModel:
    return loader.load(str(folder), dtype=torch.bfloat16, device=device, load_format="auto")


def test_weights_arrive_wherever_they_are_placed_meanwhile(folder: Path) -> None:
    expected = read(folder, CPU).model.state_dict()
    for _ in range(5):
        loaded = read(folder, CUDA)
        assert loaded.weights is not None
        for parameter in loaded.model.parameters():
            loaded.weights.place(parameter, torch.empty_like(parameter))
        found = loaded.weights.wait()
        assert found.num_bytes == sum(parameter.nbytes for parameter in loaded.model.parameters())
        for name, weight in loaded.model.state_dict().items():
            assert torch.equal(weight.cpu(), expected[name]), name


def test_a_model_from_a_checkpoint_tells_its_rate(folder: Path) -> None:
    with piecegraph.LLM(str(folder), device="cuda", max_model_len=64, max_batch_tokens=64) as llm:
        weights = llm.stats()["weights"]
        assert weights["gb_per_second"] > 0
        assert f"  weights: {llm.started.weights}" in llm.explain()
