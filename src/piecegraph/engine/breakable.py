"""The front end without a compiler: the function runs as it is, and only marked ops break the capture.

Nothing is known about the function beforehand. What the trace front end reads off a graph is learned here by watching
runs: the structure of the result, which memory is written, and how the shapes of the results follow from the sizes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from piecegraph.base import torch_compat
from piecegraph.base.call_stack import paths_from, stacks_from_here
from piecegraph.base.plan import Cut
from piecegraph.base.structure import LEAF, flatten
from piecegraph.base.user_code import user_line
from piecegraph.engine.eager_interception import CallLog, ShownCalls, intercepting, wanting
from piecegraph.engine.watch import ViewOp, Watched, watch
from piecegraph.errors import CallError, RecordError, TraceError
from piecegraph.graph.cut_rules import resolve_op
from piecegraph.graph.example import Example
from piecegraph.graph.interception import REASON, Interception, RehearsedOp, is_off
from piecegraph.graph.signature import is_constant
from piecegraph.graph.sources import Fixed, FromCall, FromSize, Update, Weight
from piecegraph.graph.tracer import EAGER_OP_REASON
from piecegraph.graph.views import InputView
from piecegraph.tape.body import FromOutput, Observed, ResultLeaf, SeenView, Sizes, watch_weight
from piecegraph.tape.record import Recorder
from piecegraph.tape.tape import WatchedWeight

_recording: ContextVar[Breaker | None] = ContextVar("piecegraph_breaker", default=None)


def eager_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that must not be inside a CUDA graph: with ``frontend="breakable"`` it runs eagerly between two
    graphs.

    Its arguments may be anything; its result a tensor, or tuples, lists, dicts and dataclasses of tensors. At replay
    the function itself is called again, with the tensors of the recording and with the other arguments it had then.
    Outside a recording it is just called.

    Example:
        >>> @eager_op
        ... def attention(q, k, v):
        ...     return q * k * v
        >>> attention(2, 3, 4)
        24
    """
    untraceable = torch.compiler.disable(function, reason=EAGER_OP_REASON)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return untraceable(*args, **kwargs)
        breaker = _recording.get()
        return function(*args, **kwargs) if breaker is None else breaker.run_marked(function, args, kwargs)

    return call


class Breaker:
    """Hands the ops that break the capture to the recorder.

    Args:
        recorder: what captures.
        interceptions: calls with callbacks, which run between graphs.
        ops: (packet, overload) of ops that run between graphs, too.
    """

    def __init__(
        self, recorder: Recorder, interceptions: Sequence[Interception], ops: Sequence[tuple[Any, Any]] = ()
    ) -> None:
        self._recorder = recorder
        self._interceptions = interceptions
        self._ops = ops
        self.cuts: list[Cut] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Python that runs inside is captured, but for the calls that break the capture."""
        token = _recording.set(self)
        watching = bool(self._ops or self._interceptions)
        try:
            self._recorder.begin()
            with self._recorder.observing(), ShownCalls(self._run_or_break) if watching else contextlib.nullcontext():
                yield
            self._recorder.end("last graph")
        finally:
            _recording.reset(token)

    def _run_or_break(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _recording.get() is not self:  # inside of an op that broke the capture
            return function(*args, **kwargs)
        packet, overload = torch_compat.op_of(function)
        is_listed = any(packet is op and (overload is None or exact in (None, overload)) for op, exact in self._ops)
        chain = wanting(self._interceptions, function)
        if not is_listed and not chain:
            return function(*args, **kwargs)
        reasons = (["listed in splitting_ops"] if is_listed else []) + ([REASON] if chain else [])
        run = RehearsedOp(function, chain, str(user_line() or "")) if chain else function
        return self._run(run, args, kwargs, "; ".join(reasons))

    def run_marked(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that is marked as an eager op. What it calls may be intercepted."""
        interceptions = self._interceptions

        @functools.wraps(function)
        def intercepted(*args: Any, **kwargs: Any) -> Any:
            with ShownCalls(intercepting(interceptions)):
                return function(*args, **kwargs)

        return self._run(intercepted if interceptions else function, args, kwargs, "marked as an eager op")

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> Any:
        """Run a function between two graphs. Breaks inside it belong to it."""
        op = torch_compat.qualified_name(function) or getattr(function, "__qualname__", None) or str(function)
        cut = Cut(len(self.cuts), op, reason, user_line())
        self.cuts.append(cut)
        flat = _FlatResult(function, cut)
        token = _recording.set(None)
        try:
            leaves = self._recorder.run_break(cut, flat, args, kwargs)
        finally:
            _recording.reset(token)
        return flat.structure.build(iter(leaves))


@contextlib.contextmanager
def callbacks(interceptions: Sequence[Interception]) -> Iterator[None]:
    """Run callbacks around the calls inside, in a run that is not recorded."""
    if not interceptions or is_off():
        yield
        return
    with ShownCalls(intercepting(interceptions)):
        yield


