"""Tiny language models of transformers: each line that launches something has a module and a line of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from tests.provenance.origins.test_inductor import run_traced

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
LINEARS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
LINEARS += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


@pytest.mark.parametrize(
    ("config", "family"), [(hf.LlamaConfig, hf.LlamaForCausalLM), (hf.Qwen3Config, hf.Qwen3ForCausalLM)]
)
def test_every_launch_has_a_module_and_a_line(config: Any, family: Any) -> None:
    model = family(config(**SHAPE)).eval()

    def logits(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]

    ran = run_traced(
        logits,
        torch.randint(0, 64, (1, 8)),
        ops=["aten::scaled_dot_product_attention"],
        provenance=True,
        sizes={"ids": 1},
    )
    calls = [call for one in ran if one.step.is_captured for _, call in one.launches()]
    assert all(call is not None and call.origins for call in calls)
    known = dict(model.named_modules())
    for call in calls:
        assert call is not None
        for origin in call.origins:
            assert origin.module in known
            assert origin.line is not None
        assert call.origins[0].module, call
    matmuls = [call.origins[0].module for call in calls if call and call.op in ("aten::mm", "aten::addmm")]
    expected = [f"model.layers.{i}.{name}" for i in range(3) for name in LINEARS] + ["lm_head"]
    assert sorted(matmuls) == sorted(expected)
