"""Linears with what stands around them as one op: how they are found in a traced graph, and what computes the op.

Patterns are matched in the traced graph, whoever wrote the model; what is not matched is the compiler's. Nothing of it
may change what a step computes but for rounding, of which there is less: the self check compares.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from piecegraph.base import torch_compat
from piecegraph.dumps.repro import register_plain_form
from piecegraph.graph.fx_nodes import take_places
from piecegraph.llm.kernels.patterns import Norm, calls, calls_in, erase, find_norm
from piecegraph.llm.kernels.skinny import Linear, multiply
from piecegraph.llm.ops import LIBRARY


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """A linear and what is around it."""

    final: Node
    """What it computes."""
    x: Node
    weight: Node
    bias: Node | None
    norm: Norm | None
    residual: Node | None
    is_gated: bool
    nodes: tuple[Node, ...]
    """All that it does, the linear first: a kernel is told to be there for that."""

    def replace(self, graph: torch.fx.Graph, *, early: bool) -> dict[Node, Node]:
        """Put the op beside what it stands for; what stands for which node.

        Args:
            graph: that it was found in.
            early: whether its kernels begin early: see Note [Early launches].
        """
        norm = self.norm
        source, gain, eps = (self.x, None, 0.0) if norm is None else (norm.source, norm.gain, norm.eps)
        args = (source, self.weight, self.bias, gain, eps, self.residual, self.is_gated, early)
        with graph.inserting_before(self.final):
            made = graph.call_function(torch.ops.piecegraph.fused_linear.default, args)
        made.meta = dict(self.final.meta)
        take_places(made, self.nodes)
        return {self.final: made}


def find_linears(graph: torch.fx.Graph) -> list[FusedLinear]:
    """All linears, each with what can be one op with it."""
    linears: dict[Node, FusedLinear] = {}
    for node in calls_in(graph):
        if calls(node, "aten::linear") and _is_linear(node):
            found = _fused_linear(node, linears)
            linears[found.final] = found
    return list(linears.values())


def find_gated(graph: torch.fx.Graph) -> list[FusedLinear]:
    """Linears of half precision with a gate, without a bias; the norm before one stays the compiler's."""
    found = []
    for node in calls_in(graph):
        if not calls(node, "aten::linear") or not _is_linear(node) or (*node.args, None)[2] is not None:
            continue
        gated, (x, weight) = _gate_of(node), node.args[:2]
        if gated is not None and torch_compat.meta_value(node).dtype in (torch.bfloat16, torch.float16):
            assert isinstance(x, Node)
            assert isinstance(weight, Node)
            found.append(FusedLinear(gated[-1], x, weight, None, None, None, True, (node, *gated)))
    return found


def put_in_place(graph: torch.fx.Graph, found: Iterable[FusedLinear], *, early: bool) -> None:
    """Each becomes one op, and what it stands for goes."""
    replaced: dict[Node, Node] = {}
    for linear in found:
        replaced |= linear.replace(graph, early=early)
    for old, new in replaced.items():
        old.replace_all_uses_with(new)
    for old in replaced:
        erase(graph, old)


def _fused_linear(node: Node, taken: Container[Node]) -> FusedLinear:
    """With what is around it; not a sum that another has taken: of two linears that are added up, the first adds."""
    x, weight, bias = (*node.args, None)[:3]
    assert isinstance(x, Node)
    assert isinstance(weight, Node)
    assert bias is None or isinstance(bias, Node)
    norm = find_norm(x) if len(x.users) == 1 else None
    before = () if norm is None else norm.nodes
    if (gated := _gate_of(node)) is not None:
        return FusedLinear(gated[-1], x, weight, bias, norm, None, True, (node, *before, *gated))
    if (residual := _residual_of(node)) is not None and residual[0] not in taken:
        final, other = residual
        return FusedLinear(final, x, weight, bias, norm, other, False, (node, *before, final))
    return FusedLinear(node, x, weight, bias, norm, None, False, (node, *before))


def _is_linear(node: Node) -> bool:
    """Whether it is one of a matrix, called without names."""
    weight = torch_compat.meta_value(node.args[1]) if isinstance(node.args[1], Node) else None
    return not node.kwargs and isinstance(weight, torch.Tensor) and weight.dim() == 2


def _residual_of(node: Node) -> tuple[Node, Node] | None:
    """The sum that is all a linear is for, and what is added."""
    final = _only_user(node)
    if final is None or not calls(final, "aten::add") or final.kwargs or len(final.args) != 2:
        return None
    others = [arg for arg in final.args if arg is not node]
    other = others[0] if len(others) == 1 else None
    return (final, other) if isinstance(other, Node) and _is_alike(other, node) else None


def _gate_of(node: Node) -> tuple[Node, ...] | None:
    """``silu(first half) * second half``, if that is all a linear is for; the product is the last node."""
    halves = _only_user(node)
    width = torch_compat.meta_value(node).shape[-1]
    if halves is None or not calls(halves, "aten::split") or halves.args[1:] != ([width // 2] * 2, -1):
        return None
    picked = {user.args[1]: user for user in halves.users if user.target is operator.getitem}
    if set(picked) != {0, 1} or len(halves.users) != 2:
        return None
    gate, up = _made_contiguous(picked[0]), _made_contiguous(picked[1])
    silu = _only_user(gate)
    if silu is None or not calls(silu, "aten::silu") or silu.kwargs.get("inplace"):
        return None
    final = _only_user(silu)
    if final is None or not calls(final, "aten::mul") or set(final.args) != {silu, up} or _only_user(up) is not final:
        return None
    return halves, gate, up, silu, final


def _made_contiguous(node: Node) -> Node:
    user = _only_user(node)
    return user if user is not None and calls(user, "aten::contiguous") else node


def _is_alike(one: Node, other: Node) -> bool:
    first, second = torch_compat.meta_value(one), torch_compat.meta_value(other)
    return isinstance(first, torch.Tensor) and str(first.shape) == str(second.shape) and first.dtype == second.dtype


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _fused_linear_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gain: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    gated: bool,
    early: bool,
) -> torch.Tensor:
    return multiply(x, Linear(weight, bias, gain, eps, residual, gated), early=early)


def _fake_linear(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    *_, gated, _early = rest
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2 if gated else weight.shape[0])


_PLAIN_LINEAR = """lambda x, weight, bias, gain, eps, residual, gated, early: (
    lambda y: y if residual is None else residual + y)(
    (lambda y: torch.nn.functional.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1] if gated else y)(
        torch.nn.functional.linear(
            x if gain is None else (
                gain * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps))).to(x.dtype),
            weight, bias)))"""


def _define() -> None:
    LIBRARY.define(
        "fused_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? gain, float eps, Tensor? residual, bool gated, "
        "bool early) -> Tensor"
    )
    LIBRARY.impl("fused_linear", _fused_linear_op, "CompositeExplicitAutograd")
    torch.library.register_fake("piecegraph::fused_linear", _fake_linear, lib=LIBRARY)
    register_plain_form("piecegraph::fused_linear", _PLAIN_LINEAR)


_define()
