"""A trace as bytes, and the same trace in another process.

Written are the graph with what is known of each value, where each input and each part of the result comes from, and
what must be as it was. Not written is what belongs to the process: weights are found by their names, ops by theirs,
values outside the call by the expressions that lead to them, and the signature is that of the call at hand.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.base.describe import Describer, IndescribableError, describe_tensor
from piecegraph.graph.asked import Question
from piecegraph.graph.code_used import CodeUsed, UnknownCodeError, classes_at, code_used, first_changed
from piecegraph.graph.example import Example, sizes_of
from piecegraph.graph.fx_nodes import attribute
from piecegraph.graph.kept_graph import (
    KeptNode,
    NodeNumber,
    StaleTraceError,
    UnkeepableError,
    dump,
    keep_nodes,
    load,
    make_graph,
    node_numbers,
)
from piecegraph.graph.outside import OutsideValues
from piecegraph.graph.signature import Signature, is_constant, with_fixed
from piecegraph.graph.sizes import SizeGuards, SizeRules
from piecegraph.graph.sources import AttributeUpdate, Fixed, FromGraph, Weight
from piecegraph.graph.streams import is_stream_object, uses_streams
from piecegraph.graph.tracer import Traced, TraceOrigin, traceable
from piecegraph.graph.views import InputView, StridedView


@dataclass(frozen=True, slots=True)
class _KeptWeight:
    """A weight: a parameter or buffer of that name, or what an expression leads to."""

    name: str
    expression: str
    layout: str


@dataclass(frozen=True, slots=True)
class _KeptView:
    """An :class:`InputView`, with the graph that it applies."""

    source: Any
    symbols: tuple[Any, ...]
    nodes: tuple[KeptNode, ...]


@dataclass(frozen=True)
class _KeptTrace:
    """All that is written of a trace."""

    symbols: tuple[torch_compat.KeptSymbol, ...]
    nodes: tuple[KeptNode, ...]
    attributes: Mapping[str, Any]
    """What ``get_attr`` nodes name."""
    inputs: tuple[Any, ...]
    results: tuple[Any, ...]
    structure: Any
    updates: tuple[Any, ...]
    size_symbols: Mapping[Any, int]
    fixed: Mapping[tuple[str, int], int]
    written_calls: tuple[int, ...]
    written_weights: tuple[_KeptWeight, ...]
    outside_tensors: tuple[str, ...]
    outside_constants: Mapping[str, str]
    """Described."""
    imports: Mapping[str, str]
    code: tuple[CodeUsed, ...]
    ops: Mapping[str, str]
    """Those that are not torch's own, described."""
    questions: tuple[Question, ...]
    left_out: tuple[str, ...]


# --- writing


def dump_trace(traced: Traced, function: Callable[..., Any], weights: Mapping[str, torch.Tensor]) -> bytes:
    """Write a trace that was just made. Raises UnkeepableError."""
    if any(is_stream_object(node) or uses_streams(node) for node in traced.graph.nodes):
        raise UnkeepableError("it uses streams, which are objects of a process")
    if any(isinstance(update, AttributeUpdate) for update in traced.updates):
        raise UnkeepableError("it sets attributes of modules")
    try:
        used = code_used(traced.origin.code, traceable(function))
        return dump(_keep(traced, used, weights))
    except (UnkeepableError, UnknownCodeError, IndescribableError, pickle.PicklingError) as error:
        raise UnkeepableError(str(error)) from error
    except Exception as error:  # objects of others are asked for much, and may raise anything
        raise UnkeepableError(f"{type(error).__name__}: {error}") from error


