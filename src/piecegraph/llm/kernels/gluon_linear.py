# mypy: ignore-errors
# (what Triton compiles is not Python: the types of arguments are those of the device. Nor does it know structures:
# every pointer and barrier is an argument of its own.)
"""The kernel for linears with a gate and many rows on Hopper GPUs, in Gluon: the gate is computed where the sums are.

Note [Tiles with a gate]
~~~~~~~~~~~~~~~~~~~~~~~~
A tile of the weight has some rows of the gate and, behind them, those of the same columns of the others, so that the
thread that holds a sum of the one holds that of the other. What two kernels would write and read again, twice as wide
as the result, never leaves the registers.

As in Note [Roles of warps] one warp has the copy engine fill places in shared memory, tile after tile, and two groups
of four warps multiply, each with half of the rows of a tile. A group that writes its half leaves the tensor cores to
the other, and the next tile is on its way.

Tiles of the same columns follow each other, so that a weight is read from memory once and then from the L2 cache; with
many rows, those of ``GROUP`` tiles of rows do.
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
GROUP = gl.constexpr(16)
"""Tiles of rows whose products follow each other."""


@gluon.jit
def tile_at(index, m, num_n):
    """The first row of a tile, and which of columns it is."""
    num_m = (m + BLOCK_M - 1) // BLOCK_M
    first = index // (GROUP * num_n) * GROUP
    size = gl.minimum(num_m - first, GROUP)
    inside = index - first * num_n
    return (first + inside % size) * BLOCK_M, inside // size


@gluon.jit
def load_tiles(
    x, weight, x_boxes, weight_boxes, filled, free, m, n, k, num_n,
    WIDTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What the one warp does: have both sides of each product copied. Half a tile without rows is not."""
    BOXES: gl.constexpr = WIDTH // SIDE
    HALF: gl.constexpr = WIDTH // 2
    step = m * 0
    for index in range(gl.program_id(0), (m + BLOCK_M - 1) // BLOCK_M * num_n, gl.num_programs(0)):
        row, tile_n = tile_at(index, m, num_n)
        has_second = row + SIDE < m
        for at in range(0, k, COLUMNS):
            place = step % STAGES
            barrier = filled.index(place)
            mbarrier.wait(free.index(place), ((step // STAGES) & 1) ^ 1)
            if has_second:
                mbarrier.expect(barrier, (2 * SIDE + WIDTH) * COLUMNS * 2)
                tma.async_copy_global_to_shared(x, [row + SIDE, at], barrier, x_boxes.index(place * 2 + 1))
            else:
                mbarrier.expect(barrier, (SIDE + WIDTH) * COLUMNS * 2)
            tma.async_copy_global_to_shared(x, [row, at], barrier, x_boxes.index(place * 2))
            for i in gl.static_range(BOXES):
                column = tile_n * HALF + i % (BOXES // 2) * SIDE + i // (BOXES // 2) * n
                tma.async_copy_global_to_shared(weight, [column, at], barrier, weight_boxes.index(place * BOXES + i))
            step += 1


@gluon.jit
def sum_up(
    x_boxes, weight_tiles, filled, free, step, k,
    MINE: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The sums of a group's half of a tile. A product is under way while the next places are waited for."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    acc = gl.zeros([SIDE, WIDTH], gl.float32, LAYOUT)
    for at in range(0, k, COLUMNS):
        place = step % STAGES
        mbarrier.wait(filled.index(place), (step // STAGES) & 1)
        mine = x_boxes.index(place * 2 + MINE)
        acc = warpgroup_mma(mine, weight_tiles.index(place).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, [acc])
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), pred=at > 0)
        step += 1
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(free.index((step + STAGES - 1) % STAGES))
    return acc


@gluon.jit
def multiply_tiles(
    MINE: gl.constexpr,
    x_boxes,
    weight_tiles,
    out_tiles,
    filled,
    free,
    out,
    m,
    k,
    num_n,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
):
    """What a group of warps does with its half of the rows of each tile. See Note [Tiles with a gate]."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    HALF: gl.constexpr = WIDTH // 2
    mine = out_tiles.index(MINE)
    boxes = mine._reinterpret(out.dtype, [HALF // COLUMNS, SIDE, COLUMNS], LAYOUT)
    steps = (k + COLUMNS - 1) // COLUMNS
    step = m * 0
    for index in range(gl.program_id(0), (m + BLOCK_M - 1) // BLOCK_M * num_n, gl.num_programs(0)):
        row, tile_n = tile_at(index, m, num_n)
        row += MINE * SIDE
        if row < m:
            acc = sum_up(x_boxes, weight_tiles, filled, free, step, k, MINE, WIDTH, STAGES)
            gate, up = gl.split(gl.permute(gl.reshape(acc, [SIDE, 2, HALF]), (0, 2, 1)))
            result = gate * up / (1 + gl.exp(-gate))
            tma.store_wait(0)
            mine.store(result.to(out.dtype))
            fence_async_shared()
            for i in gl.static_range(HALF // COLUMNS):
                tma.async_copy_shared_to_global(out, [row, tile_n * HALF + i * COLUMNS], boxes.index(i))
        else:
            for i in range(step, step + steps):
                mbarrier.wait(filled.index(i % STAGES), (i // STAGES) & 1)
                mbarrier.arrive(free.index(i % STAGES))
        step += steps
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["m", "n", "k", "num_n"])
def gated_kernel(x, weight, out, m, n, k, num_n, WIDTH: gl.constexpr, STAGES: gl.constexpr):
    """The SiLU of the first half of the columns of a linear, times the second. Grid: as many programs as run at a time.

    Args: x, weight, out: described for the copy engine, in boxes of 64 by 64; n: columns of ``out``, half as many as
    the rows of ``weight``; num_n: tiles of them; WIDTH: rows of a weight in a tile, of both halves.
    """
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    x_boxes = gl.allocate_shared_memory(x.dtype, [STAGES * 2, SIDE, COLUMNS], LAYOUT)
    weight_boxes = gl.allocate_shared_memory(x.dtype, [STAGES * (WIDTH // SIDE), SIDE, COLUMNS], LAYOUT)
    weight_tiles = weight_boxes._reinterpret(x.dtype, [STAGES, WIDTH, COLUMNS], LAYOUT)
    out_tiles = gl.allocate_shared_memory(x.dtype, [2, SIDE, WIDTH // 2], LAYOUT)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    fence_async_shared()

    # The registers of a processor, as in the kernel for prompts: see Note [Roles of warps].
    gl.warp_specialize(
        [
            (multiply_tiles, (0, x_boxes, weight_tiles, out_tiles, filled, free, out, m, k, num_n, WIDTH, STAGES)),
            (multiply_tiles, (1, x_boxes, weight_tiles, out_tiles, filled, free, out, m, k, num_n, WIDTH, STAGES)),
            (load_tiles, (x, weight, x_boxes, weight_boxes, filled, free, m, n, k, num_n, WIDTH, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )
