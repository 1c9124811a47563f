"""Which prompts our kernel in Gluon takes, and what it is told of a cache: no GPU is needed for that."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from piecegraph.llm.kernels.attention import flash, gluon_paged, triton_paged
from piecegraph.llm.kernels.chip import has_gluon
from piecegraph.llm.specs import Accepted, AttentionLayer, Rejected
from tests.cases.attention import Sequences, latent_layer, layer, problem

PLAIN = layer(8, 2, 128)
LEFT = {
    "a limited reach": layer(8, 2, 128, window=50),
    "a soft cap or sinks": layer(8, 2, 128, has_sinks=True),
    "heads of 96 and 96": layer(8, 2, 96),
    "heads of 128 and 64": layer(8, 2, 128, value_width=64),
    "latent": latent_layer(2, 8, 4, 4, 4),
}


def for_prompts(spec: AttentionLayer, num_tokens: int, block_size: int = 16) -> object:
    case = problem(spec, Sequences(name="one", spans=((num_tokens, num_tokens),)), torch.bfloat16)
    given = {name: value for name, value in case.arguments.items() if name != "batch"}
    batch = dataclasses.replace(case.batch, block_size=block_size)
    return gluon_paged.for_prompts(triton_paged.plain_operands(**given), batch)


def test_small_steps_are_left_to_triton() -> None:
    assert for_prompts(PLAIN, gluon_paged.MIN_TOKENS) is gluon_paged.launch
    assert for_prompts(PLAIN, gluon_paged.MIN_TOKENS - 1) is None


@pytest.mark.parametrize(("block_size", "is_taken"), [(8, True), (48, True), (128, True), (1, False), (20, False)])
def test_blocks_are_taken_in_rows_of_eight(block_size: int, is_taken: bool) -> None:
    assert (for_prompts(PLAIN, 200, block_size) is gluon_paged.launch) == is_taken


@pytest.mark.parametrize("reason", LEFT)
def test_other_layers_are_left_to_triton(reason: str) -> None:
    """And the choice of a kernel says so."""
    spec = LEFT[reason]
    if isinstance(spec, AttentionLayer):
        assert for_prompts(spec, 200) is None
    use_for = gluon_paged.KERNEL.use_for
    assert use_for is not None
    assert use_for([spec]) == Rejected(f"prompts of no layer: {reason}")
    verdict = use_for([PLAIN, spec])
    assert isinstance(verdict, Accepted)
    assert verdict.note.startswith("prompts by our kernel for Hopper GPUs in steps of 128 tokens or more")
    assert verdict.note.endswith(f"in 1 layers by triton ({reason})")


def test_flash_leaves_the_same_layers_but_for_its_widths() -> None:
    use_for = flash.KERNEL.use_for
    assert use_for is not None
    for reason, spec in LEFT.items():
        assert isinstance(use_for([spec]), Accepted) == (reason == "heads of 96 and 96")


def test_not_without_a_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    supports, gpu = gluon_paged.KERNEL.supports, torch.device("cuda", 0)
    assert supports(PLAIN, torch.bfloat16, torch.device("cpu")) == Rejected("it is for Hopper GPUs")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert supports(PLAIN, torch.bfloat16, gpu) == Rejected("it is for Hopper GPUs")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert supports(PLAIN, torch.float32, gpu) == Rejected("torch.float32 is neither float16 nor bfloat16")


@pytest.mark.parametrize(("version", "is_enough"), [("3.5.1", False), ("3.6.0", True), ("3.10.0+git1", True)])
def test_not_with_an_older_triton(version: str, is_enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    has_gluon.cache_clear()
    verdict = gluon_paged.KERNEL.supports(PLAIN, torch.bfloat16, torch.device("cuda", 0))
    has_gluon.cache_clear()
    assert verdict == (Accepted() if is_enough else Rejected("Triton 3.6 is needed"))


def test_a_cache_as_rows_of_tokens() -> None:
    """Also one of two that lie in turns."""
    both = torch.arange(3 * 2 * 4 * 2 * 8).view(3, 2, 4, 2, 8)
    for cache in (both[:, 0].clone(), both[:, 1]):
        rows = gluon_paged._token_rows(cache)
        step = cache.stride(0) // cache.stride(1)
        for block, offset, head in ((0, 0, 0), (1, 3, 1), (2, 3, 1)):
            found = rows[block * step + offset, head * cache.stride(2) :][:8]
            assert torch.equal(found, cache[block, offset, head])
