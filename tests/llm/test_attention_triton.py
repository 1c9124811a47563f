"""The Triton kernels in Triton's interpreter, on the CPU."""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import piecegraph.llm.kernels.linear  # noqa: F401 - defines an op
from piecegraph.llm.kernels.attention import triton_paged
from piecegraph.llm.kernels.race import (
    first_largest,
    keep_allowed,
    launch_draw,
    launch_first_largest,
    launch_keep_allowed,
    launch_weights,
    random_keys,
)
from piecegraph.llm.kernels.skinny import Heads, Linear, Tile, launch_tiles, plain, plain_rotate
from piecegraph.llm.kernels.truncate import launch_truncate, truncate
from piecegraph.llm.run.sampling import HOTTEST, sample
from piecegraph.llm.specs import Accepted, Rejected
from tests.cases.attention import Sequences, check, latent_layer, layer, problem, run
from tests.cases.interpreter import needs_interpreter, print_verdicts, verdicts_of
from tests.llm.test_attention_reference import DECODE, LAYERS, MIXED, PADDED_DECODE, PREFILL

LONG_DECODE = Sequences(  # one split, several, and one that is not quite full; more blocks than one step has keys
    name="long decode", spans=((1, 200), (1, 3), (1, 129)), padded_tokens=1, padded_seqs=1, max_seq_len=256
)
DECODES_FIRST = Sequences(  # as a step under load: rows of decoding, then prompts; few and long, so that keys are split
    name="decodes first",
    spans=((1, 200), (1, 3), (7, 40), (1, 9), (5, 5)),
    padded_tokens=2,
    padded_seqs=1,
    max_prompts=4,
)
LARGE_BLOCKS = Sequences(
    name="large blocks", spans=((3, 80), (1, 70), (5, 5)), padded_tokens=3, padded_seqs=1, block_size=32
)
MORE_LAYERS = {
    **LAYERS,
    "width 80": layer(2, 1, 80),
    "more heads than a tile": layer(20, 1, 16),
    "more latent heads than a tile": latent_layer(20, latent=24, rope=8, nope=8, value=8),
}
CASES = {
    f"{name}: {sequences.name}, {dtype}": (spec, sequences, dtype)
    for name, spec in MORE_LAYERS.items()
    for sequences in (DECODE, PADDED_DECODE, LONG_DECODE, PREFILL, MIXED, DECODES_FIRST, LARGE_BLOCKS)
    for dtype in (torch.float32, torch.float16)  # the interpreter multiplies the bits of bfloat16
    if name in ("gqa", "latent") or (dtype == torch.float32 and sequences in (LONG_DECODE, MIXED, DECODES_FIRST))
}


@needs_interpreter
def test_every_case_matches_the_definition() -> None:
    expected = dict.fromkeys([*CASES, *OTHERS], "right")
    assert verdicts_of("tests.llm.test_attention_triton") == expected


def test_says_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cpu = torch.device("cpu")
    supports = triton_paged.KERNEL.supports
    assert isinstance(supports(layer(2, 2, 64), torch.float32, cpu), Rejected)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert supports(layer(2, 2, 64), torch.float32, cpu) == Accepted()
    for spec in (layer(2, 2, 264), latent_layer(2, 1024, 64, 128, 128)):
        assert isinstance(supports(spec, torch.float32, cpu), Rejected)
    assert isinstance(supports(layer(2, 2, 64), torch.float64, cpu), Rejected)


def _many_launches() -> None:
    """The count of arrived splits is back at zero after each launch, whatever the batch was."""
    for seed, spans in enumerate([((1, 200), (1, 3)), ((1, 60), (1, 61)), ((1, 1), (1, 250)), ((1, 200), (1, 199))]):
        sequences = Sequences(name="", spans=spans, max_seq_len=256)
        case = problem(layer(4, 2, 16), sequences, torch.float32, seed=seed)
        run(triton_paged.KERNEL, case)
        torch.testing.assert_close(case.arguments["out"].double(), case.expected, rtol=2e-5, atol=2e-5)


