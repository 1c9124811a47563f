"""Models that need no weights: configurations of transformers, to be filled with random numbers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

_QWEN = {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960, "dtype": "bfloat16"}
_QWEN_MOE = {**_QWEN, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
             "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
             "norm_topk_prob": True}  # fmt: skip
_LLAMA = {"vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8, "dtype": "bfloat16"}
_TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128}

_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("LlamaConfig", {**_TINY, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                             "max_position_embeddings": 4096}),
    "qwen3-0.6b": ("Qwen3Config", {**_QWEN, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                                   "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True}),
    "llama-1b": ("LlamaConfig", {**_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                                 "head_dim": 64, "max_position_embeddings": 131072, "tie_word_embeddings": True}),
    "llama-8b": ("LlamaConfig", {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                                 "max_position_embeddings": 8192}),
    "qwen3-30b-a3b": ("Qwen3MoeConfig", {**_QWEN_MOE, "num_hidden_layers": 48}),
    "qwen3-next-tiny": ("Qwen3NextConfig", {**_TINY, "num_hidden_layers": 4, "num_attention_heads": 8,
                                            "num_key_value_heads": 2, "head_dim": 16, "linear_num_value_heads": 8,
                                            "linear_num_key_heads": 4, "linear_key_head_dim": 16,
                                            "linear_value_head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
                                            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
                                            "max_position_embeddings": 4096}),
    "gpt-oss-tiny": ("GptOssConfig", {**_TINY, "num_hidden_layers": 2, "num_attention_heads": 8,
                                      "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 8,
                                      "num_experts_per_tok": 2, "sliding_window": 64}),
}  # fmt: skip

NAMES = tuple(_SHAPES)


def shape_config(name: str, **changes: Any) -> Any:
    """The configuration of a shape, with some of its fields changed: a few layers of a large model."""
    import transformers  # the names of the shapes are known without it

    kind, fields = _SHAPES[name]
    return getattr(transformers, kind)(**{**fields, **changes})


def shape_folder(name: str) -> str:
    """A folder with the configuration of a shape: the same at every start, and on every rank."""
    from piecegraph.llm.model.model_cache import cached_folder

    config = shape_config(name)
    digest = hashlib.sha256(config.to_json_string().encode()).hexdigest()[:8]

    def make(folder: Path) -> None:
        config.save_pretrained(folder)

    return str(cached_folder(f"shape-{name}-{digest}", make, num_bytes=1 << 16))
