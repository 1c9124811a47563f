"""The two plugs of transformers: every model calls attention and experts through an interface where ours is registered.

Nothing of a model is rewritten. The functions here are what Dynamo sees when it traces a model; they emit one op of
``ops.py`` each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface
from transformers.modeling_utils import AttentionInterface

from piecegraph.llm import ops

NAME = "piecegraph"
"""Under this name the functions are registered. No mask function is registered under it, so transformers makes no masks."""

SITE = "_piecegraph_site"
"""The attribute of a module that tells which site it is."""


class UnsupportedCallError(NotImplementedError):
    """A model calls attention in a way that the ops cannot express. Raised while tracing."""


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Emit one attention op. Queries, keys and values are ``[1, heads, tokens, width]``."""
    if attention_mask is not None:
        raise UnsupportedCallError(f"{type(module).__name__} brings a mask of its own, which the paged cache cannot follow")
    if kwargs.get("position_bias") is not None:
        raise UnsupportedCallError(f"{type(module).__name__} adds a position bias to its scores")
    if is_causal is False:
        raise UnsupportedCallError(f"{type(module).__name__} attends to later tokens")
    rows = [tensor.transpose(1, 2).squeeze(0).contiguous() for tensor in (query, key, value)]
    out = rows[0].new_empty(rows[0].shape[0], rows[0].shape[1], rows[2].shape[2])
    scale = scaling if scaling is not None else getattr(module, "scaling", rows[0].shape[-1] ** -0.5)
    chunk = _chunk_length(module)
    torch.ops.piecegraph.attention(
        *rows, out, s_aux, 0, float(scale), 0 if chunk else int(sliding_window or 0), chunk, float(softcap or 0.0)
    )
    return out.unsqueeze(0), None


def _chunk_length(module: torch.nn.Module) -> int:
    """How long the chunks are that a layer attends within. Only the mask, which is not made, would have told."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None or layer is None or layer >= len(kinds) or kinds[layer] != "chunked_attention":
        return 0
    return int(config.attention_chunk_size)  # type: ignore[union-attr]


def experts_forward(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Emit one experts op."""
    out = torch.empty_like(hidden_states)
    torch.ops.piecegraph.experts(hidden_states, top_k_index, top_k_weights, out, getattr(module, SITE))
    return out


def number_experts(model: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """Give every experts module its site number, and return them in that order."""
    found = tuple(_modules_with_experts(model))
    for site, module in enumerate(found):
        setattr(module, SITE, site)
    return found


def _modules_with_experts(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    return (module for module in model.modules() if hasattr(type(module), "_apply_gate"))


def run_experts(module: Any, hidden: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What the experts op does: the model's own experts, as grouped matmuls."""
    result: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden, expert, weight)
    return result


AttentionInterface.register(NAME, attention_forward)
ExpertsInterface.register(NAME, experts_forward)
