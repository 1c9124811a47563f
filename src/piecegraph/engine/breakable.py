"""The front end without a compiler: the function runs as it is, and what no graph can hold breaks the capture.

Nothing is known about the function beforehand. What the trace front end reads off a graph is learned here by watching
runs: the structure of the result, which memory is written, what Python is told about data, and how the shapes of the
results follow from the sizes.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piecegraph.base import torch_compat
from piecegraph.base.call_stack import paths_from, stacks_from_here
from piecegraph.base.compare import first_difference
from piecegraph.base.plan import Cut, SizeKey
from piecegraph.base.structure import Structure, each_once, flatten
from piecegraph.engine.breaker import MARKED, Breaker, BreakRules, NoGraphs, Reads, callbacks, is_recording
from piecegraph.engine.eager_interception import CallLog, ShownCalls
from piecegraph.engine.outer_reads import CodeLog
from piecegraph.engine.python_state import PythonState, changes_python, outer_objects
from piecegraph.engine.reach import modules_in_reach
from piecegraph.engine.row_counts import Count, RowCounts, first_without_rows
from piecegraph.engine.watch import ViewOp, Watched, refuse_moved, watch
from piecegraph.errors import RecordError, TraceError
from piecegraph.graph.asked import Question
from piecegraph.graph.example import Example
from piecegraph.graph.indices import Indices
from piecegraph.graph.interception import Interception
from piecegraph.graph.outside import OutsideValues
from piecegraph.graph.signature import is_constant
from piecegraph.graph.sources import AnyUpdate, Fixed, FromCall, FromSize, Weight
from piecegraph.graph.views import InputView
from piecegraph.tape.body import FromOutput, Observed, ResultLeaf, SeenView, Sizes, watch_weight
from piecegraph.tape.record import Recorder
from piecegraph.tape.tape import WatchedWeight


@dataclass(frozen=True, slots=True)
class _Run:
    """A run that was looked at."""

    watched: Watched
    breaker: Breaker
    python: PythonState
    counts: RowCounts
    changed: str
    """What has another value outside of the call than the run before it found; empty if nothing."""


def _are_alike(first: Any, second: Any) -> bool:
    """Whether two results hold the same tensors."""
    leaves = [flatten(result, is_container=each_once())[0] for result in (first, second)]
    tensors = [[leaf for leaf in found if isinstance(leaf, torch.Tensor)] for found in leaves]
    return len(tensors[0]) == len(tensors[1]) and first_difference(*tensors) is None


class OtherStructureError(RecordError):
    """What comes out at a size is put together in another way than at the first."""


class BreakableBody:
    """A function that is run as it is."""

    def __init__(
        self,
        function: Callable[..., Any],
        example: Example,
        weights: Mapping[str, torch.Tensor],
        current_weight: Callable[[str, torch.Tensor], torch.Tensor],
        rules: BreakRules,
        module: torch.nn.Module | None,
    ) -> None:
        self._function = function
        self._module = module
        self.interceptions: tuple[Interception, ...] = ()
        self._log = CallLog()
        """The calls of the first run."""
        self._code = CodeLog(is_recording)
        """What runs, of all paths and sizes."""
        self.outside = OutsideValues((), (), {})
        """What it may read outside of the call."""
        self._example = example
        self._weights = weights
        self._current_weight = current_weight
        self._rules = rules
        self._seen: dict[Sizes, list[Any]] = {}
        """What came out at each size: the shape of every tensor, and every other leaf itself."""
        self._views: dict[tuple[Sizes, int], tuple[ViewOp, ...]] = {}
        """How each result that is a view of an argument is made of it, by size and leaf."""
        self._has_reads: dict[Sizes, bool] = {}
        """Whether Python is told about data, at each size that was looked at."""
        self._counts: dict[Sizes, tuple[Count, ...]] = {}
        self._indices = frozenset[int]()
        """Arguments that were seen to become indices."""
        """Truth values and counts of them that were made of rows, at each size that was looked at."""
        self._new_writes: dict[Sizes, str] = {}
        """What each size that was looked at writes to and the first did not; empty if nothing."""
        self._new_views: dict[Sizes, str] = {}
        """Which result is a view of an argument at a size, and was not at the first."""
        self.untraced = ""
        """Why it was not traced, if that was tried."""
        self.cuts: tuple[Cut, ...] = ()
        self.reads = Reads((), (), ())
        """Those of the recording."""
        self._refuse_scripts()
        self._look_at(example.tensors, log=self._log)

    def _refuse_scripts(self) -> None:
        """A module of TorchScript has its weights outside of Python, where nobody would see that one is replaced."""
        own = [] if self._module is None else self._module.modules()
        if any(isinstance(each, torch.jit.ScriptModule) for each in (*own, *self._modules())):
            raise RuntimeError("the weights of a module of TorchScript cannot be watched")

    def _look_at(self, tensors: Sequence[torch.Tensor], log: CallLog | None = None) -> None:
        """See what the function does with tensors like these."""
        seen = self._settled_run(tensors, log)
        watched = seen.watched
        arguments = {torch_compat.storage_id(tensor) for tensor in watched.inputs}
        self._in_reach = [t for t in seen.python.tensors if torch_compat.storage_id(t) not in arguments]
        """Graphs may read them by address: they are kept."""
        self.expected = seen.breaker.reads.answers
        """What Python was told in the run that was looked at."""
        self.layout_reader = watched.layout_reader
        self.devices = watched.devices
        self.written_calls = watched.written_calls
        self.written_state = watched.written_state
        self.updates: tuple[AnyUpdate, ...] = ()
        self._older = seen.python.objects
        leaves, paths, self.structure = self._take_apart(watched.returned)
        state = {torch_compat.storage_id(tensor): tensor for tensor in self._weights.values()}
        self.leaves: tuple[ResultLeaf, ...] = tuple(
            _leaf(i, leaf, path, watched, state) for i, (leaf, path) in enumerate(zip(leaves, paths, strict=True))
        )

    def _take_apart(self, returned: Any) -> tuple[list[Any], list[str], Structure]:
        """The leaves of a result. Objects that the call made, such as a cache, are made anew at every call."""
        is_new = each_once()
        return flatten(returned, is_container=lambda value: id(value) not in self._older and is_new(value))

    @property
    def classes(self) -> tuple[type, ...]:
        """Whose methods ran."""
        return self._code.classes()

    @property
    def leaves_out(self) -> bool:
        """Whether the code that ran can read more values outside of the call than are looked at."""
        return self._code.leaves_out

    @property
    def questions(self) -> tuple[Question, ...]:
        """What the code that ran asks for, on whichever path."""
        return self._code.questions

    def num_places(self, interception: Interception) -> int:
        """How many calls an interception is for, as seen in the first run."""
        return self._log.num_places(interception, self._module)

    def with_interceptions(self, interceptions: Sequence[Interception]) -> BreakableBody:
        """The same function, with callbacks around some of its calls."""
        other = copy.copy(self)
        other.interceptions = tuple(interceptions)
        other.cuts = ()
        return other

    def along(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> BreakableBody:
        """The same function on the way it goes with these tensors. See Note [Paths]."""
        other = copy.copy(self)
        other._seen, other._views, other._has_reads, other._new_writes, other._new_views = {}, {}, {}, {}, {}
        other._counts = {}
        other._look_at(tensors)
        other.learn(tensors, sizes)
        return other

    def _settled_run(self, tensors: Sequence[torch.Tensor], log: CallLog | None = None) -> _Run:
        """Run on copies. What the run changes in Python is refused, unless that happens once and changes no result:
        then something was kept for later, as any first call would have done.
        """
        first = self._watched_run(tensors, is_careful=False, log=log)
        refuse_moved(first.watched, self._example)
        change = first.python.change()
        if change is None:
            return first
        again = self._watched_run(tensors, is_careful=True)
        is_marked = any(cut.reason == MARKED for cut in again.breaker.cuts)  # it may give something else each time
        is_alike = is_marked or _are_alike(first.watched.returned, again.watched.returned)
        if again.python.change() is None and is_alike and not again.changed:
            return again
        if again.python.change() is None and is_alike and is_marked:
            raise _is_read(again.changed)
        first.python.restore()
        raise changes_python(change)

    def _watched_run(self, tensors: Sequence[torch.Tensor], *, is_careful: bool, log: CallLog | None = None) -> _Run:
        """Run once on copies, to see what comes out, what is written and what Python is told.

        Args:
            is_careful: tell apart what is changed in Python by calls that are marked: they run at every replay.
            log: writes down the calls. It is asked before what watches, whose own copies and comparisons are no calls.
        """
        looked: list[tuple[Breaker, PythonState, RowCounts]] = []

        def call(inputs: Sequence[torch.Tensor]) -> Any:
            args, kwargs = self._example.with_tensors(inputs)
            python = PythonState(self._reachable(args, kwargs))
            breaker = Breaker(NoGraphs(), (), self._rules, python=python if is_careful else None)
            counts = RowCounts(inputs, self._example.signature.tensors)
            looked.append((breaker, python, counts))
            logged = contextlib.nullcontext() if log is None else ShownCalls(log.run)
            with logged, breaker.recording(), ShownCalls(counts.run), self._code.listening():
                return self._function(*args, **kwargs)

        num_codes = self._code.num_codes
        watched = watch(call, tensors)
        run = _Run(watched, *looked[0], self.outside.first_changed())
        if not {*map(torch_compat.generator_id, run.breaker.drawn_from)} <= run.python.generators:
            self._code.note_new_generator(self._function)
        if self._code.num_codes > num_codes:
            arguments = self._example.args, self._example.kwargs
            self.outside.renew(*self._code.names(self._function, self._module, self._modules(), arguments))
        return run

    def _reachable(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """What Python code of the function can get at, by name."""
        arguments = dict(zip(*self._example.binder.bind(args, kwargs), strict=True))
        owner = {"self": self._module} if self._module is not None else {}
        return {**outer_objects(self._function), **owner, **arguments}

    def learn(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> None:
        """Run once more if this size was never looked at: shapes and views of results are looked up, not guessed."""
        views = [leaf.index for leaf in self.leaves if isinstance(leaf, SeenView)]
        if sizes in self._has_reads and all((sizes, index) in self._views for index in views):
            return
        run = self._settled_run(tensors)
        self._note_writes(run.watched, sizes)
        leaves = self._take_apart(run.watched.returned)[0]
        self._has_reads[sizes] = bool(run.breaker.reads.answers)
        self._counts[sizes] = tuple(run.counts.found)
        self._indices |= run.counts.indices
        self._remember(leaves, sizes)
        if self._has_reads[sizes] and run.breaker.reads.answers != self.expected:
            return
        for leaf in self.leaves:
            if isinstance(leaf, FromOutput | SeenView) and torch_compat.has_memory(leaves[leaf.index]):
                self._note_view(leaf, run.watched.view_of_input(leaves[leaf.index]), sizes)

    def _note_view(
        self, leaf: FromOutput | SeenView, found: tuple[int, tuple[ViewOp, ...]] | None, sizes: Sizes
    ) -> None:
        """What of an argument a result is at a size; it must be of the same as in the first call, if it is at all."""
        if isinstance(leaf, SeenView):
            self._views[sizes, leaf.index] = () if found is None else found[1]
        if found is not None and (isinstance(leaf, FromOutput) or found[0] != leaf.argument):
            name = self._example.signature.tensors[found[0]].name
            self._new_views[sizes] = f"result {leaf.index} is a view of {name}, unlike in the first call"

    def check_writes(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> None:
        """Raise if it writes to memory that nobody would put back, because the first call did not write there."""
        if sizes not in self._new_writes:
            self._note_writes(self._watched_run(tensors, is_careful=False).watched, sizes)
        if self._new_writes[sizes]:
            raise RuntimeError(self._new_writes[sizes])

    def _note_writes(self, watched: Watched, sizes: Sizes) -> None:
        known = {torch_compat.storage_id(tensor) for tensor in self.written_state}
        names = [self._example.signature.tensors[i].name for i in watched.written_calls if i not in self.written_calls]
        if any(torch_compat.storage_id(tensor) not in known for tensor in watched.written_state):
            names.append("a tensor outside the call")
        self._new_writes[sizes] = f"it writes to {' and '.join(names)}, unlike the first call" if names else ""

    def reads_data(self, sizes: Sizes) -> bool:
        return self._has_reads.get(sizes, False)

    def _remember(self, leaves: Sequence[Any], sizes: Sizes) -> None:
        self._seen[sizes] = [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def call(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Call the function on other tensors, callbacks and all."""
        with paths_from(self._module), callbacks(self.interceptions):
            args, kwargs = self._example.with_tensors(tensors)
            return self._function(*args, **kwargs)

    def run(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> list[Any]:
        leaves, _, structure = self._take_apart(self.call(tensors))
        if structure != self.structure:
            raise OtherStructureError("PG505", f"the function returns another structure at size {SizeKey(sizes)}")
        self._remember(leaves, sizes)
        return leaves

    def record(self, recorder: Recorder, tensors: Sequence[torch.Tensor], sizes: Sizes) -> list[Any]:
        state = (*self.written_state, *(tensors[i] for i in self.written_calls))
        breaker = Breaker(recorder, self.interceptions, self._rules, state)
        with breaker.recording(), stacks_from_here():
            leaves = self.run(tensors, sizes)
        self.cuts, self.reads = tuple(breaker.cuts), breaker.reads
        if self.reads.answers and not self.reads_data(sizes):
            raise RecordError(
                "PG403",
                f"the host reads data at size {sizes}, and did not when the function was looked at",
                why="what is read may lead another way, and only sizes that were seen to read have a tape for each",
                hint="mark what reads with @piecegraph.eager_op",
            )
        return recorder.outputs(leaves)

    def output_shape(self, index: int, sizes: Sizes) -> tuple[int, ...] | None:
        shape = self._seen[sizes][index]
        return shape if isinstance(shape, tuple) else None

    def reads_rows(self, index: int) -> bool:
        return True  # there is no graph to tell

    @property
    def indices(self) -> Indices:
        return Indices(self._indices, frozenset(range(len(self._example.signature.tensors))))

    def decision_by_rows(self, recorded: Sizes, sizes: Sizes) -> str:
        padded = {i for i, (large, small) in enumerate(zip(recorded, sizes, strict=True)) if large != small}
        return first_without_rows(self._counts[recorded], self._counts[sizes], padded)

    def number(self, leaf: FromSize | InputView | Observed | SeenView, sizes: Sizes) -> tuple[Any, ...]:
        assert isinstance(leaf, (Observed, SeenView)), "a breakable body has no symbolic sizes"
        return (self._seen[sizes][leaf.index],) if isinstance(leaf, Observed) else self._views[sizes, leaf.index]

    def violated(self, sizes: Sizes) -> str | None:
        return self._new_writes.get(sizes) or self._new_views.get(sizes)

    def weights(self) -> list[WatchedWeight]:
        """Which graph reads a weight is not known here: all of the module's are watched, and what else is in reach."""
        own = {id(tensor) for tensor in self._weights.values()}
        others = list(self.outside.tensors.items())
        others += [part for each in self._modules() for parts in torch_compat.parts_of(each) for part in parts.items()]
        wanted = {
            id(part): (name, part) for name, part in others if isinstance(part, torch.Tensor) and id(part) not in own
        }
        watched = [(Weight(*named), self._current_weight) for named in self._weights.items()]
        watched += [(Weight(*named), lambda _, recorded: recorded) for named in wanted.values()]
        return [
            watch_weight(weight, "the recorded graphs", current)
            for weight, current in watched
            if torch_compat.has_memory(weight.tensor)
        ]

    def _modules(self) -> list[torch.nn.Module]:
        """Those that the function or the arguments name."""
        return modules_in_reach((self._function, self._example.args, self._example.kwargs))


def _is_read(name: str) -> TraceError:
    return TraceError(
        "PG202",
        f"an eager op changes {name}, which code around it may read",
        why="that code is recorded, and would go on with what it was",
        hint="let only eager ops name it, or keep it in a tensor (register_buffer) and change it in place",
    )


def _leaf(index: int, leaf: Any, path: str, watched: Watched, state: Mapping[int, torch.Tensor]) -> ResultLeaf:
    for i, tensor in enumerate(watched.inputs):
        if leaf is tensor:
            return FromCall(i)
    if isinstance(leaf, torch.Tensor):
        owner = state.get(torch_compat.storage_id(leaf)) if torch_compat.has_memory(leaf) else None
        if owner is not None:
            return Fixed(leaf) if leaf is owner else FromOutput(index, is_state=True)
        found = watched.view_of_input(leaf) if torch_compat.has_memory(leaf) else None
        return FromOutput(index) if found is None else SeenView(index, found[0])
    if is_constant(leaf):
        return Observed(index)
    raise TraceError(
        "PG204",
        f"the result holds a {type(leaf).__name__}" + (f" in {path}" if path else ""),
        hint="return its tensors instead",
    )
