"""Stage 1: a function and an example call in, one graph out.

Dynamo traces once, with no gradients and no graph breaks; afterwards nothing of Dynamo runs again. So everything its
generated code would do around the graph is written down here: where each graph input comes from (an argument, a
weight, a size) and where each part of the result comes from (the graph, an argument, a size, a view of an argument).
"""

from __future__ import annotations

import linecache
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.base.plan import Decision, SourceLine
from piecegraph.base.structure import Structure
from piecegraph.base.user_code import is_user_file
from piecegraph.errors import PiecegraphError, TraceError
from piecegraph.graph.asked import Question, questions_in, reads_by_text
from piecegraph.graph.code_used import classes_at, places_of
from piecegraph.graph.equal_layers import LayerStack, expand
from piecegraph.graph.example import Example
from piecegraph.graph.outside import OutsideValues
from piecegraph.graph.results import GeneratedCode, ResultLeaf, identify_results
from piecegraph.graph.signature import LayoutReader, Signature, dense_strides, with_fixed
from piecegraph.graph.sizes import SizeRules
from piecegraph.graph.sources import AnyUpdate, FromCall, FromGraph, FromSize, GraphInput, Weight
from piecegraph.graph.views import StridedView

EAGER_OP_REASON = "a function marked with piecegraph.eager_op cannot be traced"
"""What such a function says when it is; see breakable.py."""


@dataclass(frozen=True)
class TraceOrigin:
    """What a trace was made of, for one that is to be kept for another process. Empty for one that was."""

    code: tuple[types.CodeType, ...] = ()
    """All Python that was read."""
    sources: tuple[str, ...] = ()
    """The expression that leads to each input."""
    outside_tensors: tuple[str, ...] = ()
    """The expressions among them for tensors that are neither of the call nor weights."""
    imports: Mapping[str, str] = field(default_factory=dict)
    """The modules that expressions name."""
    fixed: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """Dimensions of the call that the function has fixed, with their sizes."""


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
    updates: tuple[AnyUpdate, ...]
    """Containers among the arguments that it changes; what they get is in the structure, behind the result."""
    sizes: SizeRules
    written_calls: tuple[int, ...]
    """Arguments the function writes to, as indices into ``signature.tensors``."""
    written_weights: tuple[Weight, ...]
    hidden_state: tuple[torch.Tensor, ...]
    """Memory that was there before the call and that ops write to without saying so."""
    layout_reader: LayoutReader | None
    """What does something else if tensors lie otherwise in memory."""
    devices: tuple[torch.device | None, ...]
    """Where each leaf of the result lies when the function itself runs, as far as that was seen."""
    outside: OutsideValues
    """What was read outside the call."""
    classes: tuple[type, ...]
    """Whose methods were traced into."""
    streams: Mapping[int, Any]
    """The streams and events the graph refers to by number."""
    origin: TraceOrigin
    questions: tuple[Question, ...] = ()
    """What the function asks of its arguments: calls with other answers are not those of the graph."""
    left_out: tuple[str, ...] = ()
    """What the function does that changes no tensor and happens in no replay, with the lines."""
    decisions: tuple[Decision, ...] = ()

    @property
    def output_nodes(self) -> tuple[torch.fx.Node, ...]:
        """The nodes whose values the result needs, each once."""
        return tuple(dict.fromkeys(leaf.node for leaf in self.results if isinstance(leaf, (FromGraph, StridedView))))

    def copied(self) -> Traced:
        """The same with a graph that may be changed."""
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(self.graph, copies))
        inputs = {copies[node]: source for node, source in self.inputs.items()}
        results = tuple(
            replace(leaf, node=copies[leaf.node]) if isinstance(leaf, (FromGraph, StridedView)) else leaf
            for leaf in self.results
        )
        return replace(self, graph=graph, inputs=inputs, results=results)