def _keep(traced: Traced, used: tuple[CodeUsed, ...], weights: Mapping[str, torch.Tensor]) -> _KeptTrace:
    origin, numbers = traced.origin, node_numbers(traced.graph)
    names = _names_of(weights)
    sources = dict(zip(traced.inputs, origin.sources, strict=True))

    def keep_weight(weight: Weight) -> _KeptWeight:
        expression = next((sources[node] for node, source in traced.inputs.items() if source is weight), "")
        is_by_name = expression not in origin.outside_tensors  # a weight may be read by another name, too
        if id(weight.tensor) in names and is_by_name:
            return _KeptWeight(weight.name, "", describe_tensor(weight.tensor))
        if traced.outside.find(expression) is not weight.tensor:
            raise UnkeepableError(f"it reads a tensor that nothing leads to ({weight.name})")
        return _KeptWeight(weight.name, expression, describe_tensor(weight.tensor))

    def keep(value: Any) -> Any:
        if isinstance(value, Weight):
            return keep_weight(value)
        if isinstance(value, (FromGraph, StridedView)):
            return replace(value, node=NodeNumber(numbers[value.node]))  # type: ignore[arg-type]
        if isinstance(value, InputView):
            return _keep_view(value, keep(value.source))
        if isinstance(value, Fixed) and (isinstance(value.value, torch.Tensor) or not is_constant(value.value)):
            raise UnkeepableError(f"its result holds a {type(value.value).__name__} that was there before the call")
        return value

    return _KeptTrace(
        symbols=torch_compat.kept_symbols(traced.fake_mode),
        nodes=keep_nodes(traced.graph),
        attributes=_attributes(traced),
        inputs=tuple(map(keep, traced.inputs.values())),
        results=tuple(map(keep, traced.results)),
        structure=traced.structure,
        updates=traced.updates,
        size_symbols=dict(traced.sizes.symbols),
        fixed=dict(origin.fixed),
        written_calls=traced.written_calls,
        written_weights=tuple(map(keep_weight, traced.written_weights)),
        outside_tensors=origin.outside_tensors,
        outside_constants=_described(traced.outside),
        imports=dict(origin.imports),
        code=used,
        ops=_described_ops(n.target for n in traced.graph.nodes if n.op == "call_function"),
        questions=traced.questions,
        left_out=traced.left_out,
    )


def _names_of(weights: Mapping[str, torch.Tensor]) -> dict[int, str]:
    return {id(tensor): name for name, tensor in weights.items()}


def _keep_view(view: InputView, source: Any) -> _KeptView:
    chain = getattr(view.apply, "__self__", None)
    if not isinstance(chain, torch.fx.GraphModule):
        raise UnkeepableError("its result holds a view that is made outside the graph")
    return _KeptView(source, view.symbols, keep_nodes(chain.graph))


def _attributes(traced: Traced) -> dict[str, torch.Tensor]:
    """The tensors that the graph itself holds."""
    found: dict[str, torch.Tensor] = {}
    for node in traced.graph.find_nodes(op="get_attr"):
        value = attribute(traced.owner, node)
        if not isinstance(value, torch.Tensor) or "." in str(node.target):
            raise UnkeepableError(f"its graph holds a {type(value).__name__}")
        found[str(node.target)] = value.detach()
    return found


def _described(outside: OutsideValues) -> dict[str, str]:
    for name, value in outside.objects.items():
        raise UnkeepableError(f"nothing tells whether {name} is the same {type(value).__name__} in another process")
    describer, constants = Describer(), outside.constants
    # In a scope without a name is the code that makes a named tuple: of any other code there, no trace is kept.
    return {
        name: _described_value(describer, value, name)
        for name, value in constants.items()
        if torch_compat.UNNAMED_SCOPE not in name
    }


def _described_value(describer: Describer, value: Any, name: str) -> str:
    """Functions by their code: what they close over is described by names of its own."""
    code = getattr(value, "__code__", value)
    return describer.code(code) if isinstance(code, CodeType) else describer.text(value, name)


def _described_ops(targets: Iterable[Any]) -> dict[str, str]:
    """Schemas of ops, and the code behind them as far as it is Python."""
    found: dict[str, str] = {}
    for target in targets:
        name = torch_compat.kept_op_name(target)
        if name is not None and not name.startswith(("aten::", "prims::")):
            schema, functions = torch_compat.op_definition(target)
            found[name] = f"{schema} {Describer().text(functions, name)}"
    return found


# --- reading


