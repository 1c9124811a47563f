"""Passes for the pieces that steps of decoding run: what stands around a linear becomes part of it.

Note [Pieces of their own for decoding]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A step of decoding with few sequences is a chain of small kernels, each of which waits for the one before. A compiler
cannot put a norm, an activation or a residual into a linear whose kernel is not its own. So the same trace is lowered
a second time, for such steps alone: a norm before a linear, SiLU and the product behind it, and a residual go into the
op :func:`fused_linear`; norms and turns of the heads of queries and keys are one kernel; and all of them begin while
the one before ends (Note [Early launches]). Patterns are matched in the traced graph, whoever wrote the model; what is
not matched is the compiler's, as in all other steps.

Nothing of it may change what a step computes but for rounding, of which there is less: the self check compares steps of
one and of several sequences.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from piecegraph.base import torch_compat
from piecegraph.dumps.repro import register_plain_form
from piecegraph.graph.fx_nodes import op_name, take_places, writes_in_place
from piecegraph.graph.lower import goes_by_structure
from piecegraph.llm.kernels.skinny import MOST_ROWS, Heads, Linear, choose_tile, multiply, rotate
from piecegraph.llm.ops import LIBRARY

_LINEARS = ("aten::linear", "piecegraph::linear")
"""The second stands for the first in the pieces of other steps."""


@dataclass(frozen=True, slots=True)
class Norm:
    """``gain * (x / rms(x))``, as models write it."""

    source: Node
    gain: Node
    eps: float
    nodes: tuple[Node, ...]


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

    def replace(self, graph: torch.fx.Graph) -> dict[Node, Node]:
        """Put the op beside what it stands for; what stands for which node."""
        norm = self.norm
        source, gain, eps = (self.x, None, 0.0) if norm is None else (norm.source, norm.gain, norm.eps)
        args = (source, self.weight, self.bias, gain, eps, self.residual, self.is_gated)
        with graph.inserting_before(self.final):
            made = graph.call_function(torch.ops.piecegraph.fused_linear.default, args)
        made.meta = dict(self.final.meta)
        take_places(made, self.nodes)
        return {self.final: made}


@dataclass(frozen=True, slots=True)
class _Turned:
    """The heads of queries or of keys: normed, if they are, and turned."""

    final: Node
    rows: Node
    cos: Node
    sin: Node
    norm: Norm | None
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class FusedHeads:
    """What becomes of queries, keys and values between a linear and attention."""

    q: _Turned
    k: _Turned
    v: Node
    """Rows of values."""
    v_final: Node

    def replace(self, graph: torch.fx.Graph) -> dict[Node, Node]:
        """As that of linears."""
        q, k, parts = self.q, self.k, {}
        gains = [None if part.norm is None else part.norm.gain for part in (q, k)]
        eps = 0.0 if q.norm is None else q.norm.eps
        finals = (q.final, k.final, self.v_final)
        with graph.inserting_before(min(finals)):
            made = graph.call_function(
                torch.ops.piecegraph.rotated_heads.default, (q.rows, k.rows, self.v, *gains, eps, q.cos, q.sin)
            )
            made.meta = {**q.final.meta, "example_value": tuple(map(torch_compat.meta_value, finals))}
            take_places(made, (*q.nodes, *k.nodes, self.v_final))
            for index, final in enumerate(finals):
                parts[final] = graph.call_function(operator.getitem, (made, index))
                parts[final].meta = dict(final.meta)
        return parts


@goes_by_structure
def use_fused_ops(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """An FX pass: see Note [Pieces of their own for decoding]. The module that is given stays as it is."""
    copies: dict[Node, Node] = {}
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, copies))
    for old, new in copies.items():
        new.meta = old.meta
    replaced: dict[Node, Node] = {}
    for found in find_fused(graph):
        replaced |= found.replace(graph)
    for old, new in replaced.items():
        old.replace_all_uses_with(new)
    for old in replaced:
        _erase(graph, old)
    return torch_compat.lazy_module(module, graph)


def describe(graph: torch.fx.Graph) -> str:
    """What becomes part of other kernels, for the report."""
    counts: Counter[str] = Counter()
    for found in find_fused(graph):
        if isinstance(found, FusedHeads):
            counts["turns of heads"] += 1
        else:
            counts["norms"] += found.norm is not None
            counts["activations"] += found.is_gated
            counts["residuals"] += found.residual is not None
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "nothing"


def most_rows(graph: torch.fx.Graph) -> int:
    """Up to how many rows it pays: with more, cuBLAS is best for some, and a residual is a kernel that was none."""
    shapes = {
        tuple(map(int, torch_compat.meta_value(found.weight).shape))
        for found in find_fused(graph)
        if isinstance(found, FusedLinear) and found.residual is not None
    }
    return next((rows for rows in (MOST_ROWS, 32) if all(choose_tile(rows, *shape) for shape in shapes)), 16)


def find_fused(graph: torch.fx.Graph) -> list[FusedLinear | FusedHeads]:
    """All that can be one op. Nothing where something is written in place: what is computed later might see it.

    Ops at which decoders are cut write to memory that is made for them.
    """
    nodes: list[Node] = [node for node in graph.nodes if node.op in ("call_function", "call_method")]
    if any(writes_in_place(node) for node in nodes if not op_name(node).startswith("piecegraph::")):
        return []
    linears: dict[Node, FusedLinear] = {}
    for node in nodes:
        if _is(node, *_LINEARS) and _is_linear(node):
            found = _fused_linear(node, linears)
            linears[found.final] = found
    return [*linears.values(), *_find_heads(nodes)]


def _fused_linear(node: Node, taken: Container[Node]) -> FusedLinear:
    """With what is around it; not a sum that another has taken: of two linears that are added up, the first adds."""
    x, weight, bias = (*node.args, None)[:3]
    assert isinstance(x, Node)
    assert isinstance(weight, Node)
    assert bias is None or isinstance(bias, Node)
    norm = _norm(x) if len(x.users) == 1 else None
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
    if final is None or not _is(final, "aten::add") or final.kwargs or len(final.args) != 2:
        return None
    others = [arg for arg in final.args if arg is not node]
    other = others[0] if len(others) == 1 else None
    return (final, other) if isinstance(other, Node) and _is_alike(other, node) else None


def _gate_of(node: Node) -> tuple[Node, ...] | None:
    """``silu(first half) * second half``, if that is all a linear is for; the product is the last node."""
    halves = _only_user(node)
    width = torch_compat.meta_value(node).shape[-1]
    if halves is None or not _is(halves, "aten::split") or halves.args[1:] != ([width // 2] * 2, -1):
        return None
    picked = {user.args[1]: user for user in halves.users if user.target is operator.getitem}
    if set(picked) != {0, 1} or len(halves.users) != 2:
        return None
    gate, up = _made_contiguous(picked[0]), _made_contiguous(picked[1])
    silu = _only_user(gate)
    if silu is None or not _is(silu, "aten::silu") or silu.kwargs.get("inplace"):
        return None
    final = _only_user(silu)
    if final is None or not _is(final, "aten::mul") or set(final.args) != {silu, up} or _only_user(up) is not final:
        return None
    return halves, gate, up, silu, final


def _made_contiguous(node: Node) -> Node:
    user = _only_user(node)
    return user if user is not None and _is(user, "aten::contiguous") else node


def _norm(node: Node) -> Norm | None:
    """``gain * (wide * rsqrt(mean(wide ** 2) + eps)).to(dtype)``, where ``wide`` is the input in float32.

    Or ``(gain * ...).to(dtype)``.
    """
    is_last = _is(node, "aten::to")
    for gain, scaled in _in_both_orders(node.args[0] if is_last else node, "aten::mul"):
        if torch_compat.meta_value(gain).dim() != 1 or not (is_last or _is(scaled, "aten::to")):
            continue
        for wide, scale in _in_both_orders(scaled if is_last else scaled.args[0], "aten::mul"):
            if not _is(wide, "aten::to", "aten::float") or not _is(scale, "aten::rsqrt"):
                continue
            source, eps, squares = wide.args[0], *_root(scale, wide)
            if isinstance(source, Node) and eps is not None and _is_in_float32(source, wide, node):
                return Norm(source, gain, eps, (wide, *squares, scale, scaled, node))
    return None


def _root(scale: Node, wide: Node) -> tuple[float | None, tuple[Node, ...]]:
    """The epsilon in ``rsqrt(mean(wide ** 2, -1, keepdim=True) + eps)``; None if it is something else."""
    total: Any = scale.args[0]
    if not _is(total, "aten::add") or len(total.args) != 2 or not isinstance(total.args[1], float):
        return None, ()
    mean = total.args[0]
    if not _is(mean, "aten::mean") or mean.args[1:] not in ((-1,), ([-1],)) or mean.kwargs != {"keepdim": True}:
        return None, ()
    squares = mean.args[0]
    if not _is(squares, "aten::pow") or squares.args != (wide, 2):
        return None, ()
    return total.args[1], (squares, mean, total)


def _is_in_float32(source: Node, wide: Node, result: Node) -> bool:
    """Whether something is computed in float32, and given back in the precision of its input."""
    given, between, made = map(torch_compat.meta_value, (source, wide, result))
    return bool(given.dtype == made.dtype and between.dtype == torch.float32)


def _find_heads(nodes: Sequence[Node]) -> Iterator[FusedHeads]:
    turned = [found for node in nodes if (found := _turned(node)) is not None]
    plain: dict[Any, list[tuple[Node, Node]]] = {}
    for node in nodes if turned else ():
        if (rows := _plain_heads(node)) is not None:
            plain.setdefault(rows.args[0], []).append((rows, node))
    for q, k in zip(turned[::2], turned[1::2], strict=False):
        values = plain.get(q.rows.args[0], [])
        are_turned_alike = (q.cos, q.sin) == (k.cos, k.sin) and _eps(q) == _eps(k)
        if are_turned_alike and len(values) == 1 and _are_split(values[0][0], q.rows, k.rows):
            yield FusedHeads(q, k, *values[0])


def _turned(node: Node) -> _Turned | None:
    """``(x * cos + cat((-x[..., half:], x[..., :half]), -1) * sin)`` of heads, laid out as attention takes them."""
    total = _through(node, "aten::contiguous", "aten::squeeze", "aten::transpose")
    for straight, crossed in _in_both_orders(total, "aten::add"):
        for x, cos in _in_both_orders(straight, "aten::mul"):
            for swapped, sin in _in_both_orders(crossed, "aten::mul"):
                if _is_swapped(swapped, x) and _is(cos, "aten::unsqueeze") and _is(sin, "aten::unsqueeze"):
                    return _turned_heads(node, x, cos, sin, (straight, swapped, crossed, total))
    return None


def _turned_heads(node: Node, x: Node, cos: Node, sin: Node, nodes: tuple[Node, ...]) -> _Turned | None:
    if cos.args[1:] != (1,) or sin.args[1:] != (1,) or not _is(x, "aten::transpose") or x.args[1:] != (1, 2):
        return None
    heads = x.args[0]
    assert isinstance(heads, Node)
    norm = _norm(heads)
    rows = _rows_of(heads if norm is None else norm.source)
    turns, width = cos.args[0], torch_compat.meta_value(x).shape[-1]
    if rows is None or not isinstance(turns, Node) or torch_compat.meta_value(turns).shape[-1] != width:
        return None
    if torch_compat.meta_value(node).dtype != torch_compat.meta_value(rows).dtype:  # turned in a wider type
        return None
    assert isinstance(sin.args[0], Node)
    return _Turned(node, rows, turns, sin.args[0], norm, (*(norm.nodes if norm else ()), *nodes))


def _plain_heads(node: Node) -> Node | None:
    """The rows of heads that attention takes as they are."""
    found = _through(node, "aten::contiguous", "aten::squeeze", "aten::transpose", "aten::transpose")
    return _rows_of(found)


def _are_split(*parts: Node) -> bool:
    """Whether they are parts of the same rows."""
    return all(part.target is operator.getitem and part.args[0] is parts[0].args[0] for part in parts)


def _eps(heads: _Turned) -> float | None:
    return None if heads.norm is None else heads.norm.eps


def _rows_of(heads: Any) -> Node | None:
    """What heads are a view of, [1, tokens, heads * width]."""
    if not _is(heads, "aten::view", "aten::reshape"):
        return None
    rows = heads.args[0]
    if _is(rows, "aten::contiguous"):
        rows = rows.args[0]
    return rows if isinstance(rows, Node) and torch_compat.meta_value(rows).dim() == 3 else None


def _is_swapped(node: Any, x: Node) -> bool:
    """``cat((-x[..., half:], x[..., :half]), -1)``"""
    if not _is(node, "aten::cat") or (node.kwargs.get("dim"), *node.args[1:]) not in ((-1,), (None, -1)):
        return False
    half = torch_compat.meta_value(x).shape[-1] // 2
    parts = node.args[0]
    if len(parts) != 2 or not _is(parts[0], "aten::neg", "neg"):
        return False
    second, first = parts[0].args[0], parts[1]
    return _picks(second, x, slice(half, None, None)) and _picks(first, x, slice(None, half, None))


def _picks(node: Any, x: Node, columns: slice) -> bool:
    return isinstance(node, Node) and node.target is operator.getitem and node.args == (x, (Ellipsis, columns))


_STEPS: dict[str, tuple[Any, ...]] = {"aten::squeeze": (0,), "aten::transpose": (1, 2), "aten::contiguous": ()}


def _through(node: Any, *names: str) -> Any:
    """What a node is made of by these steps, the last first; None if it is not."""
    for name in names:
        if not _is(node, name) or node.args[1:] != _STEPS[name]:
            return None
        node = node.args[0]
    return node


def _in_both_orders(node: Any, name: str) -> Iterator[tuple[Node, Node]]:
    """The operands of what may have them in either order."""
    if _is(node, name) and len(node.args) == 2 and not node.kwargs and all(isinstance(arg, Node) for arg in node.args):
        yield node.args
        yield node.args[::-1]


def _is(node: Any, *names: str) -> bool:
    return isinstance(node, Node) and node.op in ("call_function", "call_method") and op_name(node) in names


def _is_alike(one: Node, other: Node) -> bool:
    first, second = torch_compat.meta_value(one), torch_compat.meta_value(other)
    return isinstance(first, torch.Tensor) and str(first.shape) == str(second.shape) and first.dtype == second.dtype


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _erase(graph: torch.fx.Graph, node: Node) -> None:
    """Take away what nobody needs any more, and what that was made of."""
    if node.users or node.op not in ("call_function", "call_method") or node._erased:
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for each in inputs:
        _erase(graph, each)


def _fused_linear_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gain: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    gated: bool,
) -> torch.Tensor:
    return multiply(x, Linear(weight, bias, gain, eps, residual, gated), early=True)


def _rotated_heads_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_gain: torch.Tensor | None,
    k_gain: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> Sequence[torch.Tensor]:
    return tuple(rotate(q, k, v, Heads(cos, sin, q_gain, k_gain, eps), early=True))


def _fake_linear(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2 if rest[-1] else weight.shape[0])


def _fake_heads(*given: Any) -> Sequence[torch.Tensor]:
    width = given[-1].shape[-1]
    return tuple(rows.new_empty(rows.shape[1], rows.shape[2] // width, width) for rows in given[:3])


_PLAIN_LINEAR = """lambda x, weight, bias, gain, eps, residual, gated: (
    lambda y: y if residual is None else residual + y)(
    (lambda y: torch.nn.functional.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1] if gated else y)(
        torch.nn.functional.linear(
            x if gain is None else (
                gain * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps))).to(x.dtype),
            weight, bias)))"""
_PLAIN_HEADS = """lambda q, k, v, q_gain, k_gain, eps, cos, sin: (
    *(x * cos[0, :, None] + torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1) * sin[0, :, None]
      for x in (heads if gain is None else (
                    gain * (heads.float() * torch.rsqrt(heads.float().pow(2).mean(-1, keepdim=True) + eps))
                ).to(heads.dtype)
                for heads, gain in ((q[0].unflatten(-1, (-1, cos.shape[-1])), q_gain),
                                    (k[0].unflatten(-1, (-1, cos.shape[-1])), k_gain)))),
    v[0].unflatten(-1, (-1, cos.shape[-1])).contiguous())"""


def _define() -> None:
    LIBRARY.define(
        "fused_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? gain, float eps, Tensor? residual, bool gated)"
        " -> Tensor"
    )
    LIBRARY.define(
        "rotated_heads(Tensor q, Tensor k, Tensor v, Tensor? q_gain, Tensor? k_gain, float eps, Tensor cos, Tensor sin)"
        " -> (Tensor, Tensor, Tensor)"
    )
    for name, function, fake, plain in (
        ("fused_linear", _fused_linear_op, _fake_linear, _PLAIN_LINEAR),
        ("rotated_heads", _rotated_heads_op, _fake_heads, _PLAIN_HEADS),
    ):
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"piecegraph::{name}", fake, lib=LIBRARY)
        register_plain_form(f"piecegraph::{name}", plain)


_define()
