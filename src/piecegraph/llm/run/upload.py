"""Copies between host and device on streams of their own.

Note [Copies beside steps]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A step is launched while the one before it runs, and what it is given is known by then. In one stream with the steps its
copies would still wait for their turn, and nothing would run on the device meanwhile: on an H200 some 30 us between two
steps of 700. So they go to buffers that the running step does not read, and what is left between two steps is a copy on
the device. The same holds for the tokens on their way back. Where no step is running there is nothing to be beside of:
what is sent goes straight to where it is read.
"""

from __future__ import annotations

import contextlib

import torch

from piecegraph.base import torch_compat


class _Events:
    """What orders the batches that are sent to the same buffers."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.device_index = int(stream.device_index)
        self.arrived = torch.cuda.Event()
        self.used = torch.cuda.Event()

    def caller(self) -> torch.cuda.Stream:
        """The caller's stream."""
        return torch_compat.current_stream(self.device_index)


class _Beside:
    """Copies within are on a stream of their own; the caller's goes on when they have arrived."""

    def __init__(self, events: _Events) -> None:
        self._events = events
        self._on_stream = torch_compat.OnStream(events.stream)

    def __enter__(self) -> None:
        self._events.stream.wait_event(self._events.used)
        self._on_stream.__enter__()

    def __exit__(self, *_: object) -> None:
        self._events.arrived.record(self._events.stream)
        self._on_stream.__exit__()
        self._events.caller().wait_event(self._events.arrived)


class _InLine:
    """Copies within are on the caller's stream."""

    def __init__(self, events: _Events) -> None:
        self._events = events

    def __enter__(self) -> None:
        self._events.caller().wait_event(self._events.used)

    def __exit__(self, *_: object) -> None:
        self._events.arrived.record(self._events.caller())


class Upload:
    """What is sent to a device, one batch after the other, to the same buffers."""

    def __init__(self, device: torch.device) -> None:
        self._events = _Events(torch.cuda.Stream(device)) if device.type == "cuda" else None
        self._ways: tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]
        self._ways = (contextlib.nullcontext(), contextlib.nullcontext())
        if self._events is not None:
            self._ways = (_InLine(self._events), _Beside(self._events))

    def wait(self) -> None:
        """Until the host's memory is no longer read."""
        if self._events is not None:
            self._events.arrived.synchronize()

    def sending(self, *, is_beside: bool) -> contextlib.AbstractContextManager[None]:
        """Copies within begin when the last batch was used. Either way they have arrived when the caller's stream goes
        on.

        Args:
            is_beside: whether a step may be running, which they are not to wait for.
        """
        return self._ways[is_beside]

    def end_use(self) -> None:
        """What comes behind this in the caller's stream does not read what was sent."""
        if self._events is not None:
            self._events.used.record(self._events.caller())


class Download:
    """Numbers on their way to the host, to two places in turn."""

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._places = [torch.empty(count, dtype=dtype, pin_memory=is_cuda) for _ in range(2)]
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        self._on_stream = torch_compat.OnStream(self._stream) if self._stream is not None else None
        self._made = torch.cuda.Event() if is_cuda else None
        self._arrived = [torch.cuda.Event() if is_cuda else None for _ in range(2)]
        self._next = 0

    def send(self, numbers: torch.Tensor) -> Pending:
        """Begin when the caller's stream has made them. They must stay as they are until they were read."""
        place, arrived = self._places[self._next][: len(numbers)], self._arrived[self._next]
        self._next ^= 1
        if self._stream is None or self._on_stream is None or self._made is None or arrived is None:
            place.copy_(numbers)
            return Pending(place, None)
        self._made.record(torch_compat.current_stream(self._stream.device_index))
        self._stream.wait_event(self._made)
        with self._on_stream:
            place.copy_(numbers, non_blocking=True)
        arrived.record(self._stream)
        return Pending(place, arrived)


class Pending:
    """Numbers that may not have arrived yet."""

    __slots__ = ("_arrived", "_place")

    def __init__(self, place: torch.Tensor, arrived: torch.cuda.Event | None) -> None:
        self._place = place
        self._arrived = arrived

    def read(self) -> list[int]:
        """Wait for them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: list[int] = self._place.tolist()
        return found
