"""Attention that turns heads itself: where it takes the place of attention, and that it computes the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from piecegraph.base import torch_compat
from piecegraph.graph.cut_rules import CutRules
from piecegraph.graph.fx_nodes import op_name
from piecegraph.graph.split import split
from piecegraph.graph.tracer import Traced
from piecegraph.llm import SamplingParams, ops
from piecegraph.llm.kernels import skinny
from piecegraph.llm.kernels.attention import reference
from piecegraph.llm.kernels.skinny import Heads
from piecegraph.llm.kernels.turned_attention import find_turned, turn_in_attention
from piecegraph.llm.specs import AttentionBatch, AttentionLayer
from tests.cases.llm_shelf import Shelf
from tests.graph.test_trace import trace_it

WIDTH = 4


class Attention(nn.Module):
    """Two heads, as models make them of one linear."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.change = change
        self.weight = nn.Parameter(torch.randn(24, 8, dtype=torch.bfloat16))
        self.gain = nn.Parameter(torch.rand(WIDTH, dtype=torch.bfloat16))

    def normed(self, heads: torch.Tensor) -> torch.Tensor:
        wide = heads.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.gain * wide.to(heads.dtype)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        parts = F.linear(x, self.weight).split([8, 8, 8], -1)
        if self.change == "order":
            parts = parts[::-1]
        heads = [part.contiguous().view(1, part.shape[1], -1, WIDTH) for part in parts]
        if self.change == "norm":
            heads[:2] = [self.normed(each) for each in heads[:2]]
        q, k, v = (each.transpose(1, 2) for each in heads)
        turns = [(turn.unsqueeze(1), other.unsqueeze(1)) for turn, other in ((cos, sin), (cos, sin))]
        if self.change == "keys otherwise":
            turns[1] = turns[1][::-1]
        half = WIDTH // 2
        q, k = (
            each * turn + torch.cat((-each[..., half:], each[..., :half]), dim=-1) * other
            for each, (turn, other) in zip((q, k), turns, strict=True)
        )
        rows = [each.transpose(1, 2).squeeze(0).contiguous() for each in (q, k, v)]
        out = rows[0].new_empty(rows[0].shape)
        torch.ops.piecegraph.attention(*rows, out, None, 7, 0.5, 0, 0, 0.0)
        return out + rows[1] if self.change == "used" else out


def traced_attention(change: str = "", dtype: torch.dtype = torch.bfloat16) -> Traced:
    turns = [torch.randn(1, 3, WIDTH, dtype=dtype) for _ in range(2)]
    return trace_it(Attention(change), torch.randn(1, 3, 8, dtype=torch.bfloat16), *turns)


def targets(traced: Traced) -> Counter[str]:
    return Counter(op_name(node) for node in traced.graph.nodes if node.op in ("call_function", "call_method"))


@pytest.mark.parametrize("change", ["", "norm", "used"])
def test_attention_is_given_what_the_linear_made(change: str) -> None:
    traced = traced_attention(change)
    before = len(traced.graph.nodes)
    other = turn_in_attention(traced)
    assert len(traced.graph.nodes) == before, "interceptions go by the graph that was traced"
    (node,) = (node for node in other.graph.nodes if node.target is ops.TURNED_ATTENTION)
    assert torch_compat.meta_value(node.args[0]).shape[-1] == 24
    assert [arg is None for arg in node.args[3:5]] == [change != "norm"] * 2
    assert node.args[5] == (1e-6 if change == "norm" else 0.0)
    assert node.args[ops.SITE_ARGS[ops.TURNED_ATTENTION]] == 7
    assert node.args[-4:] == (0.5, 0, 0, 0.0)
    found = targets(other)
    assert found["aten::split"] == found["aten::cat"] == (1 if change == "used" else 0), "what others need stays"
    cuts = [segment.title for segment in split(other, CutRules("auto"), full=False) if segment.verdict is not None]
    assert cuts == ["piecegraph::turned_attention"]


@pytest.mark.parametrize("change", ["keys otherwise", "order", "wide"])
def test_what_only_looks_alike_is_left_alone(change: str) -> None:
    traced = traced_attention(change, torch.float32 if change == "wide" else torch.bfloat16)
    assert list(find_turned(traced.graph)) == []
    assert turn_in_attention(traced) is traced


def example(
    num_seqs: int, length: int, dtype: torch.dtype
) -> tuple[AttentionLayer, AttentionBatch, list[torch.Tensor]]:
    """A layer, a batch with one new token in each sequence, and the caches."""
    layer = AttentionLayer(index=0, group=0, num_heads=4, num_kv_heads=2, key_width=32, value_width=32, scale=32**-0.5)
    per_seq, last = -(-length // 16), length - 1
    table = (torch.randperm(num_seqs * per_seq) + 1).view(num_seqs, per_seq)
    batch = AttentionBatch(
        query_starts=torch.arange(num_seqs + 1, dtype=torch.int32),
        seq_lens=torch.full((num_seqs,), length, dtype=torch.int32),
        block_table=table.int(),
        slots=table[:, last // 16] * 16 + last % 16,
        block_size=16,
        max_query_len=1,
        max_seq_len=128,
    )
    return layer, batch, [torch.randn(num_seqs * per_seq + 1, 16, 2, 32, dtype=dtype) for _ in range(2)]


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("num_seqs", [1, 3])
def test_rows_are_turned_before_a_kernel_that_does_not(num_seqs: int, has_norm: bool) -> None:
    torch.manual_seed(0)
    layer, batch, caches = example(num_seqs, 40, torch.float32)
    rows, heads = torch.randn(1, num_seqs, 256), given_heads(num_seqs, has_norm)
    out, expected = torch.empty(2, num_seqs, 4, 32).unbind()
    others = [cache.clone() for cache in caches]
    reference.KERNEL.attend_rows(
        rows, heads.cos, heads.sin, heads.q_gain, heads.k_gain, heads.eps, out, None, *caches, layer, batch
    )
    turned = skinny.plain_rotate(*rows.split([128, 64, 64], -1), heads)
    reference.KERNEL.attend(*turned, expected, None, *others, layer, batch)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(caches, others)


def given_heads(num_seqs: int, has_norm: bool) -> Heads:
    cos, sin = torch.randn(2, 1, num_seqs, 32).unbind()
    gains = (torch.rand(32), torch.rand(32)) if has_norm else (None, None)
    return Heads(cos, sin, *gains, 1e-6)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_model_answers_as_transformers_does(models: Shelf, family: str) -> None:
    """One sequence more than kernels turn, and one; the report tells how many layers turn heads."""
    llm: Any = models.load(family, options={"decode_pieces": True})
    answers = llm.generate([[3, 1, 4], [2, 7]], SamplingParams(max_new_tokens=5, ignore_eos=True))
    for prompt, answer in zip(([3, 1, 4], [2, 7]), answers, strict=True):
        assert answer.token_ids == models.greedy(family, prompt, 5)
    assert "turns of heads" in llm.explain()
    llm.close()
