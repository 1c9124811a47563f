# mypy: ignore-errors
# (what Triton compiles is not Python: the types of arguments are those of the device. Nor does it know structures:
# every pointer, stride and constant is an argument of its own, which makes functions longer than elsewhere.)
"""The Triton kernel for batches with one query in each sequence: see ``triton_steps.py`` for its tiles and
``triton_paged.py`` for its grid.
"""

from __future__ import annotations

import triton
import triton.language as tl

from piecegraph.llm.kernels.attention.triton_steps import (
    LOG2E,
    add_score,
    attend_keys,
    cap,
    columns_inside,
    first_visible,
    load_tile,
)
from piecegraph.llm.kernels.skinny_kernels import await_writes, load_turned


@triton.jit
def _combine_splits(
    partial,
    partial_top,
    partial_total,
    part,
    num_active,
    sinks,
    head,
    used,
    out_row,
    out_head_stride,
    VALUE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    COMBINE_COLUMNS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Put the results of all splits of one tile together. Loads past L1: other multiprocessors wrote what is read."""
    splits = tl.arange(0, SPLITS)
    rows = tl.arange(0, HEADS)
    present = (splits[:, None] < num_active) & used[None, :]
    places = (part + splits[:, None]) * BLOCK_M + rows[None, :]
    tops = tl.load(partial_top + places, mask=present, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(partial_total + places, mask=present, other=0.0, cache_modifier=".cg")
    top = tl.max(tops, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    top = tl.where(used, top, 0.0)
    weights = tl.exp2(tops - top[None, :])
    total = tl.sum(totals * weights, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    weights = weights / tl.where(total > 0, total, 1.0)[None, :]
    for start in tl.static_range(0, VALUE_PADDED, COMBINE_COLUMNS):
        columns = start + tl.arange(0, COMBINE_COLUMNS)
        wanted = columns < VALUE
        tile = tl.load(
            partial + places[:, :, None] * VALUE_PADDED + columns[None, None, :],
            mask=present[:, :, None] & wanted[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        result = tl.sum(tile * weights[:, :, None], 0)
        pointers = out_row + (head * out_head_stride)[:, None] + columns[None, :]
        tl.store(pointers, result.to(out_row.dtype.element_ty), mask=used[:, None] & wanted[None, :])


@triton.jit
def _store_new_token(
    key, rest, value, key_cache, rest_cache, value_cache, writes,
    KEY: tl.constexpr, KEY_PADDED: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
    VALUE: tl.constexpr, VALUE_PADDED: tl.constexpr, VALUES_ARE_KEYS: tl.constexpr,
):  # fmt: skip
    """Write the key and value of one token and one kv head to their place in the cache."""
    columns = tl.arange(0, KEY_PADDED)
    tl.store(key_cache + columns, key, mask=writes & (columns < KEY))
    if REST > 0:
        columns = tl.arange(0, REST_PADDED)
        tl.store(rest_cache + columns, rest, mask=writes & (columns < REST))
    if not VALUES_ARE_KEYS:
        columns = tl.arange(0, VALUE_PADDED)
        tl.store(value_cache + columns, value, mask=writes & (columns < VALUE))


@triton.jit
def _prefetch(
    cache, begin, end, table_row, block_stride, token_stride,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Have the first keys (or values) of a range on their way: there is time until the query is known."""
    LINE: tl.constexpr = 128 * 8 // cache.dtype.element_ty.primitive_bitwidth
    keys = begin + tl.arange(0, BLOCK_N)
    block = tl.load(table_row + keys // BLOCK_SIZE, mask=keys < end, other=0).to(tl.int64)
    rows = cache + block * block_stride + (keys % BLOCK_SIZE).to(tl.int64) * token_stride
    for start in tl.static_range(0, WIDTH, LINE):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [rows + start], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _share_of(
    place_and_split, prompt_starts, max_parts,
    HEAD_TILES: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Of the programs of a mixed batch: which sequence and tile of heads one is for, which of how many splits of its
    keys, and whether there is such a sequence. How many come first with one query is read here.
    """
    num_seqs = tl.load(prompt_starts)
    num_splits = tl.maximum(tl.minimum(max_parts // tl.maximum(num_seqs * HEAD_TILES, 1), MAX_SPLITS), 1)
    place = place_and_split // num_splits
    seq = place // HEAD_TILES
    return seq, place, place_and_split % num_splits, num_splits, seq < num_seqs


@triton.jit
def _range_of(
    last, low, split, num_splits, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The keys of one split, and in how many splits there are some. ``last`` is the new token, which is apart."""
    first_block = low // BLOCK_N
    num_blocks = tl.where(low < last, (last + BLOCK_N - 1) // BLOCK_N - first_block, 0)
    per_split = tl.maximum((num_blocks + num_splits - 1) // num_splits, 1)
    num_active = tl.maximum((num_blocks + per_split - 1) // per_split, 1)
    begin = (first_block + split * per_split) * BLOCK_N
    end = tl.minimum(begin + tl.minimum(per_split, num_blocks) * BLOCK_N, last)
    return begin, end, num_active


@triton.jit
def _load_queries(
    q, q_rows, q_rest, rest_rows, used, q_gain, cos, sin, eps,
    KEY: tl.constexpr, KEY_PADDED: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
    TURNS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """One query for each head of a tile, in one or two parts, turned if that is asked for."""
    if TURNS:
        q_tile = load_turned(q, q_rows, used, q_gain, cos, sin, eps, KEY, HAS_NORM)
    else:
        q_tile = load_tile(q, q_rows, used, KEY, KEY_PADDED, True)
    q_rest_tile = q_tile
    if REST > 0:
        q_rest_tile = load_tile(q_rest, rest_rows, used, REST, REST_PADDED, True)
    return q_tile, q_rest_tile


@triton.jit
def _load_new_token(
    k, k_row, k_rest, k_rest_row, v, v_row, is_wanted, k_gain, cos, sin, eps,
    KEY: tl.constexpr, KEY_PADDED: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
    VALUE: tl.constexpr, VALUE_PADDED: tl.constexpr, VALUES_ARE_KEYS: tl.constexpr,
    TURNS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """The key and value of the token that is not in the cache yet; zeros if they are not wanted."""
    if TURNS:
        one = tl.arange(0, 1)
        turned = load_turned(k + k_row, one, is_wanted & (one == 0), k_gain, cos, sin, eps, KEY, HAS_NORM)
        new_key = tl.reshape(turned, [KEY])
    else:
        columns = tl.arange(0, KEY_PADDED)
        new_key = tl.load(k + k_row + columns, mask=is_wanted & (columns < KEY), other=0.0)
    new_rest = new_key
    if REST > 0:
        columns = tl.arange(0, REST_PADDED)
        new_rest = tl.load(k_rest + k_rest_row + columns, mask=is_wanted & (columns < REST), other=0.0)
    new_value = new_key
    if not VALUES_ARE_KEYS:
        columns = tl.arange(0, VALUE_PADDED)
        new_value = tl.load(v + v_row + columns, mask=is_wanted & (columns < VALUE), other=0.0)
    return new_key, new_rest, new_value


@triton.jit
def _score_of(
    q_tile, q_rest_tile, new_key, new_rest, inner_scale, outer_scale,
    REST: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Of the new token, for each query."""
    products = tl.sum(q_tile.to(tl.float32) * new_key.to(tl.float32)[None, :], 1)
    if REST > 0:
        products += tl.sum(q_rest_tile.to(tl.float32) * new_rest.to(tl.float32)[None, :], 1)
    return cap(products, inner_scale, outer_scale) if SOFTCAP else products * inner_scale


@triton.jit
def decode_kernel(
    q, q_rest, k, k_rest, v, cos, sin, q_gain, k_gain, out, sinks, key_cache, rest_cache, value_cache,
    prompt_starts, seq_lens, block_table, slots, partial, partial_top, partial_total, arrived, max_parts,
    eps, inner_scale, outer_scale,
    q_token_stride, q_head_stride, q_rest_token_stride, q_rest_head_stride, k_token_stride, k_head_stride,
    k_rest_token_stride, k_rest_head_stride, v_token_stride, v_head_stride, turn_stride,
    out_token_stride, out_head_stride, key_block_stride, key_token_stride, key_head_stride,
    value_block_stride, value_token_stride, value_head_stride, table_stride,
    GROUP: tl.constexpr, TILE_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, KEY_PADDED: tl.constexpr,
    REST: tl.constexpr, REST_PADDED: tl.constexpr, VALUE: tl.constexpr, VALUE_PADDED: tl.constexpr,
    VALUES_ARE_KEYS: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr, TURNS: tl.constexpr, HAS_NORM: tl.constexpr, SPLITS: tl.constexpr,
    MAX_SPLITS: tl.constexpr, HEAD_TILES: tl.constexpr, MIXED: tl.constexpr, EARLY: tl.constexpr,
    CHAINED: tl.constexpr, COMBINE_COLUMNS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One query in each sequence. Grid: (sequences, kv heads * tiles of a group, splits of the keys).

    MIXED: only the sequences that come first have one query. Grid: as many programs as there could be sequences, or
    partial results (``max_parts``); the sequences share them.

    The new token is not read from the cache: split 0 adds it to its softmax, and the one of the group's first tile
    writes it to the cache. So one launch does all, and nothing is read that another program of it has written, but for
    the partial results: see Note [The last split combines] in ``triton_paged.py``.
    """
    TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    if MIXED:
        seq, place, split, num_splits, is_there = _share_of(
            tl.program_id(0), prompt_starts, max_parts, HEAD_TILES, MAX_SPLITS
        )
        if not is_there:
            return
    else:
        num_splits = tl.num_programs(2)
        split = tl.program_id(2)
        seq = tl.program_id(0)
        place = seq * HEAD_TILES + tl.program_id(1)
    tile = place % HEAD_TILES % TILES
    kv_head = (place % HEAD_TILES // TILES).to(tl.int64)
    length = tl.load(seq_lens + seq)

    rows = tl.arange(0, BLOCK_M)
    head_in_group = tile * TILE_HEADS + rows
    used = (rows < TILE_HEADS) & (head_in_group < GROUP)
    head = kv_head * GROUP + head_in_group
    token = seq.to(tl.int64)
    out_row = out + token * out_token_stride
    columns = tl.arange(0, VALUE_PADDED)
    out_pointers = out_row + (head * out_head_stride)[:, None] + columns[None, :]
    out_mask = columns_inside(columns, VALUE, VALUE_PADDED, used)
    if length == 0:
        if EARLY:
            tl.extra.cuda.gdc_wait()
        zeros = tl.zeros([BLOCK_M, VALUE_PADDED], dtype=out.dtype.element_ty)
        tl.store(out_pointers, zeros, mask=out_mask & (split == 0))
        return

    low = first_visible(length - 1, WINDOW, CHUNK)
    begin, end, num_active = _range_of(length - 1, low, split, num_splits, BLOCK_N)
    if split >= num_active:
        return
    key_cache += kv_head * key_head_stride
    rest_cache += kv_head * key_head_stride
    value_cache += kv_head * value_head_stride
    table_row = block_table + token * table_stride
    slot = tl.load(slots + seq)
    if EARLY:  # see Note [Early launches]: keys and values in the cache are older than the kernel before
        _prefetch(key_cache, begin, end, table_row, key_block_stride, key_token_stride, KEY, BLOCK_SIZE, BLOCK_N)
        if not VALUES_ARE_KEYS:
            _prefetch(
                value_cache, begin, end, table_row, value_block_stride, value_token_stride, VALUE, BLOCK_SIZE, BLOCK_N
            )
    await_writes(EARLY, CHAINED)

    if TURNS:
        cos += token * turn_stride
        sin += token * turn_stride
    q_tile, q_rest_tile = _load_queries(
        q, token * q_token_stride + head * q_head_stride,
        q_rest, token * q_rest_token_stride + head * q_rest_head_stride,
        used, q_gain, cos, sin, eps, KEY, KEY_PADDED, REST, REST_PADDED, TURNS, HAS_NORM,
    )  # fmt: skip
    # The new token is loaded before the loop and used after it, so that the loop need not wait for it.
    is_first = split == 0
    new_key, new_rest, new_value = _load_new_token(
        k, token * k_token_stride + kv_head * k_head_stride,
        k_rest, token * k_rest_token_stride + kv_head * k_rest_head_stride,
        v, token * v_token_stride + kv_head * v_head_stride,
        is_first, k_gain, cos, sin, eps,
        KEY, KEY_PADDED, REST, REST_PADDED, VALUE, VALUE_PADDED, VALUES_ARE_KEYS, TURNS, HAS_NORM,
    )  # fmt: skip

    acc = tl.zeros([BLOCK_M, VALUE_PADDED], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    acc, total, top = attend_keys(
        acc, total, top, q_tile, q_rest_tile, rows, begin, end, low, end,
        table_row, key_cache, rest_cache, value_cache,
        key_block_stride, key_token_stride, value_block_stride, value_token_stride, inner_scale, outer_scale,
        KEY, KEY_PADDED, REST, REST_PADDED, VALUE, VALUE_PADDED, VALUES_ARE_KEYS,
        SOFTCAP, WINDOW, CHUNK, BLOCK_SIZE, BLOCK_N, MASK="range",
    )  # fmt: skip

    score = _score_of(q_tile, q_rest_tile, new_key, new_rest, inner_scale, outer_scale, REST, SOFTCAP)
    score = tl.where(is_first, score, float("-inf"))
    acc, total, top, weight = add_score(acc, total, top, score)
    acc += weight[:, None] * new_value.to(tl.float32)[None, :]
    key_place = (slot // BLOCK_SIZE) * key_block_stride + (slot % BLOCK_SIZE) * key_token_stride
    value_place = (slot // BLOCK_SIZE) * value_block_stride + (slot % BLOCK_SIZE) * value_token_stride
    _store_new_token(
        new_key, new_rest, new_value,
        key_cache + key_place, rest_cache + key_place, value_cache + value_place, is_first & (tile == 0),
        KEY, KEY_PADDED, REST, REST_PADDED, VALUE, VALUE_PADDED, VALUES_ARE_KEYS,
    )  # fmt: skip

    if num_active == 1:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * LOG2E
            acc, total, top, _ = add_score(acc, total, top, sink)
        tl.store(out_pointers, (acc / total[:, None]).to(out.dtype.element_ty), mask=out_mask)
    else:
        if SPLITS > 1:
            part = place.to(tl.int64) * num_splits
            row_places = (part + split) * BLOCK_M + rows
            tl.store(partial_top + row_places, top, mask=used)
            tl.store(partial_total + row_places, total, mask=used)
            tl.store(partial + row_places[:, None] * VALUE_PADDED + columns[None, :], acc, mask=out_mask)
            tl.debug_barrier()  # the atomic is one thread's: what the others stored must come before it
            num_before = tl.atomic_add(arrived + place, 1, sem="acq_rel", scope="gpu")
            if num_before == num_active - 1:
                tl.store(arrived + place, 0)
                tile_rows = tl.arange(0, HEADS)
                tile_head_in_group = tile * TILE_HEADS + tile_rows
                _combine_splits(
                    partial, partial_top, partial_total, part, num_active, sinks,
                    kv_head * GROUP + tile_head_in_group,
                    (tile_rows < TILE_HEADS) & (tile_head_in_group < GROUP),
                    out_row, out_head_stride,
                    VALUE, VALUE_PADDED, HEADS, SPLITS, COMBINE_COLUMNS, HAS_SINKS, BLOCK_M,
                )  # fmt: skip