def trace(
    function: Callable[..., Any],
    example: Example,
    weights: Mapping[str, torch.Tensor],
    stack: LayerStack | None = None,
) -> Traced:
    """Trace a function on an example call. Nothing is executed and nothing of the caller's is changed.

    Args:
        function: what is traced.
        example: the call.
        weights: tensors that are the function's own, by name.
        stack: layers of which only some need be traced, if there are any. See Note [Equal layers].
    """
    tensors = _stand_ins(example, weights)
    args, kwargs = example.with_tensors(tensors)
    expanded = None if stack is None else _capture_some(traceable(function), args, kwargs, stack)
    capture = expanded or _capture(traceable(function), args, kwargs)
    if reader := reads_by_text(capture.code):
        raise _trace_error(function, RuntimeError(f"{reader} calls globals(), and nothing would tell what it reads"))
    graph, owner = _graph_of(capture)
    inputs = _identify_inputs(graph, capture.example_inputs, tensors, weights)
    traced_sizes = _sizes_of_call(capture, inputs, tensors)
    fixed = _fixed_dims(example, traced_sizes)
    signature = with_fixed(example.signature, tuple(fixed))
    shapes = {leaf.name: leaf.shape for leaf in signature.tensors}
    if any(shapes[name][dim] != size for (name, dim), size in fixed.items()):
        # A size of 0 or 1 was traced as 2, and the model fixes it to that.
        again = trace(function, replace(example, signature=signature), weights, stack)
        own = {(name, dim): shapes[name][dim] for name, dim in fixed}
        return replace(again, origin=replace(again.origin, fixed={**own, **again.origin.fixed}))
    code = GeneratedCode(capture, graph, inputs, example)
    try:
        results, structure, updates = identify_results(code, inputs, tensors)
    except PiecegraphError:
        raise
    except Exception as error:  # the code around the graph is the user's as much as the graph
        raise _trace_error(function, error) from error
    written = _written_placeholders(graph, inputs)
    outside_tensors = _outside_tensors(capture, inputs, weights)
    outside = OutsideValues(outside_tensors, capture.constants, capture.scopes)
    _require_watched(function, outside_tensors, outside)
    return Traced(
        signature=signature,
        graph=graph,
        owner=owner,
        fake_mode=capture.fake_mode,
        inputs=inputs,
        results=results,
        structure=structure,
        updates=updates,
        sizes=SizeRules.learn(signature, traced_sizes, graph, capture.fake_mode),
        written_calls=tuple(s.index for n, s in inputs.items() if n in written and isinstance(s, FromCall)),
        written_weights=tuple(s for n, s in inputs.items() if n in written and isinstance(s, Weight)),
        hidden_state=(),
        layout_reader=None,
        devices=(),
        outside=outside,
        classes=classes_at(places_of(capture.code)),
        streams=capture.external_objects,
        origin=TraceOrigin(capture.code, capture.sources, outside_tensors, capture.imports, fixed),
        questions=questions_in(capture.code),
        left_out=capture.left_out,
        decisions=() if expanded is None or stack is None else (stack.decision,),
    )


def _capture(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch_compat.DynamoCapture:
    try:
        with torch_compat.outside_inference():
            return torch_compat.dynamo_capture(function, args, kwargs)
    except Exception as error:
        # Tracing runs the user's code on fake tensors: whatever that raises is why it cannot be traced.
        raise _trace_error(function, error) from error


def _capture_some(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], stack: LayerStack
) -> torch_compat.DynamoCapture | None:
    """All layers, of which a few were traced; None if they are not as equal as they look."""
    try:
        shortened = traceable(stack.function_of(stack.shortened()))
        with torch_compat.outside_inference():
            capture = torch_compat.dynamo_capture(function, args, kwargs, traced_as=shortened)
    except Exception:  # noqa: BLE001 - a loop may ask for a layer that is not there; if there is another reason, all tell
        return None
    return expand(capture, stack)


def _trace_error(function: Callable[..., Any], error: Exception) -> TraceError:
    if EAGER_OP_REASON in str(error):
        hint = 'declare it with torch.library.custom_op, or use frontend="breakable"'
        return TraceError("PG107", f"{_name(function)} calls an eager op", why=EAGER_OP_REASON, hint=hint)
    lines, reason, hint = torch_compat.explain_dynamo_error(error)
    where = next((SourceLine(*line) for line in reversed(lines) if is_user_file(line[0])), None)
    return TraceError(
        "PG201",
        f"{_name(function)} cannot be traced",
        where=f"{where} `{linecache.getline(where.file, where.line).strip()}`" if where else "",
        why=reason,
        hint="; or ".join(filter(None, (hint.rstrip("."), 'use frontend="breakable", which runs the code as it is'))),
        line=str(where or ""),
    )


def traceable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo starts from a Python function of the user's: builtins, partials and torch's own are called from one."""
    if isinstance(function, (types.FunctionType, types.MethodType)) and is_user_file(function.__code__.co_filename):
        return function
    return lambda *args, **kwargs: function(*args, **kwargs)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _stand_ins(example: Example, weights: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Tensors to trace with: never the caller's own, so that no mark is left on them, and laid out as the buffers are,
    which share no memory with each other or with a weight.

    Dynamo treats sizes 0 and 1 as constants, so a dynamic size that was 0 or 1 in the example is traced as 2.
    """
    stand_ins = []
    # The buffers of arguments do not share memory, even if the arguments of this call do.
    taken = {torch_compat.storage_id(w) for w in weights.values() if torch_compat.has_memory(w)}
    with torch_compat.outside_inference():
        for leaf, tensor in zip(example.signature.tensors, example.tensors, strict=True):
            moving = {dim for dim, _ in leaf.dynamic}
            shape = [max(2, size) if dim in moving else size for dim, size in enumerate(leaf.shape)]
            strides = dense_strides(shape, leaf.dim_order)
            is_laid_out = tuple(shape) == leaf.shape and tensor.stride() == strides and tensor.storage_offset() == 0
            if tensor.is_inference() or not is_laid_out or torch_compat.storage_id(tensor) in taken:
                tensor = torch.empty_strided(shape, strides, dtype=leaf.dtype, device=leaf.device).zero_()
            taken.add(torch_compat.storage_id(tensor))
            stand_ins.append(tensor.detach())
            for dim in moving:
                torch_compat.mark_dynamic(stand_ins[-1], dim)
    return stand_ins


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


