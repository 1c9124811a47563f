"""The nodes of CUDA graphs: counting them during a capture, reading them afterwards, switching them off and on.

Everything here goes through cuda-bindings, which CUDA builds of torch depend on.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

import torch

from piecegraph.base import torch_compat
from piecegraph.base.origin import GraphNode, WorkKind
from piecegraph.errors import KernelError

CountNodes = Callable[[], int | None]
"""How many nodes a capture has so far; None if it is over, if an error has spoilt it, and without cuda-bindings."""


class LiveNodes(Protocol):
    """The nodes of a graph that can be replayed."""

    def describe(self) -> tuple[GraphNode, ...]:
        """What the nodes are, in the order of their capture; the calls are not filled in."""

    @property
    def off(self) -> AbstractSet[int]:
        """The nodes that do not run."""

    def switch(self, index: int, *, on: bool) -> None:
        """Let a node run or not in the replays that follow."""


def node_counter(device_index: int) -> CountNodes:
    """What counts the nodes of the capture under way on the current stream; it is asked twice for every op."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return lambda: None
    stream = torch_compat.raw_stream(device_index)
    error, _, _, graph, *_ = runtime.cudaStreamGetCaptureInfo(stream)
    active = runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive
    if int(error) != 0:
        return lambda: None

    def count() -> int | None:
        _, status = runtime.cudaStreamIsCapturing(stream)
        if status != active:  # the graph has gone
            return None
        error, _, number = runtime.cudaGraphGetNodes(graph, 0)
        return int(number) if int(error) == 0 else None

    return count


class SwitchedNodes:
    """Which nodes of a graph are switched off."""

    def __init__(self) -> None:
        self.off: set[int] = set()

    def _note(self, index: int, *, on: bool) -> None:
        (self.off.discard if on else self.off.add)(index)
        (altered.add if self.off else altered.discard)(self)


altered: weakref.WeakSet[SwitchedNodes] = weakref.WeakSet()
"""The graphs of which nodes are switched off: mostly none, which is asked at every step."""


class CudaNodes(SwitchedNodes):
    """The nodes of a graph that was captured with ``keep_graph``."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        super().__init__()
        try:
            from cuda.bindings import runtime
        except ImportError as error:
            what, hint = "the nodes of a graph cannot be read", "pip install cuda-bindings, or leave out provenance"
            raise KernelError("PG732", what, why="cuda-bindings is not installed", hint=hint) from error
        self._graph = graph  # owns the nodes
        graph.instantiate()
        self._running = runtime.cudaGraphExec_t(graph.raw_cuda_graph_exec())

    @functools.cached_property
    def _nodes(self) -> list[Any]:
        from cuda.bindings import runtime

        raw = runtime.cudaGraph_t(self._graph.raw_cuda_graph())
        count = int(_check(runtime.cudaGraphGetNodes(raw, 0))[1])
        return list(_check(runtime.cudaGraphGetNodes(raw, count))[0])[:count]

    def describe(self) -> tuple[GraphNode, ...]:
        return tuple(_describe(node) for node in self._nodes)

    def switch(self, index: int, *, on: bool) -> None:
        from cuda.bindings import runtime

        _check(runtime.cudaGraphNodeSetEnabled(self._running, self._nodes[index], int(on)))
        self._note(index, on=on)


def _describe(node: Any) -> GraphNode:
    from cuda.bindings import driver, runtime

    kind_of: dict[Any, WorkKind] = {
        runtime.cudaGraphNodeType.cudaGraphNodeTypeKernel: "kernel",
        runtime.cudaGraphNodeType.cudaGraphNodeTypeMemset: "memset",
        runtime.cudaGraphNodeType.cudaGraphNodeTypeMemcpy: "memcpy",
    }
    (node_type,) = _check(runtime.cudaGraphNodeGetType(node))
    kind = kind_of.get(node_type, "op")
    if kind != "kernel":
        return GraphNode(kind, "" if kind != "op" else str(node_type.name), None, None, None, _node_id(node))
    (params,) = _check(driver.cuGraphKernelNodeGetParams(int(node)))
    error, name = driver.cuFuncGetName(params.func)
    if int(error) != 0:  # a kernel of a library that loads its code lazily
        (name,) = _check(driver.cuKernelGetName(params.kern))
    grid = (params.gridDimX, params.gridDimY, params.gridDimZ)
    block = (params.blockDimX, params.blockDimY, params.blockDimZ)
    return GraphNode("kernel", torch_compat.demangle(name.decode()), grid, block, None, _node_id(node))


def _node_id(node: Any) -> int | None:
    """The number by which profilers name a node: drivers from CUDA 13.1 tell it."""
    from cuda.bindings import runtime

    tell = getattr(runtime, "cudaGraphNodeGetToolsId", None)
    if tell is None:
        return None
    error, number = tell(node)
    return int(number) if int(error) == 0 else None


def _check(returned: tuple[Any, ...]) -> tuple[Any, ...]:
    error, *values = returned
    if int(error) != 0:
        raise KernelError("PG732", "the nodes of a graph cannot be read or switched", why=f"CUDA says {error.name}")
    return tuple(values)
