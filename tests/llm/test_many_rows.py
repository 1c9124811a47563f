"""Linears with a gate and many rows: where they become one op, and when our kernel is chosen. No GPU is needed."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.fx

from piecegraph import LLM
from piecegraph.errors import ConfigError
from piecegraph.llm.kernels import chip, linear, many_rows, skinny
from piecegraph.llm.kernels.many_rows import choose_tiles
from piecegraph.llm.kernels.skinny import Linear
from tests.cases.gated import Gated
from tests.graph.test_trace import trace_it

HALF = torch.bfloat16
GPU = torch.device("cuda", 0)
SHAPES = [(14336, 4096), (3072, 1024), (6144, 2048), (768, 512)]


def passed(module: Gated, x: torch.Tensor) -> tuple[torch.fx.GraphModule, torch.Tensor]:
    """What the pass makes of a block, and what that gives."""
    traced = trace_it(module, x)
    made = linear.use_gated_linears(torch.fx.GraphModule(module, traced.graph))
    made.recompile()
    inputs = [traced.inputs[node] for node in made.graph.nodes if node.op == "placeholder"]
    return made, made(*(getattr(source, "tensor", x) for source in inputs))[0]


def num_fused(module: torch.fx.GraphModule) -> int:
    return sum(node.target is torch.ops.piecegraph.fused_linear.default for node in module.graph.nodes)


def test_a_gate_becomes_part_of_its_linear() -> None:
    torch.manual_seed(0)
    block, x = Gated(8, 12), torch.randn(5, 8, dtype=HALF)
    made, found = passed(block, x)
    assert num_fused(made) == 1
    assert not [node for node in made.graph.nodes if "silu" in str(node.target)]
    torch.testing.assert_close(found, block(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("block", [Gated(8, 12, torch.float32), Gated(8, 12, has_bias=True)], ids=["single", "bias"])
def test_what_the_kernel_does_not_take_stays(block: Gated) -> None:
    x = torch.randn(5, 8, dtype=block.down.weight.dtype)
    made, found = passed(block, x)
    assert num_fused(made) == 0
    torch.testing.assert_close(found, block(x))


@pytest.mark.parametrize("fuse_gates", [False, True])
@pytest.mark.parametrize("has_kernel", [False, True])
def test_the_pass_is_for_gpus_with_the_kernel(
    has_kernel: bool, fuse_gates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(linear, "has_gated_kernel", lambda device: has_kernel)
    passes = linear.linear_passes(GPU, fuse_gates=fuse_gates)
    assert (linear.use_gated_linears in passes) == (has_kernel and fuse_gates)
    assert passes[-1] is linear.use_skinny_linears, "it takes what is left"
    assert linear.use_gated_linears not in linear.linear_passes(GPU, fuse_gates=fuse_gates, deterministic=True)


def test_the_kernel_is_for_hopper_and_new_versions_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    for capability, version, is_there in (((9, 0), "3.6.0", True), ((9, 0), "3.5.1", False), ((10, 0), "3.6.0", False)):
        monkeypatch.setattr(triton, "__version__", version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        chip.has_gluon.cache_clear()
        assert linear.has_gated_kernel(GPU) == is_there
    chip.has_gluon.cache_clear()


def test_without_triton_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    chip.has_gluon.cache_clear()
    assert not chip.has_gluon()
    chip.has_gluon.cache_clear()


@pytest.mark.parametrize(("columns", "depth"), SHAPES)
@pytest.mark.parametrize("num_processors", [114, 132])
def test_no_tiles_where_processors_would_wait(columns: int, depth: int, num_processors: int) -> None:
    """What is chosen never leaves more of the chip idle than cuBLAS and a kernel behind it take longer."""
    chosen = 0
    for rows in range(16, 4097, 16):
        tiles = choose_tiles(rows, columns, depth, num_processors)
        if tiles is None:
            continue
        chosen += 1
        count = -(-rows // 128) * -(-columns // (tiles.width // 2))
        waves_us = -(-count // num_processors) * depth / 64 * tiles.step_us
        products_us = 4 * rows * columns * depth / (5.6e6 * num_processors)
        assert waves_us <= max(products_us, 4 * columns * depth / 4.1e6) + 2.5 + 6 * rows * columns / 3.6e6
    assert chosen > 100, "it is for most sizes"


def test_few_columns_are_cut_finer_than_many() -> None:
    few, many = choose_tiles(256, 3072, 1024, 132), choose_tiles(256, 14336, 4096, 132)
    assert few is not None
    assert many is not None
    assert (few.width, many.width) == (128, 256)


def test_only_what_the_copy_engine_can_read_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_rows, "is_hopper", lambda device: True)
    monkeypatch.setattr(many_rows, "has_gluon", lambda: True)
    monkeypatch.setattr(many_rows, "choose_tiles", lambda *sizes: many_rows._TILES[0])
    x, weight = torch.zeros(70, 64, dtype=HALF), torch.zeros(2 * 24, 64, dtype=HALF)
    assert many_rows.tiles_for(x, weight) is many_rows._TILES[0]
    assert many_rows.tiles_for(x, torch.zeros(2 * 20, 64, dtype=HALF)) is None, "rows of the result"
    assert many_rows.tiles_for(torch.zeros(70, 68, dtype=HALF)[:, :64], weight) is None, "rows of the input"
    assert many_rows.tiles_for(torch.zeros(70, 72, dtype=HALF)[:, 4:68], weight) is None, "their beginning"
    assert many_rows.tiles_for(torch.zeros(70, 60, dtype=HALF), torch.zeros(48, 60, dtype=HALF)) is None, "the depth"


def test_with_more_around_it_a_linear_is_left_to_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_rows, "tiles_for", lambda x, weight: many_rows._TILES[0])
    x, weight, ones = torch.zeros(70, 64), torch.zeros(48, 64), torch.ones(64)

    def is_taken(rows: int = 70, *, early: bool = False, **around: torch.Tensor) -> bool:
        linear = Linear(weight, is_gated=True, **around)  # type: ignore[arg-type]
        return skinny._tiles_of_many(x[:rows], linear, early=early) is not None

    assert is_taken()
    assert not is_taken(16), "of few rows"
    assert not is_taken(early=True)
    assert not is_taken(gain=ones)
    assert not is_taken(bias=torch.ones(48))
    assert not is_taken(residual=torch.ones(70, 24))


def test_a_wrong_wish_is_refused() -> None:
    with pytest.raises(ConfigError, match="fuse_gates"):
        LLM("demo", options={"fuse_gates": "auto"})
