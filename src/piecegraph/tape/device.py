"""What can capture work and replay it: CUDA graphs, or nothing at all.

The recorder drives a :class:`GraphDevice`; it never touches torch.cuda itself, so all its rules can be tested without
a GPU (see ``simulated.py``). One device object belongs to one compiled module and owns its memory pool and capture
stream.

Note [Pool lifetime]
~~~~~~~~~~~~~~~~~~~~
All graphs of all sizes allocate from one pool, which is held as long as the compiled module. Memory that is freed
while a size is recorded is reused by what is recorded after it: by later pieces of the same tape, and by other tapes.
Both are sound for one reason: a tape is replayed whole and in the order it was recorded, and only one tape runs at a
time, so a value is written before it is read and nobody reads it after its last reader. (A tape that is left half way,
see Note [Paths], begins anew.) Hence nothing that lives in
the pool may be kept by anything but the tape, and the tape's references do not own.

Note [Workspaces of cuBLAS]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A captured product knows the address of the workspace it was given. torch keeps one for each handle (each thread has its
own) and stream, from when the first product asks for it: in a warm-up run, in memory that is everybody's. Whoever
clears them, as ``mode="reduce-overhead"`` does whenever it records, gives away what our graphs write to. So a session
asks for its workspace first, from our pool: once cleared, it is at worst reused by what is recorded later, as anything
in the pool. torch has 32 streams and gives each out many times; one that another's products have used is not taken.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from piecegraph.base import torch_compat
from piecegraph.base.collector import collector_off
from piecegraph.tape.nodes import CountNodes, CudaNodes, LiveNodes, node_counter

_NUM_STREAMS = 32
"""That torch has, to be given out again and again."""


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A capture that holds something to do."""

    replay: Callable[[], None]
    nodes: LiveNodes | None
    """Only if they were to be kept."""


class GraphDevice(Protocol):
    """Captures work into graphs."""

    def session(self, *, tidies: bool = True) -> contextlib.AbstractContextManager[None]:
        """Everything recorded, warm-up runs included, happens inside a session.

        Args:
            tidies: first free what Python holds for nobody, which takes a while after a large model was traced.
        """

    def begin(self, *, keep_nodes: bool) -> None:
        """Start capturing; what is kept of the nodes costs memory on the host."""

    def num_nodes(self) -> int | None:
        """How many nodes the capture under way has so far; None if there is none, or an error has spoilt it."""

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function while capturing."""

    def end(self) -> CapturedGraph | None:
        """Stop capturing; returns None if the capture holds nothing to do."""

    def abandon(self) -> None:
        """Leave a capture in which something failed."""

    def end_size(self) -> None:
        """A size is recorded: its memory may be reused."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lives in the pool, so that a tape may not keep it alive."""

    def allocate_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory in the pool, of the same layout."""

    def reserved_bytes(self) -> int:
        """How much memory the allocator holds: what it grows by while a size is recorded is that size's own."""

    def free_bytes(self) -> int | None:
        """How much memory the device has left, if it can tell."""

    def use_caller_stream(self) -> None:
        """Order the work that follows behind all work this device did before, whatever stream that was on."""

    def seconds_of(self, function: Callable[[], Any]) -> float:
        """How long the work takes that a function starts."""


