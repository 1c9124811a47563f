"""What a plan runs: the common face of the two front ends.

A body takes the call's tensors and sizes and gives a flat list of outputs; it can be run plainly or under a recorder.
Where each part of the function's result comes from, an output or something else, is written in ``leaves``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from piecegraph.base import torch_compat
from piecegraph.base.structure import Structure, atoms
from piecegraph.graph.asked import Question
from piecegraph.graph.fx_nodes import computes_with_sizes, op_name
from piecegraph.graph.indices import Indices, indices_of
from piecegraph.graph.program import Program, RunStep, Slot, run_plainly
from piecegraph.graph.results import ResultLeaf as TracedLeaf
from piecegraph.graph.signature import TensorLeaf, dense_strides
from piecegraph.graph.sources import AnyUpdate, Fixed, FromCall, FromGraph, FromSize, Weight
from piecegraph.graph.tracer import Traced
from piecegraph.graph.views import InputView, StridedView
from piecegraph.tape.record import Recorder
from piecegraph.tape.tape import WatchedWeight

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FromOutput:
    """One of the body's outputs."""

    index: int
    is_state: bool = False
    """Whether it lies in the module's own memory, and is given to the caller as it is."""


@dataclass(frozen=True, slots=True)
class Observed:
    """A leaf that is not a tensor, as it was when the function was run at the same size."""

    index: int


@dataclass(frozen=True, slots=True)
class SeenView:
    """One of the body's outputs that was a view of an argument when the function was run at the same size."""

    index: int
    argument: int


ResultLeaf = FromOutput | Observed | SeenView | FromCall | FromSize | InputView | Fixed


