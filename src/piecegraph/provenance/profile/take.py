"""Taking a trace: what runs inside ``with piecegraph.trace()`` is profiled, and every kernel attributed.

The profile is written as a trace file and read back by the reader that other programs' traces go through; what is added
is marks in it, which say which call or which step of which tape runs, and what is known of these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from piecegraph.base import torch_compat
from piecegraph.base.origin import LaunchCall, Origin
from piecegraph.errors import KernelError
from piecegraph.provenance.launch import How, KernelTrace, Launch, RawLaunch
from piecegraph.provenance.observe import attributing, observing
from piecegraph.provenance.profile.attribute import attribute
from piecegraph.provenance.profile.marks import CALL_MARK, Announcer
from piecegraph.provenance.profile.read import read_launches
from piecegraph.provenance.profile.replays import RecordedGraph, RecordedTape, captured_calls, match_replay
from piecegraph.tape.tape import STEP_MARK, GraphStep, Tape, announced_steps

_FIRST_OWN = 1 << 40
"""Numbers of calls from here on are ours; those that the reader gives are smaller."""


_turn = threading.Lock()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One profiler at a time, in all threads."""
    if not _turn.acquire(blocking=False):
        raise _busy("a trace cannot be taken inside of another one, in no thread")
    try:
        if torch_compat.is_profiling():
            raise _busy("torch.profiler is running")
        yield
    finally:
        _turn.release()


def _busy(why: str) -> KernelError:
    return KernelError("PG734", "a trace cannot be taken now", why=why, hint="let the other one end first")


@contextlib.contextmanager
def profiled(folder: Path) -> Iterator[Profile]:
    """Profile what runs inside into a trace file in a folder."""
    profile = Profile(folder / "trace.json", Announcer())
    with _alone(), attributing(), announced_steps() as seen:
        with _running() as profiler:
            with observing(profile.announcer):
                yield profile
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        profile.tapes = {tape.number: _recorded(tape) for tape in seen.tapes}
        profile.left_out = seen.left_out
    profiler.export_chrome_trace(str(profile.path))


@contextlib.contextmanager
def _running() -> Iterator[torch.profiler.profile]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # Who launches what, and with which shapes, is seen by the observer. The profiler's own stacks and shapes make files
    # of hundreds of megabytes where something is compiled inside, and not all of their text is escaped.
    profiler = torch.profiler.profile(activities=activities)
    with warnings.catch_warnings():
        # torch 2.11 warns that a second cycle would clear the events of the first. There is one; and to keep events
        # across cycles (acc_events) torch would decode the names of all of them, and fail where one is no text.
        warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
        profiler.start()
    try:
        yield profiler
    finally:
        profiler.stop()


class Profile:
    """A trace file, and what its marks mean."""

    def __init__(self, path: Path, announcer: Announcer) -> None:
        self.path = path
        self.announcer = announcer
        self.tapes: dict[int, RecordedTape] = {}
        """Those that ran, by number."""
        self.left_out: Mapping[str, frozenset[int]] = {}
        """Nodes that were switched off, by the mark of the step."""

    def read(self) -> KernelTrace:
        """Attribute everything that the file holds."""
        raw, device = read_launches(self.path, progress=False, may_be_empty=True)
        if not raw.launches:
            return KernelTrace((), notes=("nothing ran while the trace was taken",))
        if not raw.device_ids:
            raw = dataclasses.replace(raw, launches=_without_watching(raw.launches))
        marked = _Marked(self)
        marked.attribute(raw.launches)
        trace = attribute(raw, device, lambda launch: marked.found.get(id(launch)))
        captured = [
            call
            for number in sorted(marked.replayed)
            for step in self.tapes[number].steps
            if isinstance(step, RecordedGraph)
            for call in captured_calls(step.record)
        ]
        return KernelTrace(trace.launches, tuple(captured), trace.device, (*trace.notes, *marked.notes()))


def _without_watching(ops: Sequence[RawLaunch]) -> tuple[RawLaunch, ...]:
    """The ops of a CPU without the time it takes to watch them: where calls are marked, an op outside of any mark is
    the outer half of one that is called inside.
    """
    marked = {op.stream for op in ops if any(_marks(op))}
    return tuple(op for op in ops if op.stream not in marked or any(_marks(op)))


def _recorded(tape: Tape) -> RecordedTape:
    steps: list[RecordedGraph | LaunchCall | str] = []
    for step in tape.steps:
        if not isinstance(step, GraphStep):
            steps.append(step.call or LaunchCall(str(step.label)))
        elif step.inside is None:
            steps.append(step.label)
        else:
            steps.append(RecordedGraph(step.inside.record))
    return RecordedTape(tape.phase, tuple(steps))


