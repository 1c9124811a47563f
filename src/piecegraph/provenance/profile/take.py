"""Taking a profile: what runs inside ``with piecegraph.trace()`` is profiled, and every kernel attributed.

torch.profiler writes a file, which is read back by the reader that other programs' profiles go through; what is added
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
from piecegraph.base.origin import LaunchCall
from piecegraph.errors import KernelError
from piecegraph.provenance.launch import KernelProfile, RawLaunch
from piecegraph.provenance.observe import attributing, observing
from piecegraph.provenance.profile.attribute import attribute
from piecegraph.provenance.profile.marks import Announcer, ByMarks, marks_around
from piecegraph.provenance.profile.read import read_launches
from piecegraph.provenance.profile.replays import RecordedGraph, RecordedTape, captured_calls
from piecegraph.tape.tape import GraphStep, Tape, announced_steps

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
def profiled(folder: Path) -> Iterator[MarkedProfile]:
    """Profile what runs inside into a file in a folder."""
    profile = MarkedProfile(folder / "trace.json", Announcer())
    with _alone(), attributing(), announced_steps() as seen:
        with profiling() as profiler:
            with observing(profile.announcer):
                yield profile
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        profile.tapes = {tape.number: _recorded(tape) for tape in seen.tapes}
        profile.left_out = seen.left_out
    profiler.export_chrome_trace(str(profile.path))


@contextlib.contextmanager
def profiling() -> Iterator[torch.profiler.profile]:
    """Torch's profiler, running, for all devices there are."""
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


class MarkedProfile:
    """The file of a profile, and what its marks mean."""

    def __init__(self, path: Path, announcer: Announcer) -> None:
        self.path = path
        self.announcer = announcer
        self.tapes: dict[int, RecordedTape] = {}
        """Those that ran, by number."""
        self.left_out: Mapping[str, frozenset[int]] = {}
        """Nodes that were switched off, by the mark of the step."""

    def read(self) -> KernelProfile:
        """Attribute everything that the file holds."""
        raw, device = read_launches(self.path, progress=False, may_be_empty=True)
        if not raw.launches:
            return KernelProfile((), notes=("nothing ran while the trace was taken",))
        if not raw.device_ids:
            raw = dataclasses.replace(raw, launches=_without_watching(raw.launches))
        marked = ByMarks(self.announcer.calls, self.tapes, self.left_out)
        marked.attribute(raw.launches)
        profile = attribute(raw, device, lambda launch: marked.found.get(id(launch)))
        captured = [
            call
            for number in sorted(marked.replayed)
            for step in self.tapes[number].steps
            if isinstance(step, RecordedGraph)
            for call in captured_calls(step.record)
        ]
        return KernelProfile(profile.launches, tuple(captured), profile.device, (*profile.notes, *marked.notes()))


def _without_watching(ops: Sequence[RawLaunch]) -> tuple[RawLaunch, ...]:
    """The ops of a CPU without the time it takes to watch them: where calls are marked, an op outside of any mark is
    the outer half of one that is called inside.
    """
    marked = {op.stream for op in ops if any(marks_around(op))}
    return tuple(op for op in ops if op.stream not in marked or any(marks_around(op)))


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
