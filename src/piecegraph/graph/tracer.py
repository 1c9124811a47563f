"""Stage 1: a function and an example call in, one graph out.

Dynamo traces once, with no gradients and no graph breaks; afterwards nothing of Dynamo runs again. So everything its
generated code would do around the graph is written down here: where each graph input comes from (an argument, a
weight, a size) and where each part of the result comes from (the graph, an argument, a size, a view of an argument).
"""

from __future__ import annotations

import contextlib
import linecache
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.base.plan import SourceLine
from piecegraph.base.structure import Structure, attributes, flatten
from piecegraph.base.user_code import is_user_file
from piecegraph.errors import PiecegraphError, TraceError
from piecegraph.graph.example import Example
from piecegraph.graph.fx_nodes import writes_in_place
from piecegraph.graph.outside import OutsideValues
from piecegraph.graph.signature import Signature, dense_strides, is_constant, with_fixed
from piecegraph.graph.sizes import SizeRules
from piecegraph.graph.sources import Fixed, FromCall, FromGraph, FromSize, GraphInput, Update, Weight
from piecegraph.graph.views import InputView, StridedView, find_view

EAGER_OP_REASON = "a function marked with piecegraph.eager_op cannot be traced"
"""What such a function says when it is; see breakable.py."""

ResultLeaf = FromGraph | FromCall | FromSize | InputView | StridedView | Fixed


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
    updates: tuple[Update, ...]
    """Containers among the arguments that it changes; what they get is in the structure, behind the result."""
    sizes: SizeRules
    written_calls: tuple[int, ...]
    """Arguments the function writes to, as indices into ``signature.tensors``."""
    written_weights: tuple[Weight, ...]
    hidden_state: tuple[torch.Tensor, ...]
    """Memory that was there before the call and that ops write to without saying so."""
    layout_reader: str
    """The line that asks how tensors lie in memory; empty if none does."""
    devices: tuple[torch.device | None, ...]
    """Where each leaf of the result lies when the function itself runs, as far as that was seen."""
    outside: OutsideValues
    """What was read outside the call."""
    streams: Mapping[int, Any]
    """The streams and events the graph refers to by number."""
    left_out: tuple[str, ...] = ()
    """What the function does that changes no tensor and happens in no replay, with the lines."""

    @property
    def output_nodes(self) -> tuple[torch.fx.Node, ...]:
        """The nodes whose values the result needs, each once."""
        return tuple(dict.fromkeys(leaf.node for leaf in self.results if isinstance(leaf, (FromGraph, StridedView))))


def trace(function: Callable[..., Any], example: Example, weights: Mapping[str, torch.Tensor]) -> Traced:
    """Trace a function on an example call. Nothing is executed and nothing of the caller's is changed."""
    tensors = _stand_ins(example, weights)
    args, kwargs = example.with_tensors(tensors)
    capture = _capture(_traceable(function), args, kwargs)
    graph, owner = _graph_of(capture)
    inputs = _identify_inputs(graph, capture.example_inputs, tensors, weights)
    traced_sizes = _sizes_of_call(capture, inputs, tensors)
    fixed = _fixed_dims(example, traced_sizes)
    signature = with_fixed(example.signature, tuple(fixed))
    shapes = {leaf.name: leaf.shape for leaf in signature.tensors}
    if any(shapes[name][dim] != size for (name, dim), size in fixed.items()):
        # A size of 0 or 1 was traced as 2, and the model fixes it to that.
        return trace(function, replace(example, signature=signature), weights)
    code = _GeneratedCode(capture, graph, inputs, example)
    try:
        results, structure, updates = _identify_results(code, inputs, tensors)
    except PiecegraphError:
        raise
    except Exception as error:  # the code around the graph is the user's as much as the graph
        raise _trace_error(function, error) from error
    written = _written_placeholders(graph)
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
        layout_reader="",
        devices=(),
        outside=_outside_values(capture, inputs, weights),
        streams=capture.external_objects,
        left_out=capture.left_out,
    )


