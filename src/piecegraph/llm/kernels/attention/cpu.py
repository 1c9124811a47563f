"""Attention over the paged cache for a CPU, in plain torch.

Keys are read where they lie: the blocks of a sequence that follow one another in the cache are one view of it.
Scattered ones are gathered, and so are the few keys of short sequences that decode together. What is cut off before the
first key that a query sees needs no mask; where one is needed, it is made once for a step and shared by its layers.
Half types are computed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from piecegraph.llm.kernels.attention.kernel import AttentionKernel
from piecegraph.llm.kernels.attention.latent import attend_absorbed, compute_type
from piecegraph.llm.kernels.attention.reference import softmax, visible_keys, write_to_cache
from piecegraph.llm.specs import Accepted, AttentionBatch, AttentionLayer, LatentLayer, Rejected, StepKind, Support

_FEW_KEYS = 256
"""Up to which the sequences of a step of decoding are gathered and served in one call: it costs as much by itself."""


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


@dataclass(frozen=True, slots=True)
class _Span:
    """The queries of one sequence, or one query of each of several, and the keys that one of them at least can see."""

    start: int
    end: int
    """Rows of the queries."""
    num_seqs: int
    num_keys: int
    """Of the sequence that sees most."""
    first_slot: int = 0
    """Where the keys begin in the cache, if they lie in one piece."""
    slots: torch.Tensor | None = None
    """int64 [sequences * keys]: where each of them is, if they do not. Those of short sequences are filled up."""
    visible: torch.Tensor | None = None
    """[sequences, 1, queries, keys]; None if every query sees all of them."""
    is_causal: bool = False
    """Whether the keys are those of the queries, and each sees those before it."""

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """[sequences, heads, queries, width] of [tokens, heads, width]."""
        rows = q if self.end - self.start == len(q) else q.narrow(0, self.start, self.end - self.start)
        if self.end - self.start == self.num_seqs:
            return rows.unsqueeze(2)
        return rows.unsqueeze(0).transpose(1, 2)

    def keys(self, cache: torch.Tensor) -> torch.Tensor:
        """[sequences, kv heads, keys, width] of a cache [blocks, block size, kv heads, width]."""
        if self.slots is not None:
            rows = cache.flatten(0, 1).index_select(0, self.slots)
            return rows.view(self.num_seqs, self.num_keys, *cache.shape[2:]).transpose(1, 2)
        # As one call: there are two of them for each sequence in each layer.
        _, of_slot, of_head, of_width = cache.stride()
        shape = (1, cache.shape[2], self.num_keys, cache.shape[3])
        offset = cache.storage_offset() + self.first_slot * of_slot
        return cache.as_strided(shape, (0, of_head, of_slot, of_width), offset)


class _Host:
    """What the layers of a group need to know of a batch, read once for a step."""

    def __init__(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._spans: list[_Span] | None = None

    def spans(self, layer: AttentionLayer) -> list[_Span]:
        """In the order of their rows. All layers of a group see equally far back."""
        if self._spans is None:
            self._spans = _read_spans(self._batch, layer)
        return self._spans


def _read_spans(batch: AttentionBatch, layer: AttentionLayer) -> list[_Span]:
    starts, lengths = batch.query_starts.tolist(), batch.seq_lens.tolist()
    every = zip(range(len(lengths)), starts[:-1], starts[1:], lengths, strict=True)
    real = [each for each in every if each[1] < each[2]]  # padded sequences are the last
    if batch.max_query_len == 1 and len(real) > 1:
        firsts = [_first_visible(length - 1, layer) for *_, length in real]
        most = max(length - first for (*_, length), first in zip(real, firsts, strict=True))
        if most <= _FEW_KEYS:
            return [_together(batch, firsts, lengths[: len(real)], most)]
    return [_alone(batch, layer, *each) for each in real]


def _together(batch: AttentionBatch, firsts: list[int], lengths: list[int], num_keys: int) -> _Span:
    """The only query of each sequence; where one has fewer keys, its last is repeated and not seen."""
    first, last = torch.tensor(firsts)[:, None], torch.tensor(lengths)[:, None] - 1
    wanted = first + torch.arange(num_keys)
    positions = wanted.minimum(last)
    blocks = batch.block_table[: len(lengths)].gather(1, positions // batch.block_size)
    slots = blocks.long() * batch.block_size + positions % batch.block_size
    is_seen = wanted <= last
    visible = None if bool(is_seen.all()) else is_seen[:, None, None]
    return _Span(0, len(lengths), len(lengths), num_keys, slots=slots.flatten(), visible=visible)


def _alone(batch: AttentionBatch, layer: AttentionLayer, row: int, start: int, end: int, length: int) -> _Span:
    position = length - (end - start)
    first = _first_visible(position, layer)
    is_causal = end - start > 1 and position == 0 and not _is_limited(length, layer)
    visible = None
    if end - start > 1 and not is_causal:
        visible = visible_keys(torch.arange(position, length), torch.arange(first, length), layer)[None, None]
    first_slot, slots = _place(batch, row, first, length)
    return _Span(start, end, 1, length - first, first_slot, slots, visible, is_causal)


def _first_visible(position: int, layer: AttentionLayer) -> int:
    """The first key that the query at a position sees; later queries see none before it."""
    first = max(0, position - layer.window + 1) if layer.window else 0
    return max(first, position - position % layer.chunk) if layer.chunk else first


def _is_limited(length: int, layer: AttentionLayer) -> bool:
    """Whether some query of a sequence does not see all keys before it."""
    return 0 < layer.window < length or 0 < layer.chunk < length


def _place(batch: AttentionBatch, row: int, first: int, length: int) -> tuple[int, torch.Tensor | None]:
    """(first slot, the slots of all keys if they do not lie in one piece)."""
    size, offset = batch.block_size, first % batch.block_size
    table = batch.block_table[row, first // size : -(-length // size)]
    blocks = table.tolist()
    if blocks == list(range(blocks[0], blocks[0] + len(blocks))):
        return blocks[0] * size + offset, None
    slots = (table.long()[:, None] * size + torch.arange(size)).flatten()
    return 0, slots[offset : offset + length - first]


def _attend_cached(
    q: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    layer: AttentionLayer,
    batch: AttentionBatch,
) -> None:
    host: _Host = batch.host if batch.host is not None else _Host(batch)
    dtype, num_rows = compute_type(q), 0
    if q.dtype != dtype:
        q = q.to(dtype)
    attend_span = _attend_plain if sinks is None and not layer.softcap else _attend_capped
    for span in host.spans(layer):
        k, v = span.keys(key_cache), span.keys(value_cache)
        if k.dtype != dtype:
            k, v = k.to(dtype), v.to(dtype)
        span.queries(out).copy_(attend_span(span.queries(q), k, v, span, sinks, layer))
        num_rows = span.end
    if num_rows < len(out):
        out[num_rows:].zero_()


def _attend_plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, span: _Span, sinks: torch.Tensor | None, layer: AttentionLayer
) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=span.visible,
        is_causal=span.is_causal,
        scale=layer.scale,
        enable_gqa=layer.num_heads != layer.num_kv_heads,
    )


def _attend_capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    span: _Span,
    sinks: torch.Tensor | None,
    layer: AttentionLayer,
) -> torch.Tensor:
    """With a softcap or sinks, which torch's own function does not know. The heads that share a key become rows."""
    visible = span.visible
    if span.is_causal:
        visible = torch.ones(1, 1, span.num_keys, span.num_keys, dtype=torch.bool).tril()
    group, num_queries = layer.num_heads // layer.num_kv_heads, q.shape[2]
    rows = q.reshape(span.num_seqs, layer.num_kv_heads, group * num_queries, -1)
    mask = None if visible is None else visible.repeat(1, 1, group, 1)
    weights = softmax(rows @ k.transpose(2, 3) * layer.scale, mask, sinks, layer)
    return (weights @ v).view(span.num_seqs, layer.num_heads, num_queries, -1)


def _supports(layer: AttentionLayer | LatentLayer, dtype: torch.dtype, device: torch.device) -> Support:
    return Accepted() if device.type == "cpu" else Rejected("it is for a CPU")


def _capture_safe(kind: StepKind) -> Support:
    return Rejected("it reads the lengths of the sequences on the host")


def _read_batch(batch: AttentionBatch) -> Any:
    return _Host(batch)


KERNEL = AttentionKernel(
    name="cpu",
    supports=_supports,
    capture_safe=_capture_safe,
    attend=attend,
    attend_latent=attend_latent,
    read_batch=_read_batch,
)
