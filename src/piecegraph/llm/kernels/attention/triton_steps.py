# mypy: ignore-errors
# (what Triton compiles is not Python: the types of arguments are those of the device. Nor does it know structures:
# every pointer, stride and constant is an argument of its own, which makes functions longer than elsewhere.)
"""The steps that the Triton kernels for prefill and decode share: loading, masking, the running softmax over keys.

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
def find_sequence(query_starts, num_seqs, block, BLOCK_Q: tl.constexpr):
    """The sequence of a block of tokens: sequence i has the blocks from ``query_starts[i] // BLOCK_Q + i`` on.

    That leaves room for a partly filled last block of each; blocks in the gaps have none.
    """
    low = num_seqs * 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        fits = tl.load(query_starts + middle) // BLOCK_Q + middle <= block
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle - 1)
    return low


@triton.jit
def columns_inside(columns, WIDTH: tl.constexpr, PADDED: tl.constexpr, rows_inside):
    """The mask of a tile whose rows are limited by ``rows_inside`` and whose columns by WIDTH."""
    mask = rows_inside[:, None]
    if WIDTH != PADDED:
        mask = mask & (columns[None, :] < WIDTH)
    return mask


@triton.jit
def load_tile(base, rows, inside, WIDTH: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """[rows, PADDED] with zeros where there is nothing to read."""
    columns = tl.arange(0, PADDED)
    pointers = base + rows[:, None] + columns[None, :]
    if MASKED:
        tile = tl.load(pointers, mask=columns_inside(columns, WIDTH, PADDED, inside), other=0.0)
    elif WIDTH != PADDED:
        tile = tl.load(pointers, mask=columns[None, :] < WIDTH, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def cap(products, inner_scale, outer_scale):
    """The scores of a layer with a softcap. The form of tanh is right at both ends: exp2 becomes inf or zero there."""
    return outer_scale * (1.0 - 2.0 / (tl.exp2(products * inner_scale * (2.0 * LOG2E)) + 1.0))


@triton.jit
def visible(keys, positions, inside, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """[queries, keys]: what each query sees."""
    query, key = positions[:, None], keys[None, :]
    visible = inside[None, :] & (key <= query)
    if WINDOW > 0:
        visible = visible & (key > query - WINDOW)
    if CHUNK > 0:
        visible = visible & (key // CHUNK == query // CHUNK)
    return visible


@triton.jit
def first_visible(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first key that the query at this position sees."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(first, position - WINDOW + 1)
    if CHUNK > 0:
        first = tl.maximum(first, position - position % CHUNK)
    return first


@triton.jit
def load_blocks(table_row, start, low, high, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The block of each key of a step, or the one block of them all; block 0 for keys outside the sequence."""
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table_row + start // BLOCK_SIZE, mask=start < high, other=0)
    else:
        keys = start + tl.arange(0, BLOCK_N)
        block = tl.load(table_row + keys // BLOCK_SIZE, mask=(keys >= low) & (keys < high), other=0)
    return block


@triton.jit
def attend_keys(
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
    next_block = load_blocks(table_row, begin, low, high, BLOCK_SIZE, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        inside = (keys >= low) & (keys < high)
        # The table is read one step ahead: a load that waits for another load of its step is pipelined half as deep.
        block = next_block.to(tl.int64)
        next_block = load_blocks(table_row, start + BLOCK_N, low, high, BLOCK_SIZE, BLOCK_N)
        offset = (keys % BLOCK_SIZE).to(tl.int64)
        key_rows = block * key_block_stride + offset * key_token_stride
        key = load_tile(key_cache, key_rows, inside, KEY, KEY_PADDED, MASK != "none")
        if VALUES_ARE_KEYS:
            value = key
        else:
            value_rows = block * value_block_stride + offset * value_token_stride
            value = load_tile(value_cache, value_rows, inside, VALUE, VALUE_PADDED, MASK != "none")
        products = tl.dot(q, tl.trans(key), input_precision="ieee")
        if REST > 0:
            rest = load_tile(rest_cache, key_rows, inside, REST, REST_PADDED, MASK != "none")
            products = tl.dot(q_rest, tl.trans(rest), products, input_precision="ieee")
        # Scores are in base 2: exp2 is what the hardware has. The scale (above zero) is left to the exponent, where it
        # is part of one multiply-add.
        scores = products
        scale = inner_scale
        if SOFTCAP:
            scores = cap(products, inner_scale, outer_scale)
            scale = 1.0
        if MASK == "range":
            scores = tl.where(inside[None, :], scores, float("-inf"))
        if MASK == "query":
            scores = tl.where(visible(keys, positions, inside, WINDOW, CHUNK), scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        base = new_top
        if MASK == "query":  # a row that has seen no key yet has no top
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores * scale - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
        top = new_top
    return acc, total, top


@triton.jit
def add_score(acc, total, top, score):
    """One more score for each row of the running softmax; the weight it gets is returned too, for its value."""
    new_top = tl.maximum(top, score)
    fade = tl.exp2(top - new_top)
    weight = tl.exp2(score - new_top)
    return acc * fade[:, None], total * fade + weight, new_top, weight
