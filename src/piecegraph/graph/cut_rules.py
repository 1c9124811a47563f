"""Which ops must not be inside a CUDA graph, and why.

A traced graph comes in; a reason for each node that has to run eagerly comes out. The reasons are kept to the end:
``explain()`` prints them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.errors import ConfigError
from piecegraph.graph.streams import StreamRegions

_registered: dict[Any, str] = {}

_CHECKED_ON_HOST = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "cholesky cholesky_inverse inverse linalg_cholesky linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh "
        "linalg_inv linalg_ldl_factor linalg_lstsq linalg_lu_factor linalg_matrix_rank linalg_pinv linalg_solve "
        "linalg_solve_ex linalg_svd linalg_svdvals svd"
    ).split()
    if hasattr(torch.ops.aten, name)
)
"""Factorisations that read on the host whether they succeeded. Capturing some breaks their library handle for good."""


COLLECTIVES = "piecegraph_ranks"
"""The namespace of our own ops between ranks."""

_COLLECTIVES = (COLLECTIVES, "c10d", "_c10d_functional", "_c10d_functional_autograd")


def register_cut_op(op: Any, reason: str) -> None:
    """Make an op a cut in every plan whose ``splitting_ops`` is ``"auto"``.

    Args:
        op: an op object, or its name ``"ns::op"``.
        reason: why it cannot be inside a graph; shown by ``explain()``.
    """
    _registered[resolve_op(op)] = reason


def resolve_op(op: Any) -> Any:
    """The op object a user named. Raises PG104 for a name that is not registered."""
    if not isinstance(op, str):
        if not callable(op):
            raise ConfigError("PG104", f"splitting_ops holds {op!r}", why="it is neither an op nor a name")
        return op
    found = torch_compat.find_op(op) if "::" in op else None
    if found is None:
        close = torch_compat.similar_op(op if "::" in op else f"aten::{op}")
        raise ConfigError(
            "PG104",
            f"no operator is called {op!r}",
            hint=f"did you mean {close!r}?" if close else 'write "namespace::name"',
        )
    return found


@dataclass(frozen=True, slots=True)
class CutVerdict:
    """Why a node runs eagerly."""

    reason: str
    is_region: bool
    """Neighbours with a region verdict run together; other cut ops stand alone."""
    is_forced: bool
    """The model cannot be captured without this cut; other cuts are the user's or the op author's wish."""
    is_stream_bound: bool = False
    """It cannot leave its region, because that runs on several streams."""


_FromData = Mapping[torch.fx.Node, frozenset[sympy.Symbol]]
"""The symbols in each node's value that stand for data."""


class CutRules:
    """Finds the cuts of a graph."""

    def __init__(self, splitting_ops: Iterable[Any] | str) -> None:
        self.asked_for = splitting_ops if isinstance(splitting_ops, str) else tuple(splitting_ops)
        wishes = (
            dict(_registered)
            if splitting_ops == "auto"
            else {resolve_op(op): "listed in splitting_ops" for op in splitting_ops}
        )
        self._wishes = [(*torch_compat.op_of(op), reason) for op, reason in wishes.items()]

    def verdicts(self, graph: torch.fx.Graph, streams: Mapping[int, Any]) -> dict[torch.fx.Node, CutVerdict]:
        """The verdict on every node that has to run eagerly."""
        reason = "lies between a fork to another CUDA stream and its join"
        forked = CutVerdict(reason, is_region=True, is_forced=True, is_stream_bound=True)
        found = dict.fromkeys(StreamRegions(graph, streams).nodes, forked)
        values = {node: torch_compat.meta_value(node) for node in graph.nodes}
        is_mixed = len(set().union(*map(_devices, values.values()))) > 1
        from_data = {node: torch_compat.unbacked_symbols(value) for node, value in values.items()}
        for node in graph.nodes:
            if node.op in ("call_function", "call_method") and node not in found:
                verdict = self._of(node, from_data) or (_host_work(node) if is_mixed else None)
                if verdict is not None:
                    found[node] = verdict
        return found

    def reason(self, target: Any) -> tuple[str, bool] | None:
        """Why calls of a target run eagerly, whatever data they are given, and whether they have to."""
        packet, overload = torch_compat.op_of(target)
        for wished_packet, wished_overload, reason in self._wishes:
            if packet is wished_packet and (overload is None or wished_overload in (None, overload)):
                return reason, False
        if torch_compat.is_cudagraph_unsafe(target):
            return "tagged cudagraph_unsafe by its author", True
        if torch_compat.chooses_by_data(target):
            return "reads on the host what is to run", True
        if packet is torch.ops.aten._shape_as_tensor:
            return "writes to memory of the host, by no op", True
        return ("reads on the host whether it succeeded", True) if packet in _CHECKED_ON_HOST else None

    def _of(self, node: torch.fx.Node, from_data: _FromData) -> CutVerdict | None:
        found = self.reason(node.target)
        if found is not None:
            return CutVerdict(found[0], is_region=False, is_forced=found[1])
        return _host_collective(node) or _data_dependence(node, from_data)


def _host_collective(node: torch.fx.Node) -> CutVerdict | None:
    """NCCL's collectives are captured like other kernels; those on a CPU are sent by the host."""
    namespace = torch_compat.qualified_name(node.target).partition("::")[0]
    if namespace not in _COLLECTIVES:
        return None
    if not any("cpu" in _devices(torch_compat.meta_value(arg)) for arg in node.all_input_nodes):
        return None
    # Torch's come in pairs, the second of which waits for the first: they run together.
    return CutVerdict("is sent to other ranks by the host", is_region=namespace != COLLECTIVES, is_forced=True)


def _data_dependence(node: torch.fx.Node, from_data: _FromData) -> CutVerdict | None:
    made, used = from_data[node], frozenset[sympy.Symbol]().union(*(from_data[arg] for arg in node.all_input_nodes))
    if made - used:
        return CutVerdict("its result's value or shape is read from data on the device", is_region=True, is_forced=True)
    if made or used:
        return CutVerdict("depends on a value or shape read from data", is_region=True, is_forced=True)
    return None


def _host_work(node: torch.fx.Node) -> CutVerdict | None:
    """Work on the CPU in a model on a GPU: a graph would do it once, while it is captured, and never again."""
    results = _devices(torch_compat.meta_value(node))
    arguments = set().union(
        *(_devices(torch_compat.meta_value(arg)) for arg in node.all_input_nodes if not _is_host_constant(arg))
    )
    if len(results | arguments) > 1:
        return CutVerdict(f"copies between {' and '.join(sorted(results | arguments))}", is_region=True, is_forced=True)
    if "cpu" in results and not _is_host_constant(node):
        return CutVerdict("runs on the CPU", is_region=True, is_forced=True)
    return None


def _is_host_constant(node: torch.fx.Node) -> bool:
    """A CPU scalar made from nothing but numbers: it is the same at every replay."""
    value = torch_compat.meta_value(node)
    is_scalar = isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim() == 0
    return is_scalar and node.op == "call_function" and not node.all_input_nodes


def _devices(value: Any) -> set[str]:
    if isinstance(value, (tuple, list)):
        return set().union(*map(_devices, value)) if value else set()
    return {value.device.type} if isinstance(value, torch.Tensor) else set()
