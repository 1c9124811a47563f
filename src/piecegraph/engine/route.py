"""Stage 5: how calls of one exact size are served.

A route is made once for each size that occurs and holds everything a call needs: where to copy the inputs, what to
run, where the results are. Serving a call touches no FX, no symbolic size and no guard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from piecegraph.base import torch_compat
from piecegraph.base.events import Event
from piecegraph.base.plan import SizeKey
from piecegraph.graph.signature import Binder, Call, TensorLeaf, is_dense
from piecegraph.graph.sources import AnyUpdate, Fixed, FromCall, FromSize
from piecegraph.tape.body import Body, FromOutput, Observed, ResultLeaf, SeenView
from piecegraph.tape.buffers import StaticInputs, conform, copy_as_it_lies, padded_parts, real_part
from piecegraph.tape.device import GraphDevice
from piecegraph.tape.tape import Addresses, DirectTape, Tape

MakeLeaf = Callable[[Sequence[Any], Sequence[torch.Tensor]], Any]
"""Makes one leaf of the result from the outputs and the call's tensors."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A call that the plan cannot serve: it runs eagerly."""

    event: Event


class Route(Protocol):
    """Serves calls of one size."""

    replays: bool
    """Whether it replays a tape."""
    loss: Event | None
    """What is lost by it."""

    def serve(self, call: Call) -> Any: ...


class TapeRoute:
    """Copies the inputs into the buffers of a recorded size, replays its tape, and cuts off the padding."""

    replays = True

    def __init__(
        self,
        body: Body,
        tape: Tape | DirectTape,
        key: SizeKey,
        sizes: tuple[int, ...],
        buffers: StaticInputs,
        *,
        clone: bool,
        device: GraphDevice | None,
        addresses: Addresses | None,
        loss: Event | None,
    ) -> None:
        self.loss = loss
        self._tape = tape
        self._buffers = buffers
        self._padded_by = object()
        """Stands for this route in the buffers, which do not hold what holds them."""
        self._device = device
        self._addresses = addresses
        views = buffers.views(key.values)
        copied = [i for i, leaf in enumerate(buffers.leaves) if leaf.address is None]
        self._copied = None if len(copied) == len(buffers.leaves) else tuple(copied)
        """Which of a call's tensors; None for all."""
        self._targets = [real_part(views[i], buffers.leaves[i], sizes) for i in copied]
        self._padding = [
            (part, buffers.pad_values[i]) for i in copied for part in padded_parts(views[i], buffers.leaves[i], sizes)
        ]
        self.is_padded = bool(self._padding)
        self._written = tuple((i, self._targets[copied.index(i)]) for i in body.written_calls if i in copied)
        self._keeps_all = clone or device is None
        """Otherwise a result of an earlier call is given up by this one, and its memory holds what is new."""
        self._leaves = [_leaf_maker(leaf, body, key.values, sizes, clone=clone) for leaf in body.leaves]
        self._structure = body.structure
        self._is_leaf = body.structure.is_leaf

    def serve(self, call: Call) -> Any:
        tensors = call.tensors
        if self._device is not None:
            self._device.use_caller_stream()
            if self._addresses is not None:
                for weight in next(self._addresses.turns):
                    tensor = weight.tensor
                    if tensor.data_ptr() != weight.address or tensor.stride() != weight.strides:
                        raise weight.moved()
        if self._targets:
            torch_compat.copy_all(
                self._targets, tensors if self._copied is None else [tensors[i] for i in self._copied]
            )
        if self._buffers.filled_by is not self._padded_by or self._written:
            for part, value in self._padding:
                part.fill_(value)
            self._buffers.filled_by = self._padded_by
        outputs = self._tape.run()
        for i, buffer in self._written:
            if self._keeps_all or not self._device.owns(tensors[i]):  # type: ignore[union-attr]
                tensors[i].copy_(buffer)
        if self._is_leaf:
            return self._leaves[0](outputs, tensors)
        return self._structure.build(iter([make(outputs, tensors) for make in self._leaves]))


class PiecesRoute:
    """Runs the compiled pieces on the caller's tensors, without graphs and without padding."""

    replays = False

    def __init__(
        self,
        body: Body,
        sizes: tuple[int, ...],
        leaves: Sequence[TensorLeaf],
        *,
        device: GraphDevice | None,
        loss: Event | None,
    ) -> None:
        self.loss = loss
        self._device = device
        self._body = body
        self._sizes = sizes
        self._inputs = tuple(leaves)
        self._leaves = [_leaf_maker(leaf, body, sizes, sizes, clone=False) for leaf in body.leaves]

    def serve(self, call: Call) -> Any:
        tensors = call.tensors
        if self._device is not None:
            self._device.use_caller_stream()
        conforming = [conform(tensor, leaf) for tensor, leaf in zip(tensors, self._inputs, strict=True)]
        outputs = self._body.run(conforming, self._sizes)
        for i in self._body.written_calls:
            if conforming[i] is not tensors[i]:
                tensors[i].copy_(conforming[i])
        return self._body.structure.build(iter([make(outputs, tensors) for make in self._leaves]))


