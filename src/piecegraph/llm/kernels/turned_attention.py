"""A pass: heads are normed and turned by attention itself, not by kernels before it.

Queries, keys and values of a token come out of one linear, side by side. What models do to them before attention is a
norm of each head, maybe, and a turn that goes by the token's position. For a compiler these are kernels for queries,
for keys and for values, behind which another one writes to the cache; it is one that does all of it here, or none in
steps of decoding, where attention's own does it (Qwen3-0.6B on an H200: prompts of 16, 256 and 4096 tokens take 0.83,
0.85 and 0.96 of the time). The pass finds that in the graph before it is cut, since attention is where it is cut, and
puts the op ``turned_attention`` in the place of ``attention``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.fx
from torch.fx import Node

from piecegraph.base import torch_compat
from piecegraph.graph.fx_nodes import take_places
from piecegraph.graph.tracer import Traced
from piecegraph.llm import ops
from piecegraph.llm.kernels.patterns import Norm, calls, calls_in, erase, find_norm, in_both_orders

_SITE = ops.SITE_ARGS[ops.ATTENTION]


@dataclass(frozen=True, slots=True)
class _Turned:
    """The heads of queries or of keys: normed, if they are, and turned."""

    rows: Node
    cos: Node
    sin: Node
    norm: Norm | None
    nodes: tuple[Node, ...]

    @property
    def how(self) -> tuple[Any, ...]:
        """What queries and keys have in common, but for their gains."""
        return self.cos, self.sin, None if self.norm is None else self.norm.eps


@dataclass(frozen=True, slots=True)
class TurnedAttention:
    """A call of attention, and what becomes of queries and keys between a linear and it."""

    attention: Node
    rows: Node
    """Of queries, keys and values, [1, tokens, width of all of them]."""
    q: _Turned
    k: _Turned

    @property
    def site(self) -> int:
        site = self.attention.args[_SITE]
        assert isinstance(site, int)
        return site

    @property
    def has_norm(self) -> bool:
        return self.q.norm is not None

    def replace(self, graph: torch.fx.Graph) -> None:
        """Put the op in the place of attention, and take away what it does itself."""
        old, q, k = self.attention, self.q, self.k
        gains = [None if part.norm is None else part.norm.gain for part in (q, k)]
        eps = 0.0 if q.norm is None else q.norm.eps
        with graph.inserting_before(old):
            made = graph.call_function(ops.TURNED_ATTENTION, (self.rows, q.cos, q.sin, *gains, eps, *old.args[3:]))
        made.meta = dict(old.meta)
        take_places(made, (old, *q.nodes, *k.nodes))
        out: Any = old.args[3]
        if calls(out, "aten::new_empty"):  # of the queries, which are of the same kind as the rows
            out.update_arg(0, self.rows)
        erase(graph, old)


def turn_in_attention(traced: Traced) -> Traced:
    """The same graph with heads turned by attention, or the graph itself where there are none of this kind."""
    if not any(find_turned(traced.graph)):
        return traced
    other = traced.copied()
    for found in list(find_turned(other.graph)):
        found.replace(other.graph)
    return other


def find_turned(graph: torch.fx.Graph) -> Iterator[TurnedAttention]:
    """The calls of attention that can turn heads themselves."""
    for node in calls_in(graph):
        if node.target is ops.ATTENTION or node.target is ops.ATTENTION.overloadpacket:
            q, k, v = _turned(node.args[0]), _turned(node.args[1]), _plain_rows(node.args[2])
            if q is not None and k is not None and v is not None and q.how == k.how:
                rows = _whole(q.rows, k.rows, v)
                if rows is not None:
                    yield TurnedAttention(node, rows, q, k)


def _turned(node: Any) -> _Turned | None:
    """``(x * cos + cat((-x[..., half:], x[..., :half]), -1) * sin)`` of heads, laid out as attention takes them."""
    total = _through(node, "aten::contiguous", "aten::squeeze", "aten::transpose")
    for straight, crossed in in_both_orders(total, "aten::add"):
        for x, cos in in_both_orders(straight, "aten::mul"):
            for swapped, sin in in_both_orders(crossed, "aten::mul"):
                if _is_swapped(swapped, x) and calls(cos, "aten::unsqueeze") and calls(sin, "aten::unsqueeze"):
                    return _turned_heads(node, x, cos, sin, (straight, swapped, crossed, total))
    return None


def _turned_heads(node: Node, x: Node, cos: Node, sin: Node, nodes: tuple[Node, ...]) -> _Turned | None:
    if cos.args[1:] != (1,) or sin.args[1:] != (1,) or not calls(x, "aten::transpose") or x.args[1:] != (1, 2):
        return None
    heads = x.args[0]
    assert isinstance(heads, Node)
    norm = find_norm(heads)
    rows = _rows_of(heads if norm is None else norm.source)
    turns, width = cos.args[0], torch_compat.meta_value(x).shape[-1]
    if rows is None or not isinstance(turns, Node) or torch_compat.meta_value(turns).shape[-1] != width:
        return None
    if torch_compat.meta_value(node).dtype != torch_compat.meta_value(rows).dtype:  # turned in a wider type
        return None
    assert isinstance(sin.args[0], Node)
    return _Turned(rows, turns, sin.args[0], norm, (*(norm.nodes if norm else ()), *nodes))


def _plain_rows(node: Any) -> Node | None:
    """The rows of heads that attention takes as they are."""
    return _rows_of(_through(node, "aten::contiguous", "aten::squeeze", "aten::transpose", "aten::transpose"))


def _whole(*parts: Node) -> Node | None:
    """What these are all the parts of, in this order."""
    source: Any = parts[0].args[0]
    for index, part in enumerate(parts):
        if part.target is not operator.getitem or part.args != (source, index):
            return None
    if not calls(source, "aten::split") or source.args[2:] != (-1,) or len(source.args[1]) != len(parts):
        return None
    rows = source.args[0]
    return rows if isinstance(rows, Node) else None


def _rows_of(heads: Any) -> Node | None:
    """What heads are a view of, [1, tokens, heads * width]."""
    if not calls(heads, "aten::view", "aten::reshape"):
        return None
    rows = heads.args[0]
    if calls(rows, "aten::contiguous"):
        rows = rows.args[0]
    return rows if isinstance(rows, Node) and torch_compat.meta_value(rows).dim() == 3 else None


def _is_swapped(node: Any, x: Node) -> bool:
    """``cat((-x[..., half:], x[..., :half]), -1)``"""
    if not calls(node, "aten::cat") or (node.kwargs.get("dim"), *node.args[1:]) not in ((-1,), (None, -1)):
        return False
    half = torch_compat.meta_value(x).shape[-1] // 2
    parts = node.args[0]
    if len(parts) != 2 or not calls(parts[0], "aten::neg", "neg"):
        return False
    second, first = parts[0].args[0], parts[1]
    return _picks(second, x, slice(half, None, None)) and _picks(first, x, slice(None, half, None))


def _picks(node: Any, x: Node, columns: slice) -> bool:
    return isinstance(node, Node) and node.target is operator.getitem and node.args == (x, (Ellipsis, columns))


_STEPS: dict[str, tuple[Any, ...]] = {"aten::squeeze": (0,), "aten::transpose": (1, 2), "aten::contiguous": ()}


def _through(node: Any, *names: str) -> Any:
    """What a node is made of by these steps, the last first; None if it is not."""
    for name in names:
        if not calls(node, name) or node.args[1:] != _STEPS[name]:
            return None
        node = node.args[0]
    return node