def _capture(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch_compat.DynamoCapture:
    try:
        with torch_compat.outside_inference():
            return torch_compat.dynamo_capture(function, args, kwargs)
    except Exception as error:
        # Tracing runs the user's code on fake tensors: whatever that raises is why it cannot be traced.
        raise _trace_error(function, error) from error


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


def _traceable(function: Callable[..., Any]) -> Callable[..., Any]:
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


def _outside_values(
    capture: torch_compat.DynamoCapture,
    inputs: Mapping[torch.fx.Node, GraphInput],
    weights: Mapping[str, torch.Tensor],
) -> OutsideValues:
    known = {id(tensor) for tensor in weights.values()}
    tensors = [
        name
        for name, source in zip(capture.sources, inputs.values(), strict=True)
        if isinstance(source, Weight) and name and id(source.tensor) not in known
    ]
    return OutsideValues(tensors, capture.constants, capture.scopes)


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
                    why=f"the model only works for {expr}",
                    hint="leave it out of dynamic_dims, or remove what fixes it (a reshape to a number, a weight)",
                )
            fixed[leaf.name, dim] = int(expr)
    return fixed


class _SizeMark(int):
    """Stands for a size in the dry run that shows the structure of the result."""


class _GeneratedCode:
    """The code that Dynamo generated around the graph, run with dummies for the graph's outputs."""

    def __init__(
        self,
        capture: torch_compat.DynamoCapture,
        graph: torch.fx.Graph,
        inputs: Mapping[torch.fx.Node, GraphInput],
        example: Example,
    ) -> None:
        outputs: list[Any] = list(graph.output_node().args[0])  # type: ignore[arg-type]
        # ``self.count += 1`` sets the buffer to what it is: a weight that was written to is its own dummy.
        weights = {_fake_place(n): source.tensor for n, source in inputs.items() if isinstance(source, Weight)}
        dummies = [weights.get(_fake_place(node)) if _is_written(node) else None for node in outputs]
        dummies = [_dummy(node) if dummy is None else dummy for node, dummy in zip(outputs, dummies, strict=True)]
        # The dummies are kept with their nodes: an id means nothing once its object is gone.
        self.nodes = {id(dummy): (dummy, node) for dummy, node in zip(dummies, outputs, strict=True)}
        self._touched = capture.touched
        self._example = example
        self._run = capture.run_bytecode(lambda *_: tuple(dummies))

    def dry_run(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, tuple[Update, ...]]:
        """The result, with a dummy for everything that comes out of the graph, and the changes of containers.

        If there are any, the result is a tuple, and what is added to each container is behind the result itself.
        """
        args, kwargs = self._example.with_tensors(tensors)
        _, values = self._example.binder.bind(args, kwargs)
        before = [(keys, container, _state(container)) for keys, container in _containers(values)][1:]
        with torch_compat.outside_inference(), _unchanged(self._touched):
            returned = self._run(*args, **kwargs)
        changed = [(keys, value, old) for keys, value, old in before if _changes(old, _state(value))]
        if not changed:
            return returned, ()
        names = self._example.signature.names
        updates = tuple(_update(names, keys, value, old, returned) for keys, value, old in changed)
        added = [_added(old, _state(value)) for _, value, old in changed]
        return (None if any(update.is_result for update in updates) else returned, *added), updates

    def at_other_sizes(self, tensors: Sequence[torch.Tensor], made: _MadeObjects) -> list[Any]:
        """The leaves of the result in a call that is larger in every size."""
        larger = []
        for tensor, leaf in zip(tensors, self._example.signature.tensors, strict=True):
            moving = {dim for dim, _ in leaf.dynamic}
            shape = [size + 1 if dim in moving else size for dim, size in enumerate(tensor.shape)]
            larger.append(torch.empty(shape, dtype=tensor.dtype, device="meta") if moving else tensor)
        return flatten(self.dry_run(larger)[0], is_container=lambda value: not made.is_older(value))[0]

    def view_of(self, index: int, tensors: Sequence[torch.Tensor], position: int, made: _MadeObjects) -> InputView:
        """A leaf of the result that the code itself makes of an argument: ``x.T`` is an attribute, and in no graph."""
        others = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]

        def apply(tensor: torch.Tensor) -> torch.Tensor:
            args, kwargs = self._example.with_tensors([*others[:index], tensor, *others[index + 1 :]])
            returned = self._run(*args, **kwargs)
            leaf: torch.Tensor = flatten(returned, is_container=lambda v: not made.is_older(v))[0][position]
            return leaf

        return InputView(FromCall(index), (), apply)


