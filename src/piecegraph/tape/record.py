"""Stage 4: a program (or any Python) and a size in, a tape out.

The recorder runs the body once. Captured work goes into graphs; at a cut the graph under way ends, the op runs
eagerly, and the next graph begins. What an op returns afresh is copied into memory of the pool, because the next
graph will look for it there at every replay. Each graph is replayed as soon as it is captured: capturing executes
nothing, and the next eager op needs data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from piecegraph.base import torch_compat
from piecegraph.base.call_stack import stacks_from_here
from piecegraph.base.events import Event, EventLog
from piecegraph.base.origin import GraphNode, GraphRecord, LaunchCall
from piecegraph.base.plan import Cut, Piece
from piecegraph.base.structure import atoms, map_arguments
from piecegraph.errors import located
from piecegraph.graph.program import Slot, Step, take
from piecegraph.tape.device import GraphDevice
from piecegraph.tape.tape import EagerStep, GraphStep, Inside, Position


class CaptureLedger(Protocol):
    """Writes down who puts what into the graphs of a recording."""

    def start_graph(self) -> None:
        """A new graph begins."""

    def finish_graph(self, title: str, phase: str) -> Callable[[Sequence[GraphNode]], GraphRecord]:
        """What makes a record of the graph that was captured, given its nodes."""

    def run_step(self, step: Step, args: tuple[Any, ...]) -> Any:
        """Run a piece, and write down who launches what in it."""

    def observing(self) -> contextlib.AbstractContextManager[None]:
        """Inside it, who launches what is written down."""

    def call_of(self, step: Step) -> LaunchCall:
        """A step that runs between two graphs, as one call."""

    def call_here(self, op: str) -> LaunchCall:
        """An op that Python is just calling."""


MakeLedger = Callable[[GraphDevice], CaptureLedger | None]
"""Makes the ledger of a recording, or none."""


class Recorder:
    """Writes down what a body does, for one size.

    Args:
        device: what captures.
        events: where losses are told.
        uncapturable: pieces that could not be captured at an earlier size, with the reason; added to.
        phase: what is recorded, in words.
        ledger: also writes down which call put what into the graphs.
    """

    def __init__(
        self,
        device: GraphDevice,
        events: EventLog,
        uncapturable: dict[int, str],
        *,
        phase: str,
        ledger: CaptureLedger | None,
    ) -> None:
        self._device = device
        self._phase = phase
        self._ledger = ledger
        self._events = events
        self._uncapturable = uncapturable
        self.steps: list[GraphStep | EagerStep] = []
        self.cells: dict[int, Any] = {}
        self._fresh: set[int] = set()
        self._unrun: list[Callable[[], None]] = []
        """Graphs whose results nobody has asked for yet: large steps take long, and most tapes are one graph."""
        self.place: dict[str, Any] = {}
        """The step under way, as errors name it."""

    @property
    def knows_calls(self) -> bool:
        """Whether it is written down who captures what."""
        return self._ledger is not None

    # -- the body is a program

    def run_step(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Any]) -> Sequence[Any]:
        """A :data:`~piecegraph.graph.program.RunStep` that records."""
        self.place = _place_of(step.label)
        with located(**self.place):
            if isinstance(step.label, Piece) and step.label.index not in self._uncapturable:
                captured = self._try_capture(step.label, step, take(args, values))
                if captured is not None:
                    return captured
            return self._run_eagerly(step, args, kwargs, values)

    def _try_capture(self, piece: Piece, step: Step, args: tuple[Any, ...]) -> Sequence[Any] | None:
        try:
            self.begin()
            if self._ledger is None:
                returned = self._device.call(step.function, args, {})
            else:
                returned = self._ledger.run_step(step, args)
            self.end(str(piece))
        except torch.OutOfMemoryError:
            self._device.abandon()
            raise
        except RuntimeError as error:
            self._device.abandon()
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            self._uncapturable[piece.index] = reason
            name = f"{piece} from {piece.first}" if piece.first else str(piece)
            hint = "name the op in splitting_ops to keep the rest of the piece captured"
            self._events.emit(Event("PG401", name, reason, hint))
            return None
        return [returned[position] for _, position in step.results]

    def _run_eagerly(
        self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Any]
    ) -> Sequence[Any]:
        self._fresh |= step.fresh_shapes
        self._catch_up()
        returned = step.function(*take(args, values), **take(kwargs, values))
        results = [(position, returned if position is None else returned[position]) for _, position in step.results]
        fresh = {i for i, (slot, _) in enumerate(step.results) if slot in self._fresh}
        bound_args, bound_kwargs = (self._bind(part, values) for part in (args, kwargs))
        kept, copies, aliases = self._keep(results, fresh, bound_args, bound_kwargs)
        cells = tuple((results[i][0], step.results[i][0]) for i in sorted(fresh))
        for i in fresh:
            self.cells[step.results[i][0]] = results[i][1]
        call = self._ledger.call_of(step) if self._ledger is not None else None
        self.steps.append(
            EagerStep(step.label, step.function, bound_args, bound_kwargs, copies, aliases, cells, self.cells, call)
        )
        return kept

    def _bind(self, arguments: Any, values: list[Any]) -> Any:
        """Arguments as the tape keeps them: slots filled in, but for those that have no fixed address."""

        def fill(atom: Any) -> Any:
            if type(atom) is not Slot:
                return atom
            return atom if atom.index in self._fresh else self.hold(values[atom.index])

        return map_arguments(arguments, fill)

    # -- the body is any Python

    def begin(self) -> None:
        """Start a graph."""
        self._device.begin(keep_nodes=self._ledger is not None)
        if self._ledger is not None:
            self._ledger.start_graph()

    def end(self, label: str) -> None:
        """End the graph under way and put it on the tape."""
        captured = self._device.end()
        if captured is None:
            return
        inside = None
        if self._ledger is not None and captured.nodes is not None:
            inside = Inside(captured.nodes, self._ledger.finish_graph(label, self._phase))
        self._unrun.append(captured.replay)
        self.steps.append(GraphStep(label, captured.replay, inside))

    def _catch_up(self) -> None:
        """Run the graphs so far: what is not captured finds their results."""
        for replay in self._unrun:
            replay()
        self._unrun.clear()

    def observing(self) -> contextlib.AbstractContextManager[None]:
        """Inside it, who captures what is written down, if that is asked for."""
        return contextlib.nullcontext() if self._ledger is None else self._ledger.observing()

    def capture(self, label: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Capture a function as one graph; who captures what in it is written down, if that is asked for."""
        self.begin()
        if self._ledger is None:
            returned = self._device.call(function, args, {})
        else:
            with self.observing(), stacks_from_here():
                returned = function(*args)
        self.end(label)
        return returned

    def run_break(
        self, label: Cut, function: Callable[..., Sequence[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Run an op between two graphs: end one, run, begin the next. The function returns a flat list of results."""
        self.end(f"graph before {label}")
        kept = self.run_between(label, function, args, kwargs)
        self.begin()
        return kept

    def run_between(
        self, label: Cut, function: Callable[..., Sequence[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """The same, where no graph is under way."""
        self.place = _place_of(label)
        self._catch_up()
        with located(**self.place):
            returned = function(*args, **kwargs)
        self.place = {}
        bound_args, bound_kwargs = (map_arguments(part, self.hold) for part in (args, kwargs))
        kept, copies, aliases = self._keep(list(enumerate(returned)), set(), bound_args, bound_kwargs)
        call = self._ledger.call_here(label.op) if self._ledger is not None else None
        self.steps.append(EagerStep(label, function, bound_args, bound_kwargs, copies, aliases, (), self.cells, call))
        return kept

    def abandon(self) -> None:
        """Leave the graph under way after an error."""
        self._device.abandon()

    # -- memory

    def hold(self, value: Any) -> Any:
        """A value as the tape may keep it: tensors of the pool without owning them, see Note [Pool lifetime]."""
        if isinstance(value, torch.Tensor) and self._device.owns(value):
            return torch_compat.non_owning(value)
        return value

    def outputs(self, values: Sequence[Any], slots: Sequence[int] | None = None) -> list[Any]:
        """The body's outputs as the tape keeps them."""
        places: Sequence[int | None] = [None] * len(values) if slots is None else slots
        return [
            Slot(slot) if slot in self._fresh and slot is not None else self.hold(v)
            for v, slot in zip(values, places, strict=True)
        ]

    def _keep(
        self, results: Sequence[tuple[Position, Any]], fresh: set[int], args: Any, kwargs: Any
    ) -> tuple[list[Any], tuple[tuple[Position, torch.Tensor], ...], tuple[tuple[Position, int], ...]]:
        """Give every result of an eager op a fixed address: views of arguments have one, others move into the pool."""
        tensors = [atom for atom in atoms((args, kwargs)) if isinstance(atom, torch.Tensor)]
        addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        kept: list[Any] = []
        copies: list[tuple[Position, torch.Tensor]] = []
        aliases: list[tuple[Position, int]] = []
        for i, (position, value) in enumerate(results):
            if not isinstance(value, torch.Tensor) or i in fresh:
                kept.append(value)
            elif value.untyped_storage().data_ptr() in addresses:
                kept.append(value)
                aliases.append((position, value.data_ptr()))
            else:
                owned = self._device.allocate_like(value)
                owned.copy_(value)
                kept.append(owned)
                copies.append((position, self.hold(owned)))
        return kept, tuple(copies), tuple(aliases)


def _place_of(label: Piece | Cut) -> dict[str, Any]:
    line = label.first if isinstance(label, Piece) else label.source
    return {"piece": label.index, "op": "" if isinstance(label, Piece) else label.op, "line": str(line or "")}
