"""What figures are measured on, and how fast its memory is."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform

import torch

from piecegraph.base.environment import describe_environment
from piecegraph.bench.result import Machine
from piecegraph.bench.timing import Effort, measure

_COPY_BYTES = 2 << 30
"""Many times any cache of a device."""


def fingerprint(num_ranks: int = 1) -> Machine:
    """The machine that this process runs on."""
    about = {
        "device": device_name(),
        "num_threads": torch.get_num_threads(),
        "num_ranks": num_ranks,
        "environment": describe_environment(),
    }
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
    return Machine(fingerprint=digest, **about)  # type: ignore[arg-type]


def now() -> str:
    """In UTC: ``2026-11-16T12:00:00Z``."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def device_name() -> str:
    """The GPU, or the processor."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def hardware() -> str:
    """What the figures were measured on, in a line."""
    threads = "" if torch.cuda.is_available() else f", {torch.get_num_threads()} threads"
    return f"{device_name()}{threads}, torch {torch.__version__}, Python {platform.python_version()}"


def bandwidth_bytes_s(device: torch.device) -> float | None:
    """Bytes a second that a large copy reads and writes on a GPU. None on a CPU, whose caches hold a small model."""
    if device.type != "cuda":
        return None
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = measure(lambda: target.copy_(source), Effort(0.1, 10))
    return 2 * _COPY_BYTES / timing.median_ms * 1e3
