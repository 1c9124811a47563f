"""Small sums over ranks by one kernel: each rank reads what all of them have, over NVLink, and adds it up by itself.

A sum of a few tokens is a matter of latency, and one kernel has less of it than the several steps of NCCL's. torch has
that kernel, over memory that all ranks have mapped.

Note [One way for all]
~~~~~~~~~~~~~~~~~~~~~~
Ranks that add up in different ways wait for each other without end. So whether the kernel is used at all is agreed on
when a model is loaded, and which sums it takes follows from their size and type, which are the same on every rank: a
tensor that lies otherwise is copied, and not left to NCCL. The kernel adds up in the order of the ranks, so all of them
have the same bits; routers of experts rely on it, as they do with NCCL.

What is added up is copied into the shared memory by a kernel of its own. torch has a form that copies by itself; in it,
a block tells its peers to read before all of its threads have written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from piecegraph.base import torch_compat
from piecegraph.base.events import Event, EventLog
from piecegraph.base.plan import Decision
from piecegraph.llm.ranks.collectives import use_one_shot
from piecegraph.llm.ranks.group import Ranks
from piecegraph.llm.ranks.watch import machine

_TYPES = (torch.bfloat16, torch.float32)
"""Those that torch's kernel adds up."""
_ALIGNMENT = 16
"""Bytes that a thread reads at once."""
_MOST_RANKS = 8
_ROUNDS = 4
_ERRORS = (RuntimeError, ImportError, AttributeError)
"""Of a torch without it, of a driver, of a container that forbids to map the memory of others."""

_kept: dict[tuple[str, int], OneShot] = {}
"""By process group and size, for good: graphs of earlier models may still write there."""


class OneShot:
    """Adds up tensors of at most some bytes.

    Args:
        buffer: bytes that all ranks have mapped.
        group: the name of their process group.
    """

    def __init__(self, buffer: torch.Tensor, group: str) -> None:
        self.buffer = buffer
        self._group = group

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a sum is made here: see Note [One way for all]."""
        size = tensor.numel() * tensor.itemsize
        return tensor.dtype in _TYPES and 0 < size <= len(self.buffer) and size % _ALIGNMENT == 0

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Add up in place."""
        staged = self.buffer[: tensor.numel() * tensor.itemsize].view(tensor.dtype).view(tensor.shape)
        staged.copy_(tensor)
        fits = tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0
        out = tensor if fits else torch.empty_like(staged)
        torch_compat.one_shot_all_reduce(staged, self._group, out)
        if out is not tensor:
            tensor.copy_(out)


def choose_all_reduce(ranks: Ranks, device: torch.device, most_bytes: int, events: EventLog) -> tuple[Decision, ...]:
    """Decide, on all ranks alike, how sums are made. On a CPU there is one way.

    Args:
        ranks: those of a model.
        device: of this one.
        most_bytes: of a sum that is made by one kernel; 0 leaves all of them to NCCL.
        events: told if the kernel was tried and is wrong.
    """
    if device.type != "cuda":
        return ()
    found = _make(ranks, device, most_bytes)
    use_one_shot(ranks.label, None)
    if isinstance(found, str):
        return (Decision("sums over ranks", "NCCL", found),)
    if wrong := _agreed(ranks, _difference(ranks, found)):
        events.emit(Event("PG685", "sums over ranks", wrong))
        return (Decision("sums over ranks", "NCCL", wrong),)
    use_one_shot(ranks.label, found)
    why = "one kernel over NVLink; it was compared with NCCL"
    return (Decision("sums over ranks", f"one-shot up to {most_bytes:,} bytes, above that NCCL", why),)


def _make(ranks: Ranks, device: torch.device, most_bytes: int) -> OneShot | str:
    """The kernel with its memory, or why there is none: the same on all ranks."""
    if why_not := _agreed(ranks, _why_not(ranks, device, most_bytes)):
        return why_not
    places = ranks.gather((machine(), device.index))
    if why_not := _agreed(ranks, _unlinked(places)):
        return why_not
    key, error = (ranks.data.group_name, most_bytes), ""
    try:
        if key not in _kept:
            _kept[key] = OneShot(torch_compat.symmetric_bytes(most_bytes, device, ranks.data), ranks.data.group_name)
    except _ERRORS as raised:
        error = _told(raised)
    return _agreed(ranks, error) or _kept[key]


def _agreed(ranks: Ranks, reason: str) -> str:
    """The first reason that a rank has, on all of them; empty if none has any."""
    return next(filter(None, ranks.gather(reason)), "")


def _why_not(ranks: Ranks, device: torch.device, most_bytes: int) -> str:
    """What speaks against it that a rank can tell by itself."""
    if most_bytes == 0:
        return "options['one_shot_bytes'] is 0"
    if not 1 < ranks.size <= _MOST_RANKS:
        return f"it is for 2 to {_MOST_RANKS} ranks"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the kernel needs compute capability 8.0"
    return ""


def _unlinked(places: list[tuple[str, int]]) -> str:
    """Why GPUs cannot read each other's memory."""
    if len({where for where, _ in places}) > 1:
        return "ranks are on several machines"
    numbers = [number for _, number in places]
    if len(set(numbers)) < len(numbers):
        return "ranks do not see the GPUs of the others"
    try:
        links = torch_compat.nvlinks()
        apart = [(a, b) for a in numbers for b in numbers if a != b and not links[a][b]]
    except (*_ERRORS, IndexError) as raised:
        return _told(raised)
    return f"there is no NVLink between GPU {apart[0][0]} and {apart[0][1]}" if apart else ""


def _difference(ranks: Ranks, one_shot: OneShot) -> str:
    """Where the kernel does not give what NCCL gives, with numbers that are added up without rounding.

    Nothing is left out once something differs: the other ranks go on, too.
    """
    device, most, wrong = one_shot.buffer.device, len(one_shot.buffer), ""
    sizes = [size for size in (_ALIGNMENT, 4096, 49_152, most) if size <= most and size % _ALIGNMENT == 0]
    for dtype in _TYPES:
        for number in (size // dtype.itemsize for size in sizes):
            pairs = [_both(ranks, one_shot, dtype, number, seed, device) for seed in range(_ROUNDS)]
            if not all(torch.equal(ours, theirs) for ours, theirs in pairs):
                wrong = wrong or f"of {number} numbers in {str(dtype).removeprefix('torch.')} it is not NCCL's"
    return wrong


def _both(
    ranks: Ranks, one_shot: OneShot, dtype: torch.dtype, number: int, seed: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    ours = ((torch.arange(number, device=device) + 3 * ranks.rank + seed) % 7).to(dtype)
    theirs = ours.clone()
    one_shot.all_reduce(ours)
    distributed.all_reduce(theirs, group=ranks.data)
    return ours, theirs


def _told(error: Any) -> str:
    return f"torch cannot: {str(error).strip().partition(chr(10))[0] or type(error).__name__}"
