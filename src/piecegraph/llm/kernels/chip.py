"""What of a GPU the sizes of tiles depend on."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Chip:
    """What programs share."""

    num_processors: int
    """How many programs run at a time, if one fills a processor."""
    shared_bytes: int
    """Of memory on each processor."""


@functools.cache
def chip(device: torch.device) -> Chip:
    """That of a device. Where kernels are interpreted: few processors, and tiles as on an H200."""
    if device.type != "cuda":
        return Chip(16, 228 << 10)
    properties = torch.cuda.get_device_properties(device)
    return Chip(properties.multi_processor_count, properties.shared_memory_per_multiprocessor)
