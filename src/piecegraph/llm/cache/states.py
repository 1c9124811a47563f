"""The memory of layers that keep a state for each sequence: one slot for each, whatever its length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from piecegraph.base.plan import Decision
from piecegraph.llm.cache.opaque import OpaqueMixers
from piecegraph.llm.kernels.state_plain import PlainStates
from piecegraph.llm.kernels.state_triton import TritonStates, supports
from piecegraph.llm.specs import (
    ConvLayer,
    DeltaLayer,
    Rejected,
    StateBatch,
    StatefulLayer,
    StateLayer,
    StepKind,
    Support,
)


class StateKernels(Protocol):
    """What computes layers in fine form. Rows of padding become zeros."""

    name: str

    def capture_safe(self, kind: StepKind) -> Support:
        """Whether it may run inside a CUDA graph, for a kind of batch."""

    def use_batch(self, batch: StateBatch) -> None:
        """What runs from now on belongs to this batch."""

    def convolve(
        self,
        states: torch.Tensor,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        activation: str,
    ) -> None:
        """A causal convolution over each sequence that remembers its last inputs."""

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
        """The gated delta rule over each sequence, from its remembered state."""


def choose_states(
    layers: Sequence[StateLayer], dtype: torch.dtype, device: torch.device
) -> tuple[StateKernels, tuple[Decision, ...]]:
    """What computes layers in fine form, and the decision, if there are such layers."""
    fine = [layer for layer in layers if not isinstance(layer, StatefulLayer)]
    if not fine:
        return PlainStates(), ()
    verdict = supports(fine, dtype, device)
    if isinstance(verdict, Rejected):
        return PlainStates(), (Decision("layers with a state", PlainStates.name, verdict.reason),)
    return TritonStates(), (Decision("layers with a state", TritonStates.name, "it supports every one of them"),)


def state_bytes(layers: Sequence[StateLayer], num_slots: int) -> int:
    """What a :class:`StateMemory` would allocate."""
    nowhere = torch.device("meta")
    return sum(_allocate(layer, num_slots, nowhere).nbytes for layer in layers if not isinstance(layer, StatefulLayer))


class StateMemory:
    """The states of a model's layers, and what stands behind the call sites of these.

    Args:
        layers: by call site.
        decoder: the model without its head, in which modules in opaque form are found.
        kernels: what computes the others.
        num_slots: slot 0 included, which no sequence may have.
        device: where the states are kept.
    """

    def __init__(
        self,
        layers: Sequence[StateLayer],
        decoder: torch.nn.Module,
        kernels: StateKernels,
        num_slots: int,
        device: torch.device,
    ) -> None:
        self._kernels = kernels
        self._states = {
            layer.index: _allocate(layer, num_slots, device) for layer in layers if not isinstance(layer, StatefulLayer)
        }
        opaque = [layer for layer in layers if isinstance(layer, StatefulLayer)]
        self._opaque = OpaqueMixers(opaque, decoder, device) if opaque else None
        self._batch: StateBatch | None = None

    @property
    def num_bytes(self) -> int:
        """What is allocated. States of modules in opaque form come on top: see :meth:`unallocated_bytes`."""
        return sum(state.nbytes for state in self._states.values())

    def unallocated_bytes(self, num_seqs: int) -> int:
        """What modules in opaque form will allocate for so many sequences."""
        return self._opaque.num_bytes * num_seqs if self._opaque is not None else 0

    def capture_safe(self, kind: StepKind) -> Support:
        """Whether a batch of a kind reads nothing on the host."""
        if self._opaque is not None:
            return Rejected("modules that keep a state are run as they are, sequence by sequence")
        return self._kernels.capture_safe(kind)

    def use_batch(self, batch: StateBatch) -> None:
        """The ops that run from now on belong to this batch."""
        self._batch = batch
        self._kernels.use_batch(batch)

    def release(self, slot: int) -> None:
        """A sequence has ended. Its slot may be given to another one."""
        if self._opaque is not None:
            self._opaque.release(slot)

    def run(self, op: str, site: int, inputs: tuple[Any, ...]) -> None:
        """An op of ``ops.py`` at one of its call sites."""
        if op == "causal_conv":
            self._kernels.convolve(self._states[site], *inputs)
        elif op == "delta_rule":
            self._kernels.delta_rule(self._states[site], *inputs)
        else:
            assert op == "stateful", op
            assert self._opaque is not None, "a module in opaque form ran in a model that has none"
            assert self._batch is not None, "a layer ran before the memory was given a batch"
            hidden, out = inputs
            self._opaque.run(site, hidden, out, self._batch.spans)


def _allocate(layer: ConvLayer | DeltaLayer, num_slots: int, device: torch.device) -> torch.Tensor:
    if isinstance(layer, ConvLayer):
        return torch.zeros(num_slots, layer.width - 1, layer.channels, dtype=layer.dtype, device=device)
    return torch.zeros(
        num_slots, layer.num_heads, layer.key_width, layer.value_width, dtype=torch.float32, device=device
    )
