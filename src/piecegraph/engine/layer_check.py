"""Whether a function does the same with all of its equal layers, which a trace of some takes for granted.

Seen by running it, op by op, once as it is and once with the layers that are traced alone. No value is looked at: what
ops are called, in which order, with which of the tensors that came before. See Note [Equal layers] in
:mod:`piecegraph.graph.equal_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from piecegraph.base import torch_compat
from piecegraph.base.call_stack import calling_modules
from piecegraph.base.structure import each_once, flatten
from piecegraph.engine.eager_interception import ShownCalls
from piecegraph.engine.watch import place_of
from piecegraph.graph.equal_layers import LayerStack
from piecegraph.graph.signature import comparable, is_constant

Stubs = Mapping[Any, Sequence[int]]
"""Ops that return nothing and need not run, and which of their arguments are not compared."""


@dataclass(frozen=True)
class Layers:
    """Layers of which some are traced, and how their function can be run to see whether that is enough."""

    stack: LayerStack
    run: Callable[[Callable[..., Any]], object]
    """Runs a function as in the call that is traced, and leaves nothing changed."""
    stubs: Stubs = field(default_factory=dict)

    def are_alike(self) -> bool:
        """Whether the function does with every block of layers what it does with the second."""
        try:
            whole, some = (self._log(model) for model in (self.stack.model, self.stack.shortened()))
            return _are_alike(self.stack, whole, some)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001 - of the user's code, which is told when all layers are traced
            return False

    def _log(self, model: nn.Module) -> list[_Call]:
        log = _Log(self.stack.members, self.stubs)
        self.run(log.of(self.stack.function_of(model)))
        return log.calls


@dataclass(frozen=True)
class _Tensor:
    """A tensor by where it comes from."""

    made_by: int | None = None
    """The call that gave it, or wrote to it last."""
    layer: int | None = None
    """Whose it is."""
    name: Any = None


@dataclass(frozen=True)
class _Call:
    op: Any
    args: Any
    layer: int | None
    """In which it was called."""


class _Log:
    """The calls of one run."""

    def __init__(self, layers: Sequence[nn.Module], stubs: Stubs) -> None:
        self.calls: list[_Call] = []
        self._stubs = stubs
        self._numbers = {id(layer): number for number, layer in enumerate(layers)}
        self._tensors: dict[Any, _Tensor] = {}
        for number, layer in enumerate(layers):
            for path, module in layer.named_modules():
                for name, value in (vars(module) | module._parameters | module._buffers).items():
                    if isinstance(value, torch.Tensor):
                        self._tensors[_key(value)] = _Tensor(layer=number, name=(path, name))

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose calls are written down; and at last, what it returns."""

        def run(*args: Any, **kwargs: Any) -> Any:
            for number, leaf in enumerate(flatten((args, kwargs))[0]):
                if isinstance(leaf, torch.Tensor):
                    self._tensors[_key(leaf)] = _Tensor(name=number)
            with ShownCalls(self._run):
                returned = function(*args, **kwargs)
            leaves, _, structure = flatten(returned, is_container=each_once())
            self.calls.append(_Call("return", (structure, *map(self._describe, leaves)), None))
            return returned

        return run

    def _run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch_compat.is_op(function) and not torch_compat.is_higher_order(function):
            return function(*args, **kwargs)
        if torch_compat.is_made_of_data(function, args):
            described: Any = _data_of(args[0])
        else:
            unread = self._stubs.get(function, ())
            described = self._describe(([arg for place, arg in enumerate(args) if place not in unread], kwargs))
        layer = next((n for module in calling_modules() if (n := self._numbers.get(id(module))) is not None), None)
        index = len(self.calls)
        self.calls.append(_Call(function, described, layer))
        returned = None if function in self._stubs else function(*args, **kwargs)
        written = torch_compat.written_args(function, args, kwargs)
        for number, leaf in enumerate(flatten((returned, *written))[0]):
            if isinstance(leaf, torch.Tensor):
                self._tensors[_key(leaf)] = _Tensor(made_by=index, name=number)
        return returned

    def _describe(self, value: Any) -> Any:
        """An argument in words that can be compared."""
        if isinstance(value, torch.Tensor):
            key = _key(value)
            return self._tensors.get(key) or _Tensor(name=key)
        if isinstance(value, list | tuple):
            return type(value), *map(self._describe, value)
        if isinstance(value, dict):
            return dict, *((key, self._describe(each)) for key, each in value.items())
        return comparable(value) if is_constant(value) else (type(value), id(value))


def _key(tensor: torch.Tensor) -> Any:
    return place_of(tensor) if torch_compat.has_memory(tensor) else id(tensor)


def _data_of(tensor: torch.Tensor) -> Any:
    """Numbers of Python's that were made a tensor."""
    return tensor.dtype, tensor.shape, tensor.tolist()


def _are_alike(stack: LayerStack, whole: Sequence[_Call], some: Sequence[_Call]) -> bool:
    """Whether the one run is the other with the second block as often as there are blocks behind the first."""
    (start, _), second = _blocks(stack, some, 2)
    blocks = _blocks(stack, whole, (stack.num_layers - stack.num_head) // stack.block)
    if whole[: second[1]] != some[: second[1]]:
        return False
    pattern, behind = whole[slice(*second)], some[second[1] :]
    for number, block in enumerate(blocks[1:]):
        moved = _Moved(stack, start, number * len(pattern), number * stack.block)
        if whole[slice(*block)] != [moved.call(each) for each in pattern]:
            return False
    moved = _Moved(stack, start, len(whole) - len(some), 0)  # what is behind the layers has the same weights
    return whole[blocks[-1][1] :] == [moved.call(each) for each in behind]


def _blocks(stack: LayerStack, calls: Sequence[_Call], number: int) -> list[tuple[int, int]]:
    """Where the blocks of a run begin and end: each with what the loop calls between its layers and the next block's,
    the last one as long as the first.
    """
    starts: list[int] = []
    for place, call in enumerate(calls):
        if call.layer is not None and call.layer >= stack.num_head:
            block = (call.layer - stack.num_head) // stack.block
            starts += [place] * (block == len(starts))
            if block != len(starts) - 1:
                raise ValueError("blocks that do not follow each other")
    ends = [*starts[1:], starts[-1] + starts[1] - starts[0]]
    if len(starts) != number or ends[-1] > len(calls):
        raise ValueError("blocks that are not as long as others, or have no calls")
    return list(zip(starts, ends, strict=True))


@dataclass(frozen=True)
class _Moved:
    """What a call of the second block would be in a later one."""

    stack: LayerStack
    start: int
    """The first call of the first block: what was made before it is the same for all."""
    num_calls: int
    num_layers: int

    def call(self, call: _Call) -> _Call:
        layer = None if call.layer is None else call.layer + self.num_layers
        return _Call(call.op, self._args(call.args), layer)

    def _args(self, value: Any) -> Any:
        if isinstance(value, _Tensor):
            if value.made_by is not None and value.made_by >= self.start:
                return replace(value, made_by=value.made_by + self.num_calls)
            if value.layer is not None and value.layer >= self.stack.num_head:
                return replace(value, layer=value.layer + self.num_layers)
            return value
        return tuple(map(self._args, value)) if isinstance(value, tuple) else value
