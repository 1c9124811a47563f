"""Layers that keep a state on made-up batches, and what they should give: token by token, in double precision."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from piecegraph.llm.cache.states import StateKernels
from piecegraph.llm.specs import Span, StateBatch

NUM_SLOTS = 8


@dataclass(frozen=True)
class Step:
    """How many tokens of which sequences a batch has. Sequence i has slot i + 1."""

    counts: dict[int, int]
    num_tokens: int
    """Of the bucket."""
    num_seqs: int


PROMPTS_AND_DECODE = (
    Step({0: 7, 1: 70}, 96, 4),
    Step({2: 3, 0: 150, 1: 1}, 160, 4),  # a chunk beside a decode
    Step({1: 1, 0: 1, 2: 1}, 4, 4),
    Step({3: 1}, 1, 1),  # a prompt of one token
    Step({0: 64, 3: 128, 4: 2}, 194, 3),  # nothing padded
    Step({4: 1, 3: 1, 2: 1, 1: 1, 0: 1}, 8, 8),
    Step({1: 130}, 256, 2),
)
"""Steps that sequences go through one after the other."""


@dataclass
class Batches:
    """Turns steps into batches; remembers how long every sequence is."""

    device: torch.device
    lengths: dict[int, int] = field(default_factory=dict)

    def next(self, step: Step) -> StateBatch:
        spans, row = [], 0
        for sequence, count in step.counts.items():
            before = self.lengths.get(sequence, 0)
            spans.append(Span(row, row + count, before == 0, sequence + 1))
            self.lengths[sequence] = before + count
            row += count
        padding = step.num_seqs - len(spans)
        is_decode = step.num_tokens == step.num_seqs and set(step.counts.values()) == {1}
        starts = [span.start for span in spans] + [row] * (padding + 1)
        lengths = [self.lengths[sequence] for sequence in step.counts] + [0] * padding
        return StateBatch(
            query_starts=torch.tensor(starts, dtype=torch.int32, device=self.device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=self.device),
            state_slots=torch.tensor([span.slot for span in spans] + [0] * padding, device=self.device),
            spans=tuple(spans),
            max_query_len=1 if is_decode else step.num_tokens,
        )


@dataclass
class ConvCase:
    """A convolution of a shape."""

    channels: int
    width: int
    activation: str
    has_bias: bool
    dtype: torch.dtype
    device: torch.device

    def check(self, kernels: StateKernels, steps: tuple[Step, ...], tolerance: float) -> None:
        """Run steps, and compare each with the definition."""
        numbers = torch.Generator().manual_seed(0)
        weight = torch.randn(self.channels, self.width, generator=numbers).to(self.dtype)
        bias = torch.randn(self.channels, generator=numbers).to(self.dtype) if self.has_bias else None
        states = _garbage(NUM_SLOTS, self.width - 1, self.channels, dtype=self.dtype, device=self.device)
        batches, seen = Batches(self.device), dict[int, torch.Tensor]()
        for step in steps:
            batch = batches.next(step)
            hidden = torch.randn(step.num_tokens, self.channels, generator=numbers).to(self.dtype)
            expected = torch.zeros(step.num_tokens, self.channels, dtype=torch.float64)
            for span in batch.spans:
                before = torch.zeros(self.width - 1, self.channels).to(hidden) if span.is_first else seen[span.slot]
                inputs = torch.cat((before, hidden[span.start : span.end]))
                windows = inputs.double().unfold(0, self.width, 1)
                result = (windows * weight.double()).sum(-1) + (bias.double() if bias is not None else 0)
                expected[span.start : span.end] = result * torch.sigmoid(result) if self.activation else result
                seen[span.slot] = inputs[len(inputs) - self.width + 1 :]
            hidden[batch.spans[-1].end :] = torch.nan
            out = _garbage(*hidden.shape, dtype=self.dtype, device=self.device)
            kernels.use_batch(batch)
            on_device = bias.to(self.device) if bias is not None else None
            kernels.convolve(states, hidden.to(self.device), weight.to(self.device), on_device, out, self.activation)
            torch.testing.assert_close(out.cpu().double(), expected, atol=tolerance, rtol=tolerance)
            for slot, inputs in seen.items():
                torch.testing.assert_close(states[slot].cpu(), inputs, atol=0, rtol=0)


@dataclass
class DeltaCase:
    """A gated delta rule of a shape."""

    num_heads: int
    key_width: int
    value_width: int
    normalises: bool
    dtype: torch.dtype
    device: torch.device
    keys_are_equal: bool = False
    """And nothing decays: what a repeated token does."""

    def check(self, kernels: StateKernels, steps: tuple[Step, ...], tolerance: float) -> None:
        """Run steps, and compare each with the definition."""
        numbers = torch.Generator().manual_seed(0)
        shape = (self.num_heads, self.key_width, self.value_width)
        states = _garbage(NUM_SLOTS, *shape, dtype=torch.float32, device=self.device)
        batches, seen = Batches(self.device), dict[int, torch.Tensor]()
        for step in steps:
            batch = batches.next(step)
            inputs = self._inputs(step.num_tokens, numbers)
            expected = torch.zeros(step.num_tokens, self.num_heads, self.value_width, dtype=torch.float64)
            for span in batch.spans:
                state = torch.zeros(shape, dtype=torch.float64) if span.is_first else seen[span.slot]
                for row in range(span.start, span.end):
                    state, expected[row] = self._token(state, *(tensor[row].double() for tensor in inputs))
                seen[span.slot] = state
            for tensor in inputs:
                tensor[batch.spans[-1].end :] = torch.nan
            out = _garbage(*expected.shape, dtype=self.dtype, device=self.device)
            kernels.use_batch(batch)
            kernels.delta_rule(states, *(tensor.to(self.device) for tensor in inputs), out, self.normalises)
            torch.testing.assert_close(out.cpu().double(), expected, atol=tolerance, rtol=tolerance)
            for slot, state in seen.items():
                torch.testing.assert_close(states[slot].cpu().double(), state, atol=4 * tolerance, rtol=tolerance)

    def _inputs(self, rows: int, numbers: torch.Generator) -> tuple[torch.Tensor, ...]:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(rows, self.num_heads, *shape, generator=numbers)

        query, key, value = normal(self.key_width), normal(self.key_width), normal(self.value_width)
        decay, beta = -normal().exp() * 0.1, torch.sigmoid(normal())
        if self.keys_are_equal:
            key, decay, beta = torch.ones_like(key), torch.zeros_like(decay), torch.full_like(beta, 0.999)
        if not self.normalises:
            key = key / key.norm(dim=-1, keepdim=True)
        return query.to(self.dtype), key.to(self.dtype), value.to(self.dtype), decay, beta.to(self.dtype)

    def _token(
        self,
        state: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.normalises:
            query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
        state = state * decay.exp()[:, None, None]
        delta = beta[:, None] * (value - torch.einsum("hk,hkv->hv", key, state))
        state = state + torch.einsum("hk,hv->hkv", key, delta)
        return state, torch.einsum("hk,hkv->hv", query, state) * self.key_width**-0.5


def _garbage(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that nobody may read."""
    return torch.full(shape, torch.nan, dtype=dtype, device=device)