def _containers(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Everything in the arguments that can be changed, and the keys that lead there."""
    if isinstance(value, (dict, list)):
        yield keys, value
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, part in parts:
        yield from _containers(part, (*keys, key))


def _added(old: dict[Any, Any], new: dict[Any, Any]) -> dict[Any, Any]:
    return {key: new[key] for key in _changes(old, new) if key in new}


def _update(names: Sequence[str], keys: tuple[Any, ...], value: Any, old: dict[Any, Any], returned: Any) -> Update:
    """How a container among the arguments is changed. Refuses what cannot be done again at every call."""
    new = _state(value)
    is_result = returned is value
    is_inside = not is_result and any(part is value for part in _reachable(returned))
    is_appended = list(new)[: len(old)] == list(old) and all(new[key] is old[key] for key in old)
    if is_inside or (isinstance(value, list) and not is_appended):
        name = names[keys[0]] + "".join(f"[{key!r}]" for key in keys[1:])
        raise TraceError(
            "PG202",
            f"the function changes Python state: {name}",
            why="a list is changed other than at its end, or the result holds what is changed",
            hint="return what is new instead",
        )
    return Update(keys, tuple(key for key in old if key not in new), is_result)


class _MadeObjects:
    """Tells which objects in a result were made by the call: a cache is, with the tensors of that call, at every call.

    What another run returns, too, was there before.
    """

    def __init__(self, returned: Any, run_again: Callable[[], Any]) -> None:
        has_objects = any(attributes(leaf) is not None for leaf in flatten(returned)[0])
        self._before = {id(value): value for value in _reachable(run_again())} if has_objects else {}
        self._made: dict[int, Any] = {}

    def __call__(self, value: Any) -> bool:
        """Whether it is to be taken apart: once, so that no result holds two copies of an object, or ends in itself."""
        is_new = not self.is_older(value) and id(value) not in self._made
        self._made[id(value)] = value
        return is_new

    def is_older(self, value: Any) -> bool:
        return id(value) in self._before


def _reachable(value: Any) -> Iterator[Any]:
    """Everything in a value that has attributes, items or elements, each once."""
    waiting, seen = [value], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen or is_constant(value) or isinstance(value, torch.Tensor):
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value
        waiting += getattr(value, "__dict__", {}).values()


def _identify_results(
    code: _GeneratedCode, inputs: Mapping[torch.fx.Node, GraphInput], tensors: Sequence[torch.Tensor]
) -> tuple[tuple[ResultLeaf, ...], Structure, tuple[Update, ...]]:
    """See where each part of the result comes from."""
    returned, updates = code.dry_run(tensors)
    made = _MadeObjects(returned, lambda: code.dry_run(tensors)[0])
    leaves, paths, structure = flatten(returned, is_container=made)
    call_index = {id(tensor): i for i, tensor in enumerate(tensors)}
    by_storage = {torch_compat.storage_id(tensor): i for i, tensor in enumerate(tensors)}
    results: list[ResultLeaf] = []
    for position, (leaf, path) in enumerate(zip(leaves, paths, strict=True)):
        if id(leaf) in code.nodes:
            results.append(_graph_result(code.nodes[id(leaf)][1], inputs))
        elif id(leaf) in call_index:
            results.append(FromCall(call_index[id(leaf)]))
        elif isinstance(leaf, torch.Tensor) and torch_compat.storage_id(leaf) in by_storage:
            results.append(code.view_of(by_storage[torch_compat.storage_id(leaf)], tensors, position, made))
        elif isinstance(leaf, int) and leaf != code.at_other_sizes(tensors, made)[position]:
            raise TraceError(
                "PG204",
                "the result holds a size" + (f" in {path}" if path else ""),
                why="nothing else is computed from it, so it is read outside the graph",
                hint="dynamic_dims={} plans for every size by itself",
            )
        elif isinstance(leaf, torch.Tensor) or is_constant(leaf) or made.is_older(leaf):
            results.append(Fixed(leaf))
        else:
            raise TraceError(
                "PG204",
                f"the result holds a {type(leaf).__name__}" + (f" in {path}" if path else ""),
                why="only tensors, numbers, strings, None, containers of them, and objects that are nothing but their "
                "attributes and are there once, can be rebuilt without the function",
                hint="return its tensors instead",
            )
    return tuple(results), structure, updates


@contextlib.contextmanager
def _unchanged(touched: Mapping[str, Any]) -> Iterator[None]:
    """Undo what is done to Python objects inside, and refuse it. Setting something and setting it back is fine."""
    before = {name: _state(value) for name, value in touched.items()}
    try:
        yield
        changes = {name: _changes(before[name], _state(value)) for name, value in touched.items()}
    finally:
        for name, value in touched.items():
            _restore(value, before[name])
    for name, keys in changes.items():
        if keys or touched[name] is None:
            shown = name.replace("L['", "").replace("G['", "").replace("']", "")
            raise TraceError(
                "PG202",
                f"the function changes Python state: {shown}" + (f" ({', '.join(map(str, keys))})" if keys else ""),
                why="a replay runs no Python, so the change would happen only once",
                hint="keep the state in a tensor (register_buffer) and change it in place",
            )


def _changes(old: dict[Any, Any], new: dict[Any, Any]) -> list[Any]:
    def is_same(key: Any) -> bool:
        if key not in old or key not in new:
            return False
        return old[key] is new[key] or (is_constant(old[key]) and bool(old[key] == new[key]))

    return [key for key in {**old, **new} if not is_same(key)]


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


def _is_written(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and writes_in_place(node)


def _fake_place(node: Any) -> tuple[Any, ...] | None:
    """Where a tensor of the graph lies, and how; None for what is none."""
    fake = torch_compat.meta_value(node) if isinstance(node, torch.fx.Node) else None
    if not isinstance(fake, torch.Tensor) or fake.layout is not torch.strided:
        return None
    layout = (fake.storage_offset(), tuple(fake.shape), tuple(fake.stride()), torch_compat.reading(fake))
    return torch_compat.storage_id(fake), *map(str, layout)


def _dummy(node: Any) -> Any:
    value = torch_compat.meta_value(node) if isinstance(node, torch.fx.Node) else node
    if isinstance(value, torch.Tensor):
        dummy = torch.empty(0)
        dummy.item = _refuse_number  # type: ignore[method-assign] # how the code around the graph reads a float
        return dummy
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return _SizeMark(0)
    raise _number_from_data(type(value).__name__)


def _refuse_number() -> float:
    raise _number_from_data("float")


def _number_from_data(kind: str) -> TraceError:
    return TraceError("PG204", f"the result holds a {kind} computed from data", hint="return a tensor instead")


def _graph_result(node: Any, inputs: Mapping[torch.fx.Node, GraphInput]) -> ResultLeaf:
    if not isinstance(node, torch.fx.Node):
        return Fixed(node)
    value = torch_compat.meta_value(node)
    if isinstance(value, (int, torch.SymInt)):
        return FromGraph(node) if torch_compat.unbacked_symbols(value) else FromSize(torch_compat.size_expr(value))
    return find_view(node, inputs) or FromGraph(node)


def _written_placeholders(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Placeholders whose memory the graph writes: the fakes' version counters tell, or an op's schema."""
    placeholders = [
        n for n in graph.find_nodes(op="placeholder") if isinstance(torch_compat.meta_value(n), torch.Tensor)
    ]
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
