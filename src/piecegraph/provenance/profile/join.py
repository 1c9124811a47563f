"""Launches with what was open around them: a GPU's work joined with the driver's calls and the ranges of the CPU.

In comes a packed profile, out come :class:`RawLaunch` values in the order of their launch. A launch that the profile
does not hold has no ranges; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from piecegraph.provenance.launch import Range, RawLaunch
from piecegraph.provenance.profile.nesting import Moment, open_ranges, own_times
from piecegraph.provenance.profile.timeline import WORK_KINDS, ThreadRanges, Timeline

MIN_OWN_MICROSECONDS = 0.0005
"""Half of what profilers can tell: less is the rounding of a difference."""


@dataclass(frozen=True, slots=True)
class RawProfile:
    """All that a profile tells of what ran."""

    launches: tuple[RawLaunch, ...]
    """In the order of their launch."""
    device_ids: tuple[int, ...]
    """Of the GPUs that something ran on; empty if ops of a CPU are listed instead."""
    ambiguous: frozenset[int] = frozenset()
    """Correlations that several processes use: the profile was merged of several, and none of them is believed."""


@dataclass(frozen=True, slots=True)
class _Context:
    """What was open at a launch."""

    ranges: tuple[Range, ...] = ()
    instance: int = -1


_NO_CONTEXT = _Context()


def join(timeline: Timeline) -> RawProfile:
    """What ran, with its launches; if nothing ran on a GPU, the ops of the CPU with their own times."""
    if not len(timeline.work):
        return RawProfile(tuple(_in_order(_op_launches(timeline))), ())
    calls, ambiguous = _launching_calls(timeline)
    devices = tuple(sorted({device for device, _ in timeline.streams.values}))
    return RawProfile(tuple(_in_order(_gpu_launches(timeline, calls))), devices, ambiguous)


def _in_order(launches: Iterator[RawLaunch]) -> list[RawLaunch]:
    return sorted(launches, key=lambda launch: (launch.launched_at, launch.correlation, launch.start))


def _launching_calls(timeline: Timeline) -> tuple[dict[int, int], frozenset[int]]:
    """Which driver call has which correlation; the runtime's, where it called the driver with the same one."""
    calls, threads = timeline.calls, timeline.threads
    found = dict.fromkeys(timeline.work.correlations, -1)
    found.pop(-1, None)
    ambiguous = set()
    for call, correlation in enumerate(calls.correlations):
        known = found.get(correlation)
        if known is None:
            continue
        if known >= 0 and threads[calls.threads[known]].process != threads[calls.threads[call]].process:
            ambiguous.add(correlation)
        elif known < 0 or calls.are_drivers[known] > calls.are_drivers[call]:
            found[correlation] = call
    kept = {correlation: call for correlation, call in found.items() if call >= 0 and correlation not in ambiguous}
    return kept, frozenset(ambiguous)


def _gpu_launches(timeline: Timeline, call_of: dict[int, int]) -> Iterator[RawLaunch]:
    work, calls, names = timeline.work, timeline.calls, timeline.names.values
    stream_name = _stream_names(timeline)
    open_at = _Contexts(timeline)
    for seen in call_of.values():
        open_at.add_time(calls.threads[seen], seen, calls.starts[seen])
    op_of = _ops_by_external_id(timeline, call_of)
    for external_id, (thread, index) in op_of.items():
        open_at.add_op(thread, ~external_id, index)
    contexts = open_at.all()
    for item in range(len(work)):
        call = call_of.get(work.correlations[item])
        op = None if call is not None else op_of.get(work.external_ids[item])
        if call is not None:
            launched_at, context = calls.starts[call], contexts[call]
        elif op is not None:
            launched_at, context = timeline.threads[op[0]].starts[op[1]], contexts[~work.external_ids[item]]
        else:
            launched_at, context = work.starts[item], _NO_CONTEXT
        grid, block = timeline.sizes.values[work.sizes[item]]
        yield RawLaunch(
            kind=WORK_KINDS[work.kinds[item]],
            name=names[work.names[item]],
            start=work.starts[item],
            duration=work.durations[item],
            stream=stream_name[work.streams[item]],
            grid=grid,
            block=block,
            correlation=work.correlations[item],
            launcher="" if call is None else names[calls.names[call]],
            launched_at=launched_at,
            ranges=context.ranges,
            instance=context.instance,
            node_id=None if work.node_ids[item] < 0 else work.node_ids[item],
        )


