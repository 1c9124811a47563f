"""Attention over the paged cache in Triton: the host's side, which computes nothing from the data of a batch.

Note [Grid fixed by the bucket]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Grids and tiles follow from shapes and from the bounds in :class:`AttentionBatch`, all fixed by the bucket. Which
program does what is found on the device, from ``query_starts`` and ``seq_lens``. A captured launch therefore serves
every batch of its bucket. Programs for which a batch has no work end at once.

Note [Two kinds of rows]
~~~~~~~~~~~~~~~~~~~~~~~~
Under load nearly every step has some prompts and many sequences with one token each, for which the kernel for prompts
takes twice as long as the one for decoding. So both are launched, one beside the other: the first reads little, the
second computes little. The sequences with one token come first; how many they are is read on the device. Either kernel
writes rows of ``out`` that the other does not. Where there are few sequences, all of them are taken for prompts, so
that a prompt alone pays for no other launch; unless one that decodes has a long context, which the kernel for prompts
goes through for longer than a step should take. Such a step runs in a size for many sequences.

Note [The last split combines]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The programs that share a sequence's keys leave partial results in a workspace and count themselves in; the last to
arrive combines them and puts the count back to zero, so the next launch or replay finds it as this one did. That saves
a launch in every layer. Launches that share a workspace must run one after another, as the layers of a model do. The
workspace is kept for good: captured graphs know its address.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from piecegraph.llm.kernels.attention.kernel import Attend, AttendTurned, AttentionKernel
from piecegraph.llm.kernels.attention.latent import absorb_query, project_values, shared_key_layer
from piecegraph.llm.kernels.attention.triton_tiles import (
    MIN_TILE,
    MOST_PROGRAMS,
    Shape,
    Tiles,
    combine_shape,
    decode_tiles,
    key_parts,
    mixed_decode_tiles,
    padded,
    power_of_two,
    prefill_tiles,
)
from piecegraph.llm.kernels.chip import chip
from piecegraph.llm.kernels.early_launch import chained_constants
from piecegraph.llm.kernels.skinny import MOST_ROWS, Heads, fits_heads, rotate
from piecegraph.llm.specs import (
    Accepted,
    AttentionBatch,
    AttentionLayer,
    LatentLayer,
    Rejected,
    SequenceRows,
    StepKind,
    Support,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_WIDTH = 256
MAX_LATENT = 512
BLOCK_SIZE = 64
"""As many keys as a step of decoding takes at most: one entry of the block table is looked up for all of them. With 16,
a layer of Llama-3.1-8B with 250 sequences took 120 us on an H200, with 64 and 128 103.
"""
WRITTEN_AT_ONCE = 2048  # numbers that one program copies to the cache


@dataclass(frozen=True, slots=True)
class Operands:
    """What the kernels read and write; keys in two parts, see Note [Two parts of a key] in ``triton_steps.py``."""

    q: torch.Tensor
    q_rest: torch.Tensor
    k: torch.Tensor
    k_rest: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    sinks: torch.Tensor | None
    key_cache: torch.Tensor
    rest_cache: torch.Tensor
    value_cache: torch.Tensor
    layer: AttentionLayer
    values_are_keys: bool
    heads: Heads | None = None
    """What is still to be done to queries and keys; None: they are as the cache holds them."""

    @property
    def shape(self) -> Shape:
        layer = self.layer
        group = layer.num_heads // layer.num_kv_heads
        return Shape(layer.num_kv_heads, group, layer.key_width, layer.value_width, self.q.dtype)


@dataclass(frozen=True, slots=True)
class _Workspace:
    partial: torch.Tensor
    tops: torch.Tensor
    totals: torch.Tensor
    arrived: torch.Tensor


class AttendPrompts(Protocol):
    """Attends with any number of queries in each of some sequences, the keys being in the cache."""

    def __call__(self, operands: Operands, batch: AttentionBatch, rows: SequenceRows) -> None: ...


class ForPrompts(Protocol):
    """Chooses what attends with the prompts of a step, keys written; None for :func:`launch_prefill`."""

    def __call__(self, operands: Operands, batch: AttentionBatch) -> AttendPrompts | None: ...


def attending(for_prompts: ForPrompts) -> tuple[Attend, AttendTurned]:
    """What a kernel is to do, with another one for some prompts."""

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
        operands = plain_operands(q, k, v, out, sinks, key_cache, value_cache, layer)
        attend_operands(operands, batch, for_prompts(operands, batch))

    def attend_turned(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: Heads,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        layer: AttentionLayer,
        batch: AttentionBatch,
    ) -> None:
        is_left = _leaves_heads(q, k, v, heads, layer, batch)
        q, k, v = _as_heads(q, k, v, layer) if is_left else rotate(q, k, v, heads)
        operands = plain_operands(q, k, v, out, sinks, key_cache, value_cache, layer, heads if is_left else None)
        attend_operands(operands, batch, for_prompts(operands, batch))

    return attend, attend_turned


def attend_operands(operands: Operands, batch: AttentionBatch, attend_prompts: AttendPrompts | None = None) -> None:
    """Each kind of rows by its kernel. If there are prompts, what is new comes into the cache before.

    Args:
        operands: what to attend with.
        batch: where the tokens belong.
        attend_prompts: another kernel for prompts, which is in need of what :func:`write` clears.
    """
    if batch.max_query_len == 1:
        launch_decode(operands, batch)
        return
    queries = write(operands, batch, clears=attend_prompts is not None)
    placed = replace(operands, q=queries)
    attend = attend_prompts or launch_prefill
    if batch.prompts is None:
        attend(placed, batch, batch.rows)
        return
    with _beside_decode(operands, batch):
        attend(placed, batch, batch.prompts)


@contextlib.contextmanager
def _beside_decode(operands: Operands, batch: AttentionBatch) -> Iterator[None]:
    """What is launched inside runs beside the rows of decoding. See Note [Two kinds of rows]."""
    if operands.q.device.type != "cuda":
        launch_decode(operands, batch)
        yield
        return
    here, beside = torch.cuda.current_stream(), _beside(operands.q.device)
    beside.wait_stream(here)
    with torch.cuda.stream(beside):
        launch_decode(operands, batch)
    yield
    here.wait_stream(beside)


@functools.cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def attend_fixed(
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
    """The same where a query gets the same bits whatever runs beside it, if all batches are of one bucket.

    Tiles then have one size, and a row of a tile is computed by itself, over the keys in steps that begin at multiples
    of their size: keys it does not see are added as zeros. All that is left is to have one loop for all of them.
    """
    operands = plain_operands(q, k, v, out, sinks, key_cache, value_cache, layer)
    write(operands, batch)
    launch_prefill(operands, batch, batch.rows, is_fixed=True)


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
    """See :class:`~piecegraph.llm.kernels.attention.kernel.AttendLatent`, and Note [Absorbed latent attention]."""
    latent_cache, rope_cache = cache.unsqueeze(2).split([layer.latent_width, layer.rope_width], -1)
    absorbed = absorb_query(q, up_projection, layer)
    summed = torch.empty_like(absorbed)
    operands = Operands(
        q=absorbed,
        q_rest=q[..., layer.nope_width :],
        k=latent.unsqueeze(1),
        k_rest=rope.unsqueeze(1),
        v=latent.unsqueeze(1),
        out=summed,
        sinks=None,
        key_cache=latent_cache,
        rest_cache=rope_cache,
        value_cache=latent_cache,
        layer=shared_key_layer(layer),
        values_are_keys=True,
    )
    attend_operands(operands, batch)
    project_values(summed, up_projection, out, layer)


def plain_operands(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    layer: AttentionLayer,
    heads: Heads | None = None,
) -> Operands:
    """The operands of a layer that is not latent."""
    first, _ = key_parts(layer.key_width)
    return Operands(
        q=q[..., :first],
        q_rest=q[..., first:],
        k=k[..., :first],
        k_rest=k[..., first:],
        v=v,
        out=out,
        sinks=sinks,
        key_cache=key_cache[..., :first],
        rest_cache=key_cache[..., first:],
        value_cache=value_cache,
        layer=layer,
        values_are_keys=False,
        heads=heads,
    )


def _leaves_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: Heads, layer: AttentionLayer, batch: AttentionBatch
) -> bool:
    """Whether heads that are still to be turned are left to the kernels.

    One sequence is faster with heads that are turned before it (a layer of Qwen3-0.6B on an H200: 19.1 against 20.0
    us): there is nothing else to do until they are.
    """
    is_alone = batch.max_query_len == 1 and batch.seq_lens.shape[0] == 1
    return not is_alone and padded(layer.key_width) == layer.key_width and fits_heads((q, k, v), heads)


def _as_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer) -> Iterator[torch.Tensor]:
    """Rows, [1, tokens, heads * width], as attention takes them."""
    return (part.view(part.shape[1], -1, layer.key_width) for part in (q, k, v))


def write(operands: Operands, batch: AttentionBatch, *, clears: bool = False) -> torch.Tensor:
    """Put every token's key and value where it belongs, and return the queries, all of it as attention takes them.

    If heads are still to be turned, they are here, but for those of rows of decoding, whose kernel does it all.

    Args:
        operands: what to write. Latents have two parts of a key, and no values.
        batch: where the tokens belong.
        clears: whether padded rows of the results become zeros, and with them the values behind each prompt.
    """
    rows, heads, q = batch.prompts or batch.rows, operands.heads, operands.q
    k, key_cache = operands.k, operands.key_cache
    v, value_cache = operands.v, operands.value_cache
    if operands.values_are_keys:
        v, value_cache = operands.k_rest, operands.rest_cache
    elif operands.k_rest.shape[-1]:
        k, key_cache = whole_key(k, operands.k_rest), whole_key(key_cache, operands.rest_cache)
    num_tokens, num_heads, key = k.shape
    value, num_queries = v.shape[2], q.shape[1] if heads is not None else 0
    tile = min(power_of_two(num_heads), max(1, WRITTEN_AT_ONCE // padded(max(key, value))))
    kv_tiles = -(-num_heads // tile)
    queries = q if heads is None else torch.empty_like(q, memory_format=torch.contiguous_format)
    _prefill().write_kernel[(num_tokens, kv_tiles + -(-num_queries // tile))](
        k,
        v,
        q,
        *((None,) * 4 if heads is None else (heads.cos, heads.sin, heads.q_gain, heads.k_gain)),
        key_cache,
        value_cache,
        queries,
        operands.out,
        batch.slots,
        rows.starts,
        rows.lens.shape[0],
        0.0 if heads is None else heads.eps,
        *_row_strides(k, v, q),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *_row_strides(queries, operands.out),
        NUM_HEADS=num_heads,
        NUM_QUERIES=num_queries,
        GROUP=operands.shape.group,
        HEADS=tile,
        KV_TILES=kv_tiles,
        KEY=key,
        KEY_PADDED=padded(key),
        VALUE=value,
        VALUE_PADDED=padded(value),
        BLOCK_SIZE=batch.block_size,
        CLEARS=clears,
        TURNS=heads is not None,
        HAS_NORM=heads is not None and heads.q_gain is not None,
        **_chained(operands),
        num_warps=4,
    )
    return queries


def whole_key(first: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """What both parts of keys, or queries, are columns of; not for latents, whose parts lie apart."""
    return first.as_strided((*first.shape[:-1], first.shape[-1] + rest.shape[-1]), first.stride())


def _chained(operands: Operands) -> dict[str, Any]:
    """How kernels for prompts are launched: early if heads are left to them, in steps of few rows."""
    rows = operands.q.shape[0]
    return chained_constants(operands.q.device, rows, is_wanted=operands.heads is not None and rows <= MOST_ROWS)


def launch_prefill(
    operands: Operands,
    batch: AttentionBatch,
    rows: SequenceRows,
    tiles: Tiles | None = None,
    *,
    is_fixed: bool = False,
) -> None:
    """Attend with any number of queries in each sequence, new keys being in the cache."""
    num_tokens, num_seqs = operands.q.shape[0], rows.lens.shape[0]
    shape = operands.shape
    tiles = tiles or prefill_tiles(shape, num_tokens, batch.max_query_len, chip(operands.q.device).num_processors)
    blocks = -(-num_tokens // (tiles.block_m // tiles.tile_heads)) + num_seqs
    grid = (shape.num_kv_heads * -(-shape.group // tiles.tile_heads), blocks)
    _prefill().prefill_kernel[grid](
        operands.q,
        operands.q_rest,
        operands.out,
        operands.sinks,
        operands.key_cache,
        operands.rest_cache,
        operands.value_cache,
        rows.starts,
        rows.lens,
        rows.table,
        num_tokens,
        num_seqs,
        *_score_scales(operands.layer),
        *_row_strides(operands.q, operands.q_rest, operands.out),
        *operands.key_cache.stride()[:3],
        *operands.value_cache.stride()[:3],
        rows.table.stride(0),
        FIXED=is_fixed,
        **_chained(operands),
        **_constants(operands, batch, tiles),
    )


def launch_decode(operands: Operands, batch: AttentionBatch, tiles: Tiles | None = None) -> None:
    """Attend with one query in each sequence before the prompts, and write the new keys and values to the cache."""
    num_seqs, device, is_mixed = batch.seq_lens.shape[0], operands.q.device, batch.prompts is not None
    shape, heads = operands.shape, operands.heads
    if tiles is None and is_mixed:
        tiles = mixed_decode_tiles(shape)
    tiles = tiles or decode_tiles(shape, num_seqs, batch.max_seq_len, chip(device))
    workspace = _workspace(device, padded(shape.value_width))
    splits, columns = combine_shape(shape, tiles)
    head_tiles = shape.num_kv_heads * -(-shape.group // tiles.tile_heads)
    max_parts = 2 * chip(device).num_processors if is_mixed else workspace.arrived.shape[0]
    grid = (max(num_seqs * head_tiles, max_parts),) if is_mixed else (num_seqs, head_tiles, tiles.num_splits)
    assert is_mixed or tiles.num_splits == 1 or math.prod(grid) <= max_parts
    _decode().decode_kernel[grid](
        operands.q,
        operands.q_rest,
        operands.k,
        operands.k_rest,
        operands.v,
        *((None,) * 4 if heads is None else (heads.cos, heads.sin, heads.q_gain, heads.k_gain)),
        operands.out,
        operands.sinks,
        operands.key_cache,
        operands.rest_cache,
        operands.value_cache,
        batch.prompts.starts if batch.prompts is not None else None,
        batch.seq_lens,
        batch.block_table,
        batch.slots,
        workspace.partial,
        workspace.tops,
        workspace.totals,
        workspace.arrived,
        max_parts,
        0.0 if heads is None else heads.eps,
        *_score_scales(operands.layer),
        *_row_strides(operands.q, operands.q_rest, operands.k, operands.k_rest, operands.v),
        0 if heads is None else heads.cos.shape[-1],
        *_row_strides(operands.out),
        *operands.key_cache.stride()[:3],
        *operands.value_cache.stride()[:3],
        batch.block_table.stride(0),
        TURNS=heads is not None,
        HAS_NORM=heads is not None and heads.q_gain is not None,
        HEADS=power_of_two(tiles.tile_heads),
        SPLITS=splits,
        MAX_SPLITS=tiles.num_splits if is_mixed else 1,
        HEAD_TILES=head_tiles,
        MIXED=is_mixed,
        **chained_constants(device, num_seqs, is_wanted=not is_mixed and num_seqs <= MOST_ROWS),
        COMBINE_COLUMNS=columns,
        **_constants(operands, batch, tiles),
    )


def prepare(layers: Sequence[AttentionLayer | LatentLayer], device: torch.device) -> None:
    """Allocate the workspaces these layers need: it may not happen while a graph is captured."""
    for layer in layers:
        width = layer.latent_width if isinstance(layer, LatentLayer) else layer.value_width
        _workspace(device, padded(width))


def _workspace(device: torch.device, width: int) -> _Workspace:
    return _make_workspace(with_index(device), width)


def with_index(device: torch.device) -> torch.device:
    """The one GPU that is meant: what is kept for a device is kept for it."""
    if device.index is not None or device.type != "cuda":
        return device
    return torch.device("cuda", torch.cuda.current_device())


@functools.cache
def _make_workspace(device: torch.device, width: int) -> _Workspace:
    """Room for as many partial results as :func:`decode_tiles` ever makes."""
    if device.type == "cuda":
        assert not torch.cuda.is_current_stream_capturing(), "prepare() was not called before the capture"
    num_parts = MOST_PROGRAMS * chip(device).num_processors
    with torch.inference_mode(False):
        return _Workspace(
            partial=torch.empty(num_parts, MIN_TILE, width, device=device),
            tops=torch.empty(num_parts, MIN_TILE, device=device),
            totals=torch.empty(num_parts, MIN_TILE, device=device),
            arrived=torch.zeros(num_parts, dtype=torch.int32, device=device),
        )


def _constants(operands: Operands, batch: AttentionBatch, tiles: Tiles) -> dict[str, Any]:
    layer = operands.layer
    key, rest = operands.q.shape[-1], operands.q_rest.shape[-1]
    return {
        "GROUP": layer.num_heads // layer.num_kv_heads,
        "TILE_HEADS": tiles.tile_heads,
        "KEY": key,
        "KEY_PADDED": padded(key),
        "REST": rest,
        "REST_PADDED": padded(rest),
        "VALUE": layer.value_width,
        "VALUE_PADDED": padded(layer.value_width),
        "VALUES_ARE_KEYS": operands.values_are_keys,
        "SOFTCAP": layer.softcap > 0,
        "WINDOW": layer.window,
        "CHUNK": layer.chunk,
        "HAS_SINKS": operands.sinks is not None,
        "BLOCK_SIZE": batch.block_size,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _score_scales(layer: AttentionLayer) -> tuple[float, float]:
    """What products are multiplied by, before and after the cap, to become scores in base 2."""
    log2e = math.log2(math.e)
    return (layer.scale / layer.softcap, layer.softcap * log2e) if layer.softcap else (layer.scale * log2e, 1.0)


def _row_strides(*tensors: torch.Tensor) -> list[int]:
    """The first two strides of each; the elements of a row must lie side by side."""
    assert all(tensor.stride(-1) == 1 for tensor in tensors)
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]


@functools.cache
def _prefill() -> Any:
    """Triton is imported when it is needed: where there is no GPU, it may not be installed."""
    from piecegraph.llm.kernels.attention import triton_prefill

    return triton_prefill


@functools.cache
def _decode() -> Any:
    from piecegraph.llm.kernels.attention import triton_decode

    return triton_decode


def can_run(dtype: torch.dtype, device: torch.device) -> Support:
    """Whether our Triton kernels run here at all."""
    if importlib.util.find_spec("triton") is None:
        return Rejected("Triton is not installed")
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return Rejected("Triton needs a CUDA device, or TRITON_INTERPRET=1")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return Rejected("compute capability 8.0 is needed")
    if dtype not in DTYPES:
        return Rejected(f"{dtype} is none of float32, float16, bfloat16")
    return Accepted()


def _supports(layer: AttentionLayer | LatentLayer, dtype: torch.dtype, device: torch.device) -> Support:
    verdict = can_run(dtype, device)
    if isinstance(verdict, Rejected):
        return verdict
    if isinstance(layer, LatentLayer):
        fits = layer.latent_width <= MAX_LATENT and layer.rope_width <= MAX_WIDTH
        return Accepted() if fits else Rejected(f"a latent of more than {MAX_LATENT} does not fit on the chip")
    if max(layer.key_width, layer.value_width) > MAX_WIDTH:
        return Rejected(f"heads wider than {MAX_WIDTH} do not fit on the chip")
    return Accepted()


def _supports_fixed(layer: AttentionLayer | LatentLayer, dtype: torch.dtype, device: torch.device) -> Support:
    if isinstance(layer, LatentLayer):
        return Rejected("latents are carried to heads and back by products of another shape")
    return _supports(layer, dtype, device)


def _capture_safe(kind: StepKind) -> Support:
    return Accepted()


attend, attend_turned = attending(lambda operands, batch: None)

KERNEL = AttentionKernel(
    name="triton",
    supports=_supports,
    capture_safe=_capture_safe,
    attend=attend,
    attend_turned=attend_turned,
    attend_latent=attend_latent,
    prepare=prepare,
    block_size=BLOCK_SIZE,
)

FIXED_KERNEL = AttentionKernel(name="triton", supports=_supports_fixed, capture_safe=_capture_safe, attend=attend_fixed)
