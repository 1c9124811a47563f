"""The pass that puts our op in the place of linears, and what the op does without a GPU."""

from __future__ import annotations

import itertools

import torch
import torch.fx
import torch.nn.functional as F

from piecegraph.llm.kernels import linear, skinny
from piecegraph.llm.kernels.chip import Chip
from piecegraph.llm.kernels.skinny import choose_tile, fits_chip


def test_pass_replaces_linears_and_changes_nothing() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Parameter(torch.randn(6, 4))
            self.bias = torch.nn.Parameter(torch.randn(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(F.linear(x, self.first, self.bias).relu(), self.first.t())

    module = Two()
    traced = torch.fx.symbolic_trace(module)
    for node in traced.graph.nodes:
        node.meta["example_value"] = torch.empty(6, 4) if node.op != "output" else None
    passed = linear.use_skinny_linears(traced)
    passed.recompile()
    targets = [node.target for node in passed.graph.nodes if node.op == "call_function"]
    assert targets.count(torch.ops.piecegraph.linear.default) == 2
    x = torch.randn(3, 4)
    torch.testing.assert_close(passed(x), module(x))


def test_a_product_over_a_depth_of_one_is_a_multiplication() -> None:
    class Both(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x @ y, y.matmul(x)

    x, y = torch.randn(2, 5, 1), torch.randn(2, 1, 5)
    traced = torch.fx.symbolic_trace(Both())
    for node in traced.graph.nodes:
        node.meta["example_value"] = {"x": x, "y": y}.get(node.name)
    passed = linear.use_outer_products(traced)
    passed.recompile()
    assert [node.target for node in passed.graph.nodes if node.op.startswith("call")] == [torch.mul, "matmul"]
    for found, expected in zip(passed(x, y), Both()(x, y), strict=True):
        assert torch.equal(found, expected)


def test_no_pass_without_a_gpu() -> None:
    assert linear.linear_passes(torch.device("cpu")) == ()


def test_tiles_cover_every_shape_they_are_chosen_for() -> None:
    for rows in range(1, 40):
        for columns, depth in [(64, 64), (1024, 2048), (4096, 4096), (28672, 4096), (4096, 14336), (1024, 2000)]:
            tile = skinny.choose_tile(rows, columns, depth)
            assert (tile is not None and tile.kernel == "one_row") is (rows == 1)
            if tile is not None:
                assert rows <= skinny.MOST_ROWS
            if tile is not None and tile.kernel == "narrow":  # every warp has a part of the depth, in whole blocks
                assert depth % (tile.num_warps * tile.depth) == 0


def test_every_tile_fits_the_chip_it_was_measured_on_and_those_of_few_stages_fit_smaller_ones() -> None:
    """Steps of 2 to 64 rows, of models of all sizes: with a norm, a gate, or neither."""
    h200, a100, ada = (Chip(128, kib << 10) for kib in (228, 164, 100))
    kinds = itertools.product((2, 8, 9, 16, 17, 32, 64), (512, 1024, 2048, 4096, 14336), (False, True), (False, True))
    fitting = 0
    for rows, depth, has_norm, is_gated in kinds:
        for columns in (1024, 4096, 6144, 28672):
            tile = choose_tile(rows, columns, depth, has_norm=has_norm, is_gated=is_gated)
            if tile is not None:
                assert fits_chip(tile, rows, h200, is_gated=is_gated), tile
                assert fits_chip(tile, rows, a100, is_gated=is_gated), tile
                fitting += fits_chip(tile, rows, ada, is_gated=is_gated)
    assert fitting, "of what does not fit there, cuBLAS does all"
