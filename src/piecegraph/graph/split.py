"""Stage 2: one graph in, a list of segments out.

A segment is a run of nodes that either becomes a piece (compiled, captured) or a cut (run eagerly between two
graphs). The order of the original graph is kept. Only tensors cross from one segment to another, plus values read
from data between cuts.

Note [Sizes do not cross]
~~~~~~~~~~~~~~~~~~~~~~~~~
Dynamo computes ``top_k * s0`` once, in the first layer that needs it, and passes it on. Then equal layers look
different, and a piece returns an integer, which a graph cannot. So no segment holds a node that only computes a size:
each use is written as an expression of the symbols, which every segment that needs them takes as inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.base.plan import SourceLine
from piecegraph.errors import LowerError
from piecegraph.graph.cut_rules import CutRules, CutVerdict
from piecegraph.graph.fx_nodes import (
    attribute,
    has_effect,
    is_size,
    module_path,
    op_name,
    picks_result,
    size_parts,
    source_line,
)
from piecegraph.graph.interception import REASON, Interception
from piecegraph.graph.sources import FromSize
from piecegraph.graph.streams import is_stream_object, uses_streams
from piecegraph.graph.tracer import Traced


@dataclass(frozen=True)
class Segment:
    """A piece or a cut, as a graph of its own."""

    nodes: tuple[torch.fx.Node, ...]
    """The nodes of the traced graph it covers."""
    verdict: CutVerdict | None
    """Why it is a cut; None for a piece."""
    module: torch.fx.GraphModule
    """Takes the inputs, returns a tuple of the outputs."""
    inputs: tuple[torch.fx.Node | FromSize, ...]
    outputs: tuple[torch.fx.Node, ...]
    interceptions: tuple[Interception, ...] = ()
    """Of a cut that is one op: whose callbacks run around it, the last one outermost."""

    @property
    def title(self) -> str:
        """The op a cut is named after."""
        others = sum(not picks_result(node) for node in self.nodes) - 1
        return op_name(self.nodes[0]) + (f" and {others} more" if others else "")

    @property
    def first_line(self) -> SourceLine | None:
        return next((line for node in self.nodes if (line := source_line(node)) is not None), None)


def split(
    traced: Traced, rules: CutRules, *, full: bool, interceptions: Sequence[Interception] = ()
) -> tuple[Segment, ...]:
    """Cut a traced graph. With ``full`` only what is intercepted is cut, and a cut that cannot be avoided is an
    error.
    """
    verdicts = rules.verdicts(traced.graph, traced.streams)
    if full:
        verdicts = _without_wishes(verdicts)
    intercepted = find_intercepted(traced.graph, interceptions)
    verdicts |= {node: _intercepted_verdict(node, verdicts.get(node), found) for node, found in intercepted.items()}
    groups = _group(traced.graph, verdicts)
    home = {node: group for group, (nodes, _) in enumerate(groups) for node in nodes}
    returned = set(traced.output_nodes)
    symbol_values = _symbol_values(traced)
    segments = []
    for group, (nodes, reason) in enumerate(groups):
        outputs = tuple(n for n in nodes if n in returned or any(home.get(user) != group for user in _readers(n)))
        if outputs or nodes[0] in intercepted or any(has_effect(node) or uses_streams(node) for node in nodes):
            segment = _build(traced, nodes, reason, outputs, symbol_values)
            segments.append(replace(segment, interceptions=intercepted.get(nodes[0], ())))
    return tuple(segments)


def find_intercepted(
    graph: torch.fx.Graph, interceptions: Sequence[Interception]
) -> dict[torch.fx.Node, tuple[Interception, ...]]:
    """The calls of a graph that interceptions are for."""
    found: dict[torch.fx.Node, tuple[Interception, ...]] = {}
    for node in graph.nodes if interceptions else ():
        if node.op in ("call_function", "call_method") and not is_size(node):
            path = module_path(node)
            wanting = tuple(each for each in interceptions if each.wants(node.target) and each.wants_module(path))
            if wanting:
                found[node] = wanting
    return found


def _intercepted_verdict(
    node: torch.fx.Node, verdict: CutVerdict | None, interceptions: tuple[Interception, ...]
) -> CutVerdict:
    """An intercepted op is a cut of its own, whatever else it is."""
    if verdict is not None and verdict.is_stream_bound:
        raise LowerError(
            "PG723",
            f"{op_name(node)} cannot be intercepted here",
            where=str(source_line(node) or ""),
            why=verdict.reason,
            hint=f"leave the place out of {interceptions[-1]} with module=",
            op=op_name(node),
            line=str(source_line(node) or ""),
        )
    reason = REASON if verdict is None else f"{verdict.reason}; {REASON}"
    return CutVerdict(reason, is_region=False, is_forced=True)


def _without_wishes(verdicts: dict[torch.fx.Node, CutVerdict]) -> dict[torch.fx.Node, CutVerdict]:
    """The cuts of a full graph: none, or an error that names the first one that cannot be left out."""
    for node, verdict in verdicts.items():
        if verdict.is_forced:
            raise LowerError(
                "PG301",
                f"{op_name(node)} cannot be inside one full graph",
                where=str(source_line(node) or ""),
                why=verdict.reason,
                hint='use cudagraph_mode="piecewise"',
                op=op_name(node),
                line=str(source_line(node) or ""),
            )
    return {}


def _group(
    graph: torch.fx.Graph, verdicts: dict[torch.fx.Node, CutVerdict]
) -> list[tuple[list[torch.fx.Node], CutVerdict | None]]:
    """Runs of neighbouring nodes that belong together."""
    groups: list[tuple[list[torch.fx.Node], CutVerdict | None]] = []
    home: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr") or is_size(node) or is_stream_object(node):
            continue
        if picks_result(node):
            producer = home[node.args[0]]  # type: ignore[index]
            producer.append(node)
            home[node] = producer
            continue
        verdict = verdicts.get(node)
        if not groups or not _belong_together(groups[-1][1], verdict):
            groups.append(([], verdict))
        groups[-1][0].append(node)
        home[node] = groups[-1][0]
    return groups


def _belong_together(first: CutVerdict | None, second: CutVerdict | None) -> bool:
    if first is None or second is None:
        return first is second  # both are parts of a piece
    return first.is_region and second.is_region


def _readers(node: torch.fx.Node) -> Iterable[torch.fx.Node]:
    """Who needs a node's tensor. A size taken of it does not: sizes come from the call."""
    return (user for user in node.users if not is_size(user) and user.op != "output")


def _symbol_values(traced: Traced) -> dict[sympy.Symbol, torch.SymInt]:
    """A SymInt for every symbol, for the placeholders of the segments."""
    values: dict[sympy.Symbol, torch.SymInt] = {}
    for node in traced.inputs:
        value = torch_compat.meta_value(node)
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt) and isinstance(torch_compat.size_expr(size), sympy.Symbol):
                values.setdefault(torch_compat.size_expr(size), size)
    return values


def _build(
    traced: Traced,
    nodes: Sequence[torch.fx.Node],
    verdict: CutVerdict | None,
    outputs: tuple[torch.fx.Node, ...],
    symbol_values: dict[sympy.Symbol, torch.SymInt],
) -> Segment:
    """Copy a run of nodes into a graph of its own, with canonical names, so that equal layers are equal graphs."""
    external, symbols = _inputs_of(nodes)
    graph = torch.fx.Graph()
    root = torch.nn.Module()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    symbol_nodes: dict[sympy.Symbol, torch.fx.Node] = {}
    for index, symbol in enumerate(symbols):
        symbol_nodes[symbol] = graph.placeholder(f"size{index}")
        symbol_nodes[symbol].meta["example_value"] = symbol_values[symbol]
    for index, node in enumerate(external):
        copies[node] = graph.placeholder(f"input{index}")
        copies[node].meta = _portable_meta(node)

    def translate(arg: torch.fx.Node) -> Any:
        if arg in copies:
            return copies[arg]
        if arg.op == "get_attr":
            name = f"attr{len(copies)}"
            _set_attribute(root, name, attribute(traced.owner, arg))
            copies[arg] = graph.get_attr(name)
            return copies[arg]
        if is_stream_object(arg):
            copies[arg] = graph.call_function(arg.target, arg.args)  # type: ignore[arg-type]
            return copies[arg]
        value = torch_compat.meta_value(arg)
        sizes = tuple(torch_compat.emit_expr(graph, torch_compat.size_expr(v), symbol_nodes) for v in size_parts(value))
        return sizes if isinstance(value, torch.Size) else sizes[0]

    for node in nodes:
        args = torch.fx.map_arg(node.args, translate)
        kwargs = torch.fx.map_arg(node.kwargs, translate)
        copies[node] = graph.create_node(node.op, node.target, args, kwargs)
        copies[node].meta = _portable_meta(node)
    graph.output(tuple(copies[node] for node in outputs))
    inputs: tuple[torch.fx.Node | FromSize, ...] = (*map(FromSize, symbols), *external)
    return Segment(tuple(nodes), verdict, torch_compat.lazy_module(root, graph), inputs, outputs)


def _inputs_of(nodes: Sequence[torch.fx.Node]) -> tuple[list[torch.fx.Node], list[sympy.Symbol]]:
    """The values a run of nodes takes from outside, and the symbols in them and in the sizes it uses."""
    inside = set(nodes)
    external: dict[torch.fx.Node, None] = {}
    symbols: dict[sympy.Symbol, None] = {}
    for node in nodes:
        for arg in node.all_input_nodes:
            if arg in inside or arg.op == "get_attr" or is_stream_object(arg):
                continue
            if not is_size(arg):
                external[arg] = None
            for part in size_parts(torch_compat.meta_value(arg)):
                symbols |= dict.fromkeys(
                    s for s in torch_compat.free_symbols(part) if s not in torch_compat.unbacked_symbols(part)
                )
    return list(external), sorted(symbols, key=str)


def _portable_meta(node: torch.fx.Node) -> dict[str, Any]:
    meta = dict(node.meta)
    meta.pop("grapharg", None)  # holds the example tensor
    return meta


def _set_attribute(root: torch.nn.Module, name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        root.register_buffer(name, value)
    else:
        setattr(root, name, value)
