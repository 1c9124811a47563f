"""A graph that fails in, the smallest part of it that still does out.

First the shortest beginning of the graph that fails is looked for, then the shortest end of that: what is left is the
op that fails, or the few that fail only together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.graph.fx_nodes import attribute, picks_result

_MOST_SECONDS = 60.0
"""After which the smallest part found so far is taken."""

Unit = tuple[torch.fx.Node, ...]
"""An op, and what picks its results."""


@dataclass(frozen=True)
class Part:
    """Some neighbouring ops of a graph, as a graph of their own."""

    module: torch.fx.GraphModule
    inputs: tuple[torch.fx.Node, ...]
    """The nodes of the whole graph that its placeholders stand for."""

    @property
    def num_ops(self) -> int:
        return sum(node.op.startswith("call_") and not picks_result(node) for node in self.module.graph.nodes)


def units_of(module: torch.fx.GraphModule) -> list[Unit]:
    """The ops of a graph that compute tensors, in order."""
    units: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in module.graph.nodes:
        if node.op not in ("call_function", "call_method") or torch_compat.meta_value(node) is None:
            continue  # what has no example value computes a size, and goes with those who read it
        head = node.args[0] if picks_result(node) else node
        units.setdefault(head if isinstance(head, torch.fx.Node) else node, []).append(node)
    return [tuple(nodes) for nodes in units.values()]


def smallest_failing(module: torch.fx.GraphModule, fails: Callable[[Part], bool]) -> Part | None:
    """The smallest part that fails, of those that are tried; None if no part smaller than the whole was seen to."""
    units = units_of(module)
    deadline = time.monotonic() + _MOST_SECONDS
    found: Part | None = None

    def does_fail(start: int, end: int) -> bool:
        nonlocal found
        if time.monotonic() > deadline:
            return False
        part = part_of(module, [node for unit in units[start:end] for node in unit])
        is_failing = fails(part)
        if is_failing:
            found = part
        return is_failing

    end = _first(1, len(units), lambda number: does_fail(0, number))
    if not does_fail(end - 1, end):  # it is not the last op alone
        _first(1, end, lambda number: does_fail(end - number, end))
    return found


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The smallest number from which on something holds; it is known to hold for the last."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return high


def part_of(module: torch.fx.GraphModule, nodes: Sequence[torch.fx.Node]) -> Part:
    """Some nodes of a graph as a graph of their own, which returns what nobody among them reads."""
    graph, root = torch.fx.Graph(), torch.nn.Module()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    inputs: list[torch.fx.Node] = []
    inside = set(nodes)

    def placeholder(node: torch.fx.Node) -> torch.fx.Node:
        inputs.append(node)
        made = graph.placeholder(node.name if node.op == "placeholder" else f"input_{node.name}")
        made.meta = dict(node.meta)
        return made

    def copied(node: torch.fx.Node) -> torch.fx.Node:
        if node not in copies:
            if node.op == "get_attr":
                setattr(root, str(node.target), attribute(module, node))
                copies[node] = graph.get_attr(str(node.target))
            else:
                copies[node] = graph.node_copy(node, copied)
        return copies[node]

    for node in module.graph.find_nodes(op="placeholder"):
        if isinstance(torch_compat.meta_value(node), torch.SymInt):  # the sizes of other inputs are written with it
            copies[node] = placeholder(node)
    outside = (arg for node in nodes for arg in node.all_input_nodes if arg not in inside)
    for arg in dict.fromkeys(outside):
        is_value = arg.op == "placeholder" or isinstance(torch_compat.meta_value(arg), torch.Tensor)
        if is_value and arg not in copies:
            copies[arg] = placeholder(arg)
    for node in nodes:
        copied(node)
    last = [node for node in nodes if isinstance(torch_compat.meta_value(node), torch.Tensor)]
    unread = [node for node in last if not any(user in inside for user in node.users)]
    graph.output(tuple(copies[node] for node in unread or last))
    return Part(torch.fx.GraphModule(root, graph), tuple(inputs))


class _Values(torch.fx.Interpreter):
    """Keeps what every node computes, and knows which one fails."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.failed: torch.fx.Node | None = None

    def run_node(self, n: torch.fx.Node) -> Any:
        try:
            return super().run_node(n)
        except Exception:
            self.failed = self.failed or n
            raise


def run_as_traced(
    module: torch.fx.GraphModule, inputs: Sequence[Any]
) -> tuple[torch.fx.Node | None, Mapping[torch.fx.Node, Any]]:
    """The node that fails when a graph is run op by op, if one does, and the values of those before it."""
    values = _Values(module)
    try:
        values.run(*inputs)
    except Exception:  # noqa: BLE001 - it is run to see what it raises
        return values.failed, values.env
    return None, values.env
