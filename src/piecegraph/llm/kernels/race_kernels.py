# mypy: ignore-errors
# (what Triton compiles is not Python: the types of arguments are those of the device)
"""The Triton kernel that makes the random numbers of ``race.py`` where they are used."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scores_kernel(
    weights,
    keys,
    count,
    row_stride,
    STEP: tl.constexpr,
    MIX_1: tl.constexpr,
    MIX_2: tl.constexpr,
    LARGEST: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Divide each weight by its exponential number. Grid: (rows, blocks of a row)."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = weights + row * row_stride + places
    weight = tl.load(at, places < count, 0.0)
    bits = tl.load(keys + row) + (places + 1).to(tl.int64) * STEP
    bits = (bits ^ (bits >> 30)) * MIX_1
    bits = (bits ^ (bits >> 27)) * MIX_2
    uniform = (bits & LARGEST).to(tl.float32) * SCALE
    # -log(1 - uniform), where 1 - uniform would round what is left of a small number away.
    small = uniform * (1.0 + uniform * (0.5 + uniform * (1.0 / 3.0)))
    number = tl.where(uniform < 0.001, small, -tl.log(1.0 - uniform))
    tl.store(at, weight / number, places < count)
