"""What ran, and who launched it: the values between a profile and its tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from piecegraph.base.origin import Dim3, LaunchCall, WorkKind

How = Literal["call", "stack", "node id", "position", "step", "none"]
"""How a launch was attributed, strongest first for each kind of launch.

``call``: the op was seen as it was called, with its exact line. ``stack``: by the ranges that the profiler saw around
the launch. Inside a graph: ``node id``: the profile names the node. ``position``: the n-th kernel of a replay is the
n-th node of the graph, and all their names agree. ``step``: only the step of the tape is known. ``none``: not at all.
"""

RangeKind = Literal["op", "python", "annotation", "module"]


@dataclass(frozen=True, slots=True)
class Range:
    """Something on the CPU during which a launch happened."""

    kind: RangeKind
    name: str
    """Of ``python``: ``file.py(12): forward`` as profilers write it."""
    shapes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """A kernel, a memset or a memcpy as it ran; on a CPU, an op."""

    kind: WorkKind
    name: str
    """Demangled and whole; tables shorten it."""
    start: float
    """Microseconds, in the file's own time."""
    duration: float
    stream: str
    grid: Dim3 | None
    block: Dim3 | None


@dataclass(frozen=True, slots=True)
class RawLaunch(DeviceWork):
    """A launch as a profile tells it."""

    correlation: int
    """Equal for everything that one call of the driver launched: all kernels of a graph replay share it. -1: none."""
    launcher: str
    """The driver's call: ``cudaLaunchKernel``, ``cudaGraphLaunch``; empty if it is not in the profile."""
    launched_at: float
    ranges: tuple[Range, ...]
    """Innermost first."""
    instance: int
    """Equal for launches with the same innermost op range, or Python range where there is no op: one call. -1: none."""
    node_id: int | None = None

    @property
    def is_replayed(self) -> bool:
        """Whether it ran as part of a graph."""
        return "GraphLaunch" in self.launcher

    def made_by(self, call: LaunchCall | None, instance: int, phase: str, how: How, replay: int = -1) -> Launch:
        """The same launch, attributed; see there for the arguments."""
        return Launch(
            kind=self.kind,
            name=self.name,
            start=self.start,
            duration=self.duration,
            stream=self.stream,
            grid=self.grid,
            block=self.block,
            call=call,
            instance=instance,
            phase=phase,
            how=how,
            replay=replay,
        )


@dataclass(frozen=True, slots=True)
class Launch(DeviceWork):
    """A launch and who made it."""

    call: LaunchCall | None
    instance: int
    """Equal for launches that one call made, and for them alone; -1 if that is not known."""
    phase: str
    """A size, a kind of step, or the innermost annotation; empty if there is none."""
    how: How
    replay: int = -1
    """Equal for all that ran in one replay of a tape, or of another program's graph; -1 outside of any."""


@dataclass(frozen=True, slots=True)
class KernelProfile:
    """Everything that ran while a profile was taken."""

    launches: tuple[Launch, ...]
    """In the order of their launch."""
    captured: tuple[CapturedCall, ...] = ()
    """What the graphs that were replayed hold, for mining groups; empty if nothing is known of them."""
    device: str = ""
    """The name of the GPU; ``cpu`` if nothing ran on a GPU and ops are listed instead."""
    notes: tuple[str, ...] = ()
    """What a reader of the tables must know: what was lost, what could not be attributed and why."""


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """One call as it was captured, with what it put into the graph."""

    call: LaunchCall
    phase: str
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Member:
    """One kernel, memset or memcpy of a call."""

    kind: WorkKind
    name: str
    grid: Dim3 | None
    block: Dim3 | None
