"""The adjustments of a batch on their way to its logits: see Note [Adjusted logits]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from piecegraph.llm.run.step import Work

_LENGTHS = tuple(1 << power for power in (12, 16, 20, 24, 28))
"""Of buffers."""
SHORTEST = _LENGTHS[0]
"""A step with this one takes hardly longer than without, and it is enough for most batches."""


class Entries(NamedTuple):
    """The lists of a batch on the device, padded."""

    rows: torch.Tensor
    """int64: the row of the logits; -1 is padding."""
    tokens: torch.Tensor
    """int64."""
    scale: torch.Tensor
    """float32: a positive logit is divided by it, another multiplied."""
    shift: torch.Tensor
    """float32: added behind that."""


class EntryBuffers:
    """Static buffers of each length, allocated when they are first needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_host: dict[int, Entries] = {}
        self._on_device: dict[int, Entries] = {}
        self._num_written: dict[int, int] = {}
        self._lists: list[tuple[int, NDArray[Any], NDArray[Any], NDArray[Any]]] = []
        self._sent = torch.cuda.Event() if device.type == "cuda" else None

    def views(self, length: int) -> Entries:
        """The tensors of a length: the same objects every time."""
        if length not in self._on_device:
            is_cuda = self._device.type == "cuda"
            self._on_host[length] = _make_entries(length, torch.device("cpu"), pin_memory=is_cuda)
            self._on_device[length] = _make_entries(length, self._device)
            self._num_written[length] = 0
        return self._on_device[length]

    def collect(self, works: Sequence[Work]) -> int:
        """Look up the lists of a step; returns how long a buffer they take. 0: there are none."""
        self._lists = [
            (row, *work.request.adjustments.entries(work.request.tokens, work.start + work.num_tokens))
            for row, work in enumerate(works)
            if work.request.adjustments is not None and work.samples
        ]
        total = sum(len(tokens) for _, tokens, _, _ in self._lists)
        return next((each for each in _LENGTHS if each >= total), total) if total else 0

    def send(self, length: int) -> None:
        """Send the lists in the buffer of a length, without waiting for the device. All others become empty."""
        if not length and not any(self._num_written.values()):
            return  # to wait for what was sent last would hold up a step that was launched ahead
        if self._sent is not None:
            self._sent.synchronize()  # the last copy reads the memory that is written now
        self._send_all(length)
        if self._sent is not None:
            self._sent.record()

    def _send_all(self, length: int) -> None:
        for other in self._on_device:
            if other != length:
                self._send(other, 0)
        if not length:
            return
        self.views(length)
        counts = [len(tokens) for _, tokens, _, _ in self._lists]
        total = sum(counts)
        if total:
            host = [view.numpy() for view in self._on_host[length]]
            host[0][:total] = np.repeat([row for row, *_ in self._lists], counts)
            for view, parts in zip(host[1:], list(zip(*self._lists, strict=True))[1:], strict=True):
                np.concatenate(parts, out=view[:total])
        self._send(length, total)

    def _send(self, length: int, num_entries: int) -> None:
        """What was written before and is behind the new entries becomes padding: it would name rows that are gone."""
        end = max(num_entries, self._num_written[length])
        if end:
            self._on_host[length].rows[num_entries:end] = -1
            for on_device, on_host in zip(self._on_device[length], self._on_host[length], strict=True):
                on_device[:end].copy_(on_host[:end], non_blocking=True)
        self._num_written[length] = num_entries


def adjust(logits: torch.Tensor, entries: Entries) -> torch.Tensor:
    """The logits as requests want them, float32. See Note [Adjusted logits].

    Args:
        logits: [rows, vocabulary].
        entries: no two are of the same row and token.
    """
    num_rows, width = logits.shape
    flat = logits.new_empty(num_rows * width + 1, dtype=torch.float32)  # with a place for entries that are not used
    flat[:-1].view(num_rows, width).copy_(logits)
    flat[-1:].zero_()
    index = torch.where(entries.rows < 0, num_rows * width, entries.rows * width + entries.tokens)
    values = flat.index_select(0, index)
    values = torch.where(values > 0, values / entries.scale, values * entries.scale) + entries.shift
    return flat.scatter_(0, index, values)[:-1].view(num_rows, width)


def _make_entries(length: int, device: torch.device, *, pin_memory: bool = False) -> Entries:
    # Not with inference mode's tensors: buffers are made in the middle of a step, and written to by others.
    with torch.inference_mode(False):
        return Entries(
            torch.full((length,), -1, dtype=torch.int64, device=device, pin_memory=pin_memory),
            torch.zeros(length, dtype=torch.int64, device=device, pin_memory=pin_memory),
            torch.ones(length, dtype=torch.float32, device=device, pin_memory=pin_memory),
            torch.zeros(length, dtype=torch.float32, device=device, pin_memory=pin_memory),
        )
