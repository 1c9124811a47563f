"""Results that are views of an argument or a weight.

A replay works on copies of the arguments, so a view it returned would be a view of the copy. Instead the chain of
view ops that leads from the argument to the result is cut out of the graph and run on the caller's own tensor after
the replay.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.errors import TraceError
from piecegraph.graph.fx_nodes import size_parts, writes_in_place
from piecegraph.graph.sources import FromCall, GraphInput, Weight


@dataclass(frozen=True, slots=True)
class InputView:
    """A result that shares memory with an argument or a weight."""

    source: FromCall | Weight
    symbols: tuple[sympy.Symbol, ...]
    apply: Callable[..., torch.Tensor]
    """Takes the tensor and the value of each symbol."""


@dataclass(frozen=True, slots=True)
class StridedView:
    """A result that lies in the memory of an argument, told by sizes and strides: it is taken from the argument if that
    lies as its buffer does, and from the graph if not.
    """

    node: torch.fx.Node
    argument: int
    """Into ``signature.tensors``."""
    shape: tuple[sympy.Expr, ...] = ()
    strides: tuple[sympy.Expr, ...] = ()
    offset: sympy.Expr = sympy.S.Zero
    is_whole: bool = False
    """Whether it is the argument itself, however that lies."""


def find_view(node: torch.fx.Node, inputs: Mapping[torch.fx.Node, GraphInput]) -> InputView | StridedView | None:
    """The view that a result is, or None if it has memory of its own or cannot be rebuilt from views alone."""
    storage = torch_compat.storage_id(torch_compat.meta_value(node))
    for root, source in inputs.items():
        if isinstance(source, (FromCall, Weight)) and torch_compat.storage_id(torch_compat.meta_value(root)) == storage:
            chain = _chain(node, root, storage)
            return _strided(node, root, source, inputs) if chain is None else _build(source, root, chain)
    return None


def _strided(
    node: torch.fx.Node, root: torch.fx.Node, source: FromCall | Weight, inputs: Mapping[torch.fx.Node, GraphInput]
) -> StridedView | None:
    """The view of an argument that several tensors have a say in: ``x.expand_as(y)``, ``torch.meshgrid(x, y)``."""
    result, base = torch_compat.meta_value(node), torch_compat.meta_value(root)
    if not isinstance(source, FromCall) or torch_compat.reading(result) != torch_compat.reading(base):
        return None
    numbers = (result.shape, result.stride(), (result.storage_offset(),))
    shape, strides, (offset,) = (tuple(map(torch_compat.size_expr, part)) for part in numbers)
    known = {symbol for node in inputs for symbol in _symbols_of(torch_compat.meta_value(node))}
    if not {symbol for expr in (*shape, *strides, offset) for symbol in expr.free_symbols} <= known:
        raise TraceError(
            "PG204",
            f"the result is a part of argument {source.index}, and data say which",
            why="where it lies would be known only at the recording",
            hint="return a copy of it",
        )
    return StridedView(node, source.index, shape, strides, offset)


def _symbols_of(value: Any) -> set[sympy.Symbol]:
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return {symbol for size in sizes for symbol in torch_compat.size_expr(size).free_symbols}


def _chain(node: torch.fx.Node, root: torch.fx.Node, storage: int) -> list[torch.fx.Node] | None:
    """The view ops from the root to the node, in order."""
    chain: list[torch.fx.Node] = []
    while node is not root:
        bases = [arg for arg in node.all_input_nodes if storage in _storages(torch_compat.meta_value(arg))]
        others = [arg for arg in node.all_input_nodes if arg not in bases and _storages(torch_compat.meta_value(arg))]
        if len(bases) != 1 or (others and not writes_in_place(node)):
            return None
        if isinstance(node.target, types.FunctionType):  # no view op: F.dropout(x, inplace=True) must not run again
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
    if any(map(torch_compat.is_unbacked, symbols)):
        what = "the result is a view of an argument, of a size computed from data"
        raise TraceError("PG204", what, hint="return a copy of it")
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