def _winners_of_a_race() -> None:
    """Those of plain torch, whatever the temperature, and the likeliest token or none where that is wanted."""
    rows, count = 9, 5000
    keys = torch.from_numpy(random_keys(np.arange(rows, dtype=np.uint64), np.arange(rows)))
    logits = 3 * torch.randn(rows, count, generator=torch.Generator().manual_seed(0))
    logits[7, :4000], logits[8, 3] = float("-inf"), float("nan")
    temperature = torch.tensor([1.0, 0.0, 0.3, 1.0, 5.0, 1e-45, HOTTEST, 0.7, 1.0])
    for table in (logits, torch.cat((logits, logits), 1)[:, :count]):
        best = first_largest(table, -1)
        expected = sample(table, temperature, torch.zeros(rows), torch.ones(rows), keys, mode="plain")
        found = launch_draw(table, best, temperature, keys)
        assert found.tolist() == expected.tolist()
        assert found[[1, 5, 8]].tolist() == best[[1, 5, 8]].tolist()
        weights = launch_weights(table, best, temperature)
        assert launch_draw(table, best, temperature, keys, weights).tolist() == found.tolist()
        weights[0, found[0]] = 0.0
        assert launch_draw(table, best, temperature, keys, weights)[0] != found[0]


def _likeliest_tokens() -> None:
    """The first of equals, in whichever part of a row they are; none in a row that is not numbers."""
    rows = torch.rand(9, 5000, generator=torch.Generator().manual_seed(0))
    rows[1, [4999, 2047, 2048]] = 2.0
    rows[2, [7, 8]] = 2.0
    rows[3, 4100], rows[4, 3] = float("nan"), float("inf")
    rows[5], rows[6, :4000], rows[7] = float("-inf"), float("-inf"), -3e38
    for logits in (rows, rows.bfloat16(), torch.cat((rows, rows), 1)[:, :5000]):
        found = launch_first_largest(logits, -1)
        assert found.tolist() == first_largest(logits, -1).tolist()
        assert found[[1, 2, 3, 4, 5, 7]].tolist() == [2047, 7, -1, -1, -2, 0]


def _allowed_tokens() -> None:
    """Also where the head is narrower or wider than the table of bits."""
    masks = torch.randint(0, 256, (3, 516), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for count in (4100, 4128, 5000):
        rows = torch.rand(3, count)
        for logits in (rows, rows.bfloat16(), torch.cat((rows, rows), 1)[:, :count]):
            found = launch_keep_allowed(logits, masks)
            assert found.dtype == logits.dtype
            assert torch.equal(found, keep_allowed(logits, masks))


def _truncated_weights() -> None:
    """As by sorting, also where many tokens are equally likely, and where only the last bits tell them apart.

    Some parts have more candidates than are written down, in parts that are small so that a row has several.
    """
    from piecegraph.llm.kernels import truncate_kernels

    constant, count = type(truncate_kernels.BLOCK), 2500
    small = {"BLOCK": constant(1024), "_TILE": constant(256), "CANDIDATES": constant(64), "_FEW": constant(64)}
    rows = 3 * torch.randn(12, count, generator=torch.Generator().manual_seed(0))
    rows[9] = torch.linspace(1, 1 - 1e-4, count)
    rows[10, 900:], rows[11] = float("-inf"), 0.0
    rows[11, ::2] *= -1  # there are two zeros
    top_k = torch.tensor([0, 1, 7, 0, 40, 0, 0, 10_000, 2, 700, 1300, 7])
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.9, 0.5, 1e-45, 0.95, 0.3, 0.7, 0.25, 0.8, 0.1])
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.2, 0.0, 1.0, 0.0, 0.0, 0.0])
    for logits, least in ((rows, None), (rows.bfloat16(), min_p), (rows.round(), min_p)):
        scaled = logits.float() - logits.float().amax(-1, keepdim=True)
        found = scaled.exp()
        with mock.patch.multiple(truncate_kernels, **small):
            launch_truncate(logits, found, top_k, top_p, least)
        assert torch.equal(found, truncate(scaled, scaled.exp(), top_k, top_p, least))
        assert (found > 0).any(-1).all()


