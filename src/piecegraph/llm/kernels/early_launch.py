"""Kernels that begin while the one before them ends: what the hardware calls programmatic dependent launch.

Note [Early launches]
~~~~~~~~~~~~~~~~~~~~~
A kernel that is launched so may begin as soon as every program of the one before has said that it may. It waits before
it touches anything that others write, and lets the next begin only after that. So when a kernel begins, at most the one
right before it is still running: weights, which nobody writes, may be read at once, and what was written earlier, too.
Inductor's kernels (``triton.enable_pdl``) rely on the same. Where a kernel of another library comes between, it waits
for the end of the one before, as always.

With CHAINED a kernel lets the next begin before it waits itself, so that several wait in line, and the first weights of
each are on their way. When one is through with waiting, the one before has ended, which had waited for the one before
it: all is written. But until then only what no kernel of the step writes may be read: weights, and what a batch was
sent with. It is for several rows: a layer of Qwen3-0.6B on an H200 took 31.4 us instead of 35.5 with 8, and with one
row no less than before.

It is for steps of few rows alone. Qwen3-0.6B on an H200, all kernels together: a step of decoding took 0.86, 0.94 and
0.96 of the time at batch 1, 8 and 64, but prompts of 512 tokens and more 1.07 to 1.11. That is not for programs that
wait and take room from others: code compiled so, and launched as ever, took 1.04 for a step at batch 1 and 1.07 to 1.21
for prompts of up to 1024 tokens. So pieces are compiled twice: see Note [Pieces of their own for decoding].
"""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def launches_early(device: torch.device) -> bool:
    """Whether kernels for a device can be launched early."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def early_constants(device: torch.device, *, is_wanted: bool) -> dict[str, Any]:
    """The arguments of a launch of a kernel of ours that knows how to wait."""
    is_early = is_wanted and launches_early(device)
    return {"EARLY": is_early, **({"launch_pdl": True} if is_early else {})}


def chained_constants(device: torch.device, rows: int, *, is_wanted: bool) -> dict[str, Any]:
    """The same for one that knows how to wait in line, in a step of so many rows."""
    early = early_constants(device, is_wanted=is_wanted)
    return {**early, "CHAINED": early["EARLY"] and rows > 1}


def inductor_settings(device: torch.device) -> dict[str, Any]:
    """What Inductor has to be told for it."""
    return {"triton.enable_pdl": True} if launches_early(device) else {}
