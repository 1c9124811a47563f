"""The two plugs of transformers: every model calls attention and experts through an interface where ours is registered.

Nothing of a model is rewritten. The functions here are what Dynamo sees when it traces a model; they emit one op of
``ops.py`` each.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers.integrations.moe import ExpertsInterface
from transformers.modeling_utils import AttentionInterface

NAME = "piecegraph"
"""What the functions are registered as. No mask function has this name, so transformers makes no masks."""

_KNOWN_TENSORS = ("position_ids", "cache_position")
"""Tensors that attention functions are given and need not look at."""

SITE = "_piecegraph_site"
"""The attribute of a module that tells which site it is."""

LATENT = "_piecegraph_latent"
"""The attribute of an attention module that hands on latents in the place of keys and values, while it is traced."""

WINDOW = "_piecegraph_window"
"""The attribute of an attention module that tells its window where it does not tell it to the attention function."""

_NOT_TOLD = -1
_SLIDING_MASK = "create_sliding_window_causal_mask"


class UnsupportedCallError(NotImplementedError):
    """A model calls attention in a way that the ops cannot express. Raised while tracing."""


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = _NOT_TOLD,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Emit one attention op. Queries, keys and values are ``[1, heads, tokens, width]``."""
    if attention_mask is not None:
        raise UnsupportedCallError(f"{_name(module)} brings a mask of its own, which the paged cache cannot follow")
    for name, given in kwargs.items():
        if isinstance(given, torch.Tensor) and name not in _KNOWN_TENSORS:
            raise UnsupportedCallError(f"{_name(module)} hands {name} to its attention, which the ops do not know")
    if (is_causal if is_causal is not None else getattr(module, "is_causal", True)) is False:
        raise UnsupportedCallError(f"{_name(module)} attends to later tokens")
    chunk = _chunk_length(module)
    window = getattr(module, WINDOW, 0) if sliding_window == _NOT_TOLD else int(sliding_window or 0)
    if hasattr(module, LATENT):
        if window or chunk or softcap or s_aux is not None:
            raise UnsupportedCallError(f"{_name(module)} attends to latents with a window, a softcap or sinks")
        return _latent_attention(module, query, key, value, scaling), None
    query, key, value = [tensor.transpose(1, 2).squeeze(0).contiguous() for tensor in (query, key, value)]
    out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
    scale = scaling if scaling is not None else getattr(module, "scaling", query.shape[-1] ** -0.5)
    torch.ops.piecegraph.attention(
        query, key, value, out, s_aux, 0, float(scale), 0 if chunk else window, chunk, float(softcap or 0.0)
    )
    return out.unsqueeze(0), None


def _name(module: torch.nn.Module) -> str:
    layer = getattr(module, "layer_idx", None)
    return type(module).__name__ if layer is None else f"{type(module).__name__} of layer {layer}"


def _latent_attention(
    module: Any, query: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Emit one attention op on latents, which are ``[1, 1, tokens, width]``, as is the rotated key."""
    rows = query.transpose(1, 2).squeeze(0).contiguous()
    weight = module.kv_b_proj.weight
    num_heads, nope_width = rows.shape[1], rows.shape[2] - rope.shape[3]
    out = rows.new_empty(rows.shape[0], num_heads, weight.shape[0] // num_heads - nope_width)
    scale = scaling if scaling is not None else module.scaling
    torch.ops.piecegraph.latent_attention(
        rows, latent[0, 0].contiguous(), rope[0, 0].contiguous(), weight, out, 0, nope_width, float(scale)
    )
    return out.unsqueeze(0)


def _chunk_length(module: torch.nn.Module) -> int:
    """How long the chunks are that a layer attends within. Only the mask, which is not made, would have told."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None or "chunked_attention" not in kinds:  # then no layer need read its number: Note [Equal layers]
        return 0
    layer = getattr(module, "layer_idx", None)
    if layer is None or layer >= len(kinds) or kinds[layer] != "chunked_attention":
        return 0
    return int(config.attention_chunk_size)  # type: ignore[union-attr]


def note_windows(model: torch.nn.Module) -> None:
    """Tell every attention module the window that its mask would have. Some families keep it to the mask, which is not
    made.
    """
    for module in model.modules():
        config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
        window = getattr(config, "sliding_window", None)
        if window and layer is not None and hasattr(sys.modules[type(module).__module__], _SLIDING_MASK):
            kinds = getattr(config, "layer_types", None)
            if kinds is None or (layer < len(kinds) and kinds[layer] == "sliding_attention"):
                setattr(module, WINDOW, int(window))


def experts_forward(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Emit one experts op."""
    out = torch.empty_like(hidden_states)
    # A trace gets the number afterwards, so that no layer need read its own: Note [Equal layers].
    site = 0 if torch.compiler.is_compiling() else getattr(module, SITE)
    torch.ops.piecegraph.experts(hidden_states, top_k_index, top_k_weights, out, site)
    return out


def number_experts(model: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """Give every experts module its site number, and return them in that order."""
    found = tuple(_modules_with_experts(model))
    for site, module in enumerate(found):
        setattr(module, SITE, site)
    return found


def _modules_with_experts(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    return (module for module in model.modules() if hasattr(type(module), "_apply_gate"))


def source_in_transformers(kind: type) -> str:
    """The source of a class that is in a model of transformers; empty for any other class."""
    return _class_source(kind) if kind.__module__.startswith("transformers.models.") else ""


# A model has many modules of few classes, and to find the source of a class Python parses the whole file.
_class_source = functools.cache(inspect.getsource)


AttentionInterface.register(NAME, attention_forward)
ExpertsInterface.register(NAME, experts_forward)
