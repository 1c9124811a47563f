"""What is refused before any time is spent on it, because it would be wrong or could not be run."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from transformers import PreTrainedModel

from piecegraph.errors import ModelError
from piecegraph.llm.kernels.linear import other_product
from piecegraph.llm.model.plug import source_in_transformers
from piecegraph.llm.specs import StateLayer

_WRONG_FAMILIES = {
    "minimax": "its lightning attention keeps a cache of its own, which paging cannot follow",
    "deepseek_v4": "its attention reads a compressed cache of its own, which paging cannot follow",
}
"""Families that would run and answer wrongly."""

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""What a modeling file asks for its attention function, if it goes through the AttentionInterface."""

_PADDED_POSITIONS = "create_position_ids_from_input_ids"
"""A method of embeddings that count positions by the tokens that are no padding."""

_GIVEN_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

_DEEP_FEATURES = "deepstack_visual_embeds"
"""Features of images that a decoder adds to the results of its first layers."""

_BOTH_WAYS = "block_sequence_ids"
"""Which tokens belong to one image, as masks are told that let those see each other."""


def refuse_family(config: Any) -> None:
    """Raise if models of this family are known to answer wrongly, or are no decoders."""
    reason, hint = _WRONG_FAMILIES.get(config.model_type), ""
    if config.is_encoder_decoder:
        reason = "it is an encoder-decoder, and only decoders are served"
        hint = "piecegraph.compile takes its modules one by one"
    if reason is not None:
        raise ModelError("PG662", f"models of family {config.model_type!r} are refused", why=reason, hint=hint)


def refuse_model(model: torch.nn.Module) -> None:
    """Raise if a module is of a kind that cannot be run."""
    parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
    if needed := [each.name for each in parameters if each.kind in _GIVEN_BY_NAME and each.default is each.empty]:
        raise _cannot_run(model, f"its forward cannot do without {', '.join(needed)}")
    for path, module in model.named_modules():
        why = ""
        if hasattr(type(module), _PADDED_POSITIONS):
            why = f"{type(module).__name__} derives the position of a token from padding before it"
        elif path.endswith(".indexer"):
            # Not left to the self check: over few tokens every token is chosen, and nothing is wrong yet.
            why = f"{type(module).__name__} chooses the tokens to attend to, by keys that the paged cache does not hold"
        if why:
            raise _cannot_run(model, why, path)


def refuse_attention(model: torch.nn.Module) -> None:
    """Raise if the attention of a model cannot be given a paged cache. Not for layers that keep a state instead."""
    if not any(_INTERFACE in source_in_transformers(type(module)) for module in model.modules()):
        path = next((path for path, module in model.named_modules() if "Attention" in type(module).__name__), "")
        raise no_interface(type(model).__name__, path)
    inner = ((path, module) for path, module in model.named_modules() if path)
    decoders = [(path, module) for path, module in inner if isinstance(module, PreTrainedModel)]
    if decoders and not any(_takes_positions(module) for _, module in decoders):
        path, module = decoders[-1]
        why = f"{type(module).__name__} takes no position_ids, and would count through all sequences of a batch"
        raise _cannot_run(model, why, path)


def refuse_embeddings(model: torch.nn.Module) -> None:
    """Raise if what a model makes of images is more than embeddings: without the rest, it would answer wrongly."""
    for path, module in model.named_modules():
        kind, why = type(module), ""
        if _DEEP_FEATURES in inspect.signature(kind.forward).parameters:
            why = f"images also reach the layers of {kind.__name__} as {_DEEP_FEATURES}"
        elif _BOTH_WAYS in source_in_transformers(kind):
            why = f"the tokens of an image attend to each other both ways in {kind.__name__}"
        if why:
            what = f"{type(model).__name__} cannot take embeddings in the place of tokens"
            raise ModelError("PG662", what, where=path, why=why, hint="prompts of tokens can be run")


def no_interface(kind: str, where: str = "") -> ModelError:
    """What to say of a model whose attention cannot be replaced."""
    return ModelError(
        "PG662",
        f"{kind} cannot be run",
        where=where,
        why="its attention does not go through transformers' AttentionInterface, so it can have no paged cache",
        hint="use a family that does; most that were added since 2023 do",
    )


def _cannot_run(model: torch.nn.Module, why: str, where: str = "") -> ModelError:
    return ModelError("PG662", f"{type(model).__name__} cannot be run", where=where, why=why)


def _takes_positions(module: torch.nn.Module) -> bool:
    return "position_ids" in inspect.signature(type(module).forward).parameters


def refuse_deterministic(
    model: Any, graph: torch.fx.Graph, states: Sequence[StateLayer], experts: Sequence[torch.nn.Module]
) -> None:
    """Refuse a model in which a row may depend on what runs beside it: see Note [Steps that are all alike]."""
    why, is_gpu = "", model.device.type == "cuda"
    if experts:
        why = "experts are given as many rows as a step happens to have for them"
    elif states:
        why = "what layers with a state make of a prompt depends on how it was cut"
    elif is_gpu and (model.dtype == torch.float64 or importlib.util.find_spec("triton") is None):
        why = f"there is no kernel for linears of {model.dtype} but cuBLAS's, which it chooses by itself"
    elif is_gpu and (product := other_product(graph)) is not None:
        why = f"{product.name} is a product that is no linear, and cuBLAS chooses its kernels by itself"
    if why:
        hint = "leave deterministic=True out"
        raise ModelError("PG668", "deterministic=True cannot be kept by this model", why=why, hint=hint)
