# mypy: ignore-errors
# (what Triton compiles is not Python: the types of arguments are those of the device. Nor does it know structures:
# every pointer, stride and constant is an argument of its own, which makes functions longer than elsewhere.)
"""The Triton kernel for batches with any number of queries in each sequence, and the one that writes their keys and
values to the cache before it: see ``triton_steps.py`` for its tiles and ``triton_paged.py`` for its grid.
"""

from __future__ import annotations

import triton
import triton.language as tl

from piecegraph.llm.kernels.attention.triton_steps import (
    LOG2E,
    add_score,
    attend_keys,
    columns_inside,
    find_sequence,
    first_visible,
    load_tile,
)
from piecegraph.llm.kernels.skinny_kernels import await_writes, load_turned


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def prefill_kernel(
    q,
    q_rest,
    out,
    sinks,
    key_cache,
    rest_cache,
    value_cache,
    query_starts,
    seq_lens,
    block_table,
    num_tokens,
    num_seqs,
    inner_scale,
    outer_scale,
    q_token_stride,
    q_head_stride,
    q_rest_token_stride,
    q_rest_head_stride,
    out_token_stride,
    out_head_stride,
    key_block_stride,
    key_token_stride,
    key_head_stride,
    value_block_stride,
    value_token_stride,
    value_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    REST: tl.constexpr,
    REST_PADDED: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    VALUES_ARE_KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FIXED: tl.constexpr,
    EARLY: tl.constexpr,
    CHAINED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Any number of queries in each sequence. Grid: (kv heads * tiles of a group, blocks of queries).

    FIXED: which keys take which loop would depend on the other queries of a tile, so all take the one that masks.
    """
    TWO_LOOPS: tl.constexpr = WINDOW == 0 and CHUNK == 0 and not FIXED
    TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    BLOCK_Q: tl.constexpr = BLOCK_M // TILE_HEADS
    kv_head = tl.program_id(0) // TILES
    # The last queries see the most keys: they start first, so that none is left over at the end.
    block = tl.num_programs(1) - 1 - tl.program_id(1)

    rows = tl.arange(0, BLOCK_M)
    head_in_group = (tl.program_id(0) % TILES) * TILE_HEADS + rows % TILE_HEADS
    head = (kv_head * GROUP + head_in_group).to(tl.int64)
    used = (rows < BLOCK_Q * TILE_HEADS) & (head_in_group < GROUP)
    columns = tl.arange(0, VALUE_PADDED)

    # Where its queries are is looked for before it waits: that came with the batch. See Note [Early launches].
    num_real = tl.load(query_starts + num_seqs)
    seq = find_sequence(query_starts, num_seqs, block, BLOCK_Q)
    query_start = tl.load(query_starts + seq)
    num_queries = tl.load(query_starts + seq + 1) - query_start
    past = tl.load(seq_lens + seq) - num_queries
    first_query = (block - (query_start // BLOCK_Q + seq)) * BLOCK_Q
    await_writes(EARLY, CHAINED)
    if (block + 1) * BLOCK_Q > num_real:  # padding begins in or before this block of rows
        token = (block * BLOCK_Q + rows // TILE_HEADS).to(tl.int64)
        padded = used & (token >= num_real) & (token < num_tokens)
        pointers = out + (token * out_token_stride + head * out_head_stride)[:, None] + columns[None, :]
        zeros = tl.zeros([BLOCK_M, VALUE_PADDED], dtype=out.dtype.element_ty)
        tl.store(pointers, zeros, mask=columns_inside(columns, VALUE, VALUE_PADDED, padded))

    if (first_query < 0) | (first_query >= num_queries):  # before the first sequence, or behind this one
        return

    query = first_query + rows // TILE_HEADS
    used = used & (query < num_queries)
    token = (query_start + query).to(tl.int64)
    q_rows = token * q_token_stride + head * q_head_stride
    q_tile = load_tile(q, q_rows, used, KEY, KEY_PADDED, True)
    q_rest_tile = q_tile
    if REST > 0:
        rest_rows = token * q_rest_token_stride + head * q_rest_head_stride
        q_rest_tile = load_tile(q_rest, rest_rows, used, REST, REST_PADDED, True)

    positions = past + query
    first_position = past + first_query
    key_end = past + tl.minimum(first_query + BLOCK_Q, num_queries)
    low = first_visible(first_position, WINDOW, CHUNK)
    begin = low // BLOCK_N * BLOCK_N
    # Up to here every row sees every key, if all see back to the beginning.
    full_end = begin
    if TWO_LOOPS:
        full_end = (first_position + 1) // BLOCK_N * BLOCK_N

    acc = tl.zeros([BLOCK_M, VALUE_PADDED], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    table_row = block_table + seq.to(tl.int64) * table_stride
    kv_head = kv_head.to(tl.int64)
    key_cache += kv_head * key_head_stride
    rest_cache += kv_head * key_head_stride
    value_cache += kv_head * value_head_stride
    if TWO_LOOPS:
        acc, total, top = attend_keys(
            acc, total, top, q_tile, q_rest_tile, positions, begin, full_end, low, key_end,
            table_row, key_cache, rest_cache, value_cache,
            key_block_stride, key_token_stride, value_block_stride, value_token_stride, inner_scale, outer_scale,
            KEY, KEY_PADDED, REST, REST_PADDED, VALUE, VALUE_PADDED, VALUES_ARE_KEYS,
            SOFTCAP, WINDOW, CHUNK, BLOCK_SIZE, BLOCK_N, MASK="none",
        )  # fmt: skip
    acc, total, top = attend_keys(
        acc, total, top, q_tile, q_rest_tile, positions, full_end, key_end, low, key_end,
        table_row, key_cache, rest_cache, value_cache,
        key_block_stride, key_token_stride, value_block_stride, value_token_stride, inner_scale, outer_scale,
        KEY, KEY_PADDED, REST, REST_PADDED, VALUE, VALUE_PADDED, VALUES_ARE_KEYS,
        SOFTCAP, WINDOW, CHUNK, BLOCK_SIZE, BLOCK_N, MASK="query",
    )  # fmt: skip

    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * LOG2E
        acc, total, top, _ = add_score(acc, total, top, sink)
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    pointers = out + (token * out_token_stride + head * out_head_stride)[:, None] + columns[None, :]
    tl.store(pointers, result.to(out.dtype.element_ty), mask=columns_inside(columns, VALUE, VALUE_PADDED, used))


@triton.jit
def write_kernel(
    k,
    v,
    q,
    cos,
    sin,
    q_gain,
    k_gain,
    key_cache,
    value_cache,
    q_out,
    out,
    slots,
    prompt_starts,
    num_seqs,
    eps,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    q_token_stride,
    q_head_stride,
    key_block_stride,
    key_token_stride,
    key_head_stride,
    value_block_stride,
    value_token_stride,
    value_head_stride,
    q_out_token_stride,
    q_out_head_stride,
    out_token_stride,
    out_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    KV_TILES: tl.constexpr,
    KEY: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CLEARS: tl.constexpr,
    TURNS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EARLY: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Write keys and values to their places in the cache. Grid: (tokens, tiles of heads).

    CLEARS: for a kernel that does neither, write zeros to the rows of ``out`` that are padding, and to the values
    behind each prompt in its last block.
    TURNS: keys are normed and turned before, and behind their tiles are those of queries, which go to ``q_out``. Tokens
    before the prompts are left to the kernel for decoding.
    """
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    is_decoded = False
    if TURNS:
        is_decoded = token < tl.load(prompt_starts)  # it came with the batch
    slot = tl.load(slots + token)
    await_writes(EARLY, CHAINED)
    if TURNS:
        if is_decoded:
            return
        cos += token * KEY
        sin += token * KEY
        if tile >= KV_TILES:
            heads = ((tile - KV_TILES) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
            used = heads < NUM_QUERIES
            rows = token * q_token_stride + heads * q_head_stride
            turned = load_turned(q, rows, used, q_gain, cos, sin, eps, KEY, HAS_NORM)
            rows = token * q_out_token_stride + heads * q_out_head_stride
            tl.store(q_out + rows[:, None] + tl.arange(0, KEY)[None, :], turned, mask=used[:, None])
            return
    heads = (tile * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    used = heads < NUM_HEADS
    key_rows = token * k_token_stride + heads * k_head_stride
    if TURNS:
        key_tile = load_turned(k, key_rows, used, k_gain, cos, sin, eps, KEY, HAS_NORM)
    else:
        key_tile = load_tile(k, key_rows, used, KEY, KEY_PADDED, True)
    value_tile = load_tile(v, token * v_token_stride + heads * v_head_stride, used, VALUE, VALUE_PADDED, True)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE

    columns = tl.arange(0, KEY_PADDED)
    rows = block * key_block_stride + offset * key_token_stride + heads * key_head_stride
    mask = columns_inside(columns, KEY, KEY_PADDED, used)
    tl.store(key_cache + rows[:, None] + columns[None, :], key_tile, mask=mask)
    columns = tl.arange(0, VALUE_PADDED)
    rows = block * value_block_stride + offset * value_token_stride + heads * value_head_stride
    mask = columns_inside(columns, VALUE, VALUE_PADDED, used)
    tl.store(value_cache + rows[:, None] + columns[None, :], value_tile, mask=mask)

    if CLEARS:
        zeros = tl.zeros([HEADS, VALUE_PADDED], dtype=out.dtype.element_ty)
        if token >= tl.load(prompt_starts + num_seqs):
            for i in range(GROUP):
                rows = token * out_token_stride + (heads * GROUP + i) * out_head_stride
                tl.store(out + rows[:, None] + columns[None, :], zeros, mask=mask)
        elif token >= tl.load(prompt_starts):
            following = tl.load(slots + token + 1, mask=token + 1 < tl.num_programs(0), other=-1)
            if following != slot + 1:  # the last of its sequence
                for place in range(offset + 1, BLOCK_SIZE):
                    rows = block * value_block_stride + place * value_token_stride + heads * value_head_stride
                    tl.store(value_cache + rows[:, None] + columns[None, :], zeros, mask=mask)
