"""Stage 1: a function and an example call in, one graph out.

Dynamo traces once, with no gradients and no graph breaks; afterwards nothing of Dynamo runs again. So everything its generated code
would do around the graph is written down here: where each graph input comes from (an argument, a weight, a size) and where each part of
the result comes from (the graph, an argument, a size, a view of an argument).
"""

from __future__ import annotations

import contextlib
import linecache
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from piecegraph import torch_compat
from piecegraph.dims import DimRequest, find_dynamic_dims
from piecegraph.errors import TraceError
from piecegraph.plan import Decision, SourceLine
from piecegraph.signature import Binder, Signature, is_constant, make_signature, with_fixed
from piecegraph.sizes import SizeRules
from piecegraph.sources import Fixed, FromCall, FromGraph, FromSize, GraphInput, Weight
from piecegraph.structure import Structure, flatten
from piecegraph.user_code import is_user_file
from piecegraph.views import InputView, find_view

ResultLeaf = FromGraph | FromCall | FromSize | InputView | Fixed


@dataclass(frozen=True)
class Traced:
    """A function as one graph."""

    signature: Signature
    graph: torch.fx.Graph
    owner: torch.nn.Module
    """Holds the attributes that ``get_attr`` nodes name."""
    fake_mode: Any
    inputs: Mapping[torch.fx.Node, GraphInput]
    """Where each placeholder comes from, in order."""
    results: tuple[ResultLeaf, ...]
    structure: Structure
    """Puts the result leaves together as the function returned them."""
    sizes: SizeRules
    written_calls: tuple[int, ...]
    """Arguments the function writes to, as indices into ``signature.tensors``."""
    written_weights: tuple[Weight, ...]
    streams: Mapping[int, Any]
    decisions: tuple[Decision, ...]

    @property
    def output_nodes(self) -> tuple[torch.fx.Node, ...]:
        """The nodes whose values the result needs, each once."""
        return tuple(dict.fromkeys(leaf.node for leaf in self.results if isinstance(leaf, FromGraph)))


def trace(
    function: Callable[..., Any],
    binder: Binder,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    weights: Mapping[str, torch.Tensor],
    dynamic_dims: Any,
    static_inputs: Sequence[str],
    training: bool | None,
) -> Traced:
    """Trace a function on an example call. Nothing is executed and nothing of the caller's is changed."""
    names, values = binder.bind(args, kwargs)
    leaves, paths, structure = flatten(tuple(values))
    paths = _root_names(names, values)
    requests, decision = find_dynamic_dims(function, leaves, paths, dynamic_dims)
    signature = make_signature(names, values, requests, static_inputs, training)
    stand_ins = _stand_ins(leaves, requests)
    trace_args, trace_kwargs = binder.unbind(args, kwargs, list(structure.build(iter(stand_ins))))
    capture = _capture(_traceable(function), trace_args, trace_kwargs)

    tensors = [leaf for leaf in stand_ins if isinstance(leaf, torch.Tensor)]
    graph, owner = _graph_of(capture)
    inputs = _identify_inputs(graph, capture.example_inputs, tensors, weights)
    by_leaf = {source.index: node for node, source in inputs.items() if isinstance(source, FromCall)}
    signature = with_fixed(signature, _fixed_dims(signature, by_leaf, requests))
    sizes = SizeRules.learn(signature, by_leaf, capture.fake_mode)
    results, result_structure = _identify_results(capture, graph, inputs, tensors, weights, trace_args, trace_kwargs)
    written = _written_placeholders(graph)
    return Traced(
        signature=signature,
        graph=graph,
        owner=owner,
        fake_mode=capture.fake_mode,
        inputs=inputs,
        results=results,
        structure=result_structure,
        sizes=sizes,
        written_calls=tuple(s.index for n, s in inputs.items() if n in written and isinstance(s, FromCall)),
        written_weights=tuple(s for n, s in inputs.items() if n in written and isinstance(s, Weight)),
        streams=capture.external_objects,
        decisions=(decision,),
    )


