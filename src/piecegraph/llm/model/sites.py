"""The call sites of a traced decoder: numbered in their order, each described by what it keeps.

No name in a model's configuration is relied on: what a layer keeps for a token is read from the traced graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx

from piecegraph.base import torch_compat
from piecegraph.graph.fx_nodes import module_path
from piecegraph.llm import ops
from piecegraph.llm.model.plug import SITE
from piecegraph.llm.specs import (
    AttentionLayer,
    ConvLayer,
    DeltaLayer,
    LatentLayer,
    Reach,
    StatefulLayer,
    StateLayer,
)


def number_sites(graph: torch.fx.Graph) -> tuple[tuple[AttentionLayer | LatentLayer, ...], tuple[Reach, ...]]:
    """Number the attention calls of a traced graph in their order, and describe each.

    A module may be called twice in a forward, and layer numbers may repeat or be missing, so the call site is what a
    cache belongs to. Returns the layers and the reach of each group of layers.
    """
    layers: list[AttentionLayer | LatentLayer] = []
    groups: dict[Reach, int] = {}
    for node in graph.nodes:
        packet = torch_compat.op_of(node.target)[0] if node.op == "call_function" else None
        if packet is ops.ATTENTION.overloadpacket:
            group = groups.setdefault(Reach(node.args[7], node.args[8]), len(groups))
            layers.append(_attention_layer(node, len(layers), group))
            node.update_arg(5, layers[-1].index)
        elif packet is ops.LATENT_ATTENTION.overloadpacket:
            layers.append(_latent_layer(node, len(layers), groups.setdefault(Reach(), len(groups))))
            node.update_arg(5, layers[-1].index)
    return tuple(layers), tuple(groups)


def _attention_layer(node: torch.fx.Node, index: int, group: int) -> AttentionLayer:
    query, key, value = (torch_compat.meta_value(arg) for arg in node.args[:3])  # type: ignore[arg-type]
    scale, window, chunk, softcap = node.args[6:10]
    return AttentionLayer(
        index=index,
        group=group,
        num_heads=int(query.shape[1]),
        num_kv_heads=int(key.shape[1]),
        key_width=int(key.shape[2]),
        value_width=int(value.shape[2]),
        scale=scale,  # type: ignore[arg-type]
        window=window,  # type: ignore[arg-type]
        chunk=chunk,  # type: ignore[arg-type]
        softcap=softcap,  # type: ignore[arg-type]
        has_sinks=node.args[4] is not None,
    )


def _latent_layer(node: torch.fx.Node, index: int, group: int) -> LatentLayer:
    query, latent, rope, _, out = (torch_compat.meta_value(arg) for arg in node.args[:5])  # type: ignore[arg-type]
    return LatentLayer(
        index=index,
        group=group,
        num_heads=int(query.shape[1]),
        latent_width=int(latent.shape[1]),
        rope_width=int(rope.shape[1]),
        nope_width=node.args[6],  # type: ignore[arg-type]
        value_width=int(out.shape[2]),
        scale=node.args[7],  # type: ignore[arg-type]
    )


def number_experts(graph: torch.fx.Graph, model: torch.nn.Module) -> None:
    """Give every call of experts in a traced graph the number of the module it was traced from."""
    for node in graph.nodes:
        if node.op == "call_function" and torch_compat.op_of(node.target)[0] is ops.EXPERTS.overloadpacket:
            node.update_arg(4, getattr(model.get_submodule(module_path(node)), SITE))


def number_states(graph: torch.fx.Graph, paths: Sequence[str]) -> tuple[StateLayer, ...]:
    """Number the ops that keep a state in their order, and describe each.

    Args:
        graph: the traced decoder, whose ops get their numbers.
        paths: of the modules in opaque form, by the number that their ops were traced with.
    """
    layers: list[StateLayer] = []
    for node in graph.nodes:
        packet = torch_compat.op_of(node.target)[0] if node.op == "call_function" else None
        if packet is ops.CAUSAL_CONV.overloadpacket:
            layers.append(_conv_layer(node, len(layers)))
            node.update_arg(5, len(layers) - 1)
        elif packet is ops.DELTA_RULE.overloadpacket:
            layers.append(_delta_layer(node, len(layers)))
            node.update_arg(7, len(layers) - 1)
        elif packet is ops.STATEFUL.overloadpacket:
            layers.append(_stateful_layer(node, len(layers), paths))
            node.update_arg(2, len(layers) - 1)
    return tuple(layers)


def _conv_layer(node: torch.fx.Node, index: int) -> ConvLayer:
    hidden, weight = (torch_compat.meta_value(arg) for arg in node.args[:2])  # type: ignore[arg-type]
    return ConvLayer(
        index=index,
        channels=int(weight.shape[0]),
        width=int(weight.shape[1]),
        activation=str(node.args[4]),
        has_bias=node.args[2] is not None,
        dtype=hidden.dtype,
    )


def _delta_layer(node: torch.fx.Node, index: int) -> DeltaLayer:
    key, value, decay, beta = (torch_compat.meta_value(arg) for arg in node.args[1:5])  # type: ignore[arg-type]
    return DeltaLayer(
        index=index,
        num_heads=int(value.shape[1]),
        key_width=int(key.shape[2]),
        value_width=int(value.shape[2]),
        normalises=bool(node.args[6]),
        dtype=value.dtype,
        decay_dtype=decay.dtype,
        beta_dtype=beta.dtype,
    )


def _stateful_layer(node: torch.fx.Node, index: int, paths: Sequence[str]) -> StatefulLayer:
    hidden = torch_compat.meta_value(node.args[0])  # type: ignore[arg-type]
    path = paths[node.args[2]]  # type: ignore[index]
    return StatefulLayer(index=index, path=path, width=int(hidden.shape[1]), dtype=hidden.dtype)
