"""A model is shared out to ranks: which part of each weight a rank keeps, and whose results are added up.

A model with all its weights comes in (:func:`split_model`); the same model with the weights of one rank is left. No
module is replaced: linears have fewer rows or columns, and hooks behind some modules add up what the ranks made.

Note [A part of every weight]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The plan is transformers' own (``base_model_tp_plan``): a projection into heads, or into the width of an MLP, keeps the
rows of some of them (``colwise``), and the one that leads back keeps their columns (``rowwise``), so that its result is
a summand. What transformers would gather behind a projection stays whole, as do embeddings and heads: every rank
computes the same there, and nothing need be sent. Where a plan leaves attention whole that can be split by heads, and
where there is none, ours is used (``_OWN_PLANS``). What is added to a sum once, a bias, is kept by the first rank and
is zero on the others, so that all ranks have one graph. With fewer heads of keys and values than ranks, neighbours keep
the same one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from piecegraph.base.plan import Decision
from piecegraph.errors import ModelError
from piecegraph.llm.ranks.collectives import sum_over_ranks

_ROWS, _COLUMNS, _HALVES, _SUMMAND = "colwise", "rowwise", "packed_colwise", "moe_tp_experts"
"""As transformers calls them, by what they are of the transposed weight; ``_HALVES`` are the rows of two weights that
lie one behind the other. The last is of a module."""
_LAST, _BEFORE_LAST, _ONCE, _CHANNELS = "last dimension", "dimension before the last", "once", "channels"
"""Ours. ``_ONCE`` is added to a sum; ``_CHANNELS`` are those of queries, keys and values, one behind the other."""
_WHOLE = frozenset(
    "replicate replicated_with_grad_allreduce colwise_gather_output colwise_rep rowwise_split_input rowwise_rep "
    "mla_kv_a_proj embedding_rowwise".split()
)
_KNOWN = _WHOLE | {_ROWS, _COLUMNS, _HALVES, _SUMMAND, _LAST, _BEFORE_LAST, _ONCE, _CHANNELS}

_LATENT_ATTENTION = {
    "self_attn.q_proj": _ROWS,
    "self_attn.q_b_proj": _ROWS,
    "self_attn.kv_b_proj": _ROWS,
    "self_attn.o_proj": _COLUMNS,
}
_OWN_PLANS: dict[str, dict[str, str]] = {
    "deepseek_v2": _LATENT_ATTENTION,
    "deepseek_v3": _LATENT_ATTENTION,
    "gpt_oss": {
        "self_attn.q_proj": _ROWS,
        "self_attn.k_proj": _ROWS,
        "self_attn.v_proj": _ROWS,
        "self_attn.sinks": _ROWS,
        "self_attn.o_proj": _COLUMNS,
        "mlp.experts": _SUMMAND,
        # Transposed, and gate and up in turn: neighbours stay together.
        "mlp.experts.gate_up_proj": _LAST,
        "mlp.experts.gate_up_proj_bias": _LAST,
        "mlp.experts.down_proj": _BEFORE_LAST,
        "mlp.experts.down_proj_bias": _ONCE,
    },
}
"""What is added to the plan of a family, by paths within a layer."""

_DELTA_NET = {
    # The rows of both projections are ordered by heads of keys.
    "linear_attn.in_proj_qkvz": _ROWS,
    "linear_attn.in_proj_ba": _ROWS,
    "linear_attn.conv1d": _CHANNELS,
    "linear_attn.A_log": _ROWS,
    "linear_attn.dt_bias": _ROWS,
    "linear_attn.out_proj": _COLUMNS,
}
"""The same for gated delta nets whose heads can be shared out evenly."""
_DELTA_NET_COUNTS = ("num_v_heads", "num_k_heads", "key_dim", "value_dim", "conv_dim")

TRIED = frozenset(
    "llama mistral qwen2 qwen3 qwen3_moe mixtral qwen3_next deepseek_v3 gpt_oss gemma2 gemma3_text".split()
)
"""Families whose parts are compared with the whole by tests. Others are compared when they are loaded."""


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a model a rank has: one of so many."""

    rank: int
    size: int
    group: str
    """The ranks that have them: see :mod:`piecegraph.llm.ranks.collectives`."""

    def of(self, path: str, weight: torch.Tensor, dim: int) -> torch.Tensor:
        """The rank's part of a dimension."""
        if weight.shape[dim] % self.size:
            why = f"its dimension {dim % weight.ndim} is {weight.shape[dim]}, and there are {self.size} ranks"
            raise _cannot(f"the weight {path}", why)
        return weight.chunk(self.size, dim)[self.rank]


