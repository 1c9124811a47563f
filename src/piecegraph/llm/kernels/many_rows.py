"""Linears with a gate and many rows: whether our kernel for Hopper GPUs is quicker than cuBLAS and a kernel behind it.

Ours is one kernel that writes the result alone; cuBLAS writes twice as many columns, which another one reads. But
cuBLAS has tiles of many shapes, and ours has two: with a few tiles more than run at a time, processors wait for those.
Microseconds of gate and up of Llama-8B (14,336 columns of 4096) and Qwen3-0.6B (3072 of 1024) on an H200; cuBLAS's are
without the kernel behind it, which takes 20 and 80 with 1024 and 4096 rows of the first:

======  =====  ====  ===  ====  =====  =====  =====
rows    64     128   256  640   1024   2048   4096
======  =====  ====  ===  ====  =====  =====  =====
cuBLAS  62     66    90   217   354    688    1389
ours    59     63    90   213   329    604    1394
cuBLAS  6.8    6.5   8.3  15.0  20.9   39.6   73.4
ours           10.5  10   15.6  21.4   38.4   72.9
======  =====  ====  ===  ====  =====  =====  =====
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from piecegraph.llm.kernels.chip import chip, has_gluon, is_hopper

_TILE_ROWS = 128
_LAUNCH_US = 4.0
"""From the start of a kernel to its first product, and from its last one to its end."""
_BYTES_PER_US = 4.1e6
_FLOPS_PER_US = 5.6e6
"""Of cuBLAS on each processor, with some hundred rows and more."""
_GATE_US, _GATE_BYTES_PER_US = 2.5, 3.6e6
"""What the kernel behind cuBLAS takes at least, and what it reads and writes in a microsecond."""
_ALIGNED = 8
"""Elements of half precision; the copy engine takes 16 bytes or a multiple."""


class Tiles(NamedTuple):
    """How our kernel is cut."""

    width: int
    """Rows of a weight in a tile, of the gate and of the others."""
    num_stages: int
    step_us: float
    """That a tile takes for 64 of depth, where there is one on each processor."""


_TILES = (Tiles(256, 4, 0.70), Tiles(128, 6, 0.375))


def choose_tiles(rows: int, columns: int, depth: int, num_processors: int) -> Tiles | None:
    """The tiles that are quickest, or None where cuBLAS and a kernel behind it are.

    Args:
        rows: of what is multiplied.
        columns: of the result, half as many as the weight has rows.
        depth: of the weight.
        num_processors: of the chip.

    >>> [tiles and tiles.width for tiles in (choose_tiles(rows, 14336, 4096, 132) for rows in (64, 192, 640, 4096))]
    [256, None, 128, 256]
    """
    reading_us = 4 * columns * depth / _BYTES_PER_US
    products_us = 4 * rows * columns * depth / (_FLOPS_PER_US * num_processors)
    gate_us = _GATE_US + 6 * rows * columns / _GATE_BYTES_PER_US
    other_us = max(reading_us, products_us) + _LAUNCH_US + gate_us
    best_us, best = min((_our_us(tiles, rows, columns, depth, num_processors), tiles) for tiles in _TILES)
    return best if max(best_us, reading_us) + _LAUNCH_US <= other_us else None


def _our_us(tiles: Tiles, rows: int, columns: int, depth: int, num_processors: int) -> float:
    count = -(-rows // _TILE_ROWS) * -(-columns // (tiles.width // 2))
    return -(-count // num_processors) * -(-depth // 64) * tiles.step_us


def tiles_for(x: torch.Tensor, weight: torch.Tensor) -> Tiles | None:
    """Those for rows of half precision and a weight with its gate first; None if ours does not serve or is slower."""
    if not (is_hopper(x.device) and has_gluon()):
        return None
    columns, depth = weight.shape[0] // 2, weight.shape[1]
    if columns % _ALIGNED or depth % _ALIGNED or x.stride(0) % _ALIGNED or x.data_ptr() % 16 or weight.data_ptr() % 16:
        return None
    return choose_tiles(x.shape[0], columns, depth, chip(x.device).num_processors)


def launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tiles: Tiles) -> None:
    """The SiLU of the first half of the columns, times the second.

    Args:
        x: [rows, depth].
        weight: [2 * columns, depth].
        out: [rows, columns], written to.
        tiles: see :func:`tiles_for`.
    """
    from piecegraph.llm.kernels import gluon_boxes as boxes
    from piecegraph.llm.kernels import gluon_linear

    (rows, columns), box = out.shape, [boxes.SIDE.value, boxes.COLUMNS.value]
    num_columns = -(-columns // (tiles.width // 2))
    num_tiles = -(-rows // _TILE_ROWS) * num_columns
    gluon_linear.gated_kernel[(min(num_tiles, chip(x.device).num_processors),)](
        boxes.described(x, box),
        boxes.described(weight, box),
        boxes.described(out, box),
        rows,
        columns,
        weight.shape[1],
        num_columns,
        WIDTH=tiles.width,
        STAGES=tiles.num_stages,
        num_warps=4,
    )
