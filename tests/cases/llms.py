"""Tiny language models of many families, with random weights large enough that mistakes show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

VOCABULARY = 128
IMAGE_TOKEN = 120

_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_COMMON = {
    **_TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA_NET = {
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
}
_DELTA_NETS = _DELTA_NET | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
}
_IN_THREE_DIMENSIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}

# One layer of each kind: half of the time of these tests is tracing, layer by layer. Several of a kind, beside each
# other and apart, are in llama, qwen3, gemma3 and qwen3_next.
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**_COMMON, num_hidden_layers=3),
    "llama_dynamic": lambda: hf.LlamaConfig(
        **_COMMON | {"max_position_embeddings": 64},
        num_hidden_layers=2,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    ),
    "phi3": lambda: hf.Phi3Config(
        **_COMMON | {"max_position_embeddings": 128},
        num_hidden_layers=2,
        original_max_position_embeddings=32,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
            "long_factor": [2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
        },
    ),
    "qwen3": lambda: hf.Qwen3Config(**_COMMON, num_hidden_layers=3, head_dim=16),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**_COMMON, **_EXPERTS, num_hidden_layers=2, head_dim=16),
    "mixtral": lambda: hf.MixtralConfig(
        **_COMMON, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=6
    ),
    "gemma2": lambda: hf.Gemma2Config(
        **_COMMON,
        num_hidden_layers=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=5,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=8.0,
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **_COMMON,
        num_hidden_layers=3,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=5,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        final_logit_softcapping=8.0,
    ),
    "gpt_oss": lambda: hf.GptOssConfig(
        **_COMMON, num_hidden_layers=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=5
    ),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2
    ),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **_COMMON | {"num_key_value_heads": 4},
        num_hidden_layers=2,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        moe_intermediate_size=32,
    ),
    "qwen3_next": lambda: hf.Qwen3NextConfig(**_COMMON, **_EXPERTS, **_DELTA_NETS, shared_expert_intermediate_size=32),
    "qwen3_5": lambda: hf.Qwen3_5TextConfig(**_COMMON, **_DELTA_NET),
    "qwen2_vl": lambda: hf.Qwen2VLConfig(
        text_config=_COMMON | {"num_hidden_layers": 2, "rope_parameters": _IN_THREE_DIMENSIONS},
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4},
        image_token_id=IMAGE_TOKEN,
    ),
    "qwen3_vl": lambda: hf.Qwen3VLConfig(
        text_config=_COMMON | {"num_hidden_layers": 2, "head_dim": 16, "rope_parameters": _IN_THREE_DIMENSIONS},
        vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "deepstack_visual_indexes": [0]},
    ),
    "olmo_hybrid": lambda: hf.OlmoHybridConfig(**_COMMON, **{k: v for k, v in _DELTA_NET.items() if k != "head_dim"}),
    "mamba": lambda: hf.MambaConfig(**_TOKENS, hidden_size=64, num_hidden_layers=2, state_size=8),
    "mamba2": lambda: hf.Mamba2Config(
        **_TOKENS,
        hidden_size=64,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=16,
        state_size=16,
        n_groups=1,
        expand=2,
        chunk_size=8,
    ),
    "bamba": lambda: hf.BambaConfig(
        **_COMMON,
        num_hidden_layers=2,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_expand=2,
        mamba_chunk_size=8,
        z_loss_coefficient=0.0,
    ),
    "jamba": lambda: hf.JambaConfig(
        **_COMMON,
        num_hidden_layers=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=8,
        mamba_d_conv=4,
        mamba_expand=2,
        use_mamba_kernels=False,
    ),
    "falcon_h1": lambda: hf.FalconH1Config(
        **_COMMON,
        num_hidden_layers=2,
        head_dim=16,
        mamba_d_ssm=128,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_expand=2,
        mamba_chunk_size=8,
    ),
    "lfm2": lambda: hf.Lfm2Config(
        **_COMMON, num_hidden_layers=2, layer_types=["conv", "full_attention"], conv_L_cache=3
    ),
}


def tiny_model(name: str, *, num_layers: int | None = None, asks_all: bool = False, **implementations: str) -> Any:
    """A model of a family, the same at every call.

    Args:
        name: of the family.
        num_layers: so many layers, with its kinds in turn.
        asks_all: each token goes to all experts, so that what is rounded otherwise does not choose others.
        implementations: ``attn_implementation`` and ``experts_implementation``.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = CONFIGS[name]()
        if num_layers is not None:
            config.num_hidden_layers = num_layers
            kinds = getattr(config, "layer_types", None)
            config.layer_types = kinds and (kinds * num_layers)[:num_layers]
        if asks_all and hasattr(config, "num_experts_per_tok"):
            config.num_experts_per_tok = getattr(config, "n_routed_experts", 0) or config.num_experts
            config.topk_group = getattr(config, "n_group", None)
        is_text = type(config) in hf.MODEL_FOR_CAUSAL_LM_MAPPING
        kind = hf.AutoModelForCausalLM if is_text else hf.AutoModelForImageTextToText
        model = kind.from_config(config, dtype=torch.float32, **implementations).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim >= 2:
                weight.copy_(noise * weight.shape[-1] ** -0.5)
            elif any(part in path for part in ("norm", "bias", "sinks")):
                weight.add_(noise * 0.1)
            elif "A_log" in path:
                weight.copy_(noise)
    return model
