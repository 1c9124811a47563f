"""How the Triton kernels cut their work, for sizes of real models."""

from __future__ import annotations

import pytest
import torch

from piecegraph.llm.kernels.attention.triton_tiles import (
    COMBINED_AT_ONCE,
    MAX_SPLITS,
    MIN_TILE,
    MOST_PROGRAMS,
    Shape,
    combine_shape,
    decode_tiles,
    key_parts,
    padded,
    prefill_tiles,
)
from piecegraph.llm.kernels.chip import Chip

H200 = Chip(132, 228 << 10)
QWEN = Shape(8, 2, 128, 128, torch.bfloat16)
DEEPSEEK = Shape(1, 128, 576, 512, torch.bfloat16)
SHAPES = [
    QWEN,
    DEEPSEEK,
    Shape(1, 71, 64, 64, torch.float16),
    Shape(4, 7, 80, 80, torch.float32),
    Shape(1, 16, 576, 512, torch.float32),
    Shape(8, 1, 256, 256, torch.bfloat16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_hold_their_heads_and_the_workspace_holds_the_splits(shape: Shape) -> None:
    for size in (1, 2, 7, 64, 300, 4096):
        prefill = prefill_tiles(shape, size, size, 132)
        assert prefill.block_m >= max(MIN_TILE, prefill.tile_heads)
        decode = decode_tiles(shape, size, 8192, H200)
        assert decode.tile_heads <= decode.block_m == MIN_TILE
        assert 1 <= decode.num_splits <= MAX_SPLITS
        tiles = -(-shape.group // decode.tile_heads)
        assert decode.num_splits == 1 or size * shape.num_kv_heads * tiles * decode.num_splits <= MOST_PROGRAMS * 132


def test_splits_fill_the_device_and_no_more() -> None:
    assert decode_tiles(QWEN, 1, 8192, H200).num_splits == 32
    assert decode_tiles(QWEN, 8, 8192, H200).num_splits == 8, "programs with half the keys, of which four fit"
    assert [decode_tiles(QWEN, 8, most, H200).num_splits for most in (192, 193)] == [2, 7], "of short contexts, fewer"
    assert decode_tiles(QWEN, 1, 192, H200).num_splits == 6, "one alone has all there are steps of keys"
    assert decode_tiles(QWEN, 16, 8192, H200).num_splits == 2
    assert decode_tiles(QWEN, 64, 8192, H200).num_splits == 1
    assert decode_tiles(QWEN, 1, 100, H200).num_splits == 4, "no more than there are steps of keys"
    assert decode_tiles(QWEN, 16, 64, H200).num_splits == 1, "of twice as many where there are many sequences"
    assert decode_tiles(DEEPSEEK, 1, 8192, H200).tile_heads == 8, "smaller tiles, as each allows few splits"
    assert decode_tiles(DEEPSEEK, 64, 8192, H200).tile_heads == 16, "enough tiles as it is"


@pytest.mark.parametrize(
    ("size", "chip", "stages"),
    [(16, H200, 3), (24, H200, 4), (64, H200, 4), (128, H200, 3), (64, Chip(108, 164 << 10), 3), (64, Chip(128, 0), 3)],
)
def test_one_stage_more_where_it_fits_and_pays(size: int, chip: Chip, stages: int) -> None:
    assert decode_tiles(QWEN, size, 8192, chip).num_stages == stages


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_the_last_split_adds_up_fits_its_registers(shape: Shape) -> None:
    for size in (1, 2, 7, 64, 300):
        tiles = decode_tiles(shape, size, 8192, H200)
        splits, columns = combine_shape(shape, tiles)
        assert splits >= tiles.num_splits
        assert splits * columns * tiles.tile_heads <= COMBINED_AT_ONCE
        assert padded(shape.value_width) % columns == 0
        assert padded(shape.value_width) // columns <= 8, "written out one after another"


def test_long_prefills_get_large_tiles() -> None:
    assert prefill_tiles(QWEN, 4096, 4096, 132).block_m == 128
    assert prefill_tiles(QWEN, 256, 256, 132).block_m == 64
    assert prefill_tiles(QWEN, 16, 16, 132).block_m == 32


@pytest.mark.parametrize("width", [1, 8, 16, 17, 24, 64, 72, 80, 96, 112, 128, 160, 192, 200, 256])
def test_parts_of_a_key_add_up(width: int) -> None:
    assert sum(key_parts(width)) == width
