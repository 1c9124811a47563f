"""Rotations that follow the longest sequence: answers are those of transformers, or it is told where they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import piecegraph
from piecegraph.errors import ModelError, RequestError
from piecegraph.llm.model import rotations
from tests.cases.checkpoints import save_checkpoint

SHORT, LONGEST = 32, 128
"""Of the model with longrope: how long the sequences are that it rotates as short ones, and what it was made for."""
NUM_NEW = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def longrope(folder: Path) -> Any:
    return save_checkpoint("phi3", folder / "phi3")


def load(path: Path, **arguments: Any) -> piecegraph.LLM:
    # Not from a shelf, which keeps one model for all lengths: what is served decides how this one is rotated.
    return piecegraph.LLM(path, backend="eager", device="cpu", options={"progress": False}, **arguments)


def largest_error(llm: piecegraph.LLM, reference: Any, num_tokens: int) -> float:
    """Of the logits of a sequence and its answer, of their norm; transformers computes them in one forward."""
    numbers = torch.Generator().manual_seed(num_tokens)
    prompt = torch.randint(4, 128, (num_tokens - NUM_NEW,), generator=numbers).tolist()
    (answer,) = llm.generate([prompt], max_new_tokens=NUM_NEW, ignore_eos=True, return_hidden_states=True)
    assert answer.error is None, answer.error
    with torch.inference_mode():
        tokens = torch.tensor([[*prompt, *answer.token_ids[:-1]]])
        expected = reference(input_ids=tokens, use_cache=False).logits[0]
        found = llm.started.model.head(answer.hidden_states)
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def decision_of(llm: piecegraph.LLM, subject: str) -> str:
    (line,) = [line.strip() for line in llm.explain().splitlines() if line.startswith(f"  {subject}: ")]
    return line


def test_by_default_only_lengths_are_served_that_are_rotated_alike(folder: Path, longrope: Any) -> None:
    llm = load(folder / "phi3")
    assert decision_of(llm, "max_model_len").startswith(f"max_model_len: {SHORT} (longer sequences are rotated")
    assert f"up to {LONGEST} may be asked for" in decision_of(llm, "max_model_len")
    assert "the frequencies of short sequences" in decision_of(llm, "rotation model.rotary_emb")
    for num_tokens in (8, SHORT):
        assert largest_error(llm, longrope, num_tokens) < 1e-4
    with pytest.raises(RequestError, match="PG652"):
        llm.generate([[5] * SHORT], max_new_tokens=1)


@pytest.mark.parametrize("max_model_len", [SHORT + 28, LONGEST])
def test_more_is_served_with_the_rotation_of_long_sequences(folder: Path, longrope: Any, max_model_len: int) -> None:
    llm = load(folder / "phi3", max_model_len=max_model_len)
    for num_tokens in (SHORT + 2, max_model_len):
        assert largest_error(llm, longrope, num_tokens) < 1e-4
    assert largest_error(llm, longrope, SHORT - 4) > 0.1, "as it is told"
    told = decision_of(llm, "rotation model.rotary_emb")
    assert f"the frequencies of long sequences (max_model_len is above {SHORT}" in told
    assert decision_of(llm, "self check").endswith("both rotated as long sequences)")


def test_the_self_check_looks_at_the_rotation(folder: Path, longrope: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = rotations._Rotation.hold

    def hold_others(self: Any, max_model_len: int) -> Any:
        decision = hold(self, max_model_len)
        self.module.inv_freq.mul_(0.5)
        return decision

    monkeypatch.setattr(rotations._Rotation, "hold", hold_others)
    with pytest.raises(ModelError, match="PG664 Phi3ForCausalLM answers differently from transformers"):
        load(folder / "phi3")


def test_dynamic_rotations_are_right_up_to_the_longest_sequence(folder: Path) -> None:
    reference = save_checkpoint("llama_dynamic", folder / "llama_dynamic")
    llm = load(folder / "llama_dynamic")
    assert decision_of(llm, "max_model_len") == "max_model_len: 64 (the model was made for 64 tokens)"
    for num_tokens in (8, 63, 64):
        assert largest_error(llm, reference, num_tokens) < 1e-4


def test_transformers_own_rotation_leaves_nothing_behind(folder: Path, longrope: Any) -> None:
    llm = load(folder / "phi3")
    model = llm.started.loaded.model
    rotation = model.model.rotary_emb
    before = dict(rotation.named_buffers())
    with rotations.own_rotations(model):
        assert "forward" not in vars(rotation)
        rotation(torch.zeros(1), torch.tensor([[SHORT]]))
        assert not torch.equal(rotation.inv_freq, before["inv_freq"])
    assert all(buffer is before[name] for name, buffer in rotation.named_buffers())
    assert "forward" in vars(rotation)
