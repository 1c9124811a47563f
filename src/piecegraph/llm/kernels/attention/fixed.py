"""The reference kernel, where what a query gets does not depend on what runs beside it, bit by bit.

Note [Tiles by position]
~~~~~~~~~~~~~~~~~~~~~~~~
How a product rounds depends on its shape, and may depend on the row. So queries are taken in tiles that lie where their
positions say: a query is always in the same row of a tile of the same size, before the same number of keys, whichever
part of its prompt it came with. What other rows of the tile hold, and keys that it does not see, change nothing: they
are multiplied by zero.
"""

from __future__ import annotations

import torch

from piecegraph.llm.kernels.attention import reference
from piecegraph.llm.kernels.attention.kernel import AttentionKernel
from piecegraph.llm.specs import AttentionBatch, AttentionLayer, LatentLayer, Rejected, Support

_TILE = 16
"""Queries. A step of decoding pays for as many."""


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    layer: AttentionLayer,
    batch: AttentionBatch,
) -> None:
    """See :class:`~piecegraph.llm.kernels.attention.kernel.Attend`, and Note [Tiles by position]."""
    reference.write_to_cache(k, key_cache, batch)
    reference.write_to_cache(v, value_cache, batch)
    starts, lengths = batch.query_starts.tolist(), batch.seq_lens.tolist()
    out[starts[-1] :].zero_()
    for i, end in enumerate(lengths):
        first = end - (starts[i + 1] - starts[i])
        for tile in range(first // _TILE, -(-end // _TILE) if first < end else 0):
            queries = range(max(first, tile * _TILE), min(end, (tile + 1) * _TILE))
            rows = slice(starts[i] + queries.start - first, starts[i] + queries.stop - first)
            caches = (key_cache, value_cache)
            out[rows] = _attend_tile(q[rows], tile, queries, caches, sinks, layer, batch, i).to(out.dtype)


def _attend_tile(
    q: torch.Tensor,
    tile: int,
    queries: range,
    caches: tuple[torch.Tensor, torch.Tensor],
    sinks: torch.Tensor | None,
    layer: AttentionLayer,
    batch: AttentionBatch,
    seq: int,
) -> torch.Tensor:
    """What the queries at some positions of a tile see; the other rows see nothing."""
    end = (tile + 1) * _TILE
    first, last = queries.start - tile * _TILE, queries.stop - tile * _TILE
    keys, values = (reference._gather(cache, batch.block_table[seq : seq + 1], end, batch) for cache in caches)
    positions = torch.arange(max(end, keys.shape[1]), device=q.device)
    visible = reference.visible_keys(positions[None, tile * _TILE : end], positions[: keys.shape[1]], layer)
    visible[:, :first] = visible[:, last:] = False
    rows = q.new_zeros(1, _TILE, *q.shape[1:])
    rows[0, first:last] = q
    return reference._attend_dense(rows, keys, values, visible, sinks, layer)[0, first:last]


def _supports(layer: AttentionLayer | LatentLayer, dtype: torch.dtype, device: torch.device) -> Support:
    if isinstance(layer, LatentLayer):
        return Rejected("latents are carried to heads and back by products of another shape")
    return reference.KERNEL.supports(layer, dtype, device)


KERNEL = AttentionKernel(
    name="reference", supports=_supports, capture_safe=reference.KERNEL.capture_safe, attend=attend
)
