"""The memory of layers that keep a state for each sequence: one slot for each, whatever its length.

Note [States in a graph]
~~~~~~~~~~~~~~~~~~~~~~~~
In a decode batch every sequence has one token, and row i is sequence i. Then everything is one vectorised step that
reads the batch from its device tensors only, so that it may be captured and replayed for any other batch. States are
gathered from their slots and put back; a sequence that starts (length 1) starts from zeros, whatever its slot held.
Padded sequences (length 0) share slot 0: what they leave there is never used, because they start as well, and their
rows of the result are zeros.

In every other batch the host knows where sequences lie. Sequences with one token take the same vectorised step
together; the longer ones are run one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.activations import ACT2FN

from piecegraph.llm.layers import ConvLayer, DeltaLayer, Span, StateBatch, StatefulLayer, StateLayer
from piecegraph.llm.opaque import OpaqueMixers
from piecegraph.llm.trace_cache import CHUNKED_DELTA_RULE


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


class StateMemory:
    """The states of a model's layers. Its methods are those of :class:`piecegraph.llm.ops.Sites`.

    Args:
        layers: by call site.
        decoder: the model without its head, in which modules in opaque form are found.
        num_slots: slot 0 included, which no sequence may have.
        device: where the states are kept.
    """

    def __init__(
        self, layers: Sequence[StateLayer], decoder: torch.nn.Module, num_slots: int, device: torch.device
    ) -> None:
        self._states = {
            layer.index: _allocate(layer, num_slots, device) for layer in layers if not isinstance(layer, StatefulLayer)
        }
        opaque = [layer for layer in layers if isinstance(layer, StatefulLayer)]
        self._opaque = OpaqueMixers(opaque, decoder, device)
        self.can_capture = not opaque
        """Whether a decode batch reads nothing on the host."""
        self._batch: StateBatch | None = None
        self._steps: _Steps | None = None

    @property
    def num_bytes(self) -> int:
        """What is allocated. States of modules in opaque form come on top: ``opaque_bytes`` for each sequence."""
        return sum(state.nbytes for state in self._states.values())

    @property
    def opaque_bytes(self) -> int:
        """What modules in opaque form keep for one sequence."""
        return self._opaque.num_bytes

    def use_batch(self, batch: StateBatch) -> None:
        """The ops that run from now on belong to this batch."""
        self._batch = batch
        self._steps = None if batch.max_query_len == 1 else _steps(batch)

    def release(self, slot: int) -> None:
        """A sequence has ended. Its slot may be given to another one."""
        self._opaque.release(slot)

    def convolve(
        self,
        site: int,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        activation: str,
    ) -> None:
        """A causal convolution over each sequence that remembers its last inputs."""
        convolution = _Convolution(self._states[site], weight, bias, activation)
        batch, steps = self._current(), self._steps
        if steps is None:
            result = convolution.step(hidden, batch.state_slots, batch.seq_lens <= 1)
            out.copy_(result.masked_fill_((batch.seq_lens == 0)[:, None], 0))
            return
        out[steps.num_tokens :].zero_()
        if len(steps.rows):
            result = convolution.step(hidden.index_select(0, steps.rows), steps.slots, steps.starts)
            out.index_copy_(0, steps.rows, result)
        for span in steps.longer:
            out[span.start : span.end] = convolution.run(hidden[span.start : span.end], span)

    def delta_rule(
        self,
        site: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        out: torch.Tensor,
        normalises: bool,
    ) -> None:
        """The gated delta rule over each sequence, from its remembered state."""
        rule = _DeltaRule(self._states[site], normalises)
        inputs = (query, key, value, decay, beta)
        batch, steps = self._current(), self._steps
        if steps is None:
            result = rule.step(inputs, batch.state_slots, batch.seq_lens <= 1)
            out.copy_(result.masked_fill_((batch.seq_lens == 0)[:, None, None], 0))
            return
        out[steps.num_tokens :].zero_()
        if len(steps.rows):
            result = rule.step([tensor.index_select(0, steps.rows) for tensor in inputs], steps.slots, steps.starts)
            out.index_copy_(0, steps.rows, result.to(out.dtype))
        for span in steps.longer:
            out[span.start : span.end] = rule.run([tensor[span.start : span.end] for tensor in inputs], span)

    def mix_state(self, site: int, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Run a module that keeps a state as it is, sequence by sequence."""
        self._opaque.run(site, hidden, out, self._current().spans)

    def _current(self) -> StateBatch:
        assert self._batch is not None, "a layer ran before the memory was given a batch"
        return self._batch


def _allocate(layer: ConvLayer | DeltaLayer, num_slots: int, device: torch.device) -> torch.Tensor:
    if isinstance(layer, ConvLayer):
        return torch.zeros(num_slots, layer.channels, layer.width - 1, dtype=layer.dtype, device=device)
    return torch.zeros(
        num_slots, layer.num_heads, layer.key_width, layer.value_width, dtype=torch.float32, device=device
    )


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
    """Inputs are ``[tokens, channels]``, remembered ones ``[slots, channels, width - 1]``."""

    states: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: str

    def step(self, hidden: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """One token of each of several sequences."""
        before = self.states.index_select(0, slots).masked_fill_(starts[:, None, None], 0)
        window = torch.cat((before, hidden[:, :, None]), -1)
        self.states.index_copy_(0, slots, window[:, :, 1:])
        # A product and a sum: on so few numbers a convolution kernel costs more than it saves. It also sums in float32.
        result = (window.float() * self.weight.float()).sum(-1)
        if self.bias is not None:
            result = result + self.bias.float()
        return self._activate(result.to(self.weight.dtype)).to(hidden.dtype)

    def run(self, hidden: torch.Tensor, span: Span) -> torch.Tensor:
        """Several tokens of one sequence."""
        state = self.states[span.slot]
        before = torch.zeros_like(state) if span.is_first else state
        window = torch.cat((before, hidden.t()), -1)
        result = torch.nn.functional.conv1d(
            window[None].to(self.weight.dtype), self.weight[:, None], self.bias, groups=len(self.weight)
        )
        state.copy_(window[:, window.shape[1] - state.shape[1] :])
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
