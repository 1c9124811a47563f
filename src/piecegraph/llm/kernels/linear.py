"""Linear layers of few rows: a decode step reads every weight once, and cuBLAS often takes two or three times as long.

Which kernel runs depends on the number of rows, so it is chosen when a step is recorded: a pass puts one op in the
place of every linear, and the op looks at the rows it is given. The pieces stay the same for all sizes.

Another op serves those who want a row to be the same bits whatever is beside it: one tile for every number of rows, in
which each row is added up by itself, in the same order. cuBLAS promises nothing of that kind.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.fx
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from piecegraph.base import torch_compat
from piecegraph.dumps.repro import register_plain_form
from piecegraph.llm.kernels.early_launch import early_constants
from piecegraph.llm.ops import LIBRARY

_MOST_ROWS = 32
_PRODUCTS = ("matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "scaled_dot_product_attention")


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


def _fixed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    columns, depth = weight.shape
    rows = x.reshape(-1, depth)
    out = x.new_empty(*x.shape[:-1], columns)
    tile, block_m = (Tile(32, 32, 4, 2), 32) if x.dtype == torch.float32 else (Tile(64, 64, 4, 4), 64)
    _launch_tiles(
        rows if rows.stride(-1) == 1 else rows.contiguous(),
        weight.contiguous(),
        bias,
        out.view(-1, columns),
        tile,
        block_m,
    )
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

    rows, columns = out.shape
    if tile.num_stages:
        _launch_tiles(x, weight, bias, out, tile, 16 if rows <= 16 else 32)
        return
    skinny_kernels.few_rows_kernel[(-(-columns // tile.columns),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        columns,
        x.stride(0),
        out.stride(0),
        M=rows,
        **early_constants(x.device),
        **_constants(weight, bias, tile),
    )


def _launch_tiles(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile, block_m: int
) -> None:
    from piecegraph.llm.kernels import skinny_kernels

    rows, columns = out.shape
    skinny_kernels.some_rows_kernel[(-(-columns // tile.columns), -(-rows // block_m))](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        columns,
        x.stride(0),
        out.stride(0),
        BLOCK_M=block_m,
        NUM_STAGES=tile.num_stages,
        **_constants(weight, bias, tile),
    )


def _constants(weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile) -> dict[str, Any]:
    return {
        "K": weight.shape[1],
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.depth,
        "HAS_BIAS": bias is not None,
        "num_warps": tile.num_warps,
    }


def _define(name: str, function: Callable[..., torch.Tensor]) -> None:
    register_plain_form(f"piecegraph::{name}", "torch.nn.functional.linear")
    LIBRARY.define(f"{name}(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"piecegraph::{name}",
        lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]),
        lib=LIBRARY,
    )


_define("linear", _linear)
_define("fixed_linear", _fixed_linear)


class FixedLinears(TorchFunctionMode):
    """Code that runs inside calls the op with fixed tiles in the place of every linear."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, bias = _arguments(*args, **(kwargs or {}))
            return torch.ops.piecegraph.fixed_linear(x, weight, bias)
        return func(*args, **(kwargs or {}))


def _arguments(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    """Those of a linear, by whichever names they were given."""
    return input, weight, bias


def use_skinny_linears(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """An FX pass: every linear becomes the op that chooses by rows."""
    return _with_op(module, torch.ops.piecegraph.linear.default)


def use_fixed_linears(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """An FX pass: every linear becomes the op with fixed tiles."""
    return _with_op(module, torch.ops.piecegraph.fixed_linear.default)


def _with_op(module: torch.fx.GraphModule, op: Any) -> torch.fx.GraphModule:
    target = torch_compat.op_of(F.linear)[0]
    for node in module.graph.nodes:
        if node.op == "call_function" and torch_compat.op_of(node.target)[0] is target and not node.kwargs:
            operands = [torch_compat.meta_value(arg) for arg in node.args if arg is not None]
            if all(isinstance(value, torch.Tensor) for value in operands) and operands[1].dim() == 2:
                node.target = op
                node.args = (*node.args, None)[:3]
    return module


def linear_passes(device: torch.device, *, deterministic: bool = False) -> tuple[Callable[..., Any], ...]:
    """The passes for a device."""
    can_launch = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return (use_fixed_linears if deterministic else use_skinny_linears,) if can_launch else ()


def other_product(graph: torch.fx.Graph) -> torch.fx.Node | None:
    """A product of matrices in a graph that is no linear, nor a product of single numbers, if there is one."""
    products = {getattr(torch.ops.aten, name) for name in _PRODUCTS}
    nodes: list[torch.fx.Node] = list(graph.nodes)
    for node in nodes:
        if node.op in ("call_function", "call_method") and torch_compat.op_of(node.target)[0] in products:
            first = node.args[0]
            value = torch_compat.meta_value(first) if isinstance(first, torch.fx.Node) else None
            if not isinstance(value, torch.Tensor) or value.shape[-1] != 1:
                return node
    return None