def _capture(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch_compat.DynamoCapture:
    try:
        with torch_compat.outside_inference():
            return torch_compat.dynamo_capture(function, args, kwargs)
    except Exception as error:
        # Tracing runs the user's code on fake tensors: whatever that raises is why it cannot be traced.
        raise _trace_error(function, error) from error


def _trace_error(function: Callable[..., Any], error: Exception) -> TraceError:
    lines, reason, hint = torch_compat.explain_dynamo_error(error)
    where = next((SourceLine(*line) for line in reversed(lines) if is_user_file(line[0])), None)
    return TraceError(
        "PG201",
        f"{_name(function)} cannot be traced",
        where=f"{where} `{linecache.getline(where.file, where.line).strip()}`" if where else "",
        why=reason,
        hint="; or ".join(filter(None, (hint.rstrip("."), 'use frontend="breakable", which runs the code as it is'))),
    )


def _traceable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo starts from a Python function of the user's: builtins, partials and torch's own functions are called from one."""
    if isinstance(function, (types.FunctionType, types.MethodType)) and is_user_file(function.__code__.co_filename):
        return function
    return lambda *args, **kwargs: function(*args, **kwargs)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _root_names(names: Sequence[str], values: Sequence[Any]) -> list[str]:
    return [path for name, value in zip(names, values, strict=True) for path in flatten(value, name)[1]]


def _stand_ins(leaves: Sequence[Any], requests: Sequence[DimRequest]) -> list[Any]:
    """Tensors to trace with: never the caller's own, so that no mark is left on them, and no dynamic size below two.

    Dynamo treats sizes 0 and 1 as constants. A size that was 0 or 1 in the example is traced as 2.
    """
    grown: dict[int, list[int]] = {}
    for request in requests:
        shape = grown.setdefault(request.leaf, list(leaves[request.leaf].shape))
        shape[request.dim] = max(2, shape[request.dim])
    stand_ins = list(leaves)
    with torch_compat.outside_inference():
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                is_same = grown.get(i, list(leaf.shape)) == list(leaf.shape)
                reusable = is_same and not leaf.is_inference() and leaf.is_contiguous()
                stand_ins[i] = leaf.detach() if reusable else _blank_like(leaf, grown.get(i, list(leaf.shape)))
        for request in requests:
            torch_compat.mark_dynamic(stand_ins[request.leaf], request.dim)
    return stand_ins


def _blank_like(leaf: torch.Tensor, shape: list[int]) -> torch.Tensor:
    if shape == list(leaf.shape):
        return torch.zeros_like(leaf)  # keeps a dense layout such as channels_last
    return torch.zeros(shape, dtype=leaf.dtype, device=leaf.device)


def _graph_of(capture: torch_compat.DynamoCapture) -> tuple[torch.fx.Graph, torch.nn.Module]:
    if capture.graph_module is not None:
        return capture.graph_module.graph, capture.graph_module
    empty = torch.fx.Graph()
    empty.output(())
    return empty, torch.nn.Module()


def _identify_inputs(
    graph: torch.fx.Graph,
    example_inputs: Sequence[Any],
    tensors: Sequence[torch.Tensor],
    weights: Mapping[str, torch.Tensor],
) -> dict[torch.fx.Node, GraphInput]:
    """Tell arguments, weights and sizes apart by the identity of the objects Dynamo saw."""
    call_index = {id(tensor): i for i, tensor in enumerate(tensors)}
    weight_name = {id(tensor): name for name, tensor in weights.items()}
    inputs: dict[torch.fx.Node, GraphInput] = {}
    for node, example in zip(graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        if isinstance(example, torch.Tensor):
            if id(example) in call_index:
                inputs[node] = FromCall(call_index[id(example)])
            else:
                inputs[node] = Weight(weight_name.get(id(example), str(node.target)), example)
        else:
            inputs[node] = FromSize(torch_compat.size_expr(torch_compat.meta_value(node)))
    return inputs


def _fixed_dims(signature: Signature, by_leaf: Mapping[int, torch.fx.Node], requests: Sequence[DimRequest]) -> list[tuple[str, int]]:
    """The requested dimensions that the model turned out to fix to one value. An error if they were asked for by name."""
    is_explicit = any(request.is_explicit for request in requests)
    fixed = []
    for index, leaf in enumerate(signature.tensors):
        for dim, _ in leaf.dynamic:
            if index not in by_leaf:
                continue
            expr = torch_compat.size_expr(torch_compat.meta_value(by_leaf[index]).shape[dim])
            if not expr.is_number:
                continue
            if is_explicit:
                raise TraceError(
                    "PG205",
                    f"{leaf.name}.shape[{dim}] cannot vary",
                    why=f"the model only works for {expr}",
                    hint="leave it out of dynamic_dims, or remove what fixes it (a reshape to a number, a weight of that size)",
                )
            fixed.append((leaf.name, dim))
    return fixed


class _SizeMark(int):
    """Stands for a size in the dry run that shows the structure of the result."""


def _identify_results(
    capture: torch_compat.DynamoCapture,
    graph: torch.fx.Graph,
    inputs: Mapping[torch.fx.Node, GraphInput],
    tensors: Sequence[torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[ResultLeaf, ...], Structure]:
    """Run Dynamo's generated code once around dummies for the graph's outputs, and see where each one ends up."""
    outputs = list(graph.output_node().args[0])  # type: ignore[arg-type]
    marks: list[Any] = [_mark(node) for node in outputs]
    with torch_compat.outside_inference(), _unchanged(capture.touched):
        returned = capture.run_bytecode(lambda *_: tuple(marks))(*args, **kwargs)
    leaves, paths, structure = flatten(returned)
    output_of = {id(mark): node for mark, node in zip(marks, outputs, strict=True)}
    call_index = {id(tensor): i for i, tensor in enumerate(tensors)}
    results: list[ResultLeaf] = []
    for leaf, path in zip(leaves, paths, strict=True):
        if id(leaf) in output_of:
            results.append(_graph_result(output_of[id(leaf)], inputs))
        elif id(leaf) in call_index:
            results.append(FromCall(call_index[id(leaf)]))
        elif isinstance(leaf, torch.Tensor) or is_constant(leaf):
            results.append(Fixed(leaf))
        else:
            raise TraceError(
                "PG204",
                f"the result holds a {type(leaf).__name__}" + (f" in {path}" if path else ""),
                why="only tensors, numbers, strings, None and containers of them can be rebuilt without running the function",
                hint="return its tensors instead; for a transformers model pass use_cache=False",
            )
    return tuple(results), structure


@contextlib.contextmanager
def _unchanged(touched: Mapping[str, Any]) -> Iterator[None]:
    """Refuse a function that leaves Python objects changed, and undo the changes. Setting something and setting it back is fine."""
    before = {name: _state(value) for name, value in touched.items()}
    yield
    for name, value in touched.items():
        old, new = before[name], _state(value)
        changed = [key for key in {**old, **new} if key not in old or key not in new or old[key] is not new[key]]
        if changed or value is None:
            for other in touched:
                _restore(touched[other], before[other])
            shown = name.replace("L['", "").replace("G['", "").replace("']", "")
            raise TraceError(
                "PG202",
                f"the function changes Python state: {shown}" + (f" ({', '.join(map(str, changed))})" if changed else ""),
                why="a replay runs no Python, so the change would happen only once",
                hint="keep the state in a tensor (register_buffer) and change it in place",
            )


def _state(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list):
        return dict(enumerate(value))
    return dict(getattr(value, "__dict__", {}))


def _restore(value: Any, state: dict[Any, Any]) -> None:
    if isinstance(value, dict):
        value.clear()
        value.update(state)
    elif isinstance(value, list):
        value[:] = state.values()
    elif hasattr(value, "__dict__"):
        value.__dict__.clear()
        value.__dict__.update(state)


def _mark(node: Any) -> Any:
    value = torch_compat.meta_value(node) if isinstance(node, torch.fx.Node) else node
    if isinstance(value, torch.Tensor):
        return torch.empty(0)
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return _SizeMark(0)
    raise TraceError("PG204", f"the result holds a {type(value).__name__} computed from data", hint="return a tensor instead")


def _graph_result(node: Any, inputs: Mapping[torch.fx.Node, GraphInput]) -> ResultLeaf:
    if not isinstance(node, torch.fx.Node):
        return Fixed(node)
    value = torch_compat.meta_value(node)
    if isinstance(value, (int, torch.SymInt)):
        return FromGraph(node) if torch_compat.unbacked_symbols(value) else FromSize(torch_compat.size_expr(value))
    return find_view(node, inputs) or FromGraph(node)


def _written_placeholders(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Placeholders whose memory the graph writes: seen in the version counters of the fakes, or declared by an op's schema."""
    placeholders = [n for n in graph.find_nodes(op="placeholder") if isinstance(torch_compat.meta_value(n), torch.Tensor)]
    written = {n for n in placeholders if torch_compat.meta_value(n)._version > 0}
    by_storage = {torch_compat.storage_id(torch_compat.meta_value(n)): n for n in placeholders}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        for value in torch_compat.written_args(node.target, node.args, node.kwargs):
            fake = torch_compat.meta_value(value) if isinstance(value, torch.fx.Node) else None
            if isinstance(fake, torch.Tensor) and torch_compat.storage_id(fake) in by_storage:
                written.add(by_storage[torch_compat.storage_id(fake)])
    return written
