"""What a model keeps on the device, and what stands behind the call sites of its ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from piecegraph.llm.attention.kernel import AttentionKernel
from piecegraph.llm.batch import BatchBuffers, BatchViews
from piecegraph.llm.layers import AttentionLayer, LatentLayer, Span, StateBatch
from piecegraph.llm.plug import run_experts
from piecegraph.llm.state import StateMemory
from piecegraph.llm.step import Bucket


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
        self._layers = tuple(layers)
        self._kernel = kernel
        self._experts = tuple(experts)
        self._states = states
        self._dtype = dtype
        self._device = device
        self._block_size = block_size
        self._caches: list[tuple[torch.Tensor, ...]] = []
        self._views: BatchViews | None = None
        """The batch that is running."""
        if kernel.prepare is not None:
            kernel.prepare(self._layers, device)

    def bytes_per_block(self, group: int) -> int:
        """What one block of a group takes, over all its layers."""
        return sum(
            self._dtype.itemsize * sum(torch.Size(shape).numel() for shape in _block_shapes(layer, self._block_size))
            for layer in self._layers
            if layer.group == group
        )

    def allocate(self, num_blocks: Sequence[int]) -> None:
        """Make the caches, with a number of blocks for each group. The old ones are given up."""
        self._caches.clear()
        for layer in self._layers:
            shapes = _block_shapes(layer, self._block_size)
            self._caches.append(
                tuple(
                    torch.zeros((num_blocks[layer.group], *shape), dtype=self._dtype, device=self._device)
                    for shape in shapes
                )
            )

    def use_batch(self, buffers: BatchBuffers, bucket: Bucket) -> None:
        """The ops that run from now on belong to what was last written to the buffers."""
        self._views = views = buffers.views(bucket)
        if self._states is None:
            return
        spans, row = [], 0
        for work in buffers.works:
            spans.append(Span(row, row + work.num_tokens, work.is_first, work.request.state_slot))
            row += work.num_tokens
        most = 1 if bucket.kind == "decode" else bucket.num_tokens
        self._states.use_batch(
            StateBatch(
                query_starts=views.query_starts,
                seq_lens=views.seq_lens,
                state_slots=views.state_slots,
                spans=tuple(spans),
                max_query_len=most,
            )
        )

    # -- the sites

    def attend(
        self,
        site: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        layer = self._layers[site]
        key_cache, value_cache = self._caches[site]
        assert isinstance(layer, AttentionLayer)
        assert self._views is not None
        batch = self._views.attention[layer.group]
        self._kernel.attend(query, key, value, out, sinks, key_cache, value_cache, layer, batch)

    def attend_latent(
        self,
        site: int,
        query: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        up_projection: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        layer = self._layers[site]
        assert isinstance(layer, LatentLayer)
        assert self._views is not None
        assert self._kernel.attend_latent is not None
        batch, (cache,) = self._views.attention[layer.group], self._caches[site]
        self._kernel.attend_latent(query, latent, rope, up_projection, out, cache, layer, batch)

    def mix_experts(
        self, site: int, hidden: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
    ) -> None:
        out.copy_(run_experts(self._experts[site], hidden, expert, weight))

    @property
    def has_states(self) -> bool:
        """Whether running a step twice is not the same as running it once."""
        return self._states is not None

    @property
    def states(self) -> StateMemory:
        assert self._states is not None, "a layer with a state ran in a model that has none"
        return self._states


def _block_shapes(layer: AttentionLayer | LatentLayer, block_size: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of a layer's caches for one block."""
    if isinstance(layer, LatentLayer):
        return ((block_size, layer.latent_width + layer.rope_width),)
    heads = layer.num_kv_heads
    return (block_size, heads, layer.key_width), (block_size, heads, layer.value_width)
