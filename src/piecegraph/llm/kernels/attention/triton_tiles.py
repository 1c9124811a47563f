"""How the work of the Triton kernels is cut into tiles: pure functions of a layer and the size of a bucket.

``benchmarks/attention.py --tune`` prints the alternatives side by side on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from piecegraph.llm.kernels.chip import Chip
from piecegraph.llm.specs import SHORT_CONTEXT

MAX_SPLITS = 32
MIN_TILE = 16  # what a product of tiles takes at least
MOST_PROGRAMS = 4  # of decoding that are on a processor at a time
COMBINED_AT_ONCE = 8192  # numbers of partial results that one program holds in registers
MAX_COMBINED = 8 * COMBINED_AT_ONCE  # what the last split adds up; more would take longer than it saves
_OTHER_SHARED_BYTES = 6 << 10
"""What a program of decoding needs besides the keys and values of its stages."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """One way to cut the work."""

    block_m: int
    """Rows: queries times the heads that share a key."""
    block_n: int
    """Keys of one step."""
    tile_heads: int
    """How many heads of a group are in one tile."""
    num_warps: int
    num_stages: int
    num_splits: int = 1
    """Programs that share the keys of one sequence and kv head; decode only."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the tiles of a layer depend on."""

    num_kv_heads: int
    group: int
    """Query heads of each kv head."""
    key_width: int
    value_width: int
    dtype: torch.dtype

    @property
    def width(self) -> int:
        return padded(max(self.key_width, self.value_width))


def padded(width: int) -> int:
    """The width of the tile that holds a width.

    >>> padded(80), padded(8), padded(128), padded(0)
    (128, 16, 128, 16)
    """
    return max(MIN_TILE, power_of_two(width))


