"""Results that are views of an argument or a weight.

A replay works on copies of the arguments, so a view it returned would be a view of the copy. Instead the chain of
view ops that leads from the argument to the result is cut out of the graph and run on the caller's own tensor after
the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.graph.fx_nodes import size_parts, writes_in_place
from piecegraph.graph.sources import FromCall, GraphInput, Weight


@dataclass(frozen=True, slots=True)
class InputView:
    """A result that shares memory with an argument or a weight."""

    source: FromCall | Weight
    symbols: tuple[sympy.Symbol, ...]
    apply: Callable[..., torch.Tensor]
    """Takes the tensor and the value of each symbol."""


def find_view(node: torch.fx.Node, inputs: Mapping[torch.fx.Node, GraphInput]) -> InputView | None:
    """The view that a result is, or None if it has memory of its own or cannot be rebuilt from views alone."""
    storage = torch_compat.storage_id(torch_compat.meta_value(node))
    for root, source in inputs.items():
        if isinstance(source, (FromCall, Weight)) and torch_compat.storage_id(torch_compat.meta_value(root)) == storage:
            chain = _chain(node, root, storage)
            return None if chain is None else _build(source, root, chain)
    return None


def _chain(node: torch.fx.Node, root: torch.fx.Node, storage: int) -> list[torch.fx.Node] | None:
    """The view ops from the root to the node, in order."""
    chain: list[torch.fx.Node] = []
    while node is not root:
        bases = [arg for arg in node.all_input_nodes if storage in _storages(torch_compat.meta_value(arg))]
        others = [arg for arg in node.all_input_nodes if arg not in bases and _storages(torch_compat.meta_value(arg))]
        if len(bases) != 1 or (others and not writes_in_place(node)):
            return None
        if not writes_in_place(node):  # an in-place op returns its first argument: already done when views are taken
            chain.append(node)
        node = bases[0]
    return chain[::-1]


def _storages(value: Any) -> set[int]:
    if isinstance(value, (tuple, list)):
        return set().union(*map(_storages, value)) if value else set()
    return {torch_compat.storage_id(value)} if isinstance(value, torch.Tensor) else set()


def _build(source: FromCall | Weight, root: torch.fx.Node, chain: list[torch.fx.Node]) -> InputView:
    graph = torch.fx.Graph()
    base = graph.placeholder("base")
    symbols = tuple(dict.fromkeys(s for node in chain for s in _symbols_used(node)))
    symbol_nodes = {symbol: graph.placeholder(str(symbol)) for symbol in symbols}
    copies: dict[torch.fx.Node, torch.fx.Node] = {root: base}

    def translate(arg: torch.fx.Node) -> Any:
        if arg in copies:
            return copies[arg]
        value = torch_compat.meta_value(arg)
        if isinstance(value, torch.Tensor):
            return copies[_latest(copies)]  # the result of an in-place op: the tensor itself
        sizes = tuple(torch_compat.emit_expr(graph, torch_compat.size_expr(v), symbol_nodes) for v in size_parts(value))
        return sizes if isinstance(value, torch.Size) else sizes[0]

    for node in chain:
        copies[node] = graph.node_copy(node, translate)
    graph.output(copies[_latest(copies)])
    return InputView(source, symbols, torch.fx.GraphModule(torch.nn.Module(), graph).forward)


def _latest(copies: dict[torch.fx.Node, torch.fx.Node]) -> torch.fx.Node:
    return next(reversed(copies))


def _symbols_used(node: torch.fx.Node) -> list[sympy.Symbol]:
    used: list[sympy.Symbol] = []
    for arg in node.all_input_nodes:
        for part in size_parts(torch_compat.meta_value(arg)):
            if isinstance(part, torch.SymInt):
                used += torch_compat.free_symbols(part)
    return used
