"""Marks in a profile: written while it is taken, and read back to say who made each launch.

Every call is a range with a number, under which it is remembered what the call was; and a tape marks its steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from piecegraph.base.origin import LaunchCall, Origin
from piecegraph.provenance.launch import How, Launch, RawLaunch
from piecegraph.provenance.profile.replays import RecordedGraph, RecordedTape, match_replay
from piecegraph.tape.tape import STEP_MARK

CALL_MARK = "piecegraph.call"
"""The name of the range around a call, before the call's number."""

_FIRST_OWN = 1 << 40
"""Numbers of calls from here on are ours; those that the reader gives are smaller."""


class Announcer:
    """A :class:`~piecegraph.provenance.observe.CallSink` that a profiler sees."""

    def __init__(self) -> None:
        self.calls: list[LaunchCall | None] = []
        """By number."""
        self._same: dict[LaunchCall, LaunchCall] = {}
        self._range: torch.profiler.record_function | None = None

    @property
    def is_inside(self) -> bool:
        return self._range is not None

    def begin(self) -> None:
        self._range = torch.profiler.record_function(f"{CALL_MARK} {len(self.calls)}")
        self.calls.append(None)
        self._range.__enter__()

    def end(self, make_call: Callable[[], LaunchCall]) -> None:
        assert self._range is not None
        self._range.__exit__(None, None, None)
        self._range = None
        call = make_call()
        self.calls[-1] = self._same.setdefault(call, call)

    def settle(self, make_call: Callable[[], LaunchCall]) -> None:
        """What ran outside of any call has no mark, and is attributed by what the profiler itself saw."""


class ByMarks:
    """Attributes launches by the marks around them.

    Args:
        calls: what the marks of calls mean, by number.
        tapes: those that ran, by number.
        left_out: nodes that were switched off, by the mark of the step.
    """

    def __init__(
        self,
        calls: Sequence[LaunchCall | None],
        tapes: Mapping[int, RecordedTape],
        left_out: Mapping[str, frozenset[int]],
    ) -> None:
        self._calls = calls
        self._tapes = tapes
        self._left_out = left_out
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
            step, call = marks_around(launch)
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
        self._keep(launch, call, ("step", mark, inner if call is not step else ""), tape.phase, "call", mark)

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
            self._keep(launch, call, key, tape.phase, how, mark)

    def _step(self, mark: str) -> tuple[RecordedTape | None, RecordedGraph | LaunchCall | str]:
        number, step, _ = map(int, mark.split("."))
        tape = self._tapes.get(number)
        if tape is None:
            return None, ""
        self.replayed.add(number)
        return tape, tape.steps[step]

    def _keep(
        self,
        raw: RawLaunch,
        call: LaunchCall | None,
        key: tuple[object, ...] | None,
        phase: str,
        how: How,
        mark: str = "",
    ) -> None:
        instance = -1 if key is None else self._instances.setdefault(key, _FIRST_OWN + len(self._instances))
        replay = int(mark.split(".")[-1]) if mark else -1
        self.found[id(raw)] = raw.made_by(call, instance, phase, how, replay)


def _part_of(step: LaunchCall, seen: LaunchCall) -> LaunchCall:
    """One of the ops of a step, as it was seen: the step knows where in the model it may come from."""
    same = tuple(origin for origin in step.origins if origin.op.partition(".")[0] == seen.op)
    return LaunchCall(seen.op, same or step.origins, seen.shapes)


def marks_around(launch: RawLaunch) -> tuple[str, str]:
    """The numbers in the marks around a launch: of a step, of a call. A step's word counts for all inside it."""
    step = call = ""
    for around in launch.ranges:
        if around.kind == "annotation":
            if around.name.startswith(STEP_MARK):
                step = around.name.removeprefix(STEP_MARK).strip()
            elif around.name.startswith(CALL_MARK) and not call:
                call = around.name.removeprefix(CALL_MARK).strip()
    return step, call