def _outside_tensors(
    capture: torch_compat.DynamoCapture,
    inputs: Mapping[torch.fx.Node, GraphInput],
    weights: Mapping[str, torch.Tensor],
) -> tuple[str, ...]:
    """Tensors that are neither of the call nor read where the weights are: a weight may have another name, too, and
    that may come to be another tensor's.
    """
    return tuple(
        torch_compat.array_behind(name)
        for name, source in zip(capture.sources, inputs.values(), strict=True)
        if isinstance(source, Weight) and name and weights.get(_weight_name(name)) is not source.tensor
    )


def _require_watched(function: Callable[..., Any], names: Iterable[str], outside: OutsideValues) -> None:
    """A tensor to which only Dynamo can find the way may come to be another one, and nobody would see it."""
    lost = next((name for name in names if name not in outside.names), None)
    if lost is not None:
        raise _trace_error(function, RuntimeError(f"nothing would tell if {lost} came to be another tensor"))


def _weight_name(expression: str) -> str:
    """The name of a parameter or buffer of what is called; empty if an expression leads elsewhere.

    >>> _weight_name("L['self']._modules['0']._parameters['weight']"), _weight_name("G['scale']")
    ('0.weight', '')
    """
    found = _OF_MODULE.fullmatch(expression)
    return ".".join(_KEY.findall(found["path"])) if found else ""


_OF_MODULE = re.compile(r"L\['\w+'\](\.__self__)?(?P<path>(\._modules\['[^']*'\])*\._(parameters|buffers)\['[^']*'\])")
_KEY = re.compile(r"\['([^']*)'\]")


def _sizes_of_call(
    capture: torch_compat.DynamoCapture, inputs: Mapping[torch.fx.Node, GraphInput], tensors: Sequence[torch.Tensor]
) -> dict[tuple[int, int], Any]:
    """What each size became in the graph, by tensor of the call and dimension. One that the function never looked at is
    missing.
    """
    call_index = {id(tensor): i for i, tensor in enumerate(tensors)}
    sizes = {(call_index[id(tensor)], dim): size for tensor, dim, size in capture.sizes if id(tensor) in call_index}
    for node, source in inputs.items():
        if isinstance(source, FromCall):
            shape = torch_compat.meta_value(node).shape
            sizes |= {(source.index, dim): size for dim, size in enumerate(shape)}
    return sizes


def _fixed_dims(example: Example, traced_sizes: Mapping[tuple[int, int], Any]) -> dict[tuple[str, int], int]:
    """The dynamic dimensions that the model fixes to one value after all, with that value. An error if they were asked
    for by name.
    """
    is_explicit = any(request.is_explicit for request in example.requests)
    fixed: dict[tuple[str, int], int] = {}
    for index, leaf in enumerate(example.signature.tensors):
        for dim, _ in leaf.dynamic:
            if (index, dim) not in traced_sizes:
                continue
            expr = torch_compat.size_expr(traced_sizes[index, dim])
            if not expr.is_number:
                continue
            if is_explicit:
                raise TraceError(
                    "PG205",
                    f"{leaf.name}.shape[{dim}] cannot vary",
                    why=f"its trace holds for {expr} alone",
                    hint="leave it out of dynamic_dims, or remove what fixes it (a reshape to a number, a weight)",
                )
            fixed[leaf.name, dim] = int(expr)
    return fixed


def _is_newer(fake: torch.Tensor, source: GraphInput | None) -> bool:
    """Whether a fake was written to. Torch writes once to make that of a weight that begins inside its memory."""
    is_inside = isinstance(source, Weight) and not source.tensor._is_view() and source.tensor.storage_offset() > 0
    return fake._version > is_inside


def _written_placeholders(graph: torch.fx.Graph, inputs: Mapping[torch.fx.Node, GraphInput]) -> set[torch.fx.Node]:
    """Placeholders whose memory the graph writes: the fakes' version counters tell, or an op's schema."""
    placeholders = [
        n for n in graph.find_nodes(op="placeholder") if isinstance(torch_compat.meta_value(n), torch.Tensor)
    ]
    written = {n for n in placeholders if _is_newer(torch_compat.meta_value(n), inputs.get(n))}
    by_storage = {torch_compat.storage_id(torch_compat.meta_value(n)): n for n in placeholders}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        for value in torch_compat.written_args(node.target, node.args, node.kwargs):
            fake = torch_compat.meta_value(value) if isinstance(value, torch.fx.Node) else None
            if isinstance(fake, torch.Tensor) and torch_compat.storage_id(fake) in by_storage:
                written.add(by_storage[torch_compat.storage_id(fake)])
    return written