class FunctionRoute:
    """Calls a function that is not traced on the caller's tensors, where nothing of it is recorded.

    It runs, so what it returns may depend on data: another branch, another view, another number. Nothing that was seen
    in an earlier run is taken for granted.
    """

    def __init__(
        self,
        call: Callable[[Sequence[torch.Tensor]], Any],
        *,
        replays: bool,
        device: GraphDevice | None,
        loss: Event | None,
    ) -> None:
        self.replays = replays
        self.loss = loss
        self._call = call
        self._device = device

    def serve(self, call: Call) -> Any:
        if self._device is not None:
            self._device.use_caller_stream()
        return self._call(call.tensors)


class UpdatingRoute:
    """Changes containers among the arguments, and attributes of modules, as the function would, with what another route
    computes.
    """

    def __init__(self, route: Route, updates: Sequence[AnyUpdate], binder: Binder) -> None:
        self.replays, self.loss = route.replays, route.loss
        self._route = route
        self._updates = updates
        self._binder = binder

    def serve(self, call: Call) -> Any:
        result, *added = self._route.serve(call)
        _, values = self._binder.bind(call.args, call.kwargs)
        for update, entries in zip(self._updates, added, strict=True):
            container = update.find(values)
            update.apply(container, entries)
            if update.is_result:
                result = container
        return result


def why_elsewhere(body: Body, tape: Tape) -> str:
    """Whether an op returns its results on another device when it is captured; some do."""
    for leaf, device in zip(body.leaves, body.devices, strict=False):
        recorded = tape.devices[leaf.index] if isinstance(leaf, FromOutput) else None
        if recorded is not None and device is not None and recorded != device:
            return f"a result is on {recorded} when captured, and on {device} when the function runs"
    return ""


def _leaf_maker(
    leaf: ResultLeaf, body: Body, recorded: tuple[int, ...], sizes: tuple[int, ...], *, clone: bool
) -> MakeLeaf:
    if isinstance(leaf, FromOutput):
        return _output_maker(leaf.index, body, recorded, sizes, clone=clone, is_state=leaf.is_state)
    if isinstance(leaf, Fixed):
        return lambda outputs, tensors: leaf.value
    if isinstance(leaf, FromCall):
        return lambda outputs, tensors: tensors[leaf.index]
    numbers = body.number(leaf, sizes)
    if isinstance(leaf, (FromSize, Observed)):
        return lambda outputs, tensors: numbers[0]
    if isinstance(leaf, SeenView):
        return _view_maker(leaf, numbers, _output_maker(leaf.index, body, recorded, sizes, clone=clone))
    source = leaf.source
    if isinstance(source, FromCall):
        return lambda outputs, tensors: leaf.apply(tensors[source.index], *numbers)
    return lambda outputs, tensors: leaf.apply(source.tensor, *numbers)


def _view_maker(leaf: SeenView, ops: Sequence[Callable[[torch.Tensor], torch.Tensor]], copy: MakeLeaf) -> MakeLeaf:
    def make(outputs: Sequence[Any], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        view = tensors[leaf.argument]
        try:
            for op in ops:
                view = op(view)
        except RuntimeError:  # it lies in memory as no view can be taken of: a reshape makes a copy then
            view = copy(outputs, tensors)
        return view

    return make if ops else copy


def _leaves_gaps(value: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether padding was cut out of the middle of memory: what is left lies otherwise than if there were none."""
    return not (value is whole or value.is_contiguous() or is_dense(value)) and is_dense(whole)


def _output_maker(
    index: int, body: Body, recorded: tuple[int, ...], sizes: tuple[int, ...], *, clone: bool, is_state: bool = False
) -> MakeLeaf:
    shape = body.output_shape(index, sizes)
    if shape is None:  # a number, or a shape read from data: made afresh by an eager step
        return lambda outputs, tensors: outputs[index]
    full = body.output_shape(index, recorded)
    assert full is not None
    cuts = [(dim, want) for dim, (have, want) in enumerate(zip(full, shape, strict=True)) if have != want]

    def make(outputs: Sequence[Any], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        whole: torch.Tensor = outputs[index]
        value = whole
        for dim, length in cuts:
            value = value.narrow(dim, 0, length)
        if is_state or not (clone or _leaves_gaps(value, whole)):
            return value
        return value.clone() if whole.is_contiguous() or is_dense(whole) else copy_as_it_lies(value)

    return make
