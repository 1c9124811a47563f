"""Linear layers: which kernel runs depends on the number of rows, so it is chosen when a step is recorded.

A pass puts one op in the place of every linear, and the op looks at the rows it is given. The pieces stay the same for
all sizes.

Another op serves those who want a row to be the same bits whatever is beside it: one tile for every number of rows, in
which each row is added up by itself, in the same order. cuBLAS promises nothing of that kind.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from piecegraph.base import torch_compat
from piecegraph.dumps.repro import register_plain_form
from piecegraph.graph.compile import goes_by_structure
from piecegraph.llm.kernels.chip import has_gluon, is_hopper
from piecegraph.llm.kernels.fused_linear import find_gated, put_in_place
from piecegraph.llm.kernels.skinny import Linear, Tile, launch_tiles, multiply
from piecegraph.llm.ops import LIBRARY

_PRODUCTS = ("matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "scaled_dot_product_attention")


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return multiply(x, Linear(weight, bias))


def _fixed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    columns, depth = weight.shape
    rows = x.reshape(-1, depth)
    out = x.new_empty(*x.shape[:-1], columns)
    is_wide = x.dtype == torch.float32
    tile, block_m = (Tile("some_rows", 32, 32, 4, 2), 32) if is_wide else (Tile("some_rows", 64, 64, 4, 4), 64)
    launch_tiles(
        rows if rows.stride(-1) == 1 else rows.contiguous(),
        Linear(weight.contiguous(), bias),
        None,
        out.view(-1, columns),
        tile,
        block_m=block_m,
    )
    return out


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


class Linears(TorchFunctionMode):
    """Code that runs inside calls this in the place of every linear of a plain matrix."""

    def __init__(self, compute: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]) -> None:
        super().__init__()
        self._compute = compute

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, bias = _arguments(*args, **(kwargs or {}))
            if type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.dim() == 2:
                return self._compute(x, weight, bias)
        return func(*args, **(kwargs or {}))


def fixed_linears() -> Linears:
    """Linears inside have fixed tiles."""
    return Linears(torch.ops.piecegraph.fixed_linear)


def early_linears() -> Linears:
    """Linears inside are of few rows, and begin early: see Note [Early launches]."""
    return Linears(lambda x, weight, bias: multiply(x, Linear(weight, bias), early=True))


def _arguments(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    """Those of a linear, by whichever names they were given."""
    return input, weight, bias


@goes_by_structure
def use_skinny_linears(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """An FX pass: every linear becomes the op that chooses by rows."""
    return _with_op(module, torch.ops.piecegraph.linear.default)


@goes_by_structure
def use_gated_linears(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """An FX pass: a linear, the SiLU of its first half and the product with the second become one op."""
    put_in_place(module.graph, find_gated(module.graph), early=False)
    return module


@goes_by_structure
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


@goes_by_structure
def use_outer_products(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """An FX pass: products over a depth of one, such as of frequencies and positions, become multiplications.

    Nothing is added up in them, so the numbers are the same; and a compiler has no kernel of its own for each.
    """
    products = {getattr(torch.ops.aten, name) for name in ("matmul", "mm", "bmm")}
    for node in module.graph.nodes:
        if node.op not in ("call_function", "call_method") or torch_compat.op_of(node.target)[0] not in products:
            continue
        operands = [torch_compat.meta_value(arg) for arg in node.args if isinstance(arg, torch.fx.Node)]
        if node.kwargs or len(operands) != 2 or not all(isinstance(value, torch.Tensor) for value in operands):
            continue
        if min(value.dim() for value in operands) >= 2 and operands[0].shape[-1] == 1:
            node.op, node.target = "call_function", torch.mul
    return module


def linear_passes(
    device: torch.device, *, deterministic: bool = False, fuse_gates: bool = False
) -> tuple[Callable[..., Any], ...]:
    """The passes for a device.

    Args:
        device: where linears run.
        deterministic: a row must be the same bits whatever is beside it.
        fuse_gates: gates become part of linears, if there is a kernel for that: see :func:`has_gated_kernel`.
    """
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return ()
    if deterministic:
        return use_outer_products, use_fixed_linears
    gates = (use_gated_linears,) if fuse_gates and has_gated_kernel(device) else ()
    return use_outer_products, *gates, use_skinny_linears


def has_gated_kernel(device: torch.device) -> bool:
    """Whether there is a kernel for many rows; for few, there is no need of one in steps of all sizes."""
    return is_hopper(device) and has_gluon()


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
