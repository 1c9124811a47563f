"""CUDA: driver, streams and graphs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch

raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device_index: 0)
"""The handle of a device's current stream, without building a Stream object. Builds without CUDA have none."""


_StreamName = tuple[int, int, int]
"""Id, device index and device type: what torch knows a stream by."""


@functools.lru_cache(maxsize=64)
def _named_stream(name: _StreamName) -> torch.cuda.Stream:
    stream_id, device_index, device_type = name
    return torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


def current_stream(device_index: int) -> torch.cuda.Stream:
    """A device's current stream: an object that is made once for each, where ``torch.cuda`` makes one for each call."""
    return _named_stream(torch._C._cuda_getCurrentStream(device_index))


class OnStream:
    """What ``torch.cuda.stream`` is, without the objects that it makes: for a stream that is entered at every step, by
    one thread at a time, and not within itself.
    """

    __slots__ = ("_here", "_own", "_there")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._own: _StreamName = (stream.stream_id, stream.device_index, stream.device_type)
        self._here = self._there = self._own

    def __enter__(self) -> None:
        # To set a stream is to set its device as the current one, so that one's stream is kept, too.
        self._here = torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice())
        self._there = torch._C._cuda_getCurrentStream(self._own[1])
        _set_stream(self._own)

    def __exit__(self, *_: object) -> None:
        _set_stream(self._there)
        _set_stream(self._here)


def _set_stream(name: _StreamName) -> None:
    stream_id, device_index, device_type = name
    torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)


def graph_replay(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """What replays a graph, without the Python around it, which asks whether a pool is tracked: ours is not."""
    replay: Callable[[], None] = super(torch.cuda.CUDAGraph, graph).replay
    return replay


_abandoned: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed. torch's allocator for pinned memory keeps calling into them, so they may never be
destroyed.
"""


def abandon_capture(graph: torch.cuda.CUDAGraph, pool_id: tuple[int, int], device_index: int) -> None:
    """Leave a capture that failed, on the capture stream. The pool cannot be captured into again.

    ``capture_end`` raises before it has tidied up (torch 2.11): the allocator still serves the capture, and so does
    the allocator for pinned memory, which has no way out; and the random number generator still counts for the
    capture. An empty capture that succeeds puts the generator right.
    """
    _abandoned.append(graph)
    with contextlib.suppress(RuntimeError):
        graph.capture_end()
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device_index, pool_id)
    healthy = torch.cuda.CUDAGraph()
    healthy.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device=f"cuda:{device_index}")
    healthy.capture_end()


def clear_blas_workspaces() -> None:
    """Free the workspaces of cuBLAS of all threads and streams; each is allocated again where it is next needed."""
    torch._C._cuda_clearCublasWorkspaces()


@contextlib.contextmanager
def capture_hidden() -> Iterator[None]:
    """Inside, Python is told that no graph is being captured."""
    asked = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked
