"""Layers that keep a state, in plain torch: on every device, and what our kernels are compared with.

Note [States in a graph]
~~~~~~~~~~~~~~~~~~~~~~~~
In a decode batch every sequence has one token, and row i is sequence i. Then everything is one vectorised step that
reads the batch from its device tensors only, so that it may be captured and replayed for any other batch. States are
gathered from their slots and put back; a sequence that starts (length 1) starts from zeros, whatever its slot held.
Padded sequences (length 0) share slot 0: what they leave there is never used, because they start as well, and their
rows of the result are zeros.

In every other batch the host knows where sequences lie. Sequences with one token take the same vectorised step
together; the longer ones are run one after the other. Such a batch cannot be captured.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers.activations import ACT2FN
from transformers.models.qwen3_next import modeling_qwen3_next

from piecegraph.llm.specs import Accepted, Rejected, Span, StateBatch, StepKind, Support

CHUNKED_DELTA_RULE: Callable[..., tuple[torch.Tensor, torch.Tensor]] = inspect.unwrap(
    modeling_qwen3_next.torch_chunk_gated_delta_rule
)
"""The rule in plain torch. Every family has its copy of it; one that differs gets no fine form."""


@dataclass(frozen=True, slots=True)
class _Steps:
    """The sequences of a mixed batch that have one token, and the others."""

    rows: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    """Whether each sequence starts from nothing."""
    longer: tuple[Span, ...]
    num_tokens: int
    """Rows from here on are padding."""


class PlainStates:
    """See :class:`~piecegraph.llm.cache.states.StateKernels`."""

    name = "plain torch"

    def __init__(self) -> None:
        self._batch: StateBatch | None = None
        self._steps: _Steps | None = None

    def capture_safe(self, kind: StepKind) -> Support:
        if kind == "decode":
            return Accepted()
        return Rejected("layers with a state are run sequence by sequence")

    def use_batch(self, batch: StateBatch) -> None:
        self._batch = batch
        self._steps = None if batch.max_query_len == 1 else _steps(batch)

    def convolve(
        self,
        states: torch.Tensor,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        activation: str,
    ) -> None:
        convolution = _Convolution(states, weight, bias, activation)
        steps = self._steps
        if steps is None:
            assert self._batch is not None
            lengths = self._batch.seq_lens
            result = convolution.step(hidden, self._batch.state_slots, lengths <= 1)
            out.copy_(result.masked_fill_((lengths == 0)[:, None], 0))
            return
        out[steps.num_tokens :].zero_()
        if len(steps.rows):
            result = convolution.step(hidden.index_select(0, steps.rows), steps.slots, steps.starts)
            out.index_copy_(0, steps.rows, result)
        for span in steps.longer:
            out[span.start : span.end] = convolution.run(hidden[span.start : span.end], span)

    def delta_rule(
        self,
        states: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        out: torch.Tensor,
        normalises: bool,
    ) -> None:
        rule = _DeltaRule(states, normalises)
        inputs = (query, key, value, decay, beta)
        steps = self._steps
        if steps is None:
            assert self._batch is not None
            lengths = self._batch.seq_lens
            result = rule.step(inputs, self._batch.state_slots, lengths <= 1)
            out.copy_(result.masked_fill_((lengths == 0)[:, None, None], 0))
            return
        out[steps.num_tokens :].zero_()
        if len(steps.rows):
            result = rule.step([tensor.index_select(0, steps.rows) for tensor in inputs], steps.slots, steps.starts)
            out.index_copy_(0, steps.rows, result.to(out.dtype))
        for span in steps.longer:
            out[span.start : span.end] = rule.run([tensor[span.start : span.end] for tensor in inputs], span)


def _steps(batch: StateBatch) -> _Steps:
    ones = [span for span in batch.spans if span.end - span.start == 1]
    device = batch.state_slots.device
    return _Steps(
        rows=torch.tensor([span.start for span in ones], dtype=torch.long, device=device),
        slots=torch.tensor([span.slot for span in ones], dtype=torch.long, device=device),
        starts=torch.tensor([span.is_first for span in ones], dtype=torch.bool, device=device),
        longer=tuple(span for span in batch.spans if span.end - span.start > 1),
        num_tokens=batch.spans[-1].end if batch.spans else 0,
    )


@dataclass(frozen=True, slots=True)
class _Convolution:
    """Inputs are ``[tokens, channels]``, remembered ones ``[slots, width - 1, channels]``."""

    states: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: str

    def step(self, hidden: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """One token of each of several sequences."""
        before = self.states.index_select(0, slots).masked_fill_(starts[:, None, None], 0)
        window = torch.cat((before, hidden[:, None]), 1)
        self.states.index_copy_(0, slots, window[:, 1:])
        # A product and a sum: on so few numbers a convolution kernel costs more than it saves. It also sums in float32.
        result = (window.float() * self.weight.float().t()).sum(1)
        if self.bias is not None:
            result = result + self.bias.float()
        return self._activate(result.to(self.weight.dtype)).to(hidden.dtype)

    def run(self, hidden: torch.Tensor, span: Span) -> torch.Tensor:
        """Several tokens of one sequence."""
        state = self.states[span.slot]
        before = torch.zeros_like(state) if span.is_first else state
        window = torch.cat((before, hidden))
        result = torch.nn.functional.conv1d(
            window.t()[None].to(self.weight.dtype), self.weight[:, None], self.bias, groups=len(self.weight)
        )
        state.copy_(window[len(window) - len(state) :])
        return self._activate(result[0].t()).to(hidden.dtype)

    def _activate(self, result: torch.Tensor) -> torch.Tensor:
        return ACT2FN[self.activation](result) if self.activation else result


@dataclass(frozen=True, slots=True)
class _DeltaRule:
    """Inputs are query, key and value ``[tokens, heads, width]``, decay (as a logarithm) and beta ``[tokens, heads]``.

    A state maps keys to values. A token lets it decay, corrects what it answers to the token's key towards the token's
    value by beta, and asks it for the token's query.
    """

    states: torch.Tensor
    normalises: bool

    def step(self, inputs: Sequence[torch.Tensor], slots: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """One token of each of several sequences."""
        query, key, value, decay, beta = (tensor.float() for tensor in inputs)
        if self.normalises:
            query, key = _normalised(query), _normalised(key)
        query = query * query.shape[-1] ** -0.5
        state = self.states.index_select(0, slots).masked_fill_(starts[:, None, None, None], 0)
        state.mul_(decay.exp()[:, :, None, None])
        answer = torch.matmul(key[:, :, None], state)
        correction = (value[:, :, None] - answer) * beta[:, :, None, None]
        state.addcmul_(key[:, :, :, None], correction)
        self.states.index_copy_(0, slots, state)
        return torch.matmul(query[:, :, None], state).squeeze(2)

    def run(self, inputs: Sequence[torch.Tensor], span: Span) -> torch.Tensor:
        """Several tokens of one sequence."""
        state = self.states[span.slot]
        query, key, value, decay, beta = (tensor[None] for tensor in inputs)
        result, after = CHUNKED_DELTA_RULE(
            query,
            key,
            value,
            g=decay,
            beta=beta,
            initial_state=None if span.is_first else state[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=self.normalises,
        )
        state.copy_(after[0])
        return result[0]


def _normalised(rows: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + 1e-6)
