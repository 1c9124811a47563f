"""Kernels that are compiled while the pieces are: which ones, and what happens if that fails."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piecegraph.llm.cache.states import StateKernels
from piecegraph.llm.kernels import skinny
from piecegraph.llm.kernels.attention.kernel import AttentionKernel
from piecegraph.llm.kernels.attention.registry import choose_kernel
from piecegraph.llm.kernels.state_plain import PlainStates
from piecegraph.llm.run.batch import BatchLimits
from piecegraph.llm.run.early_kernels import EarlyKernels, LinearShape, Shapes, shapes_of
from piecegraph.llm.run.step import Bucket
from piecegraph.llm.specs import AttentionLayer, ConvLayer, DeltaLayer
from tests.cases.gated import Gated
from tests.graph.test_trace import trace_it

CPU = torch.device("cpu")
LAYER = AttentionLayer(index=0, group=0, num_heads=4, num_kv_heads=2, key_width=8, value_width=8, scale=1.0)
CONV = ConvLayer(index=0, channels=8, width=4, activation="silu", has_bias=True, dtype=torch.float32)
DELTA = DeltaLayer(
    index=2,
    num_heads=2,
    key_width=8,
    value_width=4,
    normalises=True,
    dtype=torch.float32,
    decay_dtype=torch.float32,
    beta_dtype=torch.bfloat16,
)
SHAPES = Shapes((LinearShape(16, 8),), (LinearShape(24, 8, has_norm=True, is_gated=True),), {0: True, 2: False}, 4)
"""The second of three layers is not turned by attention."""
BUCKETS = (Bucket(4, 4, "decode"), Bucket(8, 2), Bucket(1, 1, "decode"))


def early(kernel: AttentionKernel, *layers: AttentionLayer, states: StateKernels | None = None) -> EarlyKernels:
    return EarlyKernels(
        kernel,
        layers,
        ((CONV, replace(CONV, index=1), DELTA), states or PlainStates()),
        SHAPES,
        torch.zeros(10, 8),
        buckets=BUCKETS,
        limits=BatchLimits(max_tokens=8, max_seqs=4, max_model_len=64, block_size=16, num_groups=1, vocab_size=8),
        dtype=torch.float32,
        device=CPU,
        are_kept=False,
    )


def test_the_distinct_linears_of_a_decoder() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(4, 8)
            self.out = nn.Linear(8, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(F.relu(self.first(x) + self.second(x)))

    traced = trace_it(Net(), torch.randn(3, 4))
    plain = (LinearShape(8, 4, True), LinearShape(2, 8))
    assert shapes_of(traced.graph, has_decode_pieces=False, fuses_gates=True) == Shapes(plain)
    assert shapes_of(traced.graph, has_decode_pieces=True, fuses_gates=True) == Shapes(
        plain, (LinearShape(8, 4, True, has_residual=True), LinearShape(8, 4, True), LinearShape(2, 8)), {}, 16
    )


def test_gates_are_part_of_linears_where_they_are_fused() -> None:
    traced = trace_it(Gated(8, 4), torch.randn(3, 8, dtype=torch.bfloat16))
    down = LinearShape(8, 4)
    for fuses_gates in (False, True):
        found = shapes_of(traced.graph, has_decode_pieces=False, fuses_gates=fuses_gates)
        assert found == Shapes((LinearShape(8, 8, is_gated=fuses_gates), down))


class CountedStates(PlainStates):
    """Writes down what it is launched with."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[tuple[str, int, torch.dtype]] = []

    def convolve(self, states: Tensor, hidden: Tensor, *others: Any) -> None:
        self.launched.append(("convolution", hidden.shape[0], hidden.dtype))
        super().convolve(states, hidden, *others)

    def delta_rule(self, states: Tensor, *others: Any) -> None:
        self.launched.append(("delta rule", others[0].shape[0], others[4].dtype))
        super().delta_rule(states, *others)


@pytest.mark.parametrize("waits", [False, True], ids=["longest first", "what a launch waits for last"])
def test_every_kind_of_layer_runs_once_in_every_size(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    reference = choose_kernel("reference", (), torch.float32, CPU)[0]
    attended: list[tuple[int, int, int]] = []

    def attend(query: Tensor, *args: Any) -> None:
        attended.append((query.shape[0], args[-2].window, args[-1].query_starts.shape[0] - 1))
        reference.attend(query, *args)

    multiplied: list[tuple[int, int, bool]] = []
    monkeypatch.setattr(
        skinny,
        "launch_once",
        lambda linear, rows, *, early: multiplied.append((rows, linear.weight.shape[0], early)),
    )
    turned: list[tuple[int, bool]] = []

    def attend_turned(q: Tensor, k: Tensor, v: Tensor, heads: skinny.Heads, *others: Any) -> None:
        turned.append((q.shape[1], heads.q_gain is not None))

    kernels = early(
        replace(reference, attend=attend, attend_turned=attend_turned, compiles_when_launched=waits),
        LAYER,
        replace(LAYER, index=1),
        replace(LAYER, index=2, window=4),
        states=(states := CountedStates()),
    )
    kernels.start()
    decision = kernels.wait()
    assert decision.choice == "compiled early", decision.reason
    sizes = (1, 4, 8) if waits else (8, 4, 1)
    num_seqs = {1: 1, 4: 4, 8: 2}
    assert attended == [(size, 0, num_seqs[size]) for size in sizes]
    # Steps of decoding have pieces of their own; the last of others may run on one row of each sequence.
    linears = {1: [(1, 24, True), (1, 10, True)], 4: [(4, 24, True)], 8: [(8, 16, False), (2, 16, False)]}
    assert multiplied == [linear for size in sizes for linear in linears[size]]
    assert turned == [(size, has_norm) for size in sizes for has_norm in (True, False)]
    assert states.launched == [
        (kind, size, dtype)
        for size in sizes
        for kind, dtype in (("convolution", torch.float32), ("delta rule", torch.bfloat16))
    ]


def test_what_goes_wrong_early_is_told_and_harms_nobody() -> None:
    kernels = early(choose_kernel("reference", (), torch.float32, CPU)[0], LAYER)
    kernels.start()  # there is no GPU
    decision = kernels.wait()
    assert decision.choice == "compiled when first used"
    assert "compiling them early failed: " in decision.reason
