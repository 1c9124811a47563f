"""A tiny configuration for any family: every size small, and every kind of layer that the default has still there.

The names of sizes are known to :data:`SIZES`; what lists say about each layer is cut down to the layers that are kept.
Families that need more have an entry in :data:`CORRECTIONS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 128
POSITIONS = 64
WINDOW = 6
MIN_LAYERS = 3
_WIDTH, _HEADS, _KV_HEADS, _HEAD_WIDTH = 64, 4, 2, 16

_NAMES = (
    (VOCABULARY, "vocab_size vocab_size_per_layer_input encoder_hash_byte_group_vocab"),
    (
        POSITIONS,
        "max_position_embeddings n_positions n_ctx max_seq_len model_max_length max_target_positions "
        "max_source_positions context_length original_max_position_embeddings position_bias_max_distance rel_extent",
    ),
    (
        WINDOW,
        "sliding_window sliding_window_size attention_window_size window_size local_attention attention_chunk_size "
        "keep_window_size mem_len",
    ),
    (
        _WIDTH,
        "hidden_size d_model n_embd emb_dim embedding_size embedding_dim input_embedding_size word_embed_proj_dim "
        "lru_width attention_hidden_size output_embedding_size",
    ),
    (
        96,
        "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dff dim_ff d_inner ffn_hidden_size "
        "intermediate_size_mlp dense_intermediate_size feed_forward_size n_inner",
    ),
    (
        32,
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
        "moe_shared_expert_intermediate_size expert_ffn_hidden_size kv_channels attention_head_dim",
    ),
    (
        _HEADS,
        "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads "
        "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads "
        "linear_num_value_heads linear_num_heads index_n_heads",
    ),
    (
        _KV_HEADS,
        "num_key_value_heads num_kv_heads num_query_groups swa_num_key_value_heads linear_num_key_heads "
        "num_global_key_value_heads",
    ),
    (
        _HEAD_WIDTH,
        "head_dim global_head_dim swa_head_dim v_head_dim kv_lora_rank dim_head d_head linear_key_head_dim "
        "linear_head_dim index_head_dim attention_head_size qk_head_dim state_size mamba_d_state ssm_state_size "
        "mamba_head_dim mamba_d_head mamba_headdim ple_embed_dim hidden_size_per_layer_input laurel_rank "
        "router_hidden_size "
        "query_pre_attn_scalar pronunciation_embed_dim shape_embed_dim adapter_rank time_step_rank",
    ),
    (
        8,
        "floor_scale num_experts num_local_experts n_routed_experts moe_num_experts qk_nope_head_dim "
        "qk_rope_head_dim rotary_dim linear_value_head_dim mamba_n_heads mamba_num_heads mamba_chunk_size "
        "chunk_size hc_lowrank o_lora_rank "
        "mamba_dt_rank index_topk d_rel gated_norm_rank",
    ),
    (24, "q_lora_rank"),
    (
        2,
        "num_experts_per_tok num_experts_per_token moe_topk moe_k n_group topk_group num_expert_group "
        "encoder_layers num_encoder_layers num_kv_shared_layers vision_layers attn_layer_period expert_layer_period",
    ),
    (
        1,
        "first_k_dense_replace num_dense_layers n_shared_experts num_shared_experts moe_num_shared_experts "
        "attn_layer_offset expert_layer_offset n_groups mamba_n_groups mamba_ngroups max_window_layers "
        "moe_layer_start_index index_local_blocks",
    ),
    (0, "pad_token_id num_nextn_predict_layers begin_suppress_tokens"),
    (3, "bos_token_id"),
    (5, "eos_token_id"),
)
SIZES = {name: value for value, names in _NAMES for name in names.split()}

_USED_IF_NONE = (
    "head_dim",
    "num_key_value_heads",
    "num_experts_per_tok",
    "n_routed_experts",
    "n_shared_experts",
    "sliding_window",
)
"""Sizes that are given even where the default leaves them to the model."""

_LAYER_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_blocks",
)

_GEMMA4 = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
_ZAMBA = {"layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 128}
_QWEN4 = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}

CORRECTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_config": {"hidden_size_global": 64}, "decoder_config": {"hidden_size_global": 64}},
    "cohere_compass_text": {
        "layer_types": _SLIDING,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
            "full_attention": None,
        },
    },
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_top_k": 2},
    },
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"text_config": _GEMMA4 | {"num_kv_shared_layers": 0}},
    "gemma4_unified_text": _GEMMA4 | {"num_kv_shared_layers": 0},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "laguna": {"layer_types": _SLIDING, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "mellum": {"layer_types": _SLIDING},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "index_n_heads": 2,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": _ZAMBA,
    "zamba2": _ZAMBA,
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 48]},
}
"""What a family needs besides, by the names of its configuration; ``None`` leaves a name out."""


def families() -> tuple[str, ...]:
    """Every family of causal language models that the installed transformers has."""
    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(family: str) -> Any:
    """The configuration of a tiny model of a family."""
    return _shrunk(transformers.CONFIG_MAPPING[family], CORRECTIONS.get(family, {}))


def _shrunk(kind: Any, corrections: Mapping[str, Any]) -> Any:
    default = kind()
    values = {name: value for name, value in vars(default).items() if not name.startswith("_")}
    kept = _kept_layers(values)
    small: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, transformers.PreTrainedConfig):
            small[name] = _shrunk(type(value), corrections.get(name, {}))
        elif name in _LAYER_COUNTS:
            small[name] = len(kept)
        elif _is_per_layer(value, values):
            small[name] = [value[layer] for layer in kept]
        elif _is_size(name, value):
            small[name] = SIZES[name]
    if "qk_rope_head_dim" in small:  # latent attention: every head has its keys, of which only this part is rotated
        latent = {"head_dim": small["qk_rope_head_dim"], "num_key_value_heads": _HEADS}
        small |= {name: value for name, value in latent.items() if name in small}
    small |= {name: value for name, value in corrections.items() if not isinstance(value, dict) or name not in small}
    for kinds in ("layer_types", "layers_block_type"):
        if kinds in corrections:
            small |= {name: len(small[kinds]) for name in _LAYER_COUNTS if name in small}
    small |= {name: True for name in ("is_decoder", "use_sliding_window") if name in values and name not in corrections}
    return kind(**{name: value for name, value in small.items() if value is not None})


def _is_size(name: str, value: Any) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return name in SIZES and (is_number or (value is None and name in _USED_IF_NONE))


def _num_layers(values: Mapping[str, Any]) -> int:
    return next((values[name] for name in _LAYER_COUNTS if isinstance(values.get(name), int)), 0)


def _is_per_layer(value: Any, values: Mapping[str, Any]) -> bool:
    """Whether a list tells layers apart. If all its entries differ, it is a list of layers instead."""
    is_long = isinstance(value, (list, tuple)) and len(value) == _num_layers(values) > MIN_LAYERS
    return is_long and 1 < len(set(map(str, value))) < len(value)


def _kept_layers(values: Mapping[str, Any]) -> Sequence[int]:
    """The first layer of every kind, and more from the front if these are few."""
    lists = [value for value in values.values() if _is_per_layer(value, values)]
    kinds = list(zip(*lists, strict=True)) or [()] * _num_layers(values)
    kept = {kinds.index(kind) for kind in kinds}
    for layer in range(len(kinds)):
        if len(kept) >= MIN_LAYERS:
            break
        kept.add(layer)
    return sorted(kept)


def tiny_model(config: Any) -> Any:
    """A model with random weights, large enough that a mistake in any layer shows in the logits."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim >= 2 and "A_log" not in name:
                weight.copy_(noise * weight.shape[-1] ** -0.5)
            else:
                weight.add_(noise * 0.1)
    return model