class Body(Protocol):
    """Something that can be run, and recorded, at any size."""

    @property
    def leaves(self) -> tuple[ResultLeaf, ...]:
        """Where each leaf of the result comes from."""

    @property
    def structure(self) -> Structure:
        """Puts the leaves of the result together."""

    @property
    def devices(self) -> tuple[torch.device | None, ...]:
        """Where each leaf lies when the function itself runs; empty if that is not known."""

    @property
    def updates(self) -> tuple[AnyUpdate, ...]:
        """Containers among the arguments that the function changes: what they get is behind the result."""

    @property
    def untraced(self) -> str:
        """Why the function was not traced, if that was tried."""

    @property
    def questions(self) -> tuple[Question, ...]:
        """What the function asks of its arguments, as far as it is known."""

    @property
    def written_calls(self) -> tuple[int, ...]:
        """Arguments the function writes to."""

    @property
    def written_state(self) -> tuple[torch.Tensor, ...]:
        """Weights, buffers and globals the function writes to."""

    def run(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> list[Any]:
        """Run without recording."""

    def record(self, recorder: Recorder, tensors: Sequence[torch.Tensor], sizes: Sizes) -> list[Any]:
        """Run under a recorder; returns the outputs as the tape keeps them."""

    def output_shape(self, index: int, sizes: Sizes) -> tuple[int, ...] | None:
        """The shape of an output at a size; None if it is not known before the run."""

    def reads_rows(self, index: int) -> bool:
        """Whether an output may be made of arguments with a size."""

    @property
    def indices(self) -> Indices:
        """Which arguments hold numbers that may become indices."""

    def decision_by_rows(self, recorded: Sizes, sizes: Sizes) -> str:
        """What of all rows together decides something inside, at a recorded size as at another; empty if nothing does.

        Both sizes were learned. See Note [Padding].
        """

    def number(self, leaf: FromSize | InputView | Observed | SeenView, sizes: Sizes) -> tuple[Any, ...]:
        """What a leaf needs at a size: its own value, or what its view is made with."""

    def learn(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> None:
        """Called before a new size is served, with a call of that size."""

    def check_writes(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> None:
        """Called before a size is first run. Raises if it writes to memory that others did not write to."""

    def reads_data(self, sizes: Sizes) -> bool:
        """Whether what runs at a size that was learned depends on data, which Python reads. See Note [Paths]."""

    def violated(self, sizes: Sizes) -> str | None:
        """Why the body is not valid for these sizes, or None."""

    def weights(self) -> list[WatchedWeight]:
        """The weights that graphs read by address."""


class TracedBody:
    """A traced, split and lowered function."""

    def __init__(
        self, traced: Traced, program: Program, current_weight: Callable[[str, torch.Tensor], torch.Tensor]
    ) -> None:
        self.traced = traced
        self._program = program
        self._current_weight = current_weight
        self._output_nodes = traced.output_nodes
        self._strided = {
            self._output_nodes.index(leaf.node): leaf for leaf in traced.results if isinstance(leaf, StridedView)
        }
        self.leaves: tuple[ResultLeaf, ...] = tuple(map(self._leaf, traced.results))
        self.structure = traced.structure
        self.devices = traced.devices
        self.updates = traced.updates
        self.untraced = ""
        self.questions = traced.questions
        self.written_calls = traced.written_calls
        self.written_state = (*(weight.tensor for weight in traced.written_weights), *traced.hidden_state)

    def _leaf(self, leaf: TracedLeaf) -> ResultLeaf:
        if isinstance(leaf, FromGraph):
            return FromOutput(self._output_nodes.index(leaf.node))
        if isinstance(leaf, StridedView):
            return SeenView(self._output_nodes.index(leaf.node), leaf.argument)
        return leaf

    def run(self, tensors: Sequence[torch.Tensor], sizes: Sizes, run_step: RunStep = run_plainly) -> list[Any]:
        return self._program.at(sizes).run(tensors, run_step)

    def record(self, recorder: Recorder, tensors: Sequence[torch.Tensor], sizes: Sizes) -> list[Any]:
        outputs = self.run(tensors, sizes, recorder.run_step)
        return recorder.outputs(outputs, self._program.outputs)

    def output_shape(self, index: int, sizes: Sizes) -> tuple[int, ...] | None:
        value = torch_compat.meta_value(self._output_nodes[index])
        return self._shape(value, sizes) if isinstance(value, torch.Tensor) else None

    def learn(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> None:
        """Everything is in the graph already."""

    def check_writes(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> None:
        """One graph serves every size."""

    def reads_data(self, sizes: Sizes) -> bool:
        return False

    def reads_rows(self, index: int) -> bool:
        return self._is_made_of_rows(self._output_nodes[index])

    @functools.cached_property
    def indices(self) -> Indices:
        sources = self.traced.inputs.items()
        inputs = {node: source.index for node, source in sources if isinstance(source, FromCall)}
        return indices_of(self.traced.graph, inputs)

    def decision_by_rows(self, recorded: Sizes, sizes: Sizes) -> str:
        padded = {i for i, (large, small) in enumerate(zip(recorded, sizes, strict=True)) if large != small}
        rows, truths, pure = set[torch.fx.Node](), set[torch.fx.Node](), set[torch.fx.Node]()
        for node in self.traced.graph.nodes:
            source, value = self.traced.inputs.get(node), torch_compat.meta_value(node)
            leaf = self.traced.signature.tensors[source.index] if isinstance(source, FromCall) else None
            if (leaf is None or not has_rows(leaf, padded)) and rows.isdisjoint(node.all_input_nodes):
                continue
            if torch_compat.chooses_by_data(node.target):
                return op_name(node)
            given = rows.intersection(node.all_input_nodes)
            rows.add(node)
            if is_truth(value) or not truths.isdisjoint(given):
                truths.add(node)
                if is_truth(value) or given <= pure:
                    pure.add(node)
                if is_blind(value, is_pure=node in pure) and self._is_as_large(value, recorded, sizes):
                    return op_name(node)
        return ""

    @functools.cached_property
    def computes_with_sizes(self) -> bool:
        """Whether numbers may be made of how many rows there are, or of rows in groups. See Note [Padding]."""
        nodes = self.traced.graph.nodes
        return any(map(computes_with_sizes, nodes)) or torch_compat.is_any_rounded(map(torch_compat.meta_value, nodes))

    def _is_as_large(self, value: torch.Tensor, recorded: Sizes, sizes: Sizes) -> bool:
        shape = self._shape(value, sizes)
        return shape is not None and shape == self._shape(value, recorded)

    def _shape(self, value: torch.Tensor, sizes: Sizes) -> tuple[int, ...] | None:
        """The shape of a traced value at a size; None if it is read from data."""
        if torch_compat.unbacked_symbols(value):
            return None
        return tuple(self.traced.sizes.evaluate(torch_compat.size_expr(size), sizes) for size in value.shape)

    def _is_made_of_rows(self, node: torch.fx.Node) -> bool:
        if self.written_calls or self.written_state:
            return True  # what is written may be read without the graph's saying so
        waiting, seen = [node], set[torch.fx.Node]()
        while waiting:
            node = waiting.pop()
            source = self.traced.inputs.get(node)
            if isinstance(source, FromCall) and self.traced.signature.tensors[source.index].dynamic:
                return True
            waiting += [each for each in node.all_input_nodes if each not in seen]
            seen.update(node.all_input_nodes)
        return False

    def number(self, leaf: FromSize | InputView | Observed | SeenView, sizes: Sizes) -> tuple[Any, ...]:
        if isinstance(leaf, SeenView):
            return (self._take_strided(self._strided[leaf.index], sizes),)
        assert isinstance(leaf, (FromSize, InputView)), leaf
        exprs = (leaf.expr,) if isinstance(leaf, FromSize) else leaf.symbols
        return tuple(self.traced.sizes.evaluate(expr, sizes) for expr in exprs)

    def _take_strided(self, view: StridedView, sizes: Sizes) -> Callable[[torch.Tensor], torch.Tensor]:
        if view.is_whole:
            return torch_compat.alias

        def evaluate(exprs: Sequence[Any]) -> tuple[int, ...]:
            return tuple(self.traced.sizes.evaluate(expr, sizes) for expr in exprs)

        shape, strides, (offset,) = evaluate(view.shape), evaluate(view.strides), evaluate((view.offset,))
        dim_order = self.traced.signature.tensors[view.argument].dim_order

        def take(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.stride() != dense_strides(tensor.shape, dim_order):
                raise RuntimeError("it does not lie as its buffer does")
            return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)

        return take

    def violated(self, sizes: Sizes) -> str | None:
        return self.traced.sizes.violated(sizes)

    def weights(self) -> list[WatchedWeight]:
        return [watch_weight(part, reader, self._current_weight) for part, reader in self._read_weights]

    @functools.cached_property
    def _read_weights(self) -> list[tuple[Weight, str]]:
        """Those that graphs read, with the first piece that does."""
        readers: dict[int, str] = {}
        for step in self._program.steps:
            if step.is_captured:  # an eager op is handed the tensor itself, wherever it lies
                for slot in (atom.index for atom in atoms(step.args) if type(atom) is Slot):
                    readers.setdefault(slot, str(step.label))
        return [
            (part, readers[slot])
            for slot, source in self._program.inputs.items()
            if isinstance(source, Weight) and slot in readers
            for part in source.parts or (source,)
        ]


def watch_weight(weight: Weight, reader: str, current: Callable[[str, torch.Tensor], torch.Tensor]) -> WatchedWeight:
    """A weight that must stay where it is, and how to find out where it is now."""
    tensor = weight.tensor
    found, address = lambda: current(weight.name, tensor), tensor.data_ptr()
    return WatchedWeight(weight.name, tensor, found, address, tensor.stride(), reader)


def has_rows(leaf: TensorLeaf, numbers: Collection[int]) -> bool:
    """Whether an argument has one of some sizes."""
    return any(size in numbers for _, size in leaf.dynamic)


def is_truth(value: Any) -> bool:
    """Whether a value is a tensor of truth values: NaN would not show in it."""
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


def is_blind(value: Any, *, is_pure: bool) -> bool:
    """Whether a value that is made of truth values is a tensor that NaN in rows would not show in.

    Args:
        is_pure: whether all that it is made of rows by are truth values.
    """
    return isinstance(value, torch.Tensor) and (is_pure or not (value.is_floating_point() or value.is_complex()))


def can_cut(body: Body, recorded: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether every result of a call is the beginning of the recorded size's result."""
    for leaf in body.leaves:
        if isinstance(leaf, FromOutput | SeenView):
            have, want = body.output_shape(leaf.index, recorded), body.output_shape(leaf.index, sizes)
            if (
                have is not None
                and want is not None
                and (len(have) != len(want) or any(h < w for h, w in zip(have, want, strict=True)))
            ):
                return False
    return True
