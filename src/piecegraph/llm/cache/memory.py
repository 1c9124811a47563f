"""What a model keeps on the device, and what stands behind the call sites of its ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from piecegraph.llm.cache.states import StateMemory
from piecegraph.llm.kernels.attention.kernel import AttentionKernel
from piecegraph.llm.specs import AttentionBatch, AttentionLayer, LatentLayer, StateBatch

_ATTENTION = frozenset({"attention", "turned_attention", "latent_attention"})


class Memory:
    """The caches of one model, and its :class:`~piecegraph.llm.ops.Sites`.

    Args:
        layers: the attention call sites.
        kernel: what attends.
        experts: the modules behind the experts' call sites.
        states: what layers with a state keep; None if there are none.
        dtype: of keys and values.
        device: where they live.
        block_size: tokens in a block.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer | LatentLayer],
        kernel: AttentionKernel,
        experts: Sequence[torch.nn.Module],
        states: StateMemory | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int,
    ) -> None:
        self.layers = tuple(layers)
        self._kernel = kernel
        self._attend = {
            "attention": kernel.attend,
            "turned_attention": kernel.attend_rows,
            "latent_attention": kernel.attend_latent,
        }
        self._experts = tuple(experts)
        self._states = states
        self._dtype = dtype
        self._device = device
        self._block_size = block_size
        self._caches: list[tuple[torch.Tensor, ...]] = []
        self._batches: Sequence[AttentionBatch] = ()
        """The batch that is running, for each group."""
        if kernel.prepare is not None:
            kernel.prepare(self.layers, device)

    def bytes_per_block(self, group: int) -> int:
        """What one block of a group takes, over all its layers."""
        return sum(
            self._dtype.itemsize * sum(torch.Size(shape).numel() for shape in _block_shapes(layer, self._block_size))
            for layer in self.layers
            if layer.group == group
        )

    def allocate(self, num_blocks: Sequence[int]) -> None:
        """Make the caches, with a number of blocks for each group. The old ones are given up."""
        self._caches.clear()
        for layer in self.layers:
            shapes = _block_shapes(layer, self._block_size)
            self._caches.append(
                tuple(
                    torch.zeros((num_blocks[layer.group], *shape), dtype=self._dtype, device=self._device)
                    for shape in shapes
                )
            )

    def use_batch(self, attention: Sequence[AttentionBatch], states: Callable[[], StateBatch]) -> None:
        """The ops that run from now on belong to this batch; ``states`` is asked if there are layers with a state."""
        read = self._kernel.read_batch
        self._batches = attention if read is None else [replace(batch, host=read(batch)) for batch in attention]
        if self._states is not None:
            self._states.use_batch(states())

    def run(self, op: str, site: int, inputs: tuple[Any, ...]) -> None:
        """An op of ``ops.py`` at one of its call sites."""
        if op in _ATTENTION:
            layer = self.layers[site]
            # Its inputs are the first arguments of one of the kernel's functions.
            attend: Any = self._attend[op]
            attend(*inputs, *self._caches[site], layer, self._batches[layer.group])
        elif op == "experts":
            *routed, out = inputs
            out.copy_(run_experts(self._experts[site], *routed))
        else:
            assert self._states is not None, "a layer with a state ran in a model that has none"
            self._states.run(op, site, inputs)

    @property
    def has_states(self) -> bool:
        """Whether running a step twice is not the same as running it once."""
        return self._states is not None


class EachKindOnce:
    """The sites of a model, where attention is run for the first of equal layers only: for a warm-up."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._known: set[tuple[Any, ...]] = set()

    def run(self, op: str, site: int, inputs: tuple[Any, ...]) -> None:
        """See :class:`~piecegraph.llm.ops.Sites`."""
        if op in _ATTENTION:
            kind = op, replace(self._memory.layers[site], index=0)
            if kind in self._known:
                return
            self._known.add(kind)
        self._memory.run(op, site, inputs)


def _block_shapes(layer: AttentionLayer | LatentLayer, block_size: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of a layer's caches for one block."""
    if isinstance(layer, LatentLayer):
        return ((block_size, layer.latent_width + layer.rope_width),)
    heads = layer.num_kv_heads
    return (block_size, heads, layer.key_width), (block_size, heads, layer.value_width)


def run_experts(module: Any, hidden: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What the experts op does: the model's own experts, as grouped matmuls."""
    result: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden, expert, weight)
    return result
