"""How many blocks the cache gets, and which sizes steps are padded to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piecegraph.errors import ModelError
from piecegraph.llm.run.request import Request
from piecegraph.llm.run.sampling_params import SamplingParams
from piecegraph.llm.run.sizing import CacheNeeds, choose_step_sizes, size_cache
from piecegraph.llm.run.step import LONG_CONTEXT, Bucket, StepPlan, Work
from piecegraph.llm.specs import SHORT_CONTEXT, Reach

NEEDS = CacheNeeds(
    reaches=(Reach(), Reach(window=32)),
    bytes_per_block=(100, 300),
    block_size=16,
    max_num_seqs=8,
    max_model_len=1024,
    max_batch_tokens=64,
)
ALL = 8 * 64 + 1, 8 * 3 + (4 + 8) + 1
"""Every sequence at its longest; of the window three blocks each, and what a step writes before it gives back."""


def step(num_seqs: int, num_tokens: int, *, decoding: int = 0) -> StepPlan:
    """A mixed step whose first sequence has one token, behind so many; the last has what is left."""
    request = Request("a", [1], SamplingParams())
    starts, counts = [decoding] + [0] * (num_seqs - 1), [1] * (num_seqs - 1) + [num_tokens - num_seqs + 1]
    works = tuple(Work(request, start, count, True) for start, count in zip(starts, counts, strict=True))
    return StepPlan(works, num_tokens, "mixed")


def test_no_more_than_can_be_used() -> None:
    assert size_cache(NEEDS, 10**9) == ALL
    assert size_cache(replace(NEEDS, max_tokens=320), 10**9) == (21, 21)


def test_full_attention_gives_way_before_windows_do() -> None:
    budget = 30_000
    full, window = size_cache(NEEDS, budget)
    assert window == ALL[1]
    assert budget - 100 < full * 100 + window * 300 <= budget


def test_windows_never_take_more_than_half() -> None:
    many = replace(NEEDS, reaches=(Reach(), Reach(window=512)))
    assert size_cache(many, 10_000) == (52, 16), "4,800 of 5,000 for the window"


def test_layers_that_all_have_a_window_share_everything() -> None:
    assert size_cache(replace(NEEDS, reaches=(Reach(chunk=512), Reach(window=512))), 10_000) == (25, 25)


def test_a_model_without_attention_needs_no_blocks() -> None:
    assert size_cache(replace(NEEDS, reaches=(), bytes_per_block=()), 0) == ()


def test_one_block_for_a_sequence_is_the_least() -> None:
    assert size_cache(NEEDS, 1600) == (10, 2)
    with pytest.raises(ModelError, match=r"PG665 there is no room for the cache in 0 MiB: a block of 16 tokens takes"):
        size_cache(NEEDS, 1199)


def test_steps_keep_their_size_without_graphs() -> None:
    sizes = choose_step_sizes("auto", has_graphs=False, max_num_seqs=8, max_batch_tokens=64, max_model_len=8192)
    assert sizes.bucket_for(step(3, 7)) == Bucket(7, 3)
    assert sizes.bucket_for(step(3, 47, decoding=LONG_CONTEXT)) == Bucket(47, 3, separates_prompts=True)
    assert sizes.all() == sizes.at_start() == []


def test_of_a_ladder_powers_are_recorded_at_the_start() -> None:
    sizes = choose_step_sizes("auto", has_graphs=True, max_num_seqs=40, max_batch_tokens=200, max_model_len=8192)
    first = sizes.at_start()
    assert [bucket.num_seqs for bucket in first if bucket.kind == "decode"] == [1, 8, 16, 32, 40]
    assert [bucket.num_tokens for bucket in first if bucket.kind == "mixed"] == [
        tokens for tokens in (16, 64, 200) for _ in ("few sequences", "all")
    ]
    assert {Bucket(24, 24, "decode"), Bucket(48, 8)} <= set(sizes.all()) - set(first)


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (8, [1, 8]),
        (100, [1, 8, 16, 32, 64, 96, 100]),
        (256, [1, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256]),
        (1000, [1, 8, 16, 32, 64, 128, 256, 384, 512, 640, 768, 896, 1000]),
    ],
)
def test_large_steps_of_decoding_are_padded_by_an_eighth_at_most(most: int, expected: list[int]) -> None:
    sizes = choose_step_sizes("auto", has_graphs=True, max_num_seqs=most, max_batch_tokens=8192, max_model_len=8192)
    assert [bucket.num_seqs for bucket in sizes.at_start() if bucket.kind == "decode"] == expected


def test_the_smallest_bucket_that_holds_a_step() -> None:
    sizes = choose_step_sizes([4, 1, 32], has_graphs=True, max_num_seqs=16, max_batch_tokens=64, max_model_len=8192)
    assert [sizes.decode_bucket(n).num_seqs for n in (1, 2, 4, 5)] == [1, 4, 4, 5]
    plans = [step(seqs, tokens) for seqs, tokens in ((1, 1), (2, 5), (9, 9), (1, 40))]
    many = Bucket(32, 16, separates_prompts=True)
    assert [sizes.bucket_for(plan) for plan in plans] == [Bucket(1, 1), Bucket(32, 8), many, Bucket(40, 8)]
    assert sizes.at_start() == sizes.all()
    assert {Bucket(32, 8), many} < set(sizes.all())


@pytest.mark.parametrize(
    ("most", "expected"),
    [(256, Bucket(64, 64, separates_prompts=True)), (8, Bucket(64, 8, separates_prompts=True))],
)
def test_a_long_sequence_that_decodes_is_kept_apart_from_prompts(most: int, expected: Bucket) -> None:
    sizes = choose_step_sizes(
        "auto", has_graphs=True, max_num_seqs=most, max_batch_tokens=512, max_model_len=LONG_CONTEXT + 1
    )
    assert sizes.bucket_for(step(2, 60, decoding=LONG_CONTEXT)) == expected
    assert sizes.bucket_for(step(1, 60)) == Bucket(64, 8 if most > 8 else 1)
    assert sizes.bucket_for(step(2, 9, decoding=LONG_CONTEXT)).num_tokens == 32, "the shortest keep nobody apart"
    short = sizes.bucket_for(step(2, 60, decoding=LONG_CONTEXT - 1))
    assert short.separates_prompts == (most == 8), "with few sequences only a prompt alone is not"
    assert expected in sizes.all()


def test_a_few_short_sequences_that_decode_have_sizes_of_their_own() -> None:
    sizes = choose_step_sizes(
        "auto", has_graphs=True, max_num_seqs=16, max_batch_tokens=64, max_model_len=8192, short_seqs=8
    )

    def bucket_of(num_seqs: int, longest: int) -> Bucket:
        request = Request("long", [1] * longest, SamplingParams())
        works = [Work(request, 3, 1, True)] * (num_seqs - 1) + [Work(request, longest - 1, 1, True)]
        return sizes.bucket_for(StepPlan(tuple(works), num_seqs, "decode"))

    short = Bucket(8, 8, "decode", is_short=True)
    assert [bucket_of(num_seqs, SHORT_CONTEXT) for num_seqs in (5, 8)] == [short, short]
    assert bucket_of(5, SHORT_CONTEXT + 1) == Bucket(8, 8, "decode")
    assert bucket_of(4, 5) == Bucket(4, 4, "decode"), "fewer have no other"
    assert bucket_of(9, 5) == Bucket(16, 16, "decode")
    assert [bucket for bucket in sizes.all() if bucket.is_short] == [short]
    assert short in sizes.at_start()


@pytest.mark.parametrize("most", [SHORT_CONTEXT, SHORT_CONTEXT + 1])
def test_no_other_size_where_all_sequences_are_short(most: int) -> None:
    sizes = choose_step_sizes(
        "auto", has_graphs=True, max_num_seqs=16, max_batch_tokens=64, max_model_len=most, short_seqs=8
    )
    assert any(bucket.is_short for bucket in sizes.all()) == (most > SHORT_CONTEXT)


def test_nobody_is_kept_apart_where_no_sequence_is_long() -> None:
    sizes = choose_step_sizes("auto", has_graphs=True, max_num_seqs=4, max_batch_tokens=64, max_model_len=LONG_CONTEXT)
    assert not any(bucket.separates_prompts for bucket in sizes.all())