def load_trace(
    data: bytes, function: Callable[..., Any], example: Example, weights: Mapping[str, torch.Tensor], guards: SizeGuards
) -> Traced:
    """A trace that :func:`dump_trace` wrote, for the function, the call and the weights that are there now.

    Args:
        guards: the conditions on sizes that compiling its pieces has added, and those of the trace.

    Raises:
        StaleTraceError: it was made for something else.
    """
    kept: _KeptTrace = load(data)
    _check_code(kept)
    scopes = torch_compat.outside_scopes(traceable(function), kept.imports, *example.with_tensors(example.tensors))
    outside = OutsideValues(kept.outside_tensors, tuple(kept.outside_constants), scopes)
    _check_outside(outside, kept.outside_constants)
    signature, world = _signature(example, kept.fixed), torch_compat.FakeWorld(kept.symbols)
    rules = SizeRules(kept.size_symbols, world.mode, guards)
    violated = rules.violated(sizes_of(signature, example))
    if violated is not None:
        raise StaleTraceError(f"{violated}, which is not so")
    graph, nodes = make_graph(kept.nodes, world)
    owner = torch.nn.Module()
    for name, value in kept.attributes.items():
        owner.register_buffer(name, value)
    finder = _Finder(weights, _names_of(weights), outside, nodes, world)
    return Traced(
        signature=signature,
        graph=graph,
        owner=owner,
        fake_mode=world.mode,
        inputs=dict(zip(graph.find_nodes(op="placeholder"), map(finder.find, kept.inputs), strict=True)),
        results=tuple(map(finder.find, kept.results)),
        structure=kept.structure,
        updates=kept.updates,
        sizes=rules,
        written_calls=kept.written_calls,
        written_weights=tuple(map(finder.find_weight, kept.written_weights)),
        hidden_state=(),
        layout_reader=None,
        devices=(),
        outside=outside,
        classes=classes_at((used.module, used.function) for used in kept.code),
        streams={},
        origin=TraceOrigin(),
        questions=kept.questions,
        left_out=kept.left_out,
    )


def _check_code(kept: _KeptTrace) -> None:
    """Whether what was traced is still what would run."""
    changed = first_changed(kept.code)
    if changed is not None:
        raise StaleTraceError(f"the code of {changed} is another")
    for name, text in kept.ops.items():
        if _described_ops([torch_compat.find_op(name)]) != {name: text}:
            raise StaleTraceError(f"the op {name} is another")


@dataclass(frozen=True)
class _Finder:
    """Puts what is there now in the place of what was written for it."""

    weights: Mapping[str, torch.Tensor]
    names: Mapping[int, str]
    """Of the weights, by the identity of the tensors."""
    outside: OutsideValues
    nodes: Sequence[torch.fx.Node]
    world: torch_compat.FakeWorld

    def find_weight(self, weight: _KeptWeight) -> Weight:
        found = self.outside.find(weight.expression) if weight.expression else self.weights.get(weight.name)
        if not isinstance(found, torch.Tensor) or describe_tensor(found) != weight.layout:
            raise StaleTraceError(f"{weight.name} is no {weight.layout} any more")
        # What an expression leads to may have been a weight, and be none now, or another one.
        return Weight(self.names.get(id(found), weight.expression) if weight.expression else weight.name, found)

    def find(self, value: Any) -> Any:
        if isinstance(value, _KeptWeight):
            return self.find_weight(value)
        if isinstance(value, (FromGraph, StridedView)):
            return replace(value, node=self.nodes[value.node.number])  # type: ignore[attr-defined]
        if isinstance(value, _KeptView):
            chain = torch.fx.GraphModule(torch.nn.Module(), make_graph(value.nodes, self.world)[0])
            return InputView(self.find(value.source), value.symbols, chain.forward)
        return value


def _signature(example: Example, fixed: Mapping[tuple[str, int], int]) -> Signature:
    signature = with_fixed(example.signature, tuple(fixed))
    shapes = {leaf.name: leaf.shape for leaf in signature.tensors}
    for (name, dim), size in fixed.items():
        if shapes[name][dim] != size:
            raise StaleTraceError(f"{name}.shape[{dim}] is {shapes[name][dim]}, and the model fixed it to {size}")
    return signature


def _check_outside(outside: OutsideValues, expected: Mapping[str, str]) -> None:
    describer, found = Describer(), outside.constants
    for name, text in expected.items():
        if name not in found or _described_value(describer, found[name], name) != text:
            raise StaleTraceError(f"{name} is not {text} any more")
