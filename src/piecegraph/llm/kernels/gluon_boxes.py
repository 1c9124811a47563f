"""How the copy engine of Hopper GPUs is told of a tensor, for kernels in Gluon: it copies boxes to shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SIDE = gl.constexpr(64)
"""Rows that a group of four warps multiplies at a time."""
COLUMNS = gl.constexpr(64)
"""Of what is copied at once: as wide as the pattern in which it lies in shared memory, 128 bytes."""


def described(tensor: torch.Tensor, box: Sequence[int]) -> TensorDescriptor:
    """What the copy engine has to know of a tensor. It is an argument by value, so a captured launch keeps it."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(box), box_layout(len(box)))


def box_layout(rank: int) -> Any:
    """How a box lies in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)
