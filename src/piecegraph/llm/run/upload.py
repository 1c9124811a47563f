"""Copies between host and device on streams of their own.

Note [Copies beside steps]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A step is launched while the one before it runs, and what it is given is known by then. In one stream with the steps its
copies would still wait for their turn, and nothing would run on the device meanwhile: on an H200 some 30 us between two
steps of 700. So they go to buffers that the running step does not read, and what is left between two steps is a copy on
the device. The same holds for the tokens on their way back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class Upload:
    """What is sent to a device, one batch after the other, to the same buffers."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        self._arrived = torch.cuda.Event() if is_cuda else None
        self._used = torch.cuda.Event() if is_cuda else None

    def wait(self) -> None:
        """Until the host's memory is no longer read."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def sending(self) -> contextlib.AbstractContextManager[None]:
        """Copies within begin when the last batch was used; the caller's stream goes on when they have arrived."""
        return contextlib.nullcontext() if self._stream is None else self._sending()

    @contextlib.contextmanager
    def _sending(self) -> Iterator[None]:
        assert self._stream is not None
        assert self._arrived is not None
        assert self._used is not None
        self._stream.wait_event(self._used)
        with torch.cuda.stream(self._stream):
            yield
            self._arrived.record()
        torch.cuda.current_stream(self._stream.device).wait_event(self._arrived)

    def end_use(self) -> None:
        """What comes behind this in the caller's stream does not read what was sent."""
        if self._used is not None and self._stream is not None:
            self._used.record(torch.cuda.current_stream(self._stream.device))


class Download:
    """Numbers on their way to the host, to two places in turn."""

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._places = [torch.empty(count, dtype=dtype, pin_memory=is_cuda) for _ in range(2)]
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        self._made = torch.cuda.Event() if is_cuda else None
        self._arrived = [torch.cuda.Event() if is_cuda else None for _ in range(2)]
        self._next = 0

    def send(self, numbers: torch.Tensor) -> Pending:
        """Begin when the caller's stream has made them. They must stay as they are until they were read."""
        place, arrived = self._places[self._next][: len(numbers)], self._arrived[self._next]
        self._next ^= 1
        if self._stream is None or self._made is None or arrived is None:
            place.copy_(numbers)
            return Pending(place, None)
        self._made.record(torch.cuda.current_stream(self._stream.device))
        self._stream.wait_event(self._made)
        with torch.cuda.stream(self._stream):
            place.copy_(numbers, non_blocking=True)
            arrived.record()
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