class _FlatResult:
    """Calls a function and returns the leaves of its result; what is not a tensor may not change from one call to the
    next.
    """

    def __init__(self, function: Callable[..., Any], cut: Cut) -> None:
        self._function = function
        self._cut = cut
        self.structure = LEAF
        self._leaves: list[Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        leaves, _, structure = flatten(self._function(*args, **kwargs))
        if self._leaves is None:
            self.structure = structure
            self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        elif structure != self.structure or any(
            k is not None and k != v for k, v in zip(self._leaves, leaves, strict=True)
        ):
            raise CallError(
                "PG521",
                f"{self._cut} returned something else",
                where=str(self._cut.source or ""),
                why="numbers and structures it returns steered the code that was recorded, and cannot change at replay",
                hint="return tensors, or capture again",
            )
        return leaves


class BreakableBody:
    """A function that is run as it is."""

    def __init__(
        self,
        function: Callable[..., Any],
        example: Example,
        weights: Mapping[str, torch.Tensor],
        current_weight: Callable[[str, torch.Tensor], torch.Tensor],
        splitting_ops: Iterable[Any] | str,
        module: torch.nn.Module | None,
    ) -> None:
        self._function = function
        self._module = module
        self._interceptions: tuple[Interception, ...] = ()
        self._log = CallLog()
        """The calls of the first run."""
        self._example = example
        self._weights = weights
        self._current_weight = current_weight
        self._ops = [] if splitting_ops == "auto" else [torch_compat.op_of(resolve_op(op)) for op in splitting_ops]
        self._seen: dict[Sizes, list[Any]] = {}
        """What came out at each size: the shape of every tensor, and every other leaf itself."""
        self._views: dict[tuple[Sizes, int], tuple[ViewOp, ...]] = {}
        """How each result that is a view of an argument is made of it, by size and leaf."""
        self.cuts: tuple[Cut, ...] = ()
        with ShownCalls(self._log.run):
            watched = watch(self._call, example.tensors)
        _refuse_moved([example.signature.tensors[i].name for i in watched.moved_calls])
        self.layout_reader = watched.layout_reader
        self.devices = watched.devices
        self.written_calls = watched.written_calls
        self.written_state = watched.written_state
        self.updates: tuple[Update, ...] = ()
        leaves, paths, self.structure = flatten(watched.returned)
        state = {torch_compat.storage_id(tensor) for tensor in weights.values()}
        self.leaves: tuple[ResultLeaf, ...] = tuple(
            _leaf(i, leaf, path, watched, state) for i, (leaf, path) in enumerate(zip(leaves, paths, strict=True))
        )

    def num_places(self, interception: Interception) -> int:
        """How many calls an interception is for, as seen in the first run."""
        return self._log.num_places(interception, self._module)

    def with_interceptions(self, interceptions: Sequence[Interception]) -> BreakableBody:
        """The same function, with callbacks around some of its calls."""
        other = copy.copy(self)
        other._interceptions = tuple(interceptions)
        other.cuts = ()
        return other

    def _call(self, tensors: Sequence[torch.Tensor]) -> Any:
        args, kwargs = self._example.with_tensors(tensors)
        return self._function(*args, **kwargs)

    def learn(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> None:
        """Run once more if this size was never seen: shapes and views of results are looked up, not guessed."""
        views = [leaf.index for leaf in self.leaves if isinstance(leaf, SeenView)]
        if sizes in self._seen and all((sizes, index) in self._views for index in views):
            return
        watched = watch(self._call, tensors)
        leaves = flatten(watched.returned)[0]
        self._remember(leaves, sizes)
        for index in views:
            found = watched.view_of_input(leaves[index])
            self._views[sizes, index] = () if found is None else found[1]

    def _remember(self, leaves: Sequence[Any], sizes: Sizes) -> None:
        self._seen[sizes] = [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def call(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Call the function on other tensors, callbacks and all."""
        with paths_from(self._module), callbacks(self._interceptions):
            return self._call(tensors)

    def run(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> list[Any]:
        leaves, _, structure = flatten(self.call(tensors))
        if structure != self.structure:
            raise RecordError(
                "PG403", f"the function returned another structure at size {sizes}", hint='use frontend="trace"'
            )
        self._remember(leaves, sizes)
        return leaves

    def record(self, recorder: Recorder, tensors: Sequence[torch.Tensor], sizes: Sizes) -> list[Any]:
        breaker = Breaker(recorder, self._interceptions, self._ops)
        with breaker.recording(), stacks_from_here():
            leaves = self.run(tensors, sizes)
        self.cuts = tuple(breaker.cuts)
        return recorder.outputs(leaves)

    def output_shape(self, index: int, sizes: Sizes) -> tuple[int, ...] | None:
        shape = self._seen[sizes][index]
        return shape if isinstance(shape, tuple) else None

    def number(self, leaf: FromSize | InputView | Observed | SeenView, sizes: Sizes) -> tuple[Any, ...]:
        assert isinstance(leaf, (Observed, SeenView)), "a breakable body has no symbolic sizes"
        return (self._seen[sizes][leaf.index],) if isinstance(leaf, Observed) else self._views[sizes, leaf.index]

    def violated(self, sizes: Sizes) -> str | None:
        return None

    def weights(self) -> list[WatchedWeight]:
        """Which graph reads a weight is not known here: all of the module's are watched."""
        return [
            watch_weight(Weight(name, tensor), "the recorded graphs", self._current_weight)
            for name, tensor in self._weights.items()
        ]


def _refuse_moved(names: Sequence[str]) -> None:
    if names:
        raise TraceError(
            "PG207",
            f"the shape, strides or memory of {names[0]} are changed in place",
            why="a replay works on copies of the arguments, and would leave the caller's tensor as it is",
            hint="return the view, or a new tensor, instead",
        )


def _leaf(index: int, leaf: Any, path: str, watched: Watched, state: set[int]) -> ResultLeaf:
    for i, tensor in enumerate(watched.inputs):
        if leaf is tensor:
            return FromCall(i)
    if isinstance(leaf, torch.Tensor):
        if torch_compat.has_memory(leaf) and torch_compat.storage_id(leaf) in state:
            return Fixed(leaf)
        found = watched.view_of_input(leaf) if torch_compat.has_memory(leaf) else None
        return FromOutput(index) if found is None else SeenView(index, found[0])
    if is_constant(leaf):
        return Observed(index)
    raise TraceError(
        "PG204",
        f"the result holds a {type(leaf).__name__}" + (f" in {path}" if path else ""),
        hint="return its tensors instead",
    )
