"""A language model of which only some layers were traced answers as transformers does; see tests/graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel

import piecegraph
from tests.cases.checkpoints import save_checkpoint

PROMPT = [5, 9, 17, 33, 21, 8, 90, 44, 3]


@pytest.mark.parametrize(
    ("family", "told"),
    [("gpt_oss", "4 of 6 traced"), ("deepseek_v3", "3 of 5 traced")],
    ids=["windows and experts", "one layer without experts"],
)
def test_answers_are_those_of_all_layers(family: str, told: str, tmp_path: Path) -> None:
    reference, tokens = save_checkpoint(family, tmp_path, num_layers=int(told.split()[2])), list(PROMPT)
    with torch.inference_mode():
        for _ in range(8):
            tokens.append(int(reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    with piecegraph.LLM(tmp_path, backend="eager", device="cpu", options={"progress": False}) as llm:
        (answer,) = llm.generate([PROMPT], max_new_tokens=8, ignore_eos=True)
        assert answer.token_ids == tokens[len(PROMPT) :]
        assert f"layers: {told} (the others are equal to them but for their weights)" in llm.explain()


def count_layers(self: Any, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
    """A decoder that does something to one of its layers that no value shows."""
    hidden = self.embed_tokens(input_ids)
    positions = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
    rotations = self.rotary_emb(hidden, position_ids=positions)
    mask = create_causal_mask(self.config, hidden, None, past_key_values=None, position_ids=positions)
    for number, layer in enumerate(self.layers):
        hidden = layer(hidden, attention_mask=mask, position_embeddings=rotations, position_ids=positions)
        if number == 4:
            hidden = hidden + 0.0 * hidden
    return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


def test_a_loop_that_counts_is_traced_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint("llama", tmp_path, num_layers=6)
    options = {"backend": "eager", "device": "cpu", "options": {"progress": False}}
    with piecegraph.LLM(tmp_path, **options) as llm:
        assert "layers: 2 of 6 traced" in llm.explain()
    monkeypatch.setattr(LlamaModel, "forward", count_layers)
    with piecegraph.LLM(tmp_path, **options) as llm:
        assert "layers:" not in llm.explain()
        assert "self check: passed" in llm.explain()
