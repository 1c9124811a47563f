"""The events of a profile, packed: what ran on the GPU, the driver's calls that launched it, the ranges around them.

A long profile holds millions of ranges, most of which no launch happened in. So they are kept in typed arrays, some 30
bytes each, with every name once; objects are made only for what the tables show.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import SupportsInt

from piecegraph.base.origin import Dim3, WorkKind
from piecegraph.provenance.launch import Range, RangeKind
from piecegraph.provenance.profile.event import ProfileEvent, ShapeTexts
from piecegraph.provenance.profile.interned import Interned

RANGE_KINDS: tuple[RangeKind, ...] = ("annotation", "module", "python", "op")
"""In the order in which they enclose each other if they begin and end at the same time."""
WORK_KINDS: tuple[WorkKind, ...] = ("kernel", "memset", "memcpy")
MODULE_PREFIX = "nn.Module: "

_ANNOTATION, _MODULE, _PYTHON, _OP = range(4)
_RANGES = {"user_annotation": _ANNOTATION, "python_function": _PYTHON, "cpu_op": _OP}
_WORK = {"kernel": 0, "gpu_memset": 1, "gpu_memcpy": 2}
_LAUNCHERS = {"cuda_runtime": False, "cuda_driver": True}
_PROFILED_BY_US = frozenset({"PythonDispatchMode", "PythonTLSSnapshot"})
"""What it takes to see ops from Python is no op of the program."""
_ADDRESS = re.compile(r" object at 0x[0-9a-f]+")


@dataclass(slots=True)
class ThreadRanges:
    """What happened on one thread of the CPU, column by column, in the order of the file."""

    process: str
    name: str
    starts: array[float] = field(default_factory=lambda: array("d"))
    durations: array[float] = field(default_factory=lambda: array("d"))
    kinds: array[int] = field(default_factory=lambda: array("b"))
    ranges: array[int] = field(default_factory=lambda: array("i"))
    """Places in :attr:`Timeline.ranges`."""
    external_ids: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.starts)

    def is_op(self, index: int) -> bool:
        return self.kinds[index] == _OP

    def is_python(self, index: int) -> bool:
        return self.kinds[index] == _PYTHON


@dataclass(slots=True)
class DriverCalls:
    """Calls of the CUDA runtime and of the driver, column by column."""

    correlations: array[int] = field(default_factory=lambda: array("q"))
    starts: array[float] = field(default_factory=lambda: array("d"))
    threads: array[int] = field(default_factory=lambda: array("i"))
    names: array[int] = field(default_factory=lambda: array("i"))
    are_drivers: array[int] = field(default_factory=lambda: array("b"))


@dataclass(slots=True)
class GpuWork:
    """Kernels, memsets and memcpys, column by column."""

    kinds: array[int] = field(default_factory=lambda: array("b"))
    names: array[int] = field(default_factory=lambda: array("i"))
    starts: array[float] = field(default_factory=lambda: array("d"))
    durations: array[float] = field(default_factory=lambda: array("d"))
    streams: array[int] = field(default_factory=lambda: array("i"))
    sizes: array[int] = field(default_factory=lambda: array("i"))
    correlations: array[int] = field(default_factory=lambda: array("q"))
    external_ids: array[int] = field(default_factory=lambda: array("q"))
    node_ids: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.starts)


class Timeline:
    """All of a profile that matters here. Filled by :func:`collect`."""

    def __init__(self) -> None:
        self.names: Interned[str] = Interned()
        """Of GPU work and driver calls."""
        self.ranges: list[Range] = []
        """Every distinct one once."""
        self.streams: Interned[tuple[int, str]] = Interned()
        """(device, stream)"""
        self.sizes: Interned[tuple[Dim3 | None, Dim3 | None]] = Interned()
        """(grid, block)"""
        self.threads: list[ThreadRanges] = []
        self.work = GpuWork()
        self.calls = DriverCalls()
        self._shapes = ShapeTexts()
        self._range_numbers: dict[tuple[int, str, int], int] = {}
        self._thread_numbers: dict[tuple[int | str, int | str], int] = {}

    def add(self, batch: Iterable[ProfileEvent]) -> None:
        """Take what matters of some events."""
        for event in batch:
            if event.ph != "X":
                continue
            category = event.cat
            if event.name in _PROFILED_BY_US:
                continue
            if category in _RANGES:
                self._add_range(event, _RANGES[category])
            elif category in _WORK:
                self._add_work(event, _WORK[category])
            elif category in _LAUNCHERS:
                self._add_call(event, _LAUNCHERS[category])

    def _add_range(self, event: ProfileEvent, kind: int) -> None:
        name, args = event.name, event.args
        if kind == _PYTHON:
            if name.startswith(MODULE_PREFIX):
                kind = _MODULE
            elif name.startswith("<"):
                # The address of a bound method's object would make every name another one.
                name = _ADDRESS.sub("", name)
        thread = self.threads[self._thread(event)]
        thread.starts.append(event.ts)
        thread.durations.append(event.dur)
        thread.kinds.append(kind)
        thread.ranges.append(self._range(kind, name, self._shapes.number(args.dims, args.types) if kind == _OP else 0))
        thread.external_ids.append(args.external_id)

    def _range(self, kind: int, name: str, shapes: int) -> int:
        key = (kind, name, shapes)
        number = self._range_numbers.get(key)
        if number is None:
            number = self._range_numbers[key] = len(self.ranges)
            self.ranges.append(Range(RANGE_KINDS[kind], name, self._shapes.values[shapes]))
        return number

    def _add_work(self, event: ProfileEvent, kind: int) -> None:
        work, args = self.work, event.args
        work.kinds.append(kind)
        work.names.append(self.names.number(event.name))
        work.starts.append(event.ts)
        work.durations.append(event.dur)
        work.streams.append(self.streams.number((args.device, str(args.stream))))
        work.sizes.append(self.sizes.number((_dim3(args.grid), _dim3(args.block))))
        work.correlations.append(args.correlation)
        work.external_ids.append(args.external_id)
        work.node_ids.append(_node_id(args.graph_id, args.node_id))

    def _add_call(self, event: ProfileEvent, is_driver: bool) -> None:
        calls = self.calls
        calls.correlations.append(event.args.correlation)
        calls.starts.append(event.ts)
        calls.threads.append(self._thread(event))
        calls.names.append(self.names.number(event.name))
        calls.are_drivers.append(is_driver)

    def _thread(self, event: ProfileEvent) -> int:
        key = (event.pid, event.tid)
        number = self._thread_numbers.get(key)
        if number is None:
            number = self._thread_numbers[key] = len(self.threads)
            self.threads.append(ThreadRanges(process=str(event.pid), name=str(event.tid)))
        return number


def collect(batches: Iterable[Sequence[ProfileEvent]]) -> Timeline:
    """Pack the events of a profile."""
    timeline = Timeline()
    for batch in batches:
        timeline.add(batch)
    return timeline


def _node_id(graph_id: int, node_id: int) -> int:
    """The graph in the upper half, the node in the lower; -1 outside of graphs.

    That is how torch writes it; some versions write the lower half alone, where the first node of a graph is 0.
    """
    if graph_id <= 0 and node_id <= 0:
        return -1
    return node_id if node_id >> 32 else graph_id << 32 | node_id


def _dim3(values: Sequence[SupportsInt]) -> Dim3 | None:
    if len(values) != 3:
        return None
    x, y, z = values
    return (int(x), int(y), int(z))
