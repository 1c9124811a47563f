"""Plain attention over the paged cache against its definition."""

from __future__ import annotations

import pytest
import torch

from piecegraph.llm.kernels.attention import reference
from tests.cases.attention import Sequences, check, latent_layer, latent_problem, layer, problem, run

DECODE = Sequences(name="decode", spans=((1, 5), (1, 1), (1, 37)), block_size=4)
PADDED_DECODE = Sequences(
    name="padded decode", spans=((1, 16), (1, 17)), padded_tokens=2, padded_seqs=2, max_seq_len=64
)
PREFILL = Sequences(name="prefill", spans=((7, 7), (1, 1), (20, 20)), block_size=4)
MIXED = Sequences(
    name="mixed", spans=((3, 19), (1, 30), (9, 9), (1, 1)), padded_tokens=6, padded_seqs=3, block_size=8, max_seq_len=50
)
SEQUENCES = [DECODE, PADDED_DECODE, PREFILL, MIXED]
LAYERS = {
    "plain": layer(4, 4, 16),
    "gqa": layer(6, 2, 16),
    "mqa": layer(4, 1, 24),
    "window": layer(4, 2, 16, window=5),
    "chunk": layer(4, 2, 16, chunk=6),
    "window of one": layer(2, 2, 16, window=1),
    "softcap": layer(4, 2, 16, softcap=2.0),
    "sinks": layer(4, 2, 16, has_sinks=True),
    "sinks, window": layer(4, 2, 16, has_sinks=True, window=7),
    "softcap, sinks, chunk": layer(4, 2, 16, softcap=1.5, has_sinks=True, chunk=8),
    "narrow values": layer(4, 2, 24, value_width=8),
    "wide values": layer(4, 2, 8, value_width=24),
    "latent": latent_layer(3, latent=16, rope=8, nope=12, value=10),
}


@pytest.mark.parametrize("sequences", SEQUENCES, ids=lambda s: s.name)
@pytest.mark.parametrize("spec", LAYERS.values(), ids=LAYERS.keys())
def test_matches_the_definition(spec: object, sequences: Sequences) -> None:
    check(reference.KERNEL, spec, sequences)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sequences", [DECODE, MIXED], ids=lambda s: s.name)
@pytest.mark.parametrize("name", ["gqa", "sinks", "latent"])
def test_half_types(name: str, sequences: Sequences, dtype: torch.dtype) -> None:
    check(reference.KERNEL, LAYERS[name], sequences, dtype)


def test_half_types_are_computed_in_float32() -> None:
    case = problem(layer(4, 2, 16), MIXED, torch.bfloat16)
    run(reference.KERNEL, case)
    out = case.arguments["out"]
    half_a_step = 2**-8 * 1.001  # nothing but the result is rounded
    torch.testing.assert_close(out.double(), case.expected, rtol=half_a_step, atol=1e-6)


def test_new_tokens_are_in_the_cache_and_padding_went_to_block_zero() -> None:
    case = problem(layer(4, 2, 16), MIXED, torch.float32)
    before = case.arguments["key_cache"].clone()
    run(reference.KERNEL, case)
    cache, fresh = case.arguments["key_cache"], case.arguments["k"]
    num_real = MIXED.num_tokens - MIXED.padded_tokens
    real = case.batch.slots[:num_real]
    assert torch.equal(cache.flatten(0, 1)[real], fresh[:num_real])
    untouched = torch.ones(cache.shape[0] * cache.shape[1], dtype=torch.bool)
    untouched[case.batch.slots] = False
    left, kept = cache.flatten(0, 1)[untouched], before.flatten(0, 1)[untouched]
    torch.testing.assert_close(left, kept, rtol=0, atol=0, equal_nan=True)


def test_strided_inputs() -> None:
    """q, k and v may be slices of one fused projection."""
    case = problem(layer(4, 2, 16), MIXED, torch.float32)
    for name in ("q", "k", "v"):
        value = case.arguments[name]
        case.arguments[name] = torch.stack([value, value], 2)[:, :, 0]
    run(reference.KERNEL, case)
    torch.testing.assert_close(case.arguments["out"], case.expected.float(), rtol=1e-5, atol=1e-5)


def test_a_second_batch_reads_what_the_first_wrote() -> None:
    spec = latent_layer(2, latent=8, rope=4, nope=4, value=4)
    whole = latent_problem(spec, Sequences(name="whole", spans=((12, 12),)), torch.float32)
    run(reference.KERNEL, whole)
    last = latent_problem(spec, Sequences(name="last", spans=((1, 12),)), torch.float32)
    last.arguments.update(cache=whole.arguments["cache"])
    for name in ("q", "latent", "rope"):
        last.arguments[name] = whole.arguments[name][-1:]
    for name in ("block_table", "slots"):
        getattr(last.batch, name).copy_(getattr(whole.batch, name)[-1:])
    run(reference.KERNEL, last)
    torch.testing.assert_close(last.arguments["out"], whole.arguments["out"][-1:])
