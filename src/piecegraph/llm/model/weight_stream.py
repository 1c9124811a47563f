"""Weights go to their device while the plan is made or loaded: mapped files in, memory of the device out.

Note [Weights on their way]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
transformers maps the files of a checkpoint and reads none of a weight's bytes. So each large weight is given empty
memory on the device, and threads fill it: they read the file, block by block in the order of the file, into pinned
memory, and send each block while the next is read. Tracing, cutting and compiling need shapes and dtypes, no numbers;
what needs numbers waits (:meth:`WeightStream.wait`). Where weights are given other memory meanwhile, because linears
are joined, those that are still to come go there at once (:meth:`WeightStream.place`).

A weight that transformers has written to, or made of others, is no longer what the file holds: the mapping tells, and
it is copied from the host's memory, by the same threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from piecegraph.errors import ModelError

_BLOCK = 16 * 2**20
"""Bytes that are read at once: large enough for any disk, and two of them for each thread are quickly pinned."""
_SMALL = 2**20
"""Bytes of a weight that is not worth a block."""
_NUM_THREADS = 4
"""One copies some 5 GB/s out of the page cache, and a disk likes to be asked for several blocks."""
_READ_EARLY = re.compile(r"\.kv_b_proj\.weight$")
"""What is tried on numbers before the model is traced: whether latents can be cached."""
_COMPARED = 64
"""Bytes of each block that are compared with what is mapped."""
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ \d+\s+(.*\.safetensors)$")


@dataclass(frozen=True, slots=True)
class WeightsRead:
    """How weights came to their device."""

    num_bytes: int
    seconds: float
    """From the first block to the last, whatever else was done meanwhile."""
    waited_seconds: float
    """Of these, how long the start had nothing else to do."""
    disk_bytes: int
    """What was not in the page cache, as far as the kernel tells."""
    disk_seconds: float
    """From the first of those blocks to the last."""

    @property
    def gb_per_second(self) -> float:
        return self.num_bytes / 1e9 / self.seconds if self.seconds else 0.0

    @property
    def disk_gb_per_second(self) -> float:
        return self.disk_bytes / 1e9 / self.disk_seconds if self.disk_seconds else 0.0

    def __str__(self) -> str:
        whole = f"{self.num_bytes / 1e9:.2f} GB in {self.seconds:.2f} s ({self.gb_per_second:.1f} GB/s)"
        disk = "all from memory"
        if self.disk_bytes:
            disk = f"{self.disk_bytes / self.num_bytes:.0%} from the disk at {self.disk_gb_per_second:.1f} GB/s"
        return f"{whole}, {disk}; the start waited {self.waited_seconds:.2f} s for them"


@dataclass(slots=True)
class _Weight:
    """One that is on its way."""

    parameter: torch.Tensor
    host: torch.Tensor
    """Where transformers has it, as bytes."""
    file: str = ""
    """Which file it is mapped from; empty if it is read from the host's memory."""
    offset: int = 0
    num_left: int = 0
    """Blocks that are not there yet."""
    has_begun: bool = False
    usable: Any = None
    """An event: its memory may be written to once that has happened."""


@dataclass(frozen=True, slots=True)
class _Block:
    weight: _Weight
    start: int
    end: int

    @property
    def host(self) -> torch.Tensor:
        return self.weight.host[self.start : self.end]

    @property
    def target(self) -> torch.Tensor:
        return _as_bytes(self.weight.parameter)[self.start : self.end]


class _Staging(Protocol):
    """Takes blocks to the device, for one thread."""

    def send(self, block: _Block, reader: _Reader) -> None:
        """Have a block read, and send it; that may still be going on when this returns."""

    def finish(self) -> None:
        """Until all is there."""

    def before_caller(self) -> None:
        """What the caller asks the device to do next comes behind all that was sent."""


