"""Kernels that begin while the one before them ends: what the hardware calls programmatic dependent launch.

Note [Early launches]
~~~~~~~~~~~~~~~~~~~~~
A kernel that is launched so may begin as soon as every program of the one before has said that it may. It waits before
it touches anything that others write, and lets the next begin only after that. So when a kernel begins, at most the one
right before it is still running: weights, which nobody writes, may be read at once, and what was written earlier, too.
Inductor's kernels (``triton.enable_pdl``) rely on the same. Where a kernel of another library comes between, it waits
for the end of the one before, as always.

It is off unless it is asked for. Qwen3-0.6B on an H200, all kernels together: a step of decoding took 0.86, 0.94 and
0.96 of the time at batch 1, 8 and 64, but prompts of 512 tokens and more 1.07 to 1.11. That is not for programs that
wait and take room from others: code compiled so, and launched as ever, took 1.04 for a step at batch 1 and 1.07 to 1.21
for prompts of up to 1024 tokens. To have the one without the other, pieces would have to be compiled twice.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from piecegraph.base.plan import Decision

_SWITCH = "PIECEGRAPH_EARLY_LAUNCH"


@functools.cache
def launches_early(device: torch.device) -> bool:
    """Whether kernels for a device are launched early."""
    is_able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return is_able and os.environ.get(_SWITCH) == "1"


def early_constants(device: torch.device, *, is_wanted: bool = True) -> dict[str, Any]:
    """The arguments of a launch of a kernel of ours that knows how to wait."""
    is_early = is_wanted and launches_early(device)
    return {"EARLY": is_early, **({"launch_pdl": True} if is_early else {})}


def inductor_settings(device: torch.device) -> dict[str, Any]:
    """What Inductor has to be told for it."""
    return {"triton.enable_pdl": True} if launches_early(device) else {}


def early_launches(device: torch.device) -> list[Decision]:
    """Whether kernels are launched early, for the report; nothing where nobody asked."""
    if os.environ.get(_SWITCH) != "1":
        return []
    if launches_early(device):
        return [Decision("early launches", "on", "a kernel begins while the one before it ends")]
    return [Decision("early launches", "off", "compute capability 9.0 is needed")]
