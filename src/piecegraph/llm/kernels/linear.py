"""Linear layers of few rows: a decode step reads every weight once, and cuBLAS often takes two or three times as long.

Which kernel runs depends on the number of rows, so it is chosen when a step is recorded: a pass puts one op in the
place of every linear, and the op looks at the rows it is given. The pieces stay the same for all sizes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.fx
import torch.nn.functional as F

from piecegraph.base import torch_compat
from piecegraph.llm.ops import LIBRARY

_MOST_ROWS = 32


class Tile(NamedTuple):
    """How a kernel is cut: columns and depth of a program's tile, warps, pipeline stages (0: no tensor cores)."""

    columns: int
    depth: int
    num_warps: int
    num_stages: int


def choose_tile(rows: int, columns: int, depth: int) -> Tile | None:
    """The tile for a matmul, or None where cuBLAS is as good. Measured on an H200 in bfloat16, in microseconds:

    ==============  ====  ======  =====   ==============  ====  ======  =====
    columns, depth  rows  cuBLAS  ours    columns, depth  rows  cuBLAS  ours
    ==============  ====  ======  =====   ==============  ====  ======  =====
    4096, 1024      1     4.9     3.8     4096, 4096      1     13.2    9.7
    1024, 2048      1     13.0    2.9     28672, 4096     1     61.5    53.6
    1024, 2048      4     13.3    4.1     28672, 4096     8     62.2    56.2
    1024, 3072      1     7.5     3.5     4096, 14336     1     32.1    28.6
    6144, 1024      1     6.0     4.7     4096, 14336     8     32.8    36.0
    ==============  ====  ======  =====   ==============  ====  ======  =====

    Where the gain is small, what it takes to compile one more kernel is not worth it.

    >>> choose_tile(1, 4096, 1024), choose_tile(8, 4096, 14336), choose_tile(64, 4096, 1024)
    (Tile(columns=2, depth=1024, num_warps=4, num_stages=0), None, None)
    """
    if rows == 1 or (rows <= 4 and columns <= 2048):
        return Tile(4 if depth > 8192 else 2, 1024, 4, 0)
    if rows > _MOST_ROWS:
        return None
    if columns >= 16384:
        return Tile(64, 128, 4, 4)
    if columns == 4096 and depth == 4096 and rows > 8:
        return Tile(32, 256, 4, 4)
    return None


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    columns, depth = weight.shape
    rows = x.numel() // depth
    tile = choose_tile(rows, columns, depth) if _fits(x, weight, bias) else None
    if tile is None:
        return F.linear(x, weight, bias)
    out = x.new_empty(*x.shape[:-1], columns)
    _launch(x.reshape(rows, depth), weight, bias, out.view(rows, columns), tile)
    return out


def launch_linear(
    rows: int, columns: int, depth: int, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Launch the kernel that a linear of this size would take, on dummies; nothing where that is cuBLAS's."""
    if choose_tile(rows, columns, depth) is None:
        return
    x, weight = (torch.zeros(size, depth, dtype=dtype, device=device) for size in (rows, columns))
    _linear(x, weight, torch.zeros(columns, dtype=dtype, device=device) if has_bias else None)


def _fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.dtype == x.dtype
        and weight.is_contiguous()
        and x.stride(-1) == 1
        and (bias is None or bias.is_contiguous())
    )


def _launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile) -> None:
    from piecegraph.llm.kernels import skinny_kernels

    (rows, columns), depth = out.shape, weight.shape[1]
    grid = (-(-columns // tile.columns),)
    added = weight if bias is None else bias
    common: dict[str, Any] = {
        "K": depth,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.depth,
        "HAS_BIAS": bias is not None,
        "num_warps": tile.num_warps,
    }
    strides = (x.stride(0), out.stride(0))
    if tile.num_stages == 0:
        skinny_kernels.few_rows_kernel[grid](x, weight, added, out, columns, *strides, M=rows, **common)
        return
    block_m = 16 if rows <= 16 else 32
    skinny_kernels.some_rows_kernel[grid](
        x, weight, added, out, rows, columns, *strides, BLOCK_M=block_m, NUM_STAGES=tile.num_stages, **common
    )


LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
LIBRARY.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake(
    "piecegraph::linear",
    lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]),
    lib=LIBRARY,
)


def use_skinny_linears(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """An FX pass: every linear becomes the op above."""
    target = torch_compat.op_of(F.linear)[0]
    for node in module.graph.nodes:
        if node.op == "call_function" and torch_compat.op_of(node.target)[0] is target and not node.kwargs:
            operands = [torch_compat.meta_value(arg) for arg in node.args if arg is not None]
            if all(isinstance(value, torch.Tensor) for value in operands) and operands[1].dim() == 2:
                node.target = torch.ops.piecegraph.linear.default
                node.args = (*node.args, None)[:3]
    module.recompile()
    return module


def linear_passes(device: torch.device) -> tuple[Callable[..., Any], ...]:
    """The passes for a device."""
    can_launch = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return (use_skinny_linears,) if can_launch else ()