def split_model(model: Any, part: Part) -> tuple[Decision, ...]:
    """Leave a model the weights of one rank. See Note [A part of every weight].

    Raises:
        ModelError: PG682, the family has no plan, or its sizes cannot be shared out.
    """
    plan = _plan_for(model, part.size)
    _check_heads(model, plan, part.size)
    num_whole = sum(weight.numel() for weight in model.parameters())
    heads, channels = _key_value_heads(model), _channels(model)
    for path, module in model.named_modules():
        for name, given in list(module.named_parameters(recurse=False)):
            style, (weight, is_part) = _style_of(plan, path, name), _local(given)
            if style not in _WHOLE and not is_part:
                weight = _kept(f"{path}.{name}", weight, style, part, heads.get(path), channels.get(path))
            if weight is not given:
                module._parameters[name] = torch.nn.Parameter(weight, requires_grad=False)
        if plan.get(_generic(path)) in (_COLUMNS, _SUMMAND):
            module.register_forward_hook(partial(sum_over_ranks, part.group))
    num_kept = sum(weight.numel() for weight in model.parameters())
    if num_kept == num_whole and part.size > 1:
        raise _cannot(type(model).__name__, "its plan leaves every weight whole")
    _tell_modules(model, plan, part.size)
    reason = f"{num_kept / num_whole:.0%} of the weights; results are added up behind attention and MLP"
    return (Decision("tensor parallel", f"rank {part.rank} of {part.size}", reason),)


def slices_to_read(model: Any, size: int) -> dict[str, str]:
    """A plan for transformers' own loader, by which a rank reads no more than it needs; the rest is cut off behind it.

    Args:
        model: the model without weights.
        size: how many ranks there are.
    """
    plan, heads = _plan_for(model, size), _key_value_heads(model)
    _check_heads(model, plan, size)
    few, paths = {_generic(path) for path, num_heads in heads.items() if num_heads < size}, _paths(model)
    # What is of modules leaves weights whole, in all versions of the loader; older ones do not know "replicate".
    return {
        path: style if style in (_ROWS, _COLUMNS, _HALVES) and path not in few else _SUMMAND
        for path, style in plan.items()
        if path in paths
    }