class _PinnedStaging:
    """Two pinned buffers: one is read into while the other is sent."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(_BLOCK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in self._buffers]

    def send(self, block: _Block, reader: _Reader) -> None:
        target = block.target
        buffer, sent = self._buffers[0][: len(target)], self._sent[0]
        sent.synchronize()
        reader.read(block, buffer)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(block.weight.usable)
            target.copy_(buffer, non_blocking=True)
            sent.record(self._stream)
        self._buffers.reverse()
        self._sent.reverse()

    def finish(self) -> None:
        self._stream.synchronize()

    def before_caller(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


class _DirectStaging:
    """For memory of the host: blocks are read to where they belong."""

    def send(self, block: _Block, reader: _Reader) -> None:
        reader.read(block, block.target)

    def finish(self) -> None:
        pass

    def before_caller(self) -> None:
        pass


class WeightStream:
    """Fills weights in threads. See Note [Weights on their way].

    Args:
        weights: parameters with empty memory on the device, each with what it is to hold, on the host.
        device: of the parameters.
    """

    def __init__(self, weights: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> None:
        self._device = device
        self._weights = {id(parameter): _Weight(parameter, _as_bytes(host)) for parameter, host in weights}
        _find_files(self._weights.values())
        self._blocks = iter(_blocks(self._weights.values()))
        self._changed = threading.Condition()
        """Held while a block is taken or told done, and while a weight is given other memory."""
        self._error: BaseException | None = None
        self._stagings: list[_Staging] = []
        self._reader = _Reader()
        self._num_bytes = sum(len(weight.host) for weight in self._weights.values())
        self._read: WeightsRead | None = None
        self._start = self._end = time.perf_counter()
        self._mark_usable(self._weights.values())
        names = [f"piecegraph weights {number}" for number in range(_NUM_THREADS if self._weights else 0)]
        # No daemons: a process that ends meanwhile waits for them, because CUDA is gone behind that.
        self._threads = [threading.Thread(target=self._run, name=name) for name in names]
        for thread in self._threads:
            thread.start()

    def place(self, parameter: torch.Tensor, memory: torch.Tensor) -> None:
        """Give a parameter other memory, of the same layout; what it holds, or will hold, goes there."""
        weight = self._weights.get(id(parameter))
        with self._changed:
            if weight is None or weight.has_begun:
                self._changed.wait_for(lambda: weight is None or not weight.num_left or self._error is not None)
                for staging in self._stagings:
                    staging.before_caller()
                memory.copy_(parameter.detach())
            parameter.data = memory
            self._mark_usable([weight] if weight is not None else ())

    def wait(self) -> WeightsRead:
        """Until every weight is there. Raises what a thread raised."""
        start = time.perf_counter()
        for thread in self._threads:
            thread.join()
        waited, reader = time.perf_counter() - start, self._reader
        self._weights.clear()  # what the host holds of them, and pinned memory, is needed no more
        self._stagings.clear()
        if self._error is not None:
            raise self._error
        if self._read is None:
            seconds, disk_seconds = self._end - self._start, reader.disk_end - reader.disk_start
            self._read = WeightsRead(self._num_bytes, seconds, waited, reader.disk_bytes, disk_seconds)
        return self._read

    def _mark_usable(self, weights: Iterable[_Weight]) -> None:
        """What the device was asked to do with this memory before, for others, comes first."""
        if self._device.type == "cuda":
            event = torch.cuda.current_stream(self._device).record_event()
            for weight in weights:
                weight.usable = event

    def _run(self) -> None:
        try:
            with torch.inference_mode(), _on_device(self._device):
                staging = _PinnedStaging(self._device) if self._device.type == "cuda" else _DirectStaging()
                with self._changed:
                    self._stagings.append(staging)
                while (block := self._next()) is not None:
                    staging.send(block, self._reader)
                    self._tell_done(block.weight)
                staging.finish()
                self._end = max(self._end, time.perf_counter())
        except BaseException as error:  # noqa: BLE001 - a thread has nobody to raise to: raised where it is waited for
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self) -> _Block | None:
        with self._changed:
            block = next(self._blocks, None) if self._error is None else None
            if block is not None:
                block.weight.has_begun = True
            return block

    def _tell_done(self, weight: _Weight) -> None:
        with self._changed:
            weight.num_left -= 1
            self._changed.notify_all()


def stream_weights(model: torch.nn.Module, device: torch.device) -> WeightStream | None:
    """Move a model from the host to its device; the large weights are on their way when this returns.

    None where there is nothing to move: on a CPU, weights stay in the files that they are mapped from.
    """
    if device.type == "cpu":
        return None
    moved: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, parameter in model.named_parameters():
        host = parameter.data
        is_plain = type(host) is torch.Tensor and host.device.type == "cpu" and host.is_contiguous()
        if is_plain and host.nbytes >= _SMALL and not _READ_EARLY.search(name):
            parameter.data = torch.empty_like(host, device=device)
            moved.append((parameter, host))
    model.to(device)
    return WeightStream(moved, device) if moved else None


class _Reader:
    """Reads blocks, and counts what came from the disk."""

    def __init__(self) -> None:
        self.disk_bytes = 0
        self.disk_start = self.disk_end = 0.0
        self._counting = threading.Lock()

    def read(self, block: _Block, into: torch.Tensor) -> None:
        """Read a block into memory of the host. Raises ModelError if the file is shorter than it was."""
        if not block.weight.file:
            into.copy_(block.host)
            return
        start, num_missing = time.perf_counter(), len(into) - _resident_bytes(block.host)
        _read_file(block.weight.file, block.weight.offset + block.start, into)
        if not torch.equal(into[:_COMPARED], block.host[:_COMPARED]):  # another file has taken its name
            into.copy_(block.host)
        if num_missing > 0:
            with self._counting:
                self.disk_bytes += num_missing
                self.disk_start = min(self.disk_start or start, start)
                self.disk_end = max(self.disk_end, time.perf_counter())


def _read_file(path: str, offset: int, into: torch.Tensor) -> None:
    view = memoryview(into.numpy())  # type: ignore[arg-type]
    file = os.open(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, offset, len(view), os.POSIX_FADV_WILLNEED)
        while view:
            num_read = os.preadv(file, [view], offset)
            if not num_read:
                what, why = f"{path} cannot be read", "it has become shorter since it was opened"
                raise ModelError("PG661", what, why=why, hint="check that the file is complete")
            view, offset = view[num_read:], offset + num_read
    finally:
        os.close(file)


def _blocks(weights: Iterable[_Weight]) -> list[_Block]:
    """The blocks of all weights, in the order in which they lie in their files."""
    found: list[_Block] = []
    for weight in sorted(weights, key=lambda weight: (weight.file, weight.offset)):
        starts = range(0, len(weight.host), _BLOCK)
        weight.num_left = len(starts)
        found += [_Block(weight, start, min(start + _BLOCK, len(weight.host))) for start in starts]
    return found


def _find_files(weights: Iterable[_Weight]) -> None:
    """Tell which weights lie in a file as they are mapped from it."""
    mappings = _clean_mappings()
    for weight in weights:
        address = weight.host.data_ptr()
        for start, end, offset, file in mappings:
            if start <= address and address + len(weight.host) <= end:
                weight.file, weight.offset = file, offset + address - start


def _clean_mappings() -> list[tuple[int, int, int, str]]:
    """(start, end, offset in the file, file) of what is mapped from checkpoints and nobody has written to.

    Linux tells; elsewhere weights are copied from where they are mapped, page by page.
    """
    found: list[tuple[int, int, int, str]] = []
    mapped: tuple[int, int, int, str] | None = None
    try:
        lines = Path("/proc/self/smaps").read_text(errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        if match := _MAPPING.match(line):
            start, end, offset = (int(match[i], 16) for i in (1, 2, 3))
            mapped = (start, end, offset, match[4]) if os.path.exists(match[4]) else None
        elif mapped is not None and line.startswith("Anonymous:"):
            found += [mapped] if line.split()[1] == "0" else []
            mapped = None
    return found


def _resident_bytes(mapped: torch.Tensor) -> int:
    """How much of a mapped file is in the page cache; all, if the kernel does not tell."""
    page = mmap.PAGESIZE
    start = mapped.data_ptr() // page * page
    length = mapped.data_ptr() + len(mapped) - start
    pages = (ctypes.c_ubyte * -(-length // page))()
    if ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), pages) != 0:
        return len(mapped)
    return min(len(mapped), bytes(pages).count(1) * page)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data.reshape(-1).view(torch.uint8)  # of no version: whoever traces it meanwhile sees no writes


def _on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