def _fixed_linears() -> None:
    x, weight = torch.randn(70, 40), torch.randn(50, 40)
    for bias in (None, torch.randn(50)):
        found = torch.ops.piecegraph.fixed_linear(x[None], weight, bias)
        torch.testing.assert_close(found[0], F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
        assert torch.equal(torch.ops.piecegraph.fixed_linear(x[33:40], weight, bias), found[0, 33:40])


def _fixed_attention() -> None:
    case = problem(layer(4, 2, 16), MIXED, torch.float32)
    run(triton_paged.FIXED_KERNEL, case)
    torch.testing.assert_close(case.arguments["out"].double(), case.expected, rtol=2e-5, atol=2e-5)


def _cleared() -> None:
    """What is behind the end of a prompt, and padded rows of the results, are zeros if asked for; nothing else is."""
    case = problem(layer(4, 2, 16), DECODES_FIRST, torch.float32)
    arguments = case.arguments
    before = {name: arguments[name].clone() for name in ("out", "value_cache")}
    operands = {name: part for name, part in arguments.items() if name != "batch"}
    triton_paged.write(triton_paged.plain_operands(**operands), case.batch, clears=True)
    num_real = int(case.batch.query_starts[-1])
    assert not arguments["out"][num_real:].any()
    assert torch.equal(arguments["out"][:num_real].isnan(), before["out"][:num_real].isnan())
    for seq, (_, length) in enumerate(DECODES_FIRST.spans):
        block, offset = divmod(length - 1, 16)
        behind = arguments["value_cache"][int(case.batch.block_table[seq, block]), offset + 1 :]
        assert not behind.any() if seq >= 2 else bool(behind.isnan().all())


def _turned_heads() -> None:
    """One sequence by two kernels, several by one; prompts by the kernel that writes to the cache; both in one step."""
    each = (((1, 40),), ((1, 200), (1, 3), (1, 129)))
    alone, several = (Sequences(name="", spans=spans, max_seq_len=256) for spans in each)
    for sequences, has_norm in itertools.product((alone, several, MIXED, DECODES_FIRST), (False, True)):
        case = problem(layer(4, 2, 16), sequences, torch.float32)
        arguments, expected = case.arguments, copy.deepcopy(case.arguments)
        turn = torch.randn(2, 1, arguments["q"].shape[0], 16)
        heads = Heads(*turn, *(torch.rand(2, 16) if has_norm else (None, None)), 1e-6)
        rows = [arguments.pop(name).flatten(1)[None] for name in ("q", "k", "v")]
        expected |= zip(("q", "k", "v"), plain_rotate(*rows, heads), strict=True)
        triton_paged.attend(**expected)
        with mock.patch.object(triton_paged, "fits_heads", return_value=True):
            triton_paged.attend_turned(*rows, heads, **arguments)
        for name in ("out", "key_cache", "value_cache"):
            torch.testing.assert_close(arguments[name], expected[name], rtol=2e-5, atol=2e-5, equal_nan=True)


def _linears_of_some_rows() -> None:
    """With a gate and without, behind which a residual is added."""
    x, weight, bias = torch.randn(20, 64), torch.randn(48, 64), torch.randn(48)
    for is_gated, given in itertools.product((False, True), (None, bias)):
        residual = torch.randn(20, 24 if is_gated else 48)
        linear = Linear(weight, given, residual=residual, is_gated=is_gated)
        out = torch.empty_like(residual)
        launch_tiles(x, linear, residual, out, Tile("some_rows", 16, 32, 4, 2))
        torch.testing.assert_close(out, plain(x, linear), rtol=1e-5, atol=1e-4)


OTHERS = {
    "heads that attention turns": _turned_heads,
    "linears of some rows": _linears_of_some_rows,
    "what is cleared for another kernel": _cleared,
    "many launches over one workspace": _many_launches,
    "winners of a race": _winners_of_a_race,
    "truncated weights": _truncated_weights,
    "likeliest tokens": _likeliest_tokens,
    "allowed tokens": _allowed_tokens,
    "linears of fixed tiles": _fixed_linears,
    "attention of fixed tiles": _fixed_attention,
}

if __name__ == "__main__":
    jobs = {name: functools.partial(check, triton_paged.KERNEL, *case) for name, case in CASES.items()}
    print_verdicts({**jobs, **OTHERS})
