# mypy: ignore-errors
# (what Triton compiles is not Python: types of arguments are those of the device)
"""The device code of attention over the paged cache. Everything about a batch is read from device memory, see
Note [Grid fixed by the bucket] in ``triton_paged.py``, which launches these.

Note [Rows of a tile]
~~~~~~~~~~~~~~~~~~~~~
The heads that share a key are rows of one tile, so that a key is loaded once for all of them: row ``m`` is head ``m %
TILE_HEADS`` of query ``m // TILE_HEADS``. A group of more heads than a tile has rows takes several tiles.

Note [Two parts of a key]
~~~~~~~~~~~~~~~~~~~~~~~~~
Tiles are powers of two wide. A key of 192 is read as 128 and 64 rather than as 256, one of 576 as 512 and 64; the
second part is called ``rest``. In the latent form the first part is also the value and is read once for both.

Note [What may be NaN]
~~~~~~~~~~~~~~~~~~~~~~
Memory that no sequence owns may hold anything, NaN included. Scores are masked by selection, so a NaN key does no harm;
a value is multiplied, and zero times NaN is NaN: values outside the sequence are replaced by zero as they are loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _columns_inside(columns, WIDTH: tl.constexpr, PADDED: tl.constexpr, rows_inside):
    """The mask of a tile whose rows are limited by ``rows_inside`` and whose columns by WIDTH."""
    mask = rows_inside[:, None]
    if WIDTH != PADDED:
        mask = mask & (columns[None, :] < WIDTH)
    return mask


@triton.jit
def _load_tile(base, rows, inside, WIDTH: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """[rows, PADDED] with zeros where there is nothing to read."""
    columns = tl.arange(0, PADDED)
    pointers = base + rows[:, None] + columns[None, :]
    if MASKED:
        tile = tl.load(pointers, mask=_columns_inside(columns, WIDTH, PADDED, inside), other=0.0)
    elif WIDTH != PADDED:
        tile = tl.load(pointers, mask=columns[None, :] < WIDTH, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _to_scores(products, inner_scale, outer_scale, SOFTCAP: tl.constexpr):
    """Products of queries and keys to scores in base 2: exp2 is what the hardware has."""
    scores = products * inner_scale
    if SOFTCAP:
        # tanh, by a form that is right at both ends: exp2 overflows to inf or underflows to zero.
        scores = outer_scale * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2E)) + 1.0))
    return scores


@triton.jit
def _visible(keys, positions, inside, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """[queries, keys]: what each query sees."""
    query, key = positions[:, None], keys[None, :]
    visible = inside[None, :] & (key <= query)
    if WINDOW > 0:
        visible = visible & (key > query - WINDOW)
    if CHUNK > 0:
        visible = visible & (key // CHUNK == query // CHUNK)
    return visible


@triton.jit
def _first_visible(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first key that the query at this position sees."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(first, position - WINDOW + 1)
    if CHUNK > 0:
        first = tl.maximum(first, position - position % CHUNK)
    return first


@triton.jit
def _attend_keys(
    acc,
    total,
    top,
    q,
    q_rest,
    positions,
    begin,
    end,
    low,
    high,
    table_row,
    key_cache,
    rest_cache,
    value_cache,
    key_block_stride,
    key_token_stride,
    value_block_stride,
    value_token_stride,
    inner_scale,
    outer_scale,
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
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASK: tl.constexpr,
):
    """Go over the keys from ``begin`` (a multiple of BLOCK_N) to ``end`` and add them to the running softmax.

    MASK: "none" if every row sees every key of the range; "range" if every row sees the keys from ``low`` to ``high``;
    "query" if each row sees its own. One loop for all three, so it is long: Triton pipelines what it sees in one loop.
    """
    for start in tl.range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        inside = (keys >= low) & (keys < high)
        if BLOCK_SIZE % BLOCK_N == 0:
            block = tl.load(table_row + start // BLOCK_SIZE).to(tl.int64)
        elif MASK == "none":
            block = tl.load(table_row + keys // BLOCK_SIZE).to(tl.int64)
        else:
            block = tl.load(table_row + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        offset = (keys % BLOCK_SIZE).to(tl.int64)
        key_rows = block * key_block_stride + offset * key_token_stride
        key = _load_tile(key_cache, key_rows, inside, KEY, KEY_PADDED, MASK != "none")
        if VALUES_ARE_KEYS:
            value = key
        else:
            value_rows = block * value_block_stride + offset * value_token_stride
            value = _load_tile(value_cache, value_rows, inside, VALUE, VALUE_PADDED, MASK != "none")
        products = tl.dot(q, tl.trans(key), input_precision="ieee")
        if REST > 0:
            rest = _load_tile(rest_cache, key_rows, inside, REST, REST_PADDED, MASK != "none")
            products = tl.dot(q_rest, tl.trans(rest), products, input_precision="ieee")
        scores = _to_scores(products, inner_scale, outer_scale, SOFTCAP)
        if MASK == "range":
            scores = tl.where(inside[None, :], scores, float("-inf"))
        if MASK == "query":
            scores = tl.where(_visible(keys, positions, inside, WINDOW, CHUNK), scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = new_top
        if MASK == "query":  # a row that has seen no key yet has no top
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
        top = new_top
    return acc, total, top


@triton.jit
def _add_score(acc, total, top, score):
    """One more score for each row of the running softmax; the weight it gets is returned too, for its value."""
    new_top = tl.maximum(top, score)
    fade = tl.exp2(top - new_top)
    weight = tl.exp2(score - new_top)
    return acc * fade[:, None], total * fade + weight, new_top, weight


@triton.jit
def _find_sequence(query_starts, num_seqs, block, BLOCK_Q: tl.constexpr):
    """The sequence of a block of queries: sequence i has the blocks from ``query_starts[i] // BLOCK_Q + i`` on.

    That leaves room for a partly filled last block of each; blocks in the gaps have no queries.
    """
    low = num_seqs * 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        fits = tl.load(query_starts + middle) // BLOCK_Q + middle <= block
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle - 1)
    return low


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
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Any number of queries in each sequence. Grid: (kv heads * tiles of a group, blocks of queries)."""
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

    num_real = tl.load(query_starts + num_seqs)
    if (block + 1) * BLOCK_Q > num_real:  # padding begins in or before this block of rows
        token = (block * BLOCK_Q + rows // TILE_HEADS).to(tl.int64)
        padded = used & (token >= num_real) & (token < num_tokens)
        pointers = out + (token * out_token_stride + head * out_head_stride)[:, None] + columns[None, :]
        zeros = tl.zeros([BLOCK_M, VALUE_PADDED], dtype=out.dtype.element_ty)
        tl.store(pointers, zeros, mask=_columns_inside(columns, VALUE, VALUE_PADDED, padded))

    seq = _find_sequence(query_starts, num_seqs, block, BLOCK_Q)
    query_start = tl.load(query_starts + seq)
    num_queries = tl.load(query_starts + seq + 1) - query_start
    first_query = (block - (query_start // BLOCK_Q + seq)) * BLOCK_Q
    if first_query >= num_queries:
        return

    query = first_query + rows // TILE_HEADS
    used = used & (query < num_queries)
    token = (query_start + query).to(tl.int64)
    q_rows = token * q_token_stride + head * q_head_stride
    q_tile = _load_tile(q, q_rows, used, KEY, KEY_PADDED, True)
    q_rest_tile = q_tile
    if REST > 0:
        rest_rows = token * q_rest_token_stride + head * q_rest_head_stride
        q_rest_tile = _load_tile(q_rest, rest_rows, used, REST, REST_PADDED, True)

    past = tl.load(seq_lens + seq) - num_queries
    positions = past + query
    first_position = past + first_query
    key_end = past + tl.minimum(first_query + BLOCK_Q, num_queries)
    low = _first_visible(first_position, WINDOW, CHUNK)
    begin = low // BLOCK_N * BLOCK_N
    # Up to here every row sees every key, if all see back to the beginning.
    full_end = begin
    if WINDOW == 0 and CHUNK == 0:
        full_end = (first_position + 1) // BLOCK_N * BLOCK_N

    acc = tl.zeros([BLOCK_M, VALUE_PADDED], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    table_row = block_table + seq.to(tl.int64) * table_stride
    kv_head = kv_head.to(tl.int64)
    key_cache += kv_head * key_head_stride
    rest_cache += kv_head * key_head_stride
    value_cache += kv_head * value_head_stride
    if WINDOW == 0 and CHUNK == 0:
        acc, total, top = _attend_keys(
            acc, total, top, q_tile, q_rest_tile, positions, begin, full_end, low, key_end,
            table_row, key_cache, rest_cache, value_cache,
            key_block_stride, key_token_stride, value_block_stride, value_token_stride, inner_scale, outer_scale,
            KEY, KEY_PADDED, REST, REST_PADDED, VALUE, VALUE_PADDED, VALUES_ARE_KEYS,
            SOFTCAP, WINDOW, CHUNK, BLOCK_SIZE, BLOCK_N, MASK="none",
        )  # fmt: skip
    acc, total, top = _attend_keys(
        acc, total, top, q_tile, q_rest_tile, positions, full_end, key_end, low, key_end,
        table_row, key_cache, rest_cache, value_cache,
        key_block_stride, key_token_stride, value_block_stride, value_token_stride, inner_scale, outer_scale,
        KEY, KEY_PADDED, REST, REST_PADDED, VALUE, VALUE_PADDED, VALUES_ARE_KEYS,
        SOFTCAP, WINDOW, CHUNK, BLOCK_SIZE, BLOCK_N, MASK="query",
    )  # fmt: skip

    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * LOG2E
        acc, total, top, _ = _add_score(acc, total, top, sink)
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    pointers = out + (token * out_token_stride + head * out_head_stride)[:, None] + columns[None, :]
    tl.store(pointers, result.to(out.dtype.element_ty), mask=_columns_inside(columns, VALUE, VALUE_PADDED, used))


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
def decode_kernel(
    q,
    q_rest,
    k,
    k_rest,
    v,
    out,
    sinks,
    key_cache,
    rest_cache,
    value_cache,
    seq_lens,
    block_table,
    slots,
    partial,
    partial_top,
    partial_total,
    arrived,
    inner_scale,
    outer_scale,
    q_token_stride,
    q_head_stride,
    q_rest_token_stride,
    q_rest_head_stride,
    k_token_stride,
    k_head_stride,
    k_rest_token_stride,
    k_rest_head_stride,
    v_token_stride,
    v_head_stride,
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
    HEADS: tl.constexpr,
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
    SPLITS: tl.constexpr,
    COMBINE_COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One query in each sequence. Grid: (sequences, kv heads * tiles of a group, splits of the keys).

    The new token is not read from the cache: split 0 adds it to its softmax, and the one of the group's first tile
    writes it to the cache. So one launch does all, and nothing is read that another program of it has written, but for
    the partial results: see Note [The last split combines] in ``triton_paged.py``.
    """
    TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    seq = tl.program_id(0)
    tile = tl.program_id(1) % TILES
    kv_head = (tl.program_id(1) // TILES).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(seq_lens + seq)

    rows = tl.arange(0, BLOCK_M)
    head_in_group = tile * TILE_HEADS + rows
    used = (rows < TILE_HEADS) & (head_in_group < GROUP)
    head = kv_head * GROUP + head_in_group
    token = seq.to(tl.int64)
    # Loaded before the length is looked at: one wait for both.
    q_tile = _load_tile(q, token * q_token_stride + head * q_head_stride, used, KEY, KEY_PADDED, True)
    q_rest_tile = q_tile
    if REST > 0:
        rest_rows = token * q_rest_token_stride + head * q_rest_head_stride
        q_rest_tile = _load_tile(q_rest, rest_rows, used, REST, REST_PADDED, True)

    out_row = out + token * out_token_stride
    columns = tl.arange(0, VALUE_PADDED)
    out_pointers = out_row + (head * out_head_stride)[:, None] + columns[None, :]
    out_mask = _columns_inside(columns, VALUE, VALUE_PADDED, used)
    if length == 0:
        zeros = tl.zeros([BLOCK_M, VALUE_PADDED], dtype=out.dtype.element_ty)
        tl.store(out_pointers, zeros, mask=out_mask & (split == 0))
        return

    last = length - 1
    low = _first_visible(last, WINDOW, CHUNK)
    first_block = low // BLOCK_N
    # Of keys before the new one; none, if that is all there is to see.
    num_blocks = tl.where(low < last, (last + BLOCK_N - 1) // BLOCK_N - first_block, 0)
    per_split = tl.maximum((num_blocks + tl.num_programs(2) - 1) // tl.num_programs(2), 1)
    num_active = tl.maximum((num_blocks + per_split - 1) // per_split, 1)
    if split >= num_active:
        return

    # The new token is loaded before the loop and used after it, so that the loop need not wait for it.
    is_first = split == 0
    key_columns = tl.arange(0, KEY_PADDED)
    k_row = k + token * k_token_stride + kv_head * k_head_stride
    new_key = tl.load(k_row + key_columns, mask=is_first & (key_columns < KEY), other=0.0)
    new_rest = new_key
    if REST > 0:
        rest_columns = tl.arange(0, REST_PADDED)
        k_rest_row = k_rest + token * k_rest_token_stride + kv_head * k_rest_head_stride
        new_rest = tl.load(k_rest_row + rest_columns, mask=is_first & (rest_columns < REST), other=0.0)
    new_value = new_key
    if not VALUES_ARE_KEYS:
        v_row = v + token * v_token_stride + kv_head * v_head_stride
        new_value = tl.load(v_row + columns, mask=is_first & (columns < VALUE), other=0.0)
    slot = tl.load(slots + seq)

    key_cache += kv_head * key_head_stride
    rest_cache += kv_head * key_head_stride
    value_cache += kv_head * value_head_stride
    acc = tl.zeros([BLOCK_M, VALUE_PADDED], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    begin = (first_block + split * per_split) * BLOCK_N
    end = tl.minimum(begin + tl.minimum(per_split, num_blocks) * BLOCK_N, last)
    acc, total, top = _attend_keys(
        acc, total, top, q_tile, q_rest_tile, rows, begin, end, low, end,
        block_table + token * table_stride, key_cache, rest_cache, value_cache,
        key_block_stride, key_token_stride, value_block_stride, value_token_stride, inner_scale, outer_scale,
        KEY, KEY_PADDED, REST, REST_PADDED, VALUE, VALUE_PADDED, VALUES_ARE_KEYS,
        SOFTCAP, WINDOW, CHUNK, BLOCK_SIZE, BLOCK_N, MASK="range",
    )  # fmt: skip

    products = tl.sum(q_tile.to(tl.float32) * new_key.to(tl.float32)[None, :], 1)
    if REST > 0:
        products += tl.sum(q_rest_tile.to(tl.float32) * new_rest.to(tl.float32)[None, :], 1)
    score = tl.where(is_first, _to_scores(products, inner_scale, outer_scale, SOFTCAP), float("-inf"))
    acc, total, top, weight = _add_score(acc, total, top, score)
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
            acc, total, top, _ = _add_score(acc, total, top, sink)
        tl.store(out_pointers, (acc / total[:, None]).to(out.dtype.element_ty), mask=out_mask)
    else:
        if SPLITS > 1:
            place = seq * tl.num_programs(1) + tl.program_id(1)
            part = place.to(tl.int64) * tl.num_programs(2)
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


@triton.jit
def write_kernel(
    k,
    v,
    key_cache,
    value_cache,
    slots,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    key_block_stride,
    key_token_stride,
    key_head_stride,
    value_block_stride,
    value_token_stride,
    value_head_stride,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Write keys and values to their places in the cache. Grid: (tokens, tiles of heads)."""
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    used = heads < NUM_HEADS
    key_tile = _load_tile(k, token * k_token_stride + heads * k_head_stride, used, KEY, KEY_PADDED, True)
    value_tile = _load_tile(v, token * v_token_stride + heads * v_head_stride, used, VALUE, VALUE_PADDED, True)
    slot = tl.load(slots + token)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE

    columns = tl.arange(0, KEY_PADDED)
    rows = block * key_block_stride + offset * key_token_stride + heads * key_head_stride
    mask = _columns_inside(columns, KEY, KEY_PADDED, used)
    tl.store(key_cache + rows[:, None] + columns[None, :], key_tile, mask=mask)
    columns = tl.arange(0, VALUE_PADDED)
    rows = block * value_block_stride + offset * value_token_stride + heads * value_head_stride
    mask = _columns_inside(columns, VALUE, VALUE_PADDED, used)
    tl.store(value_cache + rows[:, None] + columns[None, :], value_tile, mask=mask)
