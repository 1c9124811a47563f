"""The stitched program: pieces and cuts as callables, and which values each one reads and writes.

It runs in two ways with the same code: plainly (compiled pieces without graphs), or under a recorder, which is handed
every step with its arguments and decides what to do with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from piecegraph.base.plan import Cut, Piece
from piecegraph.base.structure import map_arguments
from piecegraph.base.torch_compat import CompiledSource
from piecegraph.graph.sizes import SizeRules
from piecegraph.graph.sources import FromCall, FromSize, Weight


@dataclass(frozen=True, slots=True)
class Slot:
    """A value that one step produces and later ones read."""

    index: int


@dataclass(frozen=True, slots=True)
class StepSource:
    """What a step was made from."""

    module: torch.fx.GraphModule
    """The step's own graph, after passes. Steps that share compiled code have each their own."""
    compiled: CompiledSource | None = None
    """The source that runs; None if the graph itself does."""

    @property
    def calls(self) -> tuple[torch.fx.Node, ...]:
        """The nodes that compute something, in order."""
        return tuple(node for node in self.module.graph.nodes if node.op.startswith("call_"))


@dataclass(frozen=True)
class Step:
    """One piece or cut, ready to run."""

    label: Piece | Cut
    function: Callable[..., Any]
    args: tuple[Any, ...]
    """Constants, :class:`Slot` and :class:`FromSize`, nested as the op takes them."""
    kwargs: Mapping[str, Any]
    results: tuple[tuple[int, int | None], ...]
    """(slot, position in the returned tuple, or None for the whole return value)."""
    frees: tuple[int, ...]
    """Slots that no later step reads."""
    source: StepSource
    fresh_shapes: frozenset[int] = frozenset()
    """Result slots whose value or shape is read from data, so that it has no fixed address."""

    @property
    def is_captured(self) -> bool:
        return isinstance(self.label, Piece)


RunStep = Callable[[Step, tuple[Any, ...], dict[str, Any], list[Any]], Sequence[Any]]
"""Runs a step, given its arguments (slots not filled in) and the slots' values, and returns the value of each of its
result slots.
"""


def take(arguments: Any, values: Any) -> Any:
    """Nested arguments with every slot replaced by its value."""
    if type(arguments) is tuple:  # of a piece, nearly all are slots, and it has many
        return tuple([values[part.index] if type(part) is Slot else take(part, values) for part in arguments])
    return map_arguments(arguments, lambda atom: values[atom.index] if type(atom) is Slot else atom)


_watch: ContextVar[RunStep | None] = ContextVar("piecegraph_watch", default=None)


@contextlib.contextmanager
def watched_steps(run_step: RunStep) -> Iterator[None]:
    """Steps that would be run plainly go through ``run_step`` instead."""
    token = _watch.set(run_step)
    try:
        yield
    finally:
        _watch.reset(token)


def run_plainly(step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Any]) -> Sequence[Any]:
    """Call a step's function and nothing else."""
    watch = _watch.get()
    if watch is not None:
        return watch(step, args, kwargs, values)
    return _results(step, step.function(*take(args, values), **take(kwargs, values)))


def _results(step: Step, returned: Any) -> Sequence[Any]:
    return [returned if position is None else returned[position] for _, position in step.results]


@contextlib.contextmanager
def equal_pieces_once() -> Iterator[None]:
    """Equal pieces that would be run plainly run once: enough to load and tune the kernels of all of them.

    Those behind the first get its results, which are of the same shapes. Where a result is an index, the next cut may
    look something up with it that is another for every layer, so such pieces run.
    """
    known: dict[tuple[Any, ...], Sequence[Any]] = {}

    def run_step(step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Any]) -> Sequence[Any]:
        taken, named = take(args, values), take(kwargs, values)
        shapes = (each.shape if isinstance(each, torch.Tensor) else each for each in taken)
        key = (id(step.function), *shapes) if step.is_captured else ()
        if key in known:
            return known[key]
        results = _results(step, step.function(*taken, **named))
        if key and all(isinstance(each, torch.Tensor) and each.is_floating_point() for each in results):
            known[key] = results
        return results

    with watched_steps(run_step):
        yield


@dataclass(frozen=True)
class Program:
    """All steps of a graph, for any size."""

    inputs: Mapping[int, FromCall | Weight]
    """The source of each input slot."""
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    """The slots the caller gets."""
    num_slots: int
    sizes: SizeRules
    _at: dict[tuple[int, ...], BoundProgram] = field(default_factory=dict)

    def at(self, sizes: tuple[int, ...]) -> BoundProgram:
        """The program with every size expression worked out."""
        if sizes not in self._at:
            if len(self._at) > 4096:  # a server that sees every size: forget and work them out again
                self._at.clear()

            def fill(atom: Any) -> Any:
                return self.sizes.evaluate(atom.expr, sizes) if type(atom) is FromSize else atom

            steps = tuple((step, *map_arguments((step.args, dict(step.kwargs)), fill)) for step in self.steps)
            self._at[sizes] = BoundProgram(self.inputs, steps, self.outputs, self.num_slots)
        return self._at[sizes]


@dataclass(frozen=True)
class BoundProgram:
    """A program for one size. It does not hold the program, which holds it: weights go as soon as nobody holds both."""

    inputs: Mapping[int, FromCall | Weight]
    steps: tuple[tuple[Step, tuple[Any, ...], dict[str, Any]], ...]
    outputs: tuple[int, ...]
    num_slots: int

    def run(self, tensors: Sequence[torch.Tensor], run_step: RunStep = run_plainly) -> list[Any]:
        """Run every step in order on the call's tensors and return the outputs."""
        values: list[Any] = [None] * self.num_slots
        for slot, source in self.inputs.items():
            values[slot] = tensors[source.index] if isinstance(source, FromCall) else source.tensor
        for step, args, kwargs in self.steps:
            for (slot, _), value in zip(step.results, run_step(step, args, kwargs, values), strict=True):
                values[slot] = value
                del value  # or it would outlive the slot by one step, and its memory could not be reused
            for slot in step.frees:
                values[slot] = None
        return [values[slot] for slot in self.outputs]