def _stream_names(timeline: Timeline) -> list[str]:
    """With the device in front where there are several: each counts its streams by itself."""
    streams = timeline.streams.values
    is_one_device = len({device for device, _ in streams}) == 1
    return [stream if is_one_device else f"{device}:{stream}" for device, stream in streams]


def _ops_by_external_id(timeline: Timeline, call_of: dict[int, int]) -> dict[int, tuple[int, int]]:
    """(thread, range) of the ops of work whose driver call is not in the profile."""
    work = timeline.work
    pairs = zip(work.correlations, work.external_ids, strict=True)
    wanted = {external_id for correlation, external_id in pairs if correlation not in call_of and external_id > 0}
    found: dict[int, tuple[int, int]] = {}
    ambiguous: set[int] = set()
    for number, thread in enumerate(timeline.threads if wanted else []):
        for index, external_id in enumerate(thread.external_ids):
            if external_id in wanted and thread.is_op(index):
                first, _ = found.setdefault(external_id, (number, index))
                if timeline.threads[first].process != thread.process:
                    ambiguous.add(external_id)
    return {external_id: place for external_id, place in found.items() if external_id not in ambiguous}


def _op_launches(timeline: Timeline) -> Iterator[RawLaunch]:
    own = [(number, *time) for number, thread in enumerate(timeline.threads) for time in own_times(thread)]
    own = [(number, op, duration) for number, op, duration in own if duration >= MIN_OWN_MICROSECONDS]
    open_at = _Contexts(timeline)
    for number, op, _ in own:
        open_at.add_op(number, open_at.instance(number, op), op)
    contexts = open_at.all()
    for number, op, duration in own:
        thread, context = timeline.threads[number], contexts[open_at.instance(number, op)]
        yield RawLaunch(
            kind="op",
            name=timeline.ranges[thread.ranges[op]].name,
            start=thread.starts[op],
            duration=duration,
            stream=thread.name,
            grid=None,
            block=None,
            correlation=-1,
            launcher="",
            launched_at=thread.starts[op],
            ranges=context.ranges,
            instance=context.instance,
        )


class _Contexts:
    """Collects moments, then finds what was open at each; equal answers are one object."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._moments: list[list[Moment]] = [[] for _ in timeline.threads]
        self._first_instance = [0]
        for thread in timeline.threads:
            self._first_instance.append(self._first_instance[-1] + len(thread))
        self._stacks: dict[tuple[int, ...], tuple[Range, ...]] = {}

    def add_time(self, thread: int, number: int, time: float) -> None:
        self._moments[thread].append(Moment(number, time))

    def add_op(self, thread: int, number: int, op: int) -> None:
        self._moments[thread].append(Moment(number, self._timeline.threads[thread].starts[op], op))

    def instance(self, thread: int, index: int) -> int:
        """A number for a range that no other range of any thread has."""
        return self._first_instance[thread] + index

    def all(self) -> dict[int, _Context]:
        """What was open, by the number of the moment."""
        contexts = {}
        for number, thread in enumerate(self._timeline.threads):
            for moment, opened in open_ranges(thread, self._moments[number]):
                caller = _caller(thread, opened)
                instance = -1 if caller is None else self.instance(number, caller)
                contexts[moment] = _Context(self._stack(thread, opened), instance)
        return contexts

    def _stack(self, thread: ThreadRanges, opened: list[int]) -> tuple[Range, ...]:
        key = tuple(map(thread.ranges.__getitem__, reversed(opened)))
        known = self._stacks.get(key)
        if known is None:
            known = self._stacks[key] = tuple(map(self._timeline.ranges.__getitem__, key))
        return known


def _caller(thread: ThreadRanges, opened: list[int]) -> int | None:
    """The innermost op, or the innermost Python function where there is no op."""
    for is_meant in (thread.is_op, thread.is_python):
        for index in reversed(opened):
            if is_meant(index):
                return index
    return None
