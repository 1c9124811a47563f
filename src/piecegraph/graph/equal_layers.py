"""Layers that are equal are traced once.

Note [Equal layers]
~~~~~~~~~~~~~~~~~~~
Dynamo takes a third of a second for a layer, and a language model has some thirty that differ in nothing but their
weights. So two blocks of them are traced, and the graph of the second is written down again for all that follow:

    layers      0 1 2 | 3 4 | 5 6 | 7 8 | 9 10      here with a head of three, and a block of two
    traced      head   first second
    copied                          of the second

A block goes on behind its last layer with what the loop does there, ``x = x + layer(x).relu()``; the second is as long
as the first.

What makes this sound is what makes Dynamo's guards sound: its graph follows from the objects that it reads. A layer is
equal to another if both are of the same classes, with the same attributes, and every value in them is the same (of
weights, their layout); numbers may count the layers, as long as none of them was read. Lists of the configuration with
an element for each layer must repeat likewise, because the loop over the layers may read them. Then the two blocks that
were traced must have the same graph, in which the second takes from the first what the first takes from what is before
it; and nothing behind the blocks may read the first. Anything else, and all layers are traced. One thing is not seen:
that the loop itself counts, and does something else for a layer that was not traced. So the function is run op by op,
with all layers and with those that were traced: it must call the same ops for every block as for the second, with the
same constants and on the same tensors, counted from block to block, and the same behind them. Values tell less: zeros
and NaN stay what they are whatever is done to them, and not every kernel gives the same bits twice.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx
from torch import nn

from piecegraph.base import torch_compat
from piecegraph.base.plan import Decision
from piecegraph.graph.signature import is_constant, is_same_constant

_LONGEST_BLOCK = 8


def _forward_of(model: nn.Module) -> Callable[..., Any]:
    return model.forward


@dataclass(frozen=True)
class LayerStack:
    """A list of layers, of which the first few tell how all of them are."""

    model: nn.Module
    path: tuple[str, ...]
    """Of the list, in the model."""
    num_layers: int
    num_head: int
    """Layers before the blocks."""
    block: int
    """Layers of a block."""
    function_of: Callable[[nn.Module], Callable[..., Any]] = _forward_of
    """What is traced, of any model in the place of this one."""

    @property
    def owner(self) -> nn.Module:
        """The module that has the list."""
        return self.model.get_submodule(".".join(self.path[:-1]))

    @property
    def name(self) -> str:
        """Of the list, in its owner."""
        return self.path[-1]

    @property
    def members(self) -> tuple[nn.Module, ...]:
        """The layers."""
        return tuple(self.model.get_submodule(".".join(self.path)).children())

    @property
    def num_traced(self) -> int:
        return self.num_head + 2 * self.block

    @property
    def decision(self) -> Decision:
        why = "the others are equal to them but for their weights"
        return Decision("layers", f"{self.num_traced} of {self.num_layers} traced", why)

    def shortened(self) -> nn.Module:
        """A model with the layers that are traced alone. Only what leads to them is copied: the model itself is left
        as it is, because others may run it meanwhile.
        """
        model = owner = _copied(self.model)
        for name in self.path:
            child: Any = owner._modules[name]
            owner._modules[name] = owner = _copied(child)
        for name in list(owner._modules)[self.num_traced :]:
            del owner._modules[name]
        return model


def _copied(module: nn.Module) -> nn.Module:
    """Another module with the same attributes, whose list of modules may be changed."""
    copied = type(module).__new__(type(module))
    vars(copied).update(vars(module), _modules=dict(module._modules))
    return copied


def find_stack(
    model: nn.Module, function_of: Callable[[nn.Module], Callable[..., Any]] = _forward_of
) -> LayerStack | None:
    """The longest list of layers in a model, if it pays to trace only some of them."""
    lists = [
        (path, child)
        for path, child in model.named_modules()
        if type(child) in (nn.ModuleList, nn.Sequential)  # one of another class may do anything with its layers
        and path
        and list(child._modules) == [str(number) for number in range(len(child._modules))]
    ]
    if not lists:
        return None
    path, layers = max(lists, key=lambda found: len(found[1]._modules))
    owner, num_layers = model.get_submodule(path.rpartition(".")[0]), len(layers._modules)
    if len(set(map(id, layers.children()))) != num_layers:
        return None
    if _is_held(model, path):
        return None
    members = list(layers.children())
    found: LayerStack | None = None
    for block in range(1, min(_LONGEST_BLOCK, num_layers // 3) + 1):
        unlike = [i for i in range(num_layers - block) if not _are_equal(owner, members, i, i + block)]
        head = max(unlike, default=-1) + 1
        head += (num_layers - head) % block
        stack = LayerStack(model, tuple(path.split(".")), num_layers, head, block, function_of)
        if stack.num_traced + block <= num_layers and (found is None or stack.num_traced < found.num_traced):
            found = stack
    return found


def _is_held(model: nn.Module, path: str) -> bool:
    """Whether a module has another as its attribute that is copied for the trace: it would see the original."""
    names = path.split(".")
    copied = {id(model.get_submodule(".".join(names[:depth]))) for depth in range(len(names) + 1)}
    return any(id(value) in copied for module in model.modules() for value in vars(module).values())


def _are_equal(owner: nn.Module, layers: Sequence[nn.Module], first: int, second: int) -> bool:
    lists = [
        each
        for config in _configurations(getattr(owner, "config", None))
        for each in vars(config).values()
        if isinstance(each, list | tuple) and len(each) == len(layers)
    ]
    if any(each[first] != each[second] for each in lists):
        return False
    return _Comparison(second - first).is_same(layers[first], layers[second])


def _configurations(config: Any) -> Iterator[Any]:
    if hasattr(config, "__dict__"):
        yield config
        for value in vars(config).values():
            if type(value).__name__.endswith("Config"):
                yield value


class _Comparison:
    """Compares two layers by everything in them.

    Args:
        distance: of the two; numbers may differ by so much, which then count the layers.
    """

    def __init__(self, distance: int = 0) -> None:
        self._distance = distance
        self._compared: set[tuple[int, int]] = set()

    def is_same(self, one: Any, other: Any) -> bool:
        """Whether Dynamo would read the same from both."""
        if one is other:
            return True
        if type(one) is not type(other):
            return False
        if isinstance(one, torch.Tensor):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # of weights that are not there yet
                return _layout(one) == _layout(other)
            return False
        if isinstance(one, nn.Module):
            pair = id(one), id(other)
            is_known = pair in self._compared
            self._compared.add(pair)
            return is_known or self.is_same(vars(one), vars(other))
        if isinstance(one, dict):
            return list(one) == list(other) and all(self.is_same(one[key], other[key]) for key in one)
        if isinstance(one, list | tuple):
            return len(one) == len(other) and all(map(self.is_same, one, other))
        if isinstance(one, set | frozenset):
            return bool(one == other)
        if isinstance(one, functools.partial):
            return self.is_same((one.func, one.args, one.keywords), (other.func, other.args, other.keywords))
        if type(one) is int and other - one == self._distance:
            return True
        return is_constant(one) and is_same_constant(one, other)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    kind = tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad
    return tensor.shape, tensor.stride(), tensor.storage_offset(), *kind


def expand(capture: torch_compat.DynamoCapture, stack: LayerStack) -> torch_compat.DynamoCapture | None:
    """What Dynamo would have captured with all layers, from a capture of some; None if that does not follow from it."""
    try:
        return _Expansion(capture, stack).run()
    except Exception:  # noqa: BLE001 - besides the one below, what ops and tensors raise that are no plain ones
        return None


class _NotEqualError(Exception):
    """The graphs of two blocks are not the same, or more than that depends on them."""


def _require(condition: object) -> None:
    if not condition:
        raise _NotEqualError


class _Expansion:
    """Writes the graph of the second block down again."""

    def __init__(self, capture: torch_compat.DynamoCapture, stack: LayerStack) -> None:
        _require(capture.graph_module is not None)
        self._capture, self._stack = capture, stack
        self._graph: torch.fx.Graph = capture.graph_module.graph  # type: ignore[union-attr]
        self._in_expression = re.compile(rf"(?P<owner>.*?)\._modules\['{stack.name}'\]\._modules\['(?P<number>\d+)'\]")
        placeholders = self._graph.find_nodes(op="placeholder")
        self._behind_inputs = placeholders[-1].next
        self._sources = dict(zip(placeholders, capture.sources, strict=True))
        self._in_path = self._path_pattern()
        values = map(torch_compat.meta_value, placeholders)
        self._fake: Any = next(value for value in values if isinstance(value, torch.Tensor))
        """Of the mode of the trace: the capture's own is for what comes behind it."""
        first, self._second = self._find_blocks()
        self._first_places = {node: place for place, node in enumerate(first)}
        self._second_places = {node: place for place, node in enumerate(self._second)}
        self._values = _Values(self._second)
        self._compare(first)

    def _path_pattern(self) -> re.Pattern[str]:
        """Finds the number of a layer in what Dynamo tells of a node's modules."""
        found = [self._in_expression.match(source) for source in self._capture.sources]
        owners = list({each["owner"] for each in found if each})
        _require(len(owners) == 1 and self._find(owners[0]) is self._stack.owner)
        path = re.sub(r"\._modules\['(\w+)'\]", r".\1", owners[0])
        return re.compile(rf"(?P<owner>{re.escape(path)}\.{self._stack.name}[.\[])(?P<number>\d+)(?P<rest>.*)")

    def run(self) -> torch_compat.DynamoCapture:
        """The capture, with all layers in its graph."""
        stack, captured, behind = self._stack, self._capture, self._second[-1].next
        weights = [node for node in self._sources if self._number_of(self._sources[node]) in self._range(1)]
        constants = [name for name in captured.constants if self._number_of(name) in self._range(1)]
        inputs = dict(zip(self._sources.items(), captured.example_inputs, strict=True))
        known, latest, names = {id(tensor) for tensor in inputs.values()}, self._second, list(captured.constants)
        with torch_compat.outside_inference(), self._fake.fake_mode:
            for shift in range(stack.block, stack.num_layers - stack.num_head - stack.block, stack.block):
                moved = {node: self._move_weight(node, shift) for node in weights}
                added = {
                    (node, self._moved(self._sources[old], shift)): tensor for old, (node, tensor) in moved.items()
                }
                _require(not known & {id(tensor) for tensor in added.values()})
                inputs |= added
                _require(all(self._is_same(name, self._moved(name, shift)) for name in constants))
                names += [self._moved(name, shift) for name in constants]
                latest = self._copy(behind, latest, {old: node for old, (node, _) in moved.items()}, shift)
            self._continue(behind, latest)
        self._graph.lint()
        order = {node: place for place, node in enumerate(self._graph.nodes)}
        ordered = sorted(inputs, key=lambda item: order[item[0]])
        return replace(
            captured,
            sources=tuple(source for _, source in ordered),
            example_inputs=tuple(inputs[item] for item in ordered),
            constants=tuple(names),
        )

    def _range(self, block: int) -> range:
        """The layers of the first or the second block."""
        start = self._stack.num_head + block * self._stack.block
        return range(start, start + self._stack.block)

    def _number_of(self, expression: str) -> int | None:
        """The layer that an expression leads into."""
        found = self._in_expression.search(expression)
        return int(found["number"]) if found else None

    def _moved(self, expression: str, shift: int) -> str:
        """The expression for the same in a later layer."""
        found = self._in_expression.search(expression)
        assert found is not None, "only expressions of layers are moved"
        start, end = found.span("number")
        return f"{expression[:start]}{int(found['number']) + shift}{expression[end:]}"

    def _find(self, expression: str) -> Any:
        try:
            return eval(expression, dict(self._capture.scopes))
        except Exception:  # noqa: BLE001 - what only Dynamo can read
            return None

    def _is_same(self, one: str, other: str) -> bool:
        return _Comparison().is_same(self._find(one), self._find(other))

    def _find_blocks(self) -> tuple[list[torch.fx.Node], list[torch.fx.Node]]:
        """The nodes of the two blocks: from the first node of their first layer to that of the next block, with what
        the loop does between two layers. Behind the second it has done as much.
        """
        nodes = [node for node in self._graph.nodes if node.op not in ("placeholder", "output")]
        numbers = [self._layer_of(node) for node in nodes]
        inside = [number for number in numbers if number is not None]
        _require(inside == sorted(inside) and set(inside) == set(range(self._stack.num_traced)))
        starts = [numbers.index(self._range(block)[0]) for block in (0, 1)]
        end = 2 * starts[1] - starts[0]
        _require(end <= len(nodes) and set(numbers[end:]) <= {None})
        blocks = nodes[starts[0] : starts[1]], nodes[starts[1] : end]
        behind = {arg for node in (*nodes[end:], self._graph.output_node()) for arg in node.all_input_nodes}
        _require(not behind & set(blocks[0]))
        return blocks

    def _layer_of(self, node: torch.fx.Node) -> int | None:
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            if found := self._in_path.fullmatch(path):
                return int(found["number"])
        return None

    def _compare(self, first: Sequence[torch.fx.Node]) -> None:
        """Both blocks have the same graph; see Note [Equal layers]."""
        _require(len(first) == len(self._second))
        for one, other in zip(first, self._second, strict=True):
            _require(one.op == other.op and one.op != "get_attr" and one.target == other.target)
            _require(self._are_alike((one.args, one.kwargs), (other.args, other.kwargs)))

    def _are_alike(self, one: Any, other: Any) -> bool:
        if isinstance(one, torch.fx.Node) and isinstance(other, torch.fx.Node):
            return self._take_the_same(one, other)
        if type(one) is not type(other):
            return False
        if isinstance(one, dict):
            return one.keys() == other.keys() and all(self._are_alike(one[key], other[key]) for key in one)
        if isinstance(one, list | tuple):
            return len(one) == len(other) and all(map(self._are_alike, one, other))
        if isinstance(one, slice):
            return self._are_alike((one.start, one.stop, one.step), (other.start, other.stop, other.step))
        return bool(one is other or one == other)

    def _take_the_same(self, one: torch.fx.Node, other: torch.fx.Node) -> bool:
        """Whether an argument in the first block is what another is in the second."""
        if one in self._first_places or other in self._second_places:
            return self._first_places.get(one) == self._second_places.get(other)
        if other in self._first_places:  # carried on from block to block; the first takes it from before
            return True
        numbers = [self._number_of(self._sources.get(node, "")) for node in (one, other)]
        if None not in numbers and numbers[0] in self._range(0):
            return bool(self._moved(self._sources[one], self._stack.block) == self._sources[other])
        return one is other

    def _move_weight(self, node: torch.fx.Node, shift: int) -> tuple[torch.fx.Node, torch.Tensor]:
        """The input for the same weight of a later layer."""
        source = self._moved(self._sources[node], shift)
        old, tensor = self._find(self._sources[node]), self._find(source)
        _require(isinstance(tensor, torch.Tensor) and type(tensor) is type(old) and _layout(tensor) == _layout(old))
        fake = torch_compat.fake_like(tensor, self._fake)
        with self._graph.inserting_before(self._behind_inputs):
            copied = self._graph.placeholder(re.sub(r"\W+", "_", source))
        copied.meta = self._moved_meta(node, shift) | {"example_value": fake}
        return copied, tensor

    def _copy(
        self,
        behind: torch.fx.Node,
        latest: Sequence[torch.fx.Node],
        weights: Mapping[torch.fx.Node, torch.fx.Node],
        shift: int,
    ) -> list[torch.fx.Node]:
        """The second block once more, behind the latest."""
        copies: list[torch.fx.Node] = []

        def moved(arg: torch.fx.Node) -> torch.fx.Node:
            if arg in self._second_places:
                return copies[self._second_places[arg]]
            if arg in self._first_places:
                return latest[self._first_places[arg]]
            return weights.get(arg, arg)

        for place, node in enumerate(self._second):
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), moved)
            with self._graph.inserting_before(behind):
                copied = self._graph.create_node(node.op, node.target, args, kwargs)
            copied.meta = self._moved_meta(node, shift)
            if "example_value" in node.meta:
                copied.meta["example_value"] = self._values.make(place, node, copied, shift // self._stack.block)
            copies.append(copied)
        return copies

    def _continue(self, behind: torch.fx.Node, latest: Sequence[torch.fx.Node]) -> None:
        """What is behind the layers takes from the latest block what it took from the second."""
        stale = {storage for node in self._second for storage in _storages(node)}
        for node in _nodes_from(behind):
            for arg in node.all_input_nodes:
                if arg in self._second_places:
                    node.replace_input_with(arg, latest[self._second_places[arg]])
            if node.op != "output" and stale & _storages(node):  # a view of the second block
                node.meta["example_value"] = _run(node)

    def _moved_meta(self, node: torch.fx.Node, shift: int) -> dict[str, Any]:
        stack = {}
        for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
            found = self._in_path.fullmatch(path)
            name = path if found is None else f"{found['owner']}{int(found['number']) + shift}{found['rest']}"
            stack[key if found is None else f"{key}+{shift}"] = name, kind
        return {**node.meta, "nn_module_stack": stack} if stack else dict(node.meta)


def _nodes_from(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    while node.op != "root":
        yield node
        node = node.next


class _Values:
    """What the nodes of copies produce: as those of the second block, but no block shares memory with two before it.

    No piece reaches farther; and a fake tensor takes a millisecond to make, and there are thousands.

    Args:
        nodes: of the second block.
    """

    def __init__(self, nodes: Sequence[torch.fx.Node]) -> None:
        self._fresh: tuple[dict[int, Any], ...] = {}, {}, {}
        self._derived: dict[tuple[int, ...], tuple[Any, Any]] = {}
        for place, node in enumerate(nodes):
            self._fresh[0][place] = torch_compat.meta_value(node)

    def make(self, place: int, node: torch.fx.Node, copied: torch.fx.Node, number: int) -> Any:
        """The value of a copy of the node at a place of the second block; copies are numbered from one."""
        value = torch_compat.meta_value(node)
        if not isinstance(value, torch.Tensor | list | tuple):
            return value
        held = {storage for arg in node.all_input_nodes for storage in _storages(arg)}
        if isinstance(value, torch.Tensor) and torch_compat.storage_id(value) not in held:
            fresh = self._fresh[number % 3]
            if place not in fresh:
                fresh[place] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            return fresh[place]
        args = [torch_compat.meta_value(arg) for arg in copied.all_input_nodes]
        key = place, *map(id, args)
        if key not in self._derived:
            self._derived[key] = args, _run(copied)  # an id means nothing once its object is gone
        return self._derived[key][1]


def _storages(node: torch.fx.Node) -> set[int]:
    value = torch_compat.meta_value(node)
    values = value if isinstance(value, list | tuple) else (value,)
    return {torch_compat.storage_id(each) for each in values if isinstance(each, torch.Tensor)}


def _run(node: torch.fx.Node) -> Any:
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), torch_compat.meta_value)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]
