# mypy: ignore-errors
# (what Triton compiles is not Python: the types of arguments are those of the device. Nor does it know structures:
# every pointer, stride and barrier is an argument of its own, which makes functions longer than elsewhere.)
"""The kernel for prompts on Hopper GPUs, in Gluon, which leaves layouts, copies and the roles of warps to us.

Note [Roles of warps]
~~~~~~~~~~~~~~~~~~~~~
There is one program for each processor. In it one warp takes tiles of queries, until there are no more, and has the
copy engine bring queries, keys and values to shared memory. Two groups of four warps attend, each with half of the rows
of a tile. For every place in shared memory one barrier says that it is filled and one that it may be filled again.

The tensor cores are to have work all the time. So a group starts the products of its queries with the next keys and,
behind them, those of the weights of the keys before with their values; it computes weights while the latter run. The
groups take turns in starting products: the weights of one are computed while the products of the other run.

Values have one more place than keys, because they are given back later and needed as early: with two places, prompts of
4096 tokens took 1.05 times as long (Llama-8B on an H200).

Note [A branch before the wait]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Nothing that the computation of weights needs is made by the products that run beside it, so the assembler feels free to
move all of it behind the wait for these. It does not move it across a branch. Another wait for values that are known to
be there is a branch.

Note [Order of tiles]
~~~~~~~~~~~~~~~~~~~~~
A tile is some queries with all the heads that share a key, or as many of these as there are in a power of two (Note
[Rows of a tile] in ``triton_steps.py``). The last queries see the most keys and come first. Heads are gone through in
sections whose keys and values stay in the L2 cache: all at once took 1.06 times as long with 32,768 keys.

Programs take the next tile from a counter: some may begin late, because rows of decoding run beside them. The last to
find no tile puts the counters back to zero, as in Note [The last split combines] in ``triton_paged.py``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from piecegraph.llm.kernels.gluon_boxes import COLUMNS, SIDE

BLOCK_M = gl.constexpr(128)
BLOCK_N = gl.constexpr(128)
K_PLACES = gl.constexpr(2)
V_PLACES = gl.constexpr(3)
SEQUENCES = gl.constexpr(128)
"""Looked at at once."""


@gluon.jit
def numbers_from(base):
    """Those of some sequences."""
    return base + gl.arange(0, SEQUENCES, layout=gl.BlockedLayout([SEQUENCES // 32], [32], [gl.num_warps()], [0]))


@gluon.jit
def num_before(query_starts, num_seqs, token):
    """How many sequences start before a token."""
    count = num_seqs * 0
    for base in range(0, num_seqs, SEQUENCES):
        i = numbers_from(base)
        starts = gl.load(query_starts + i, mask=i < num_seqs, other=token)
        count += gl.sum((starts < token).to(gl.int32), 0)
    return count


@gluon.jit
def find_sequence(query_starts, num_seqs, block, BLOCK_Q: gl.constexpr):
    """The sequence of a block of tokens, as in ``triton_steps.py``, but all of them are looked at at once."""
    count = num_seqs * 0
    for base in range(0, num_seqs, SEQUENCES):
        i = numbers_from(base)
        starts = gl.load(query_starts + i, mask=i < num_seqs, other=0)
        count += gl.sum(((starts // BLOCK_Q + i <= block) & (i < num_seqs)).to(gl.int32), 0)
    return gl.maximum(count - 1, 0)


@gluon.jit
def longest(seq_lens, num_seqs):
    """The most tokens of a sequence, or one."""
    most = num_seqs * 0 + 1
    for base in range(0, num_seqs, SEQUENCES):
        i = numbers_from(base)
        most = gl.maximum(most, gl.max(gl.load(seq_lens + i, mask=i < num_seqs, other=0), 0))
    return most


@gluon.jit
def put(place, number):
    """Write a number to shared memory."""
    place.store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))


@gluon.jit
def take(place):
    """Read it."""
    return gl.sum(place.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def copy_keys(
    cache,
    boxes,
    place,
    filled,
    blocks,
    start,
    first_column,
    rows_of_block,
    WIDTH: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BOX: gl.constexpr,
):
    """Have a tile of keys, or values, copied from where its blocks are; in shared memory it lies in one piece."""
    PARTS: gl.constexpr = WIDTH // COLUMNS
    BOXES: gl.constexpr = BLOCK_N // BOX
    mbarrier.expect(filled, BLOCK_N * WIDTH * 2)
    for i in gl.static_range(BOXES):
        row = blocks[i] * rows_of_block + (start + i * BOX) % BLOCK_SIZE
        for part in gl.static_range(PARTS):
            box = boxes.index((place * PARTS + part) * BOXES + i)
            tma.async_copy_global_to_shared(cache, [row, first_column + part * COLUMNS], filled, box)


@gluon.jit
def load_tiles(
    q,
    key_cache,
    value_cache,
    q_boxes,
    k_boxes,
    v_boxes,
    tile,
    q_filled,
    q_free,
    k_filled,
    k_free,
    v_filled,
    v_free,
    query_starts,
    seq_lens,
    block_table,
    counters,
    num_seqs,
    num_heads,
    group,
    cached_keys,
    key_head_stride,
    value_head_stride,
    key_rows_of_block,
    value_rows_of_block,
    table_stride,
    WIDTH: gl.constexpr,
    TILE_HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BOX: gl.constexpr,
):
    """What the one warp does. See Note [Roles of warps] and Note [Order of tiles]."""
    PARTS: gl.constexpr = WIDTH // COLUMNS
    BLOCK_Q: gl.constexpr = BLOCK_M // TILE_HEADS
    num_real = gl.load(query_starts + num_seqs)
    first_block = gl.load(query_starts) // BLOCK_Q
    num_blocks = num_real // BLOCK_Q + num_before(query_starts, num_seqs, num_real) - first_block
    head_tiles = num_heads // TILE_HEADS
    tiles_of_key = group // TILE_HEADS
    section_keys = gl.maximum(cached_keys // longest(seq_lens, num_seqs), 1)
    section_tiles = gl.minimum(section_keys * tiles_of_key, head_tiles)

    step = num_seqs * 0
    num_taken = num_seqs * 0
    index = gl.program_id(0)
    while index < num_blocks * head_tiles:
        section = index // (num_blocks * section_tiles)
        tiles_here = gl.minimum(section_tiles, head_tiles - section * section_tiles)
        index -= section * num_blocks * section_tiles
        block = first_block + num_blocks - 1 - index // tiles_here
        head_tile = section * section_tiles + index % tiles_here

        seq = find_sequence(query_starts, num_seqs, block, BLOCK_Q)
        query_start = gl.load(query_starts + seq)
        num_queries = gl.load(query_starts + seq + 1) - query_start
        first_query = (block - (query_start // BLOCK_Q + seq)) * BLOCK_Q
        position = gl.load(seq_lens + seq) - num_queries + first_query
        if (first_query >= 0) & (first_query < num_queries):
            num_queries -= first_query
            token = query_start + first_query
            key_end = position + gl.minimum(num_queries, BLOCK_Q)
            last_block = (key_end - 1) // BLOCK_SIZE
            table_row = block_table + seq.to(gl.int64) * table_stride
            kv_head = head_tile // tiles_of_key

            mbarrier.wait(q_free, (num_taken & 1) ^ 1)
            num_taken += 1
            put(tile.index(0), num_queries)
            put(tile.index(1), position)
            put(tile.index(2), token)
            put(tile.index(3), head_tile * TILE_HEADS)
            mbarrier.expect(q_filled, BLOCK_M * WIDTH * 2)
            for i in gl.static_range(BLOCK_M // SIDE * PARTS):
                where = [token + i // PARTS * (SIDE // TILE_HEADS), head_tile * TILE_HEADS, i % PARTS * COLUMNS]
                tma.async_copy_global_to_shared(q, where, q_filled, q_boxes.index(i))

            for i in range(0, (key_end + BLOCK_N - 1) // BLOCK_N):
                start = ((key_end + BLOCK_N - 1) // BLOCK_N - 1 - i) * BLOCK_N
                blocks = ()  # read before anything waits; behind the end, the last one is as good as any
                for j in gl.static_range(BLOCK_N // BOX):
                    entry = gl.minimum((start + j * BOX) // BLOCK_SIZE, last_block)
                    blocks = blocks + (gl.load(table_row + entry),)  # noqa: RUF005 - Triton knows no other way
                k_place = step % K_PLACES
                mbarrier.wait(k_free.index(k_place), ((step // K_PLACES) & 1) ^ 1)
                copy_keys(
                    key_cache, k_boxes, k_place, k_filled.index(k_place), blocks, start,
                    kv_head * key_head_stride, key_rows_of_block, WIDTH, BLOCK_SIZE, BOX,
                )  # fmt: skip
                v_place = step % V_PLACES
                mbarrier.wait(v_free.index(v_place), ((step // V_PLACES) & 1) ^ 1)
                copy_keys(
                    value_cache, v_boxes, v_place, v_filled.index(v_place), blocks, start,
                    kv_head * value_head_stride, value_rows_of_block, WIDTH, BLOCK_SIZE, BOX,
                )  # fmt: skip
                step += 1
        index = gl.num_programs(0) + gl.atomic_add(counters, 1)

    mbarrier.wait(q_free, (num_taken & 1) ^ 1)
    put(tile.index(0), 0)
    mbarrier.arrive(q_filled)
    if gl.atomic_add(counters + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counters, 0)
        gl.store(counters + 1, 0)


@gluon.jit
def weigh(products, total, top, first_key, positions, scale, MASKED: gl.constexpr):
    """The running softmax: see ``attend_keys`` in ``triton_steps.py``."""
    scores = products
    if MASKED:
        keys = first_key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, products.type.layout))
        scores = gl.where(keys[None, :] <= positions[:, None], products, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1) * scale)
    base = new_top
    if MASKED:  # a row that has seen no key yet has no top
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(scores * scale - base[:, None])
    fade = gl.exp2(top - base)
    return weights, fade, total * fade + gl.sum(weights, 1), new_top


@gluon.jit
def add_keys(
    acc,
    weights,
    total,
    top,
    q,
    k_tiles,
    v_tiles,
    k_filled,
    k_free,
    v_filled,
    v_free,
    turns,
    step,
    first_key,
    positions,
    scale,
    MINE: gl.constexpr,
    S_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr,
    MASKED: gl.constexpr,
):
    """The weights of one tile of keys, beside the products of the weights of the tile before with its values."""
    k_place = step % K_PLACES
    v_place = (step - 1) % V_PLACES
    v_phase = ((step - 1) // V_PLACES) & 1
    mbarrier.wait(k_filled.index(k_place), (step // K_PLACES) & 1)
    mbarrier.wait(turns.index(MINE), (step & 1) ^ (1 - MINE))
    zeros = gl.zeros([SIDE, BLOCK_N], gl.float32, S_LAYOUT)
    products = warpgroup_mma(q, k_tiles.index(k_place).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_filled.index(v_place), v_phase)
    acc = warpgroup_mma(weights, v_tiles.index(v_place), acc, is_async=True)
    mbarrier.arrive(turns.index(1 - MINE))
    products = warpgroup_mma_wait(1, [products])
    mbarrier.arrive(k_free.index(k_place))
    next_weights, fade, total, top = weigh(products, total, top, first_key, positions, scale, MASKED)
    next_weights = gl.convert_layout(next_weights.to(v_tiles.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
    mbarrier.wait(v_filled.index(v_place), v_phase)  # see Note [A branch before the wait]
    acc, weights, next_weights = warpgroup_mma_wait(0, [acc, weights, next_weights])
    mbarrier.arrive(v_free.index(v_place))
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return acc, next_weights, total, top


@gluon.jit
def attend_tiles(
    MINE: gl.constexpr,
    q_tiles,
    k_tiles,
    v_tiles,
    tile,
    q_filled,
    q_free,
    k_filled,
    k_free,
    v_filled,
    v_free,
    turns,
    out,
    scale,
    out_token_stride,
    out_head_stride,
    WIDTH: gl.constexpr,
    TILE_HEADS: gl.constexpr,
):
    """What a group of warps does with its half of the rows of each tile. See Note [Roles of warps]."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    OUT_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    q = q_tiles.index(MINE)
    step = gl.program_id(0) * 0
    num_taken = step
    mbarrier.wait(q_filled, 0)
    num_queries = take(tile.index(0))
    while num_queries > 0:
        position = take(tile.index(1))
        token = take(tile.index(2))
        first_head = take(tile.index(3))
        num_steps = (position + gl.minimum(num_queries, BLOCK_M // TILE_HEADS) + BLOCK_N - 1) // BLOCK_N
        # Of these steps every row sees every key. The one with the first row's own key is never one of them, so that
        # no row is without a key when they begin.
        full_steps = position // BLOCK_N
        rows = MINE * SIDE + gl.arange(0, SIDE, layout=gl.SliceLayout(1, S_LAYOUT))
        positions = position + rows // TILE_HEADS

        k_place = step % K_PLACES
        mbarrier.wait(k_filled.index(k_place), (step // K_PLACES) & 1)
        mbarrier.wait(turns.index(MINE), (step & 1) ^ (1 - MINE))
        zeros = gl.zeros([SIDE, BLOCK_N], gl.float32, S_LAYOUT)
        products = warpgroup_mma(q, k_tiles.index(k_place).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.arrive(turns.index(1 - MINE))
        products = warpgroup_mma_wait(0, [products])
        mbarrier.arrive(k_free.index(k_place))
        top = gl.full([SIDE], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        total = gl.zeros([SIDE], gl.float32, gl.SliceLayout(1, S_LAYOUT))
        weights, _, total, top = weigh(products, total, top, (num_steps - 1) * BLOCK_N, positions, scale, True)
        weights = gl.convert_layout(weights.to(v_tiles.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
        acc = gl.zeros([SIDE, WIDTH], gl.float32, O_LAYOUT)
        step += 1
        for i in range(1, num_steps - full_steps):
            acc, weights, total, top = add_keys(
                acc, weights, total, top, q, k_tiles, v_tiles, k_filled, k_free, v_filled, v_free, turns, step,
                (num_steps - 1 - i) * BLOCK_N, positions, scale, MINE, S_LAYOUT, O_LAYOUT, MASKED=True,
            )  # fmt: skip
            step += 1
        for _i in range(0, full_steps):
            acc, weights, total, top = add_keys(
                acc, weights, total, top, q, k_tiles, v_tiles, k_filled, k_free, v_filled, v_free, turns, step,
                0, positions, scale, MINE, S_LAYOUT, O_LAYOUT, MASKED=False,
            )  # fmt: skip
            step += 1
        mbarrier.arrive(q_free)
        v_place = (step - 1) % V_PLACES
        mbarrier.wait(v_filled.index(v_place), ((step - 1) // V_PLACES) & 1)
        acc = warpgroup_mma(weights, v_tiles.index(v_place), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(v_free.index(v_place))

        result = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, O_LAYOUT))[:, None]
        result = gl.convert_layout(result.to(out.dtype.element_ty), OUT_LAYOUT)
        rows = MINE * SIDE + gl.arange(0, SIDE, layout=gl.SliceLayout(1, OUT_LAYOUT))
        query = rows // TILE_HEADS
        head = first_head + rows % TILE_HEADS
        places = (token + query).to(gl.int64) * out_token_stride + head * out_head_stride
        columns = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, OUT_LAYOUT))
        gl.store(out + places[:, None] + columns[None, :], result, mask=(query < num_queries)[:, None])

        num_taken += 1
        mbarrier.wait(q_filled, num_taken & 1)
        num_queries = take(tile.index(0))


@gluon.jit(
    do_not_specialize=[
        "num_seqs",
        "num_heads",
        "group",
        "cached_keys",
        "key_head_stride",
        "value_head_stride",
        "key_rows_of_block",
        "value_rows_of_block",
        "table_stride",
    ]
)
def prefill_kernel(
    q,
    key_cache,
    value_cache,
    out,
    query_starts,
    seq_lens,
    block_table,
    counters,
    num_seqs,
    num_heads,
    group,
    cached_keys,
    scale,
    key_head_stride,
    value_head_stride,
    key_rows_of_block,
    value_rows_of_block,
    table_stride,
    out_token_stride,
    out_head_stride,
    WIDTH: gl.constexpr,
    TILE_HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BOX: gl.constexpr,
):
    """Attend with any number of queries in each sequence. Grid: as many programs as run at a time.

    Args: q: as the caches, described for the copy engine; cached_keys: as many, and their values, of one head are to be
    in the L2 cache; key_rows_of_block, value_rows_of_block: from the rows of one block to those of the next; BOX: keys
    that are side by side in a block, and copied at once.
    """
    PARTS: gl.constexpr = WIDTH // COLUMNS
    BOXES: gl.constexpr = BLOCK_N // BOX
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_shape: gl.constexpr = [BLOCK_M // SIDE * PARTS, SIDE // TILE_HEADS, TILE_HEADS, COLUMNS]
    q_boxes = gl.allocate_shared_memory(q.dtype, q_shape, Q_LAYOUT)
    k_boxes = gl.allocate_shared_memory(q.dtype, [K_PLACES * PARTS * BOXES, BOX, COLUMNS], LAYOUT)
    v_boxes = gl.allocate_shared_memory(q.dtype, [V_PLACES * PARTS * BOXES, BOX, COLUMNS], LAYOUT)
    q_tiles = q_boxes._reinterpret(q.dtype, [BLOCK_M // SIDE, SIDE, WIDTH], LAYOUT)
    k_tiles = k_boxes._reinterpret(q.dtype, [K_PLACES, BLOCK_N, WIDTH], LAYOUT)
    v_tiles = v_boxes._reinterpret(q.dtype, [V_PLACES, BLOCK_N, WIDTH], LAYOUT)
    tile = gl.allocate_shared_memory(gl.int32, [4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))

    q_filled = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_filled = gl.allocate_shared_memory(gl.int64, [K_PLACES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [K_PLACES, 1], BARRIER)
    v_filled = gl.allocate_shared_memory(gl.int64, [V_PLACES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [V_PLACES, 1], BARRIER)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    mbarrier.init(q_filled, count=1)
    mbarrier.init(q_free, count=2)
    for i in gl.static_range(K_PLACES):
        mbarrier.init(k_filled.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
    for i in gl.static_range(V_PLACES):
        mbarrier.init(v_filled.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()

    # A processor has 504 registers for each of 128 threads: 232 for either group that attends, 40 for the warp that
    # loads (and three that are not there).
    gl.warp_specialize(
        [
            (attend_tiles, (0, q_tiles, k_tiles, v_tiles, tile, q_filled, q_free, k_filled, k_free, v_filled, v_free,
                            turns, out, scale, out_token_stride, out_head_stride, WIDTH, TILE_HEADS)),
            (attend_tiles, (1, q_tiles, k_tiles, v_tiles, tile, q_filled, q_free, k_filled, k_free, v_filled, v_free,
                            turns, out, scale, out_token_stride, out_head_stride, WIDTH, TILE_HEADS)),
            (load_tiles, (q, key_cache, value_cache, q_boxes, k_boxes, v_boxes, tile, q_filled, q_free, k_filled,
                          k_free, v_filled, v_free, query_starts, seq_lens, block_table, counters, num_seqs, num_heads,
                          group, cached_keys, key_head_stride, value_head_stride, key_rows_of_block,
                          value_rows_of_block, table_stride, WIDTH, TILE_HEADS, BLOCK_SIZE, BOX)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
