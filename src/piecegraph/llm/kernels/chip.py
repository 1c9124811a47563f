"""What of a GPU the sizes of tiles depend on, and what it runs."""

from __future__ import annotations

import functools
import importlib
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


def is_hopper(device: torch.device) -> bool:
    """Whether a device has what kernels in Gluon here are written for: its copy engine, its way to multiply."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def has_gluon() -> bool:
    """As kernels here are written for; before Triton 3.6, warps got their roles in another way."""
    try:
        version: str = importlib.import_module("triton").__version__
    except ImportError:
        return False
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= (3, 6)
