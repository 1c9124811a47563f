"""Prompts by FlashAttention 4, where it is installed: every batch against the reference, and captured graphs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from piecegraph.llm.kernels.attention import flash, reference, triton_paged
from piecegraph.llm.kernels.attention.registry import choose_kernel
from piecegraph.llm.specs import Accepted, AttentionLayer
from tests.cases.attention import Sequences, check_against, layer
from tests.gpu.test_gpu_attention import BATCHES, CUDA, HALF, LARGE, Bucket, check_replays

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
LAYERS = [layer(16, 8, 128), layer(32, 8, 128), layer(9, 3, 64), layer(8, 8, 96), layer(71, 1, 64), layer(8, 2, 128)]


@pytest.fixture(autouse=True)
def _every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    if not isinstance(flash.KERNEL.supports(LAYERS[0], HALF, torch.device(CUDA)), Accepted):
        pytest.skip("flash-attn-4 is not installed, or this is no Hopper GPU")
    monkeypatch.setattr(flash, "MIN_TOKENS", 2)


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("sequences", [*BATCHES, *LARGE], ids=lambda s: s.name)
@pytest.mark.parametrize("spec", LAYERS, ids=lambda s: f"{s.num_heads}-{s.num_kv_heads}-{s.key_width}")
def test_batches(spec: AttentionLayer, sequences: Sequences, block_size: int) -> None:
    changed = dataclasses.replace(sequences, block_size=block_size)
    check_against(flash.KERNEL, reference.KERNEL, spec, changed, HALF, CUDA)


@pytest.mark.parametrize("decode_share", [0.0, 0.9])
def test_replays(decode_share: float) -> None:
    bucket = Bucket("flash", layer(16, 8, 128), 256, 40, 200, decode_share=decode_share, replays=60, block_size=128)
    check_replays(bucket, flash.KERNEL, may_clear=True)


def test_chosen_where_it_is_of_use() -> None:
    plain, windowed = layer(16, 8, 128), layer(16, 8, 128, window=50)
    kernel, why = choose_kernel("auto", [plain, windowed], HALF, torch.device(CUDA))
    assert kernel is flash.KERNEL
    assert "in 1 layers by triton (a limited reach)" in why
    assert choose_kernel("auto", [windowed], HALF, torch.device(CUDA))[0] is triton_paged.KERNEL
