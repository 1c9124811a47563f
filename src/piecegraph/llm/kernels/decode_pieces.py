"""Passes for the pieces that steps of decoding run: what stands around a linear becomes part of it.

Note [Pieces of their own for decoding]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A step of decoding with few sequences is a chain of small kernels, each of which waits for the one before. A compiler
cannot put a norm, an activation or a residual into a linear whose kernel is not its own. So the same trace is lowered
a second time, for such steps alone: a norm before a linear, SiLU and the product behind it, and a residual go into the
op ``fused_linear`` (``fused_linear.py``), and all of them begin while the one before ends (Note [Early launches]). The
self check compares steps of one and of several sequences.
"""

from __future__ import annotations

from collections import Counter

import torch.fx
from torch.fx import Node

from piecegraph.base import torch_compat
from piecegraph.graph.compile import goes_by_structure
from piecegraph.llm.kernels.fused_linear import find_linears, put_in_place
from piecegraph.llm.kernels.skinny import MOST_ROWS, choose_tile
from piecegraph.llm.kernels.turned_attention import find_turned


@goes_by_structure
def use_fused_ops(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """An FX pass: see Note [Pieces of their own for decoding]. The module that is given stays as it is."""
    copies: dict[Node, Node] = {}
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, copies))
    for old, new in copies.items():
        new.meta = old.meta
    put_in_place(graph, find_linears(graph), early=True)
    return torch_compat.lazy_module(module, graph)


def describe(graph: torch.fx.Graph) -> str:
    """What becomes part of other kernels, for the report."""
    counts: Counter[str] = Counter()
    for found in find_linears(graph):
        counts["norms"] += found.norm is not None
        counts["activations"] += found.is_gated
        counts["residuals"] += found.residual is not None
    counts["turns of heads (in all steps)"] = sum(1 for _ in find_turned(graph))
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "nothing"


def most_rows(graph: torch.fx.Graph) -> int:
    """Up to how many rows it pays: with more, cuBLAS is best for some, and a residual is a kernel that was none."""
    shapes = {
        tuple(map(int, torch_compat.meta_value(found.weight).shape))
        for found in find_linears(graph)
        if found.residual is not None
    }
    return next((rows for rows in (MOST_ROWS, 32) if all(choose_tile(rows, *shape) for shape in shapes)), 16)


def short_seqs(rows: int) -> int:
    """Up to how many sequences a step of short contexts has a size of its own, in which attention leaves the kernels
    behind it room to begin early.

    Of a wide model attention is a small part, and more programs read faster. Milliseconds of a step on an H200, with
    and without, 8 sequences: Qwen3-0.6B 0.935 and 1.014 from 128 tokens of context on, 0.970 and 0.936 from 190;
    Llama-3.1-8B 4.397 and 4.373.

    Args:
        rows: see :func:`most_rows`; 0 where decoding has no pieces of its own.
    """
    return 8 if rows == MOST_ROWS else 0
