"""Which steps are recorded when, and which recorded step serves one that is not."""

from __future__ import annotations

import pytest

from piecegraph.llm.run.adjustment_buffers import SHORTEST
from piecegraph.llm.run.coverage import best_cover, first_keys, later_keys
from piecegraph.llm.run.model_step import StepKey
from piecegraph.llm.run.sampling import SamplingMode
from piecegraph.llm.run.sizing import choose_step_sizes
from piecegraph.llm.run.step import Bucket

LADDER = choose_step_sizes("auto", has_graphs=True, max_num_seqs=256, max_batch_tokens=8192, max_model_len=8192)


def decode(size: int, sampling: SamplingMode = "greedy") -> StepKey:
    return StepKey(Bucket(size, size, "decode"), sampling)


def short(size: int) -> StepKey:
    return StepKey(Bucket(size, size, "decode", is_short=True), "greedy")


def adjusted(size: int, num_adjusted: int = SHORTEST) -> StepKey:
    return StepKey(Bucket(size, size, "decode"), "greedy", num_adjusted=num_adjusted)


@pytest.mark.parametrize("num_adjusted", [0, SHORTEST])
@pytest.mark.parametrize("sampling", ["greedy", "plain", "truncated"])
def test_what_is_recorded_first_covers_every_step(sampling: SamplingMode, num_adjusted: int) -> None:
    first = first_keys(LADDER)
    for bucket in LADDER.all():
        found = best_cover(StepKey(bucket, sampling, num_adjusted=num_adjusted), first)
        assert found is not None
        if not num_adjusted:
            assert found.sampling == sampling
        if bucket.kind == "decode":
            assert found.bucket.num_tokens < max(2 * bucket.num_tokens, 17)
        else:
            assert found.bucket.num_tokens < (2 if bucket.num_tokens > 256 else 4) * bucket.num_tokens
        assert not found.has_masks


def test_what_is_recorded_first_covers_every_step_with_masks() -> None:
    first = first_keys(LADDER)
    for bucket in LADDER.all():
        found = best_cover(StepKey(bucket, "greedy", has_masks=True), first)
        assert found is not None
        assert bucket.kind == "mixed" or found.bucket.num_tokens < max(2 * bucket.num_tokens, 17)
    masked = [key for key in first if key.has_masks]
    assert {key.greedy for key in masked} <= set(first), "behind greedy steps"


def test_few_sizes_are_recorded_before_a_model_serves() -> None:
    first = [key.bucket for key in first_keys(LADDER) if key.sampling == "greedy"]
    decode = [bucket.num_tokens for bucket in first if bucket.kind == "decode"]
    assert decode == [1, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256]
    mixed = dict.fromkeys(bucket.num_tokens for bucket in first if bucket.kind == "mixed")
    assert list(mixed) == [16, 64, 256, 512, 1024, 2048, 4096, 8192]
    assert len({key.greedy for key in first_keys(LADDER)}) < 30, "others are samplers behind these"


def test_what_follows_is_in_the_order_of_need() -> None:
    load, few = later_keys(LADDER)
    every = [*first_keys(LADDER), *load, *few]
    assert {key.bucket for key in every} == set(LADDER.all())
    assert len(set(every)) == len(every), "nothing twice"
    assert all(key.bucket.kind == "decode" or key.bucket.num_seqs in (key.bucket.num_tokens, 256) for key in load)
    assert all(key.bucket.num_seqs == 8 for key in few)
    assert {key.sampling for key in load} == {key.sampling for key in few} == {"greedy", "plain", "truncated"}


def test_sizes_that_are_listed_are_all_recorded_first() -> None:
    sizes = choose_step_sizes([4, 24], has_graphs=True, max_num_seqs=16, max_batch_tokens=64, max_model_len=8192)
    assert {key.bucket for key in first_keys(sizes)} == set(sizes.all())
    assert [key for group in later_keys(sizes) for key in group] == []


def test_one_size_for_all_steps() -> None:
    sizes = choose_step_sizes(
        "auto", has_graphs=True, max_num_seqs=4, max_batch_tokens=64, max_model_len=8192, deterministic=True
    )
    greedy, *sampled = first_keys(sizes)
    assert greedy == StepKey(Bucket(64, 4), "greedy")
    plain, every = (
        StepKey(Bucket(64, 4), "truncated", False, each, SHORTEST, has_masks=True) for each in (False, True)
    )
    assert sampled == [plain, every]
    assert later_keys(sizes) == [[], []]


@pytest.mark.parametrize(
    ("wanted", "recorded", "expected"),
    [
        (decode(24), [decode(16), decode(32), decode(64)], decode(32)),
        (decode(24), [decode(24, "truncated"), decode(32)], decode(32)),
        (decode(24, "plain"), [decode(24), decode(32, "truncated"), decode(64, "plain")], decode(32, "truncated")),
        (decode(24, "truncated"), [decode(24, "plain"), decode(32)], None),
        (decode(24), [adjusted(24), decode(24, "plain")], adjusted(24)),
        (adjusted(24), [decode(24), adjusted(32), adjusted(32, 2 * SHORTEST)], adjusted(32)),
        (adjusted(24, 2 * SHORTEST), [adjusted(24)], None),
        (decode(24), [StepKey(Bucket(24, 24), "greedy")], None),
        (StepKey(Bucket(64, 8), "greedy"), [StepKey(Bucket(64, 4), "greedy"), StepKey(Bucket(256, 8), "greedy")], 256),
        (StepKey(Bucket(512, 8), "greedy"), [StepKey(Bucket(4096, 8), "greedy")], None),
        (StepKey(Bucket(64, 8), "greedy", every_row=True), [StepKey(Bucket(64, 8), "greedy")], None),
        (StepKey(Bucket(64, 8), "greedy"), [StepKey(Bucket(64, 8), "greedy", takes_embeds=True)], None),
        (short(4), [decode(8), decode(4), short(8)], decode(4)),
        (short(4), [decode(8), short(8), decode(16)], short(8)),
        (decode(4), [short(4), short(8)], None),
    ],
)
def test_the_cheapest_that_covers_a_step(
    wanted: StepKey, recorded: list[StepKey], expected: StepKey | int | None
) -> None:
    found = best_cover(wanted, recorded)
    assert (found.bucket.num_tokens if isinstance(expected, int) and found else found) == expected
