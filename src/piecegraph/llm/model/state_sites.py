"""Which call sites of a traced graph keep a state, and what."""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx

from piecegraph.base import torch_compat
from piecegraph.llm import ops
from piecegraph.llm.specs import ConvLayer, DeltaLayer, StatefulLayer, StateLayer


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
