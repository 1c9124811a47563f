"""Attention over the paged cache in plain torch: right on every device, the measure of the other kernels.

Half types are computed in float32. A decode batch is one gather and one product for all sequences; otherwise sequences
are served one after another. Keys that no query sees are zeroed before any product: what lies there may be NaN, and
zero times NaN is NaN.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from piecegraph.llm.kernels.attention.kernel import AttentionKernel
from piecegraph.llm.kernels.attention.latent import attend_absorbed, compute_type
from piecegraph.llm.specs import Accepted, AttentionBatch, AttentionLayer, LatentLayer, Rejected, StepKind, Support


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
    """See :class:`~piecegraph.llm.kernels.attention.kernel.Attend`."""
    write_to_cache(k, key_cache, batch)
    write_to_cache(v, value_cache, batch)
    _attend_cached(q, out, sinks, key_cache, value_cache, layer, batch)


def attend_latent(
    q: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    up_projection: torch.Tensor,
    out: torch.Tensor,
    cache: torch.Tensor,
    layer: LatentLayer,
    batch: AttentionBatch,
) -> None:
    """See :class:`~piecegraph.llm.kernels.attention.kernel.AttendLatent`."""
    write_to_cache(torch.cat([latent, rope], -1), cache, batch)
    attend_absorbed(_attend_cached, q, up_projection, out, cache, layer, batch)


def write_to_cache(rows: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch) -> None:
    """Put each token's row where it belongs."""
    cache.flatten(0, 1).index_copy_(0, batch.slots, rows if rows.dtype == cache.dtype else rows.to(cache.dtype))


def _attend_cached(
    q: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    layer: AttentionLayer,
    batch: AttentionBatch,
) -> None:
    lengths = batch.seq_lens.tolist()
    if batch.max_query_len == 1:
        keys, values = (_gather(cache, batch.block_table, max(lengths), batch) for cache in (key_cache, value_cache))
        visible = visible_keys(batch.seq_lens[:, None] - 1, torch.arange(keys.shape[1], device=q.device), layer)
        result = _attend_dense(q[:, None], keys, values, visible, sinks, layer)[:, 0]
        out.copy_(result.masked_fill_((batch.seq_lens == 0)[:, None, None], 0))
        return
    starts = batch.query_starts.tolist()
    for i, length in enumerate(lengths):
        start, end = starts[i], starts[i + 1]
        if start == end:
            continue
        keys, values = (
            _gather(cache, batch.block_table[i : i + 1], length, batch) for cache in (key_cache, value_cache)
        )
        positions = torch.arange(length - (end - start), length, device=q.device)
        visible = visible_keys(positions[None], torch.arange(keys.shape[1], device=q.device), layer)
        out[start:end] = _attend_dense(q[None, start:end], keys, values, visible, sinks, layer)[0].to(out.dtype)
    out[starts[-1] :].zero_()


def _gather(cache: torch.Tensor, table: torch.Tensor, length: int, batch: AttentionBatch) -> torch.Tensor:
    """[sequences, whole blocks of tokens, heads, width]; blocks beyond a sequence's own are whatever they are."""
    num_blocks = max(1, -(-length // batch.block_size))
    blocks = table[:, :num_blocks].clamp(0, cache.shape[0] - 1)  # entries that no sequence owns may hold anything
    return cache[blocks].flatten(1, 2)


def visible_keys(query: torch.Tensor, key: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
    """[..., queries, keys] from the positions of queries [..., queries] and of keys [keys]."""
    query = query[..., None]
    visible = key <= query
    if layer.window:
        visible = visible & (key > query - layer.window)
    if layer.chunk:
        visible = visible & (key // layer.chunk == query // layer.chunk)
    return visible


def _attend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    sinks: torch.Tensor | None,
    layer: AttentionLayer,
) -> torch.Tensor:
    """q [sequences, queries, heads, width], k and v [sequences, keys, kv heads, width] to the shape of q."""
    num_seqs, num_queries = q.shape[:2]
    group = layer.num_heads // layer.num_kv_heads
    dtype = compute_type(q)
    unseen = ~visible.any(1)[:, :, None, None]
    k, v = (cached.to(dtype).masked_fill(unseen, 0).transpose(1, 2) for cached in (k, v))
    # The heads that share a key become rows of one product: [sequences, kv heads, group * queries, width].
    rows = q.to(dtype).unflatten(2, (layer.num_kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = visible[:, None, None].expand(-1, -1, group, -1, -1).flatten(2, 3)
    if sinks is None and not layer.softcap:
        result = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=layer.scale)
    else:
        result = softmax(rows @ k.transpose(2, 3) * layer.scale, mask, sinks, layer) @ v
    by_query: torch.Tensor = result.unflatten(2, (group, num_queries)).permute(0, 3, 1, 2, 4)
    return by_query.reshape(num_seqs, num_queries, layer.num_heads, -1)


def softmax(
    scores: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor | None, layer: AttentionLayer
) -> torch.Tensor:
    """Scores [sequences, kv heads, group * queries, keys] to weights; a sink takes its share and gives nothing."""
    if layer.softcap:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return scores.softmax(-1)
    by_kv_head = sinks.to(scores.dtype).view(1, layer.num_kv_heads, -1, 1)
    column = by_kv_head.repeat_interleave(scores.shape[2] // by_kv_head.shape[2], 2).expand(scores.shape[0], -1, -1, -1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def _supports(layer: AttentionLayer | LatentLayer, dtype: torch.dtype, device: torch.device) -> Support:
    return Accepted()


def _capture_safe(kind: StepKind) -> Support:
    return Rejected("it reads the lengths of the sequences on the host")


KERNEL = AttentionKernel(
    name="reference", supports=_supports, capture_safe=_capture_safe, attend=attend, attend_latent=attend_latent
)
