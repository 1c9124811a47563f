"""Prompts by our kernel in Gluon, on Hopper GPUs: every batch against the reference, and captured graphs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from piecegraph.base import torch_compat
from piecegraph.llm.kernels.attention import gluon_paged, reference, triton_paged
from piecegraph.llm.kernels.attention.registry import choose_kernel
from piecegraph.llm.specs import Accepted, AttentionLayer
from tests.cases.attention import Problem, Sequences, assert_close, check_against, layer, problem, run
from tests.gpu.test_gpu_attention import BATCHES, CUDA, HALF, LARGE, MIXED, Bucket, check_replays

pytestmark = pytest.mark.gpu
DEVICE = torch.device(CUDA)
LAYERS = [layer(32, 8, 128), layer(9, 3, 64), layer(71, 1, 64), layer(16, 1, 128)]
FEW = Sequences(name="few of many", spans=((200, 200), (1, 300), (129, 140)), padded_seqs=200)


@pytest.fixture(autouse=True)
def _every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    if not isinstance(gluon_paged.KERNEL.supports(LAYERS[0], HALF, DEVICE), Accepted):
        pytest.skip("this is no Hopper GPU")
    monkeypatch.setattr(gluon_paged, "MIN_TOKENS", 2)


@pytest.mark.parametrize("sequences", [*BATCHES, *LARGE, FEW], ids=lambda s: s.name)
@pytest.mark.parametrize("spec", LAYERS, ids=lambda s: f"{s.num_heads}-{s.num_kv_heads}-{s.key_width}")
def test_batches(spec: AttentionLayer, sequences: Sequences) -> None:
    check_against(gluon_paged.KERNEL, reference.KERNEL, spec, sequences, HALF, CUDA)


@pytest.mark.parametrize("block_size", [8, 48, 128, 256])
def test_block_sizes(block_size: int) -> None:
    for sequences in (MIXED, LARGE[1], LARGE[3]):
        changed = dataclasses.replace(sequences, block_size=block_size)
        check_against(gluon_paged.KERNEL, reference.KERNEL, layer(8, 4, 128), changed, torch.float16, CUDA)


@pytest.mark.parametrize("decode_share", [0.0, 0.9])
def test_replays(decode_share: float) -> None:
    bucket = Bucket("gluon", layer(32, 8, 128), 256, 40, 200, decode_share=decode_share, replays=60)
    check_replays(bucket, gluon_paged.KERNEL, may_clear=True)


def test_strided_inputs() -> None:
    """q, k and v as slices of one fused projection, and caches whose blocks lie apart."""
    case: Problem = problem(layer(8, 2, 128), MIXED, HALF, CUDA)
    fused = torch.cat([case.arguments[name] for name in ("q", "k", "v")], 1)
    case.arguments.update(zip(("q", "k", "v"), fused.split([8, 2, 2], 1), strict=True))
    both = torch.stack([case.arguments["key_cache"], case.arguments["value_cache"]], 1)
    case.arguments.update(zip(("key_cache", "value_cache"), both.unbind(1), strict=True))
    run(gluon_paged.KERNEL, case)
    assert_close(case.arguments["out"], case.expected, HALF)


def test_counters_are_left_as_they_were_found() -> None:
    check_against(gluon_paged.KERNEL, reference.KERNEL, LAYERS[0], LARGE[0], HALF, CUDA)
    assert gluon_paged._counters(DEVICE).tolist() == [0, 0]


def test_compiled_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By copies, in another form than any other test has: the launch finds it."""
    source = pytest.importorskip("triton.experimental.gluon._runtime").GluonASTSource
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    case = problem(layer(8, 4, 64), dataclasses.replace(LARGE[0], block_size=32), torch.float16, CUDA, defined=False)
    with torch_compat.compiled_aside(DEVICE, torch_compat.fork_compilers()):
        run(gluon_paged.KERNEL, case)
    assert len(list(tmp_path.glob("*/prefill_kernel.cubin"))) == 1
    monkeypatch.setattr(source, "make_ir", None)  # what compiles would call it
    run(gluon_paged.KERNEL, case)


def test_chosen_where_it_is_of_use() -> None:
    plain, windowed = layer(16, 8, 128), layer(16, 8, 128, window=50)
    _, why = choose_kernel("gluon", [plain, windowed], HALF, DEVICE)
    assert "in 1 layers by triton (a limited reach)" in why
    assert choose_kernel("auto", [windowed], HALF, DEVICE)[0] is triton_paged.KERNEL
