"""A graph as bytes, and the same graph in another process.

Written is what is known of each value. Ops are found by their names; fake tensors and symbols are made anew.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.base.source_files import with_files_here, with_portable_names
from piecegraph.graph.signature import is_constant

_KEPT_META = ("example_value", "val")
_STACK = "stack_trace"
_MODULES = "nn_module_stack"


class UnkeepableError(Exception):
    """A trace holds something that means nothing in another process."""


class StaleTraceError(Exception):
    """A trace was made for something else than is there now."""


@dataclass(frozen=True, slots=True)
class NodeNumber:
    """A node, by its place in the graph."""

    number: int


@dataclass(frozen=True, slots=True)
class _KeptSize:
    """A symbolic number."""

    expr: Any
    kind: str


@dataclass(frozen=True, slots=True)
class KeptNode:
    """A node of a graph."""

    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any
    meta: dict[str, Any]


def dump(kept: Any) -> bytes:
    """Write what holds kept graphs. Raises what pickle does."""
    file = io.BytesIO()
    _OpPickler(file, pickle.HIGHEST_PROTOCOL).dump(kept)
    return file.getvalue()


def load(data: bytes) -> Any:
    """Read it. Raises StaleTraceError if there is no such op here."""
    return _OpUnpickler(io.BytesIO(data)).load()


def node_numbers(graph: torch.fx.Graph) -> dict[torch.fx.Node, int]:
    """The place of each node."""
    return {node: number for number, node in enumerate(graph.nodes)}


def keep_nodes(graph: torch.fx.Graph) -> tuple[KeptNode, ...]:
    """A graph, to be written. Raises UnkeepableError."""
    numbers = node_numbers(graph)

    def refer(value: Any) -> Any:
        return torch.fx.map_arg(value, lambda node: NodeNumber(numbers[node]))  # type: ignore[arg-type,return-value]

    return tuple(KeptNode(n.op, n.name, n.target, refer(n.args), refer(n.kwargs), _keep_meta(n)) for n in graph.nodes)


def _keep_meta(node: torch.fx.Node) -> dict[str, Any]:
    """What is known of a node. Modules are kept by their paths: their classes need not be found again."""
    meta = {name: _keep_value(node.meta[name]) for name in _KEPT_META if name in node.meta}
    if _STACK in node.meta:
        meta[_STACK] = with_portable_names(node.meta[_STACK])
    if _MODULES in node.meta:
        meta[_MODULES] = {key: (str(path), str(cls)) for key, (path, cls) in node.meta[_MODULES].items()}
    return meta


def _keep_value(value: Any) -> Any:
    """What a node produces, without what belongs to the process."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _KeptSize(torch_compat.size_expr(value), type(value).__name__)
    if isinstance(value, torch.Tensor):
        if not torch_compat.is_keepable_fake(value):
            raise UnkeepableError(f"it computes a {type(value).__name__} that is no plain dense tensor")
        return torch_compat.kept_layout(value)
    if isinstance(value, torch.Size):
        return ("size", [_keep_value(part) for part in value])
    if isinstance(value, (tuple, list)):
        return (type(value).__name__ if type(value) in (tuple, list) else "tuple", [_keep_value(p) for p in value])
    return value if is_constant(value) else None


def make_graph(kept: Sequence[KeptNode], world: torch_compat.FakeWorld) -> tuple[torch.fx.Graph, list[torch.fx.Node]]:
    """A graph that was written, and its nodes."""
    graph = torch.fx.Graph()
    nodes: list[torch.fx.Node] = []

    def resolve(value: Any) -> Any:
        return torch_compat.map_aggregate(value, lambda v: nodes[v.number] if isinstance(v, NodeNumber) else v)

    with world.making_tensors():
        for each in kept:
            node = graph.create_node(each.op, each.target, resolve(each.args), resolve(each.kwargs), each.name)
            node.meta = {name: _make_meta(name, value, world) for name, value in each.meta.items()}
            nodes.append(node)
    return graph, nodes


def _make_meta(name: str, value: Any, world: torch_compat.FakeWorld) -> Any:
    if name == _STACK:
        return with_files_here(value)
    return value if name == _MODULES else _make_value(value, world)


def _make_value(value: Any, world: torch_compat.FakeWorld) -> Any:
    if isinstance(value, _KeptSize):
        return world.size(value.expr, value.kind)
    if isinstance(value, torch_compat.FakeLayout):
        return world.tensor(value)
    if isinstance(value, tuple):
        kind, parts = value
        made = [_make_value(part, world) for part in parts]
        return torch.Size(made) if kind == "size" else made if kind == "list" else tuple(made)
    return value


class _OpPickler(pickle.Pickler):
    """Writes ops by their names, and functions by those that they go by: ``F.max_pool2d`` was defined as another."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType) and obj.__name__ != obj.__qualname__:
            place = obj.__module__, obj.__name__
            return place if getattr(sys.modules.get(obj.__module__), obj.__name__, None) is obj else None
        return torch_compat.kept_op_name(obj)


class _OpUnpickler(pickle.Unpickler):
    """Finds them."""

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, tuple):
            module, name = pid
            return getattr(importlib.import_module(module), name)
        found = torch_compat.find_op(pid)
        if found is None:
            raise StaleTraceError(f"there is no op {pid!r}")
        return found
