"""Where each part of a function's result comes from, as the code tells that Dynamo generated around the graph.

That code is run with dummies for the graph's outputs. What it returns shows which part is an output, which an argument
or a view of one, which a constant, and which objects the call makes; what it does to Python objects is undone.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.base.structure import Structure, attributes, children, flatten
from piecegraph.errors import TraceError
from piecegraph.graph.example import Example
from piecegraph.graph.fx_nodes import writes_in_place
from piecegraph.graph.signature import is_constant, is_same_constant
from piecegraph.graph.sources import (
    AnyUpdate,
    AttributeUpdate,
    Fixed,
    FromCall,
    FromGraph,
    FromSize,
    GraphInput,
    Update,
    Weight,
)
from piecegraph.graph.views import InputView, StridedView, find_view

ResultLeaf = FromGraph | FromCall | FromSize | InputView | StridedView | Fixed

_BOOKS = frozenset(vars(torch.nn.Module()))
"""What torch keeps of every module: parameters, buffers, hooks, whether it is training."""
_NO_PART = r"(?<!_parameters\[)(?<!_buffers\[)(?<!_modules\[)"
"""Not behind the names of the tables in which modules have their parts: those are no attributes."""


_EARLIER: Any = object()
"""What an attribute was set to by a call before."""


class _SizeMark(int):
    """Stands for a size in the dry run that shows the structure of the result."""


class GeneratedCode:
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
        self._names = capture.names_in_code
        self._read = (*capture.sources, *capture.constants)
        self._calls_custom = any(node.op == "call_function" and _is_custom(node) for node in graph.nodes)
        self._example = example
        self._run = capture.run_bytecode(lambda *_: tuple(dummies))

    def dry_run(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, tuple[AnyUpdate, ...]]:
        """The result, with a dummy for everything that comes out of the graph, and what changes containers and modules.

        If anything does, the result is a tuple, and what is added to or set in each is behind the result itself.
        """
        args, kwargs = self._example.with_tensors(tensors)
        _, values = self._example.binder.bind(args, kwargs)
        before = [(keys, container, _held(container)) for keys, container in _containers(values)][1:]
        with torch_compat.outside_inference(), _undone(self._touched):
            states = {name: self._emptied(value) for name, value in self._touched.items()}
            returned = self._run(*args, **kwargs)
            kept = self._kept(states)
        changed = [(keys, value, old) for keys, value, old in before if _changes(old, _held(value))]
        if not changed and not kept:
            return returned, ()
        names = self._example.signature.names
        updates = tuple(_update(names, keys, value, old, returned) for keys, value, old in changed)
        added = [_added(old, _held(value)) for _, value, old in changed]
        is_result = any(update.is_result for update in updates)
        return (None if is_result else returned, *added, *kept.values()), (*updates, *kept)

    def _emptied(self, value: Any) -> dict[Any, Any]:
        """The state of an object, in which no module has the numbers and texts any more that a call will set: those of
        an earlier call may be the same by chance, and other calls would set others.
        """
        if isinstance(value, torch.nn.Module):
            held = vars(value)
            names = [name for name in self._names if self._is_only_set(name, held) and _is_number_or_text(held[name])]
            held.update(dict.fromkeys(names, _EARLIER))
        return _state(value)

    def _kept(self, states: Mapping[str, dict[Any, Any]]) -> dict[AttributeUpdate, dict[str, Any]]:
        """The attributes that modules have come to have, and what they are. Refuses other changes of Python objects."""
        kept: dict[AttributeUpdate, dict[str, Any]] = {}
        for name, value in self._touched.items():
            now = _state(value)
            keys = _changes(states[name], now)
            if not keys and value is not None:
                continue
            if not isinstance(value, torch.nn.Module) or not all(self._is_only_set(key, now) for key in keys):
                raise changes_state(_shown(name) + (f" ({', '.join(map(str, keys))})" if keys else ""))
            update = AttributeUpdate(value, _shown(name), tuple(keys))
            kept[update] = {key: now[key] for key in keys}
        return kept

    def _is_only_set(self, key: str, now: Mapping[str, Any]) -> bool:
        """Whether a call sets an attribute before anything reads it, of this module or of another. A custom op may read
        whatever it likes, and would do so before a replay sets anything.
        """
        is_read = re.compile(rf"(\.|{_NO_PART}['\"]){re.escape(key)}\b")
        is_plain = key in now and key not in _BOOKS and not self._calls_custom
        return is_plain and not any(map(is_read.search, self._read))

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
            returned, _ = self.dry_run([*others[:index], tensor, *others[index + 1 :]])
            leaf: torch.Tensor = flatten(returned, is_container=lambda v: not made.is_older(v))[0][position]
            return leaf

        return InputView(FromCall(index), (), apply)


def _is_number_or_text(value: Any) -> bool:
    return is_constant(value) and not callable(value)


def _containers(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Everything in the arguments that can be changed, and the keys that lead there."""
    held = _held(value)
    if isinstance(value, (dict, list)) or (held and not isinstance(value, tuple)):
        yield keys, value
    for key, part in held.items():
        yield from _containers(part, (*keys, key))


