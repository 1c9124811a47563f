"""What passes look for in a traced graph, whoever wrote the model, and how they take away what is left over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from piecegraph.base import torch_compat
from piecegraph.graph.fx_nodes import op_name, writes_in_place


@dataclass(frozen=True, slots=True)
class Norm:
    """``gain * (x / rms(x))``, as models write it."""

    source: Node
    gain: Node
    eps: float
    nodes: tuple[Node, ...]


def calls_in(graph: torch.fx.Graph) -> list[Node]:
    """What a graph calls. Nothing where something is written in place: what is computed later might see it.

    Ops at which decoders are cut write to memory that is made for them.
    """
    nodes: list[Node] = [node for node in graph.nodes if node.op in ("call_function", "call_method")]
    if any(writes_in_place(node) for node in nodes if not op_name(node).startswith("piecegraph::")):
        return []
    return nodes


def find_norm(node: Node) -> Norm | None:
    """``gain * (wide * rsqrt(mean(wide ** 2) + eps)).to(dtype)``, where ``wide`` is the input in float32.

    Or ``(gain * ...).to(dtype)``.
    """
    is_last = calls(node, "aten::to")
    for gain, scaled in in_both_orders(node.args[0] if is_last else node, "aten::mul"):
        if torch_compat.meta_value(gain).dim() != 1 or not (is_last or calls(scaled, "aten::to")):
            continue
        for wide, scale in in_both_orders(scaled if is_last else scaled.args[0], "aten::mul"):
            if not calls(wide, "aten::to", "aten::float") or not calls(scale, "aten::rsqrt"):
                continue
            source, eps, squares = wide.args[0], *_root(scale, wide)
            if isinstance(source, Node) and eps is not None and _is_in_float32(source, wide, node):
                return Norm(source, gain, eps, (wide, *squares, scale, scaled, node))
    return None


def _root(scale: Node, wide: Node) -> tuple[float | None, tuple[Node, ...]]:
    """The epsilon in ``rsqrt(mean(wide ** 2, -1, keepdim=True) + eps)``; None if it is something else."""
    total: Any = scale.args[0]
    if not calls(total, "aten::add") or len(total.args) != 2 or not isinstance(total.args[1], float):
        return None, ()
    mean = total.args[0]
    if not calls(mean, "aten::mean") or mean.args[1:] not in ((-1,), ([-1],)) or mean.kwargs != {"keepdim": True}:
        return None, ()
    squares = mean.args[0]
    if not calls(squares, "aten::pow") or squares.args != (wide, 2):
        return None, ()
    return total.args[1], (squares, mean, total)


def _is_in_float32(source: Node, wide: Node, result: Node) -> bool:
    """Whether something is computed in float32, and given back in the precision of its input."""
    given, between, made = map(torch_compat.meta_value, (source, wide, result))
    return bool(given.dtype == made.dtype and between.dtype == torch.float32)


def in_both_orders(node: Any, name: str) -> Iterator[tuple[Node, Node]]:
    """The operands of what may have them in either order."""
    if (
        calls(node, name)
        and len(node.args) == 2
        and not node.kwargs
        and all(isinstance(arg, Node) for arg in node.args)
    ):
        yield node.args
        yield node.args[::-1]


def calls(node: Any, *names: str) -> bool:
    """Whether it is a call of one of these ops."""
    return isinstance(node, Node) and node.op in ("call_function", "call_method") and op_name(node) in names


def erase(graph: torch.fx.Graph, node: Node) -> None:
    """Take away what nobody needs any more, and what that was made of."""
    if node.users or node.op not in ("call_function", "call_method") or node._erased:
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for each in inputs:
        erase(graph, each)