class _Marked:
    """Attributes launches by the marks around them."""

    def __init__(self, profile: Profile) -> None:
        self._tapes = profile.tapes
        self._left_out = profile.left_out
        self._calls: Sequence[LaunchCall | None] = profile.announcer.calls
        self._instances: dict[tuple[object, ...], int] = {}
        self.found: dict[int, Launch] = {}
        """By the identity of the raw launch."""
        self.replayed: set[int] = set()
        """The tapes that ran."""
        self._unknown: set[str] = set()
        self._mismatched: set[str] = set()

    def attribute(self, launches: Sequence[RawLaunch]) -> None:
        replays: dict[tuple[str, int], list[RawLaunch]] = {}
        for launch in launches:
            step, call = _marks(launch)
            if step and launch.is_replayed:
                replays.setdefault((step, launch.correlation), []).append(launch)
            elif step:
                self._attribute_in_step(launch, step, call)
            elif call:
                number = int(call)
                self._keep(launch, self._calls[number], ("call", number), "", "call")
        for (step, correlation), together in replays.items():
            self._attribute_replay(together, step, correlation)

    def notes(self) -> Iterator[str]:
        """What could not be found out."""
        if self._unknown:
            names = ", ".join(sorted(self._unknown)[:4])
            yield f"{len(self._unknown)} graphs were recorded without provenance ({names}): only their step is known"
        if self._mismatched:
            names = ", ".join(sorted(self._mismatched)[:4])
            yield f"the kernels of {names} are not those that were captured: only their step is known"

    def _attribute_in_step(self, launch: RawLaunch, mark: str, inner: str) -> None:
        """What a step launches outside of graphs: the op between two graphs, or what torch does for a replay."""
        tape, step = self._step(mark)
        if tape is None:
            return
        if not isinstance(step, LaunchCall):
            call = LaunchCall("replay of a graph", (Origin("replay", ""),), is_several=True)
        else:
            seen = self._calls[int(inner)] if inner else None
            call = step if seen is None or not step.is_several else _part_of(step, seen)
        self._keep(launch, call, ("step", mark, inner if call is not step else ""), tape.phase, "call")

    def _attribute_replay(self, launches: Sequence[RawLaunch], mark: str, correlation: int) -> None:
        tape, step = self._step(mark)
        if tape is None:
            return
        if not isinstance(step, RecordedGraph):
            self._unknown.add(str(step))
            calls: Sequence[int | None] = [None] * len(launches)
            how: How = "step"
        else:
            off = self._left_out.get(mark, frozenset())
            calls, how = match_replay(launches, dataclasses.replace(step, off=off))
            if how == "step":
                self._mismatched.add(f"{step.record.title} at {tape.phase}")
        for launch, number in zip(launches, calls, strict=True):
            known = isinstance(step, RecordedGraph) and number is not None
            call = step.record.calls[number] if known else None  # type: ignore[union-attr,index]
            key = ("replay", mark, correlation, number) if known else None
            self._keep(launch, call, key, tape.phase, how)

    def _step(self, mark: str) -> tuple[RecordedTape | None, RecordedGraph | LaunchCall | str]:
        number, step, _ = map(int, mark.split("."))
        tape = self._tapes.get(number)
        if tape is None:
            return None, ""
        self.replayed.add(number)
        return tape, tape.steps[step]

    def _keep(
        self, raw: RawLaunch, call: LaunchCall | None, key: tuple[object, ...] | None, phase: str, how: How
    ) -> None:
        instance = -1 if key is None else self._instances.setdefault(key, _FIRST_OWN + len(self._instances))
        self.found[id(raw)] = raw.made_by(call, instance, phase, how)


def _part_of(step: LaunchCall, seen: LaunchCall) -> LaunchCall:
    """One of the ops of a step, as it was seen: the step knows where in the model it may come from."""
    same = tuple(origin for origin in step.origins if origin.op.partition(".")[0] == seen.op)
    return LaunchCall(seen.op, same or step.origins, seen.shapes)


def _marks(launch: RawLaunch) -> tuple[str, str]:
    """The numbers in the marks around a launch: of a step, of a call. A step's word counts for all inside it."""
    step = call = ""
    for around in launch.ranges:
        if around.kind == "annotation":
            if around.name.startswith(STEP_MARK):
                step = around.name.removeprefix(STEP_MARK).strip()
            elif around.name.startswith(CALL_MARK) and not call:
                call = around.name.removeprefix(CALL_MARK).strip()
    return step, call