class _Attribute(str):
    """A key that is no item, but an attribute of an object."""

    __slots__ = ()


def _held(value: Any) -> dict[Any, Any]:
    """What a container among the arguments holds; nothing if it is none."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, torch.Tensor) or is_constant(value):
        return {}
    named = {**children(value), **getattr(value, "__dict__", {})}
    return {_Attribute(name.removeprefix(".")): part for name, part in named.items()}


def _added(old: dict[Any, Any], new: dict[Any, Any]) -> dict[Any, Any]:
    return {key: new[key] for key in _changes(old, new) if key in new}


def _update(names: Sequence[str], keys: tuple[Any, ...], value: Any, old: dict[Any, Any], returned: Any) -> Update:
    """How a container among the arguments is changed. Refuses what cannot be done again at every call."""
    new = _held(value)
    is_in_object = not isinstance(value, (dict, list)) or any(isinstance(key, _Attribute) for key in keys)
    is_result = returned is value
    is_inside = not is_result and any(part is value for part in _reachable(returned))
    is_appended = list(new)[: len(old)] == list(old) and all(new[key] is old[key] for key in old)
    if is_in_object or is_inside or (isinstance(value, list) and not is_appended):
        name = names[keys[0]] + "".join(f".{key}" if isinstance(key, _Attribute) else f"[{key!r}]" for key in keys[1:])
        raise TraceError(
            "PG202",
            f"the function changes Python state: {name}",
            why="an object is changed, or a list other than at its end, or the result holds what is changed",
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


def identify_results(
    code: GeneratedCode, inputs: Mapping[torch.fx.Node, GraphInput], tensors: Sequence[torch.Tensor]
) -> tuple[tuple[ResultLeaf, ...], Structure, tuple[AnyUpdate, ...]]:
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
def _undone(touched: Mapping[str, Any]) -> Iterator[None]:
    """Undo what is done to Python objects inside."""
    before = {name: _state(value) for name, value in touched.items()}
    try:
        yield
    finally:
        for name, value in touched.items():
            _restore(value, before[name])


def _shown(name: str) -> str:
    """What Dynamo calls an object, as a person would.

    >>> _shown("L['self']._modules['layers']._modules['0']"), _shown("G['model'].state")
    ('self.layers.0', 'model.state')
    """
    return re.sub(r"\._modules\['(\w+)'\]", r".\1", re.sub(r"^[LG]\['(\w+)'\]", r"\1", name))


def changes_state(what: str, or_else: str = "") -> TraceError:
    """The refusal of a function that changes something in Python at every call.

    Args:
        what: is changed.
        or_else: what else can be done about it.
    """
    return TraceError(
        "PG202",
        f"the function changes Python state: {what}",
        why="a replay runs no Python, so the change would happen only once",
        hint="keep the state in a tensor (register_buffer) and change it in place" + or_else,
    )


def _changes(old: dict[Any, Any], new: dict[Any, Any]) -> list[Any]:
    def is_same(key: Any) -> bool:
        if key not in old or key not in new:
            return False
        return old[key] is new[key] or (is_constant(old[key]) and is_same_constant(old[key], new[key]))

    return [key for key in {**old, **new} if not is_same(key)]


def _state(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, deque)):
        return dict(enumerate(value))
    if isinstance(value, set):
        return dict.fromkeys(value)
    return dict(getattr(value, "__dict__", {}))


def _restore(value: Any, state: dict[Any, Any]) -> None:
    if isinstance(value, dict):
        value.clear()
        value.update(state)
    elif isinstance(value, (list, deque)):
        value.clear()
        value.extend(state.values())
    elif isinstance(value, set):
        value.clear()
        value.update(state)
    elif isinstance(value, type):
        for name in _changes(state, _state(value)):
            setattr(value, name, state[name]) if name in state else delattr(value, name)
    elif hasattr(value, "__dict__"):
        for name in _changes(state, vars(value)):  # and nothing else: others may use it meanwhile
            if name in state:
                vars(value)[name] = state[name]
            else:
                del vars(value)[name]


def _is_custom(node: torch.fx.Node) -> bool:
    """Whether it calls an op that is not torch's own, and may be written in Python."""
    return torch_compat.qualified_name(node.target).partition("::")[0] not in ("", "aten", "prim", "prims")


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