class CudaGraphs:
    """CUDA graphs on one device."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self.pool = torch.cuda.MemPool()
        self.stream = torch.cuda.Stream(self._index)
        self._retired: list[torch.cuda.MemPool] = []
        self._anchors: list[torch.cuda.CUDAGraph] = []
        """A graph in every pool that stays: torch 2.11 cannot capture into a pool again whose last graph has gone."""
        self._capturing: torch.cuda.CUDAGraph | None = None
        self._count_nodes: CountNodes = lambda: None
        self._keeps_nodes = False
        self._ranges: list[tuple[int, int]] = []
        self._outside: set[int] = set()
        self._handles: set[int] = set()
        """Of cuBLAS, whose workspaces are ours."""
        self._last_stream = torch.cuda.current_stream(self._index)

    @contextlib.contextmanager
    def session(self, *, tidies: bool = True) -> Iterator[None]:
        caller = torch.cuda.current_stream(self._index)
        torch.cuda.synchronize(self._index)
        if tidies:
            gc.collect()
        torch.cuda.empty_cache()
        try:
            # A collection in the middle of a capture may free a graph or CUDA memory, which invalidates the capture.
            with collector_off(), torch.cuda.device(self._index):
                self._own_workspace()
                with torch.cuda.stream(self.stream):
                    yield
        finally:
            caller.wait_stream(self.stream)
            torch.cuda.empty_cache()  # what warm-up runs left behind on the capture stream serves nobody else

    def _own_workspace(self) -> None:
        """See Note [Workspaces of cuBLAS]."""
        for _ in range(_NUM_STREAMS):
            with torch.cuda.stream(self.stream), torch.cuda.use_mem_pool(self.pool):
                before = self._allocated_bytes()
                handle = torch.cuda.current_blas_handle()
                if handle in self._handles:
                    return
                if self._allocated_bytes() > before:
                    self._handles.add(handle)
                    return
            self.stream = torch.cuda.Stream(self._index)
        torch_compat.clear_blas_workspaces()  # there is no stream without; as torch's own graphs do
        with torch.cuda.stream(self.stream), torch.cuda.use_mem_pool(self.pool):
            self._handles.add(torch.cuda.current_blas_handle())

    def _allocated_bytes(self) -> int:
        return sum(segment["allocated_size"] for segment in self.pool.snapshot())

    def begin(self, *, keep_nodes: bool) -> None:
        if len(self._anchors) == len(self._retired):
            self._anchors.append(self._begin(keep_nodes=False))
            torch.zeros(1, device=f"cuda:{self._index}")
            self._anchors[-1].capture_end()
        self._capturing = self._begin(keep_nodes)
        self._count_nodes = node_counter(self._index)
        self._keeps_nodes = keep_nodes

    def _begin(self, keep_nodes: bool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=keep_nodes)
        # thread_local: other threads (a NCCL watchdog, a data loader) may make calls that a capture forbids.
        graph.capture_begin(pool=self.pool.id, capture_error_mode="thread_local")  # type: ignore[arg-type]
        return graph

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)

    def num_nodes(self) -> int | None:
        return self._count_nodes()

    def end(self) -> CapturedGraph | None:
        graph = self._capturing
        assert graph is not None, "end() without begin()"
        num_nodes = self.num_nodes()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # so it is, between two ops that are eager
            graph.capture_end()
        self._capturing = None
        if num_nodes == 0:
            return None
        return CapturedGraph(torch_compat.graph_replay(graph), CudaNodes(graph) if self._keeps_nodes else None)

    def abandon(self) -> None:
        if self._capturing is not None:
            torch_compat.abandon_capture(self._capturing, self.pool.id, self._index)
            self._capturing = None
            # The graphs recorded so far keep the old pool; what follows shares a new one.
            self._retired.append(self.pool)
            self.pool = torch.cuda.MemPool()

    def end_size(self) -> None:
        self._outside.clear()

    def owns(self, tensor: torch.Tensor) -> bool:
        if not tensor.is_cuda:
            return False
        address = tensor.untyped_storage().data_ptr()
        if self._in_ranges(address):
            return True
        if address not in self._outside:  # outside, or in a segment that the pool has grown since
            segments = [segment for pool in (self.pool, *self._retired) for segment in pool.snapshot()]
            self._ranges = [(s["address"], s["address"] + s["total_size"]) for s in segments]
            if self._in_ranges(address):
                return True
            self._outside.add(address)
        return False

    def _in_ranges(self, address: int) -> bool:
        return any(start <= address < end for start, end in self._ranges)

    def allocate_like(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.cuda.use_mem_pool(self.pool):
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    def reserved_bytes(self) -> int:
        # memory_reserved() makes a flat table of all there is to know first, which takes longer than asking.
        return int(torch.cuda.memory_stats_as_nested_dict(self._index)["reserved_bytes"]["all"]["current"])

    def free_bytes(self) -> int | None:
        return torch.cuda.mem_get_info(self._index)[0]

    def use_caller_stream(self) -> None:
        if torch_compat.raw_stream(self._index) != self._last_stream.cuda_stream:
            current = torch.cuda.current_stream(self._index)
            current.wait_stream(self._last_stream)
            self._last_stream = current

    def seconds_of(self, function: Callable[[], Any]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
