"""Prompts on Hopper GPUs by a kernel of ours in Gluon; rows of decoding, and all other layers, by those in Triton.

It takes a batch as they do, but there are as many programs as processors. As FlashAttention it leaves it to the kernel
that writes keys and values to clear padded rows and the values behind a prompt, which it multiplies by zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from piecegraph.llm.kernels.attention import triton_paged
from piecegraph.llm.kernels.attention.kernel import AttentionKernel
from piecegraph.llm.kernels.attention.plain_prompts import supports, use_for, why_left
from piecegraph.llm.kernels.chip import chip, has_gluon
from piecegraph.llm.specs import (
    AttentionBatch,
    AttentionLayer,
    LatentLayer,
    Rejected,
    SequenceRows,
    Support,
)

MIN_TOKENS = 128
"""Of a step; as many as a tile has rows. One prompt of them took as long as by Triton, one of 256 a twentieth less."""
WIDTHS = (64, 128)
"""Of heads: what is copied at once is 64 wide, and of wider ones too few fit on the chip."""
ROWS_AT_ONCE = 8
"""Of a block, in which copies are laid out in shared memory."""
CACHED_BYTES = 32 << 20
"""Of the L2 cache, of which a Hopper GPU has 50 MiB, for keys and values: see Note [Order of tiles]."""


def for_prompts(operands: triton_paged.Operands, batch: AttentionBatch) -> triton_paged.AttendPrompts | None:
    """What attends with prompts; None if it is the Triton kernel."""
    is_small = min(operands.q.shape[0], batch.max_query_len) < MIN_TOKENS
    if is_small or batch.block_size % ROWS_AT_ONCE or why_left(operands.layer, WIDTHS):
        return None
    return launch


def launch(operands: triton_paged.Operands, batch: AttentionBatch, rows: SequenceRows) -> None:
    """See :class:`~piecegraph.llm.kernels.attention.triton_paged.AttendPrompts`."""
    from piecegraph.llm.kernels import gluon_boxes as boxes
    from piecegraph.llm.kernels.attention import gluon_prefill as gluon

    layer, device = operands.layer, operands.q.device
    num_seqs, width, group = rows.lens.shape[0], layer.key_width, layer.num_heads // layer.num_kv_heads
    heads, box = tile_heads(group), math.gcd(batch.block_size, gluon.BLOCK_N.value)
    queries = gluon.BLOCK_M.value // heads
    most_tiles = (-(-operands.q.shape[0] // queries) + num_seqs) * (layer.num_heads // heads)
    key_cache, value_cache = operands.key_cache, operands.value_cache
    gluon.prefill_kernel[(min(most_tiles, chip(device).num_processors),)](
        boxes.described(operands.q, [boxes.SIDE.value // heads, heads, boxes.COLUMNS.value]),
        boxes.described(_token_rows(key_cache), [box, boxes.COLUMNS.value]),
        boxes.described(_token_rows(value_cache), [box, boxes.COLUMNS.value]),
        operands.out,
        rows.starts,
        rows.lens,
        rows.table,
        _counters(device),
        num_seqs,
        layer.num_heads,
        group,
        CACHED_BYTES // (2 * width * key_cache.element_size()),
        layer.scale * math.log2(math.e),
        key_cache.stride(2),
        value_cache.stride(2),
        key_cache.stride(0) // key_cache.stride(1),
        value_cache.stride(0) // value_cache.stride(1),
        rows.table.stride(0),
        *operands.out.stride()[:2],
        WIDTH=width,
        TILE_HEADS=heads,
        BLOCK_SIZE=batch.block_size,
        BOX=box,
        num_warps=4,
    )


def tile_heads(group: int) -> int:
    """How many heads of a group are in one tile: the largest power of two of which there are several, or one.

    >>> [tile_heads(group) for group in (1, 4, 7, 12, 71, 128)]
    [1, 4, 1, 4, 1, 64]
    """
    return min(group & -group, 64)


def _token_rows(cache: torch.Tensor) -> torch.Tensor:
    """A cache as rows of one token each, which all heads share; rows between blocks, if there are some, are in it."""
    num_blocks, block_size, num_heads, width = cache.shape
    block, token, head, _ = cache.stride()
    assert block % token == 0, "blocks must lie whole rows apart"
    return cache.as_strided(
        ((num_blocks - 1) * (block // token) + block_size, (num_heads - 1) * head + width), (token, 1)
    )


def prepare(layers: Sequence[AttentionLayer | LatentLayer], device: torch.device) -> None:
    """See :class:`~piecegraph.llm.kernels.attention.kernel.Prepare`."""
    triton_paged.prepare(layers, device)
    _counters(device)


def _counters(device: torch.device) -> torch.Tensor:
    return _make_counters(triton_paged.with_index(device))


@functools.cache
def _make_counters(device: torch.device) -> torch.Tensor:
    """Tiles that are taken, and programs that found none any more. Kept for good, as the workspaces of decoding are."""
    assert not torch.cuda.is_current_stream_capturing(), "prepare() was not called before the capture"
    with torch.inference_mode(False):
        return torch.zeros(2, dtype=torch.int32, device=device)


def _supports(layer: AttentionLayer | LatentLayer, dtype: torch.dtype, device: torch.device) -> Support:
    verdict = supports(layer, dtype, device)
    return verdict if isinstance(verdict, Rejected) or has_gluon() else Rejected("Triton 3.6 is needed")


def _use_for(layers: Sequence[AttentionLayer | LatentLayer]) -> Support:
    steps = f"in steps of {MIN_TOKENS} tokens or more, where blocks have a multiple of {ROWS_AT_ONCE}"
    return use_for(layers, WIDTHS, f"our kernel for Hopper GPUs {steps}")


attend, attend_turned = triton_paged.attending(for_prompts)

KERNEL = AttentionKernel(
    name="gluon",
    supports=_supports,
    use_for=_use_for,
    capture_safe=triton_paged.KERNEL.capture_safe,
    attend=attend,
    attend_turned=attend_turned,
    attend_latent=triton_paged.attend_latent,
    prepare=prepare,
    block_size=triton_paged.BLOCK_SIZE,
)