def _local(weight: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """A weight as it lies here, and whether it is a part already."""
    if not isinstance(weight, DTensor):
        return weight, False
    return weight.to_local().detach(), any(not placement.is_replicate() for placement in weight.placements)


def _plan_for(model: Any, size: int) -> Mapping[str, str]:
    """How weights are shared out, by their paths, or those of their modules, with stars for the numbers of layers."""
    config, plan = model.config.get_text_config(), dict(model.tp_plan or {})
    own = _OWN_PLANS.get(config.model_type, {})
    if size > 1 and not own and not any("layers." in path for path in plan):
        why = f"transformers has no plan for the family {config.model_type!r}, and neither have we"
        raise _cannot(type(model).__name__, why)
    paths = _paths(model)
    if any(path.endswith("linear_attn.in_proj_qkvz") for path in paths):
        is_even = config.linear_num_key_heads % size == 0
        own = own | {path: style if is_even else "replicate" for path, style in _DELTA_NET.items()}
    plan |= {path: own[within] for path in paths if (within := path.partition("layers.*.")[2]) in own}
    unknown = sorted({style for path, style in plan.items() if path in paths} - _KNOWN)
    if unknown and size > 1:
        raise _cannot(type(model).__name__, f"its plan has parts of the kind {unknown[0]!r}, which is not known here")
    return plan


def _style_of(plan: Mapping[str, str], path: str, name: str) -> str:
    """What is done to a weight of a module."""
    module = _generic(path)
    style = plan.get(f"{module}.{name}", plan.get(module, "replicate"))
    return "replicate" if style == _SUMMAND or style not in _KNOWN else style


def _paths(model: torch.nn.Module) -> set[str]:
    """All that a plan may name of a model."""
    return {_generic(path) for path, _ in (*model.named_modules(), *model.named_parameters())}


def _generic(path: str) -> str:
    """A path with stars for numbers.

    >>> _generic("model.layers.0.mlp.experts.12")
    'model.layers.*.mlp.experts.*'
    """
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _kept(
    path: str, weight: torch.Tensor, style: str, part: Part, num_heads: int | None, channels: tuple[int, ...] | None
) -> torch.Tensor:
    """What a rank keeps of a weight, in memory of its own."""
    weight = weight.detach()
    if style == _ONCE or (style == _COLUMNS and weight.ndim == 1):
        return weight.clone() if part.rank == 0 else torch.zeros_like(weight)
    dim = -1 if style in (_COLUMNS, _LAST) else max(weight.ndim - 2, 0)
    pieces: tuple[torch.Tensor, ...] = (weight,)
    if style == _HALVES:
        pieces = weight.chunk(2, dim)
    elif style == _CHANNELS:
        assert channels is not None
        dim, pieces = 0, weight.split(channels)
    elif style == _ROWS and num_heads is not None and num_heads < part.size:
        return weight.chunk(num_heads)[part.rank * num_heads // part.size].clone()
    return torch.cat([part.of(path, piece, dim) for piece in pieces], dim)


def _key_value_heads(model: torch.nn.Module) -> dict[str, int]:
    """How many heads the projections to keys and values are for, by their paths."""
    return {
        f"{path}.{name}": module.k_proj.out_features // module.head_dim
        for path, module in model.named_modules()
        if isinstance(getattr(module, "k_proj", None), torch.nn.Linear)
        and isinstance(getattr(module, "head_dim", None), int)
        for name in ("k_proj", "v_proj")
    }


def _channels(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """How many channels of queries, keys and values a convolution has, by its path."""
    return {
        f"{path}.conv1d": (module.key_dim, module.key_dim, module.value_dim)
        for path, module in model.named_modules()
        if hasattr(module, "conv1d") and isinstance(getattr(module, "key_dim", None), int)
    }


def _check_heads(model: Any, plan: Mapping[str, str], size: int) -> None:
    """Raise if heads would be torn."""
    is_split = any(path.endswith("self_attn.o_proj") and style == _COLUMNS for path, style in plan.items())
    if is_split and (num_heads := model.config.get_text_config().num_attention_heads) % size:
        raise _cannot(type(model).__name__, f"it has {num_heads} heads, and there are {size} ranks")
    for path, num_kv_heads in _key_value_heads(model).items():
        if plan.get(_generic(path)) == _ROWS and num_kv_heads % size and size % num_kv_heads:
            why = f"it has {num_kv_heads} heads of keys and values, and there are {size} ranks"
            raise _cannot(type(model).__name__, why)


def _tell_modules(model: Any, plan: Mapping[str, str], size: int) -> None:
    """Modules that count their heads or features count those of the rank."""
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and plan.get(_generic(path)) in (_ROWS, _COLUMNS, _HALVES):
            module.out_features, module.in_features = module.weight.shape
        elif plan.get(f"{_generic(path)}.conv1d") == _CHANNELS:
            for name in _DELTA_NET_COUNTS:
                setattr(module, name, getattr(module, name) // size)
    for path in _key_value_heads(model):
        module = model.get_submodule(path.rpartition(".")[0])
        if plan.get(_generic(path)) == _ROWS and hasattr(module, "num_key_value_groups"):
            num_kv_heads = module.k_proj.out_features // module.head_dim
            num_heads = model.config.get_text_config().num_attention_heads // size
            module.num_key_value_groups = num_heads // num_kv_heads


def _cannot(what: str, why: str) -> ModelError:
    hint = "use a number of ranks that fits, or tensor_parallel_size=1"
    return ModelError("PG682", f"{what} cannot be shared out to ranks", why=why, hint=hint)