def power_of_two(number: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(0, number - 1).bit_length()


def key_parts(width: int) -> tuple[int, int]:
    """A key's width as one or two parts, whichever wastes less: see Note [Two parts of a key].

    >>> key_parts(128), key_parts(192), key_parts(112), key_parts(80), key_parts(8)
    ((128, 0), (128, 64), (112, 0), (64, 16), (8, 0))
    """
    whole = padded(width)
    first = whole // 2
    if first < MIN_TILE or width <= first or first + padded(width - first) >= whole:
        return width, 0
    return first, width - first


def prefill_tiles(shape: Shape, num_tokens: int, max_query_len: int, num_processors: int) -> Tiles:
    """Large tiles for long sequences; smaller ones as long as processors would be idle, or rows unused."""
    largest, block_n, num_stages = _prefill_limits(shape)
    tile_heads = min(shape.group, largest)
    rows = power_of_two(max_query_len * tile_heads)
    block_m = max(MIN_TILE, power_of_two(tile_heads), min(largest, rows))
    while (
        block_m > max(64, power_of_two(tile_heads))
        and _num_programs(shape, num_tokens, block_m, tile_heads) < num_processors
    ):
        block_m //= 2
    wide = shape.width > 256
    return Tiles(block_m, block_n, tile_heads, 8 if block_m >= 128 or wide else 4, num_stages)


def _prefill_limits(shape: Shape) -> tuple[int, int, int]:
    """(rows at most, keys of a step, stages of the pipeline) that registers and shared memory allow."""
    if shape.dtype == torch.float32:  # no tensor cores: all of a tile's products are written out one by one
        return 16, 32 if shape.width <= 128 else 16, 1
    if shape.width <= 128:
        return 128, 64, 3
    return (128, 64, 2) if shape.width <= 256 else (64, 32, 2)


def _num_programs(shape: Shape, num_tokens: int, block_m: int, tile_heads: int) -> int:
    queries = block_m // tile_heads
    return -(-num_tokens // queries) * shape.num_kv_heads * -(-shape.group // tile_heads)


def decode_tiles(shape: Shape, num_seqs: int, max_seq_len: int, chip: Chip) -> Tiles:
    """As many splits as keep all processors busy with all programs that fit; a sequence too short for them leaves some
    idle.

    Two programs fit on a processor, four with half the keys in a step: those that would run behind others are as many
    waves less (a layer of Qwen3-0.6B on an H200, 64 sequences of 160 tokens: 18.9 against 24.1 us). One sequence alone
    is a matter of latency, of which half the keys have less (all its layers, with 160, 4096 and 32,000 tokens: 0.95,
    0.91 and 1.07 of the time). Two warps are enough for them (64 sequences of 160 and of 1000 tokens: 0.98).

    A few sequences are read faster by twice as many programs with half the keys (a layer of Qwen3-0.6B, 8 sequences of
    128, 300, 700, 2048 and 32,768 tokens: 34.3, 35.9, 36.1, 48.8 and 271 us against 33.8, 33.2, 40.2, 52.3 and 296; 2
    of 128 and 32,768: 28.4 and 93.5 against 30.4 and 101.7; of Llama-3.1-8B, 8 of 160 and 1000: 128.1 and 135.9 against
    129.9 and 136.6), 16 are not. Where all contexts are short there is little to read, and what counts is that the next
    kernel finds room to begin early: one program for each processor (a layer of Qwen3-0.6B, 8 sequences of 130, 160 and
    192 tokens: 30.4, 30.3 and 30.7 us against 33.6, 33.7 and 33.8; of 256: 32.1 and 31.0).

    Where there is more than one part for each processor, one stage more pays, if as many programs still fit (a layer of
    Qwen3-0.6B with 32 sequences of 128 tokens: 33.3 against 36.3 us; 64 of 128: 40.5 and 42.0; 64 of 2048: 158 and
    173; of Llama-3.1-8B with 64 of 300: 159.6 and 163.5). With fewer parts the next kernel finds no room to begin early
    (Qwen3-0.6B, 8 of 160: 33.7 against 30.4 us), and with more than four none pays (Llama-3.1-8B, 256 of 300: 376 and
    366).
    """
    num_processors = chip.num_processors
    block_n, num_stages = _decode_limits(shape)
    tile_heads = min(shape.group, MIN_TILE)
    while tile_heads > 4 and _num_parts(shape, num_seqs, tile_heads) * _max_splits(shape, tile_heads) < num_processors:
        tile_heads = -(-tile_heads // 2)
    num_parts, num_warps = _num_parts(shape, num_seqs, tile_heads), 4
    load = num_parts / num_processors
    is_half = shape.dtype != torch.float32
    is_narrow, is_small = is_half and shape.width <= 128, load < 0.5 and num_seqs > 1
    if (is_narrow and (num_seqs == 1 or is_small)) or (is_half and 2 < load <= 4):
        block_n, num_warps = block_n // 2, 2 if is_narrow else 4
    if is_narrow and 1 < load <= 4 and _fits(shape, block_n, num_stages + 1, chip):
        num_stages += 1
    num_programs = 2 if not (is_narrow and is_small) else 1 if max_seq_len <= SHORT_CONTEXT else MOST_PROGRAMS
    num_programs *= num_processors
    num_splits = min(_max_splits(shape, tile_heads), num_programs // num_parts, -(-max_seq_len // block_n))
    return Tiles(MIN_TILE, block_n, tile_heads, num_warps, num_stages, max(1, num_splits))


def _fits(shape: Shape, block_n: int, num_stages: int, chip: Chip) -> bool:
    """Whether as many programs of decoding are on a processor at a time as are meant to be; see above."""
    num_programs = 2 * _decode_limits(shape)[0] // block_n
    step_bytes = block_n * (padded(shape.key_width) + padded(shape.value_width)) * shape.dtype.itemsize
    return num_programs * ((num_stages - 1) * step_bytes + _OTHER_SHARED_BYTES) <= chip.shared_bytes


def mixed_decode_tiles(shape: Shape) -> Tiles:
    """For a number of sequences that only the device knows: the splits are the most there may be."""
    block_n, num_stages = _decode_limits(shape)
    tile_heads = min(shape.group, MIN_TILE)
    return Tiles(MIN_TILE, block_n, tile_heads, 4, num_stages, _max_splits(shape, tile_heads))


def combine_shape(shape: Shape, tiles: Tiles) -> tuple[int, int]:
    """(splits, columns) of the tile in which the last split adds up the partial results, all heads of its tile at once.

    One compiled kernel serves every number of splits above one, unless the tile would be much too large for that.
    """
    if tiles.num_splits == 1:
        return 1, padded(shape.value_width)
    heads = power_of_two(tiles.tile_heads)
    whole = MAX_SPLITS * heads * padded(shape.value_width) <= MAX_COMBINED
    splits = MAX_SPLITS if whole else power_of_two(tiles.num_splits)
    return splits, min(padded(shape.value_width), COMBINED_AT_ONCE // (splits * heads))


def _max_splits(shape: Shape, tile_heads: int) -> int:
    return min(MAX_SPLITS, MAX_COMBINED // (power_of_two(tile_heads) * padded(shape.value_width)))


def _decode_limits(shape: Shape) -> tuple[int, int]:
    """(keys of a step, stages of the pipeline)."""
    if shape.dtype == torch.float32:
        return (32, 1) if shape.width <= 128 else (16, 1)
    if shape.width <= 128:
        return 64, 3
    return (64, 2) if shape.width <= 256 else (32, 2)


def _num_parts(shape: Shape, num_seqs: int, tile_heads: int) -> int:
    return num_seqs * shape.num_kv_heads * -(-shape.group // tile_heads)
