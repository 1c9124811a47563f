"""The tape: a flat list of bound steps, recorded for one size and replayed in order.

Note [Fixed addresses]
~~~~~~~~~~~~~~~~~~~~~~
Every tensor a captured graph reads is a weight, a static input buffer, a tensor of the pool, or a copy the tape owns
of what an eager step returned. None of them moves by itself, but the user can move a weight (``model.to(...)``) and
an eager op can return something else than it did. So the first replay of every tape goes through the checked path: it
compares the address of every weight, and the address and layout of everything an eager step reads or returns, with
those of the recording.

Note [Tapes go by themselves]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A tape holds graphs, and what it replays holds a model, its weights and its cache. All of that must go as soon as nobody
holds a tape any more: the collector looks for circles when it has counted enough objects of Python, and knows nothing
of a GPU that is full. So what a tape is replayed by refers to its steps, and not to the tape.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from piecegraph.base.origin import GraphNode, GraphRecord, LaunchCall
from piecegraph.base.plan import Cut, Piece
from piecegraph.base.structure import atoms
from piecegraph.errors import AddressError, CallError
from piecegraph.graph.program import Slot, take
from piecegraph.tape.nodes import LiveNodes

STEP_MARK = "piecegraph.step"
"""The name of the range around a step of a tape, before the tape's number, the step's and the replay's."""

_numbers = itertools.count()
_serials = itertools.count()
_live: weakref.WeakSet[Tape] = weakref.WeakSet()
_watching = threading.Lock()
"""Held while tapes begin or cease to announce their steps: other threads may record some meanwhile."""
_seen: SeenReplays | None = None


class SeenReplays:
    """What was replayed while steps were announced."""

    def __init__(self) -> None:
        self.tapes: dict[Tape, None] = {}
        """They are kept until it is known what they hold, even if what they belong to is closed meanwhile."""
        self.left_out: dict[str, frozenset[int]] = {}
        """Nodes that were switched off, by the mark of the step; they may be on again before anybody asks."""


@contextlib.contextmanager
def announced_steps() -> Iterator[SeenReplays]:
    """All tapes, those of now and those recorded inside, tell a profiler which of their steps runs."""
    global _seen
    seen = SeenReplays()
    with _watching:
        assert _seen is None, "a profiler is at work already"
        _seen = seen
        for tape in _live:
            tape._announce(seen)
    try:
        yield seen
    finally:
        with _watching:
            _seen = None
            for tape in _live:
                tape._fall_silent()


Position = int | None
"""Where in a returned tuple a value is; None for the returned value itself."""


class Inside:
    """What is known of a graph that was captured with provenance.

    Args:
        nodes: of the graph.
        read: makes a record of what they are. It is called when that is first asked for: most graphs never are.
    """

    def __init__(self, nodes: LiveNodes, read: Callable[[Sequence[GraphNode]], GraphRecord]) -> None:
        self.nodes = nodes
        self._read = read

    @functools.cached_property
    def record(self) -> GraphRecord:
        """What is inside, and who put it there."""
        return self._read(self.nodes.describe())


@dataclass(frozen=True, slots=True)
class GraphStep:
    """A captured piece."""

    label: str
    replay: Callable[[], None]
    inside: Inside | None = None

    @property
    def run(self) -> Callable[[], None]:
        return self.replay

    def check(self) -> None:
        self.replay()


@dataclass(frozen=True, slots=True)
class EagerStep:
    """An op that runs eagerly on fixed memory, its results copied to where the next graphs expect them."""

    label: Piece | Cut
    function: Callable[..., Any]
    args: tuple[Any, ...]
    """Bound, but for the slots that are read from the cells at every replay."""
    kwargs: dict[str, Any]
    copies: tuple[tuple[Position, torch.Tensor], ...]
    """Results that go into memory the tape owns."""
    aliases: tuple[tuple[Position, int], ...]
    """Results that are views of an argument, with their address."""
    cells: tuple[tuple[Position, int], ...]
    """Results without a fixed address: which cell each goes to."""
    store: dict[int, Any]
    """The tape's cells."""
    call: LaunchCall | None = None
    """Who it is, with provenance."""

    @property
    def run(self) -> Callable[[], None]:
        if not self.copies and not self.cells and not _has_cells((self.args, self.kwargs)):
            return partial(self.function, *self.args, **self.kwargs)
        return self._run

    def _run(self) -> None:
        returned = self._call()
        for position, target in self.copies:
            target.copy_(_pick(returned, position))
        for position, cell in self.cells:
            self.store[cell] = _pick(returned, position)

    def _call(self) -> Any:
        return self.function(*take(self.args, self.store), **take(self.kwargs, self.store))

    def check(self) -> None:
        """Run, and verify that everything is where and what it was at recording."""
        addresses = [t.data_ptr() for t in _tensors((self.args, self.kwargs))]
        returned = self._call()
        for position, target in self.copies:
            self._check_layout(_pick(returned, position), target)
            target.copy_(_pick(returned, position))
        for position, address in self.aliases:
            result = _pick(returned, position)
            if result.data_ptr() != address:
                raise AddressError(
                    "PG520",
                    f"result {position or 0} of {self.label}",
                    where=str(getattr(self.label, "source", None) or ""),
                    why=f"it was a view of an argument, and has moved from {address:#x} to {result.data_ptr():#x}; "
                    "the graphs behind it read the old place",
                    hint="return a fresh tensor, or write to an output argument",
                )
        for position, cell in self.cells:
            self.store[cell] = _pick(returned, position)
        if addresses != [t.data_ptr() for t in _tensors((self.args, self.kwargs))]:
            raise AddressError(
                "PG520", f"{self.label} moved one of its arguments", why="the graphs around it read the old place"
            )

    def _check_layout(self, result: Any, target: torch.Tensor) -> None:
        if not isinstance(result, torch.Tensor) or result.shape != target.shape or result.dtype != target.dtype:
            now = f"{result.dtype} {tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
            raise CallError(
                "PG521",
                f"{self.label} returned {now}",
                where=str(getattr(self.label, "source", None) or ""),
                why=f"it returned {target.dtype} {tuple(target.shape)} when it was recorded",
                hint="an op between graphs must return the same shapes for the same input shapes",
            )


class WeightMovedError(AddressError):
    """A weight is not where graphs read it: they have to be recorded again."""


@dataclass(frozen=True, slots=True)
class WatchedWeight:
    """A weight that graphs read, to be found where it was recorded."""

    name: str
    tensor: torch.Tensor
    """As it was recorded; ``model.to(...)`` moves its data."""
    current: Callable[[], torch.Tensor]
    """Finds the tensor that bears the name now, which may be another one."""
    address: int
    strides: tuple[int, ...]
    reader: str

    def moved(self) -> WeightMovedError:
        """The error to raise when it is somewhere else."""
        now = self.current()
        places = [f"{address:#x}" for address in (self.address, now.data_ptr())]
        if places[0] == places[1]:
            places = [f"strides {strides}" for strides in (self.strides, now.stride())]
        return WeightMovedError(
            "PG520",
            f"weight {self.name!r} has moved",
            where=f"input of {self.reader}",
            why=f"the graph reads {places[0]}, the weight is now at {places[1]}",
            hint="change weights in place (copy_, load_state_dict), or compile again after moving them",
        )


class Addresses:
    """Where the weights of a plan lie.

    To look at hundreds of them would take longer than a replay, so they take turns. A weight that leaves its memory is
    noticed at once unless somebody else keeps that memory: see engine/tree.py.
    """

    def __init__(self, weights: Sequence[WatchedWeight]) -> None:
        self._weights = tuple(weights)
        is_few = len(weights) <= 4 or not weights[0].tensor.is_cuda
        self.turns = itertools.cycle([self._weights] if is_few else [(weight,) for weight in weights])
        """Those to look at next."""


class Tape:
    """The recording of one size."""

    def __init__(
        self,
        steps: Sequence[GraphStep | EagerStep],
        outputs: Sequence[Any],
        weights: Sequence[WatchedWeight],
        cells: dict[int, Any],
        *,
        phase: str,
        check_always: bool,
    ) -> None:
        self.number = next(_numbers)
        self.phase = phase
        """What it was recorded for, in words."""
        self.steps = tuple(steps)
        self.is_graphs_only = all(isinstance(step, GraphStep) for step in self.steps)
        insides = (step.inside for step in self.steps if isinstance(step, GraphStep))
        self.insides = tuple(each for each in insides if each is not None)
        """What is known of its graphs: nothing without provenance."""
        self._outputs = tuple(outputs)
        self.devices = tuple(value.device if isinstance(value, torch.Tensor) else None for value in outputs)
        """Where each output lies."""
        self._weights = tuple(weights)
        self._cells = cells
        self._check_always = check_always
        self._replay_order = tuple(step.run for step in self.steps)
        self._replay = _replay_of(self._replay_order, self._outputs, cells)
        self._checked_replay = partial(_check_and_replay, weakref.ref(self))
        self.run: Callable[[], Sequence[Any]] = self._checked_replay
        """Replay, and return the outputs. The first time it goes through every check, see Note [Fixed addresses]; and
        see Note [Tapes go by themselves].
        """
        with _watching:
            _live.add(self)
            if _seen is not None:
                self._announce(_seen)

    def check_and_replay(self) -> Sequence[Any]:
        """Replay, and look whether everything is where it was."""
        self._check_weights()
        for step in self.steps:
            step.check()
        if not self._check_always:
            self.run = self._replay
        return tuple(take(self._outputs, self._cells))

    def _announce(self, seen: SeenReplays) -> None:
        quiet = self.run

        def run() -> Sequence[Any]:
            """The same, each step inside a range that a profiler sees."""
            seen.tapes[self] = None
            is_checked = quiet is not self._checked_replay
            if not is_checked:
                self._check_weights()
            serial = next(_serials)
            for number, step in enumerate(self.steps):
                mark = f"{self.number}.{number}.{serial}"
                if isinstance(step, GraphStep) and step.inside is not None and step.inside.nodes.off:
                    seen.left_out[mark] = frozenset(step.inside.nodes.off)
                with torch.profiler.record_function(f"{STEP_MARK} {mark}"):
                    (self._replay_order[number] if is_checked else step.check)()
            return tuple(take(self._outputs, self._cells))

        self.run, self._quiet_run = run, quiet

    def _fall_silent(self) -> None:
        self.run = self._quiet_run

    def _check_weights(self) -> None:
        for weight in self._weights:
            now = weight.current()
            if now.data_ptr() != weight.address or now.stride() != weight.strides:
                raise weight.moved()


def _replay_of(
    steps: tuple[Callable[[], Any], ...], outputs: tuple[Any, ...], cells: dict[int, Any]
) -> Callable[[], Sequence[Any]]:
    def replay() -> Sequence[Any]:
        for step in steps:
            step()
        return outputs

    def replay_with_cells() -> Sequence[Any]:
        for step in steps:
            step()
        return tuple(take(outputs, cells))

    return replay_with_cells if _has_cells(outputs) else replay


def _check_and_replay(tape: weakref.ref[Tape]) -> Sequence[Any]:
    held = tape()
    assert held is not None, "who replays a tape holds it"
    return held.check_and_replay()


@dataclass(frozen=True, slots=True)
class Rerun:
    """A recorded size, ready to be run again on the inputs it had last, without harm to anything outside of it."""

    replay: Callable[[], Any]
    """Replay the tape."""
    compute: Callable[[], Any]
    """Run what was recorded again, without graphs."""
    seconds_of: Callable[[Callable[[], Any]], float]
    """How long the work takes that a function starts."""


class DirectTape:
    """Stands in for a tape where nothing can be captured: runs the same steps on the same buffers."""

    steps: tuple[GraphStep | EagerStep, ...] = ()
    insides: tuple[Inside, ...] = ()
    is_graphs_only = False

    def __init__(self, run: Callable[[], Sequence[Any]]) -> None:
        self.run = run


def _pick(returned: Any, position: Position) -> Any:
    return returned if position is None else returned[position]


def _tensors(arguments: Any) -> list[torch.Tensor]:
    return [atom for atom in atoms(arguments) if isinstance(atom, torch.Tensor)]


def _has_cells(arguments: Any) -> bool:
    return any(type(atom) is Slot for atom in atoms(arguments))
