"""Where a kernel comes from: the nouns that capture, profiler and tables share.

An *origin* is a place in the user's model. A *call* is what launched kernels: an op, or one launch of a compiled
kernel, which has one origin for each op that was fused into it. A *graph node* is a kernel, memset or memcpy inside a
captured graph, with the call that put it there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from piecegraph.base.plan import SourceLine

Dim3 = tuple[int, int, int]

WorkKind = Literal["kernel", "memset", "memcpy", "op"]
"""What ran on a device; ``op`` stands for an op whose time was taken on a CPU."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A place in the user's model."""

    op: str
    """``aten::linear``, ``mylib::attention``: what the model calls there."""
    module: str
    """The full path, ``model.layers.3.self_attn.q_proj``; empty outside of any module, or if not known."""
    stack: tuple[SourceLine, ...] = ()
    """Outermost first. Frames of torch itself are left out."""

    @property
    def line(self) -> SourceLine | None:
        """The innermost line of the user's code."""
        return self.stack[-1] if self.stack else None


@dataclass(frozen=True, slots=True)
class LaunchCall:
    """A call that launches kernels. All that one call launches belongs together."""

    op: str
    """What is called: ``aten::mm``, a custom op, or the name of a compiled kernel."""
    origins: tuple[Origin, ...] = ()
    """The main one first; a fused kernel has several. Empty if nothing is known."""
    shapes: tuple[str, ...] = ()
    """Of its tensor arguments: ``bfloat16[16, 4096]``."""
    is_several: bool = False
    """It stands for several ops that could not be told apart: what they launch need not belong together."""


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A node of a captured graph."""

    kind: WorkKind
    name: str
    """Of a kernel: demangled. Of a memset or memcpy: empty."""
    grid: Dim3 | None
    block: Dim3 | None
    call: int | None
    """Which of the graph's calls put it there; None if no call was seen to."""
    node_id: int | None = None
    """What profilers call it, where driver and bindings tell."""


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """What is inside one captured graph."""

    title: str
    """``piece 3``"""
    phase: str
    """What it was captured for: a size, or a kind of step."""
    calls: tuple[LaunchCall, ...]
    nodes: tuple[GraphNode, ...]
    """In the order of their capture, which is the order in which they run."""
