"""Which tokens run next: whatever is scheduled, every request gets the tokens it would get alone."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piecegraph.errors import ConfigError, RequestError
from piecegraph.llm.cache.paged import CacheGroup, PagedCache
from piecegraph.llm.run.request import Request
from piecegraph.llm.run.sampling_params import SamplingParams
from piecegraph.llm.run.scheduler import Scheduler, SchedulerLimits
from piecegraph.llm.run.step import Bucket
from tests.cases.fake_llm import EOS, VOCAB_SIZE, FakeLLM, alone

MAX_MODEL_LEN = 48


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    ignore_eos: bool
    abort_after: int | None
    wants_every_row: bool
    num_answers: int


# Prompts share beginnings: a stem is one of three, cut anywhere.
_stems = st.sampled_from([tuple(range(1, 22)) * 2, (5,) * 40, (3, 1) * 20])
_prompts = st.builds(
    lambda stem, cut, tail: stem[:cut] + tuple(tail),
    _stems,
    st.integers(0, 40),
    st.lists(st.integers(1, VOCAB_SIZE - 1), min_size=1, max_size=4),
)
_arrivals = st.builds(
    Arrival,
    step=st.integers(0, 12),
    prompt=_prompts,
    max_new_tokens=st.integers(1, 12),
    ignore_eos=st.booleans(),
    abort_after=st.none() | st.none() | st.integers(0, 8),
    wants_every_row=st.sampled_from([False, False, True]),
    num_answers=st.sampled_from([1, 1, 3]),
)
_groups = st.lists(
    st.builds(
        lambda num_blocks, reach: CacheGroup(num_blocks=num_blocks, **reach),
        st.integers(6, 40),
        st.sampled_from([{}, {}, {"window": 1}, {"window": 5}, {"window": 9}, {"chunk": 6}]),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=120, deadline=None)
@given(
    groups=_groups,
    block_size=st.integers(1, 5),
    max_num_seqs=st.integers(1, 5),
    extra_tokens=st.integers(0, 12),
    prefix_cache=st.booleans(),
    arrivals=st.lists(_arrivals, min_size=1, max_size=8),
    num_padded=st.integers(0, 3),
    looks_ahead=st.booleans(),
    sizes=st.sampled_from([(), (2, 4, 8, 16), (1, 3, 7)]),
)
def test_every_request_gets_the_tokens_it_would_get_alone(
    groups: list[CacheGroup],
    block_size: int,
    max_num_seqs: int,
    extra_tokens: int,
    prefix_cache: bool,
    arrivals: list[Arrival],
    num_padded: int,
    looks_ahead: bool,
    sizes: tuple[int, ...],
) -> None:
    llm = FakeLLM(
        groups,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_num_seqs + extra_tokens,
        max_model_len=MAX_MODEL_LEN,
        prefix_cache=prefix_cache,
        needs_state=not prefix_cache,
        looks_ahead=looks_ahead,
        sizes=sizes,
    )
    requests = _run(llm, arrivals, num_padded)
    for arrival, request in requests:
        expected = alone(arrival.prompt, request.params, groups, MAX_MODEL_LEN)
        assert request.is_done
        if request.finish_reason == "abort":
            assert request.generated == expected[: len(request.generated)]
        else:
            assert request.generated == expected
            assert request.finish_reason == ("stop" if expected[-1] == EOS and not arrival.ignore_eos else "length")
    assert all(pool.num_free == pool.num_blocks - 1 for pool in llm.cache.pools)
    assert llm.scheduler.num_unfinished == 0


def _run(llm: FakeLLM, arrivals: list[Arrival], num_padded: int) -> list[tuple[Arrival, Request]]:
    requests: list[tuple[Arrival, Request]] = []
    pending = sorted(arrivals, key=lambda arrival: arrival.step)
    step = 0
    while pending or llm.scheduler.num_unfinished:
        while pending and pending[0].step <= step:
            arrival = pending.pop(0)
            params = SamplingParams(
                max_new_tokens=arrival.max_new_tokens,
                ignore_eos=arrival.ignore_eos,
                prompt_logprobs=0 if arrival.wants_every_row else None,
            )
            first = None
            for _ in range(arrival.num_answers):
                request = Request(f"request {len(requests)}", arrival.prompt, params)
                request.first_answer = first
                first = first or request
                with contextlib.suppress(RequestError):  # it may never fit; that is tested below
                    llm.scheduler.add(request)
                    requests.append((arrival, request))
        llm.step(num_padded)
        step += 1
        for arrival, request in requests:
            if arrival.abort_after is not None and step >= arrival.step + arrival.abort_after:
                llm.scheduler.abort(request.id)
        assert step < 2000, "no progress"
    return requests


def make(num_blocks: int = 50, **options: Any) -> FakeLLM:
    defaults = {"block_size": 4, "max_num_seqs": 4, "max_batch_tokens": 16}
    return FakeLLM([CacheGroup(num_blocks=num_blocks)], **{**defaults, **options})


def request(name: str, length: int, new: int = 4, **params: Any) -> Request:
    prompt = [1 + (i * 7 + len(name)) % 20 for i in range(length)]
    return Request(name, prompt, SamplingParams(max_new_tokens=new, ignore_eos=True, **params))


def test_the_next_step_is_known_also_where_requests_come_and_go() -> None:
    llm = make(num_blocks=200, max_num_seqs=4, max_batch_tokens=40, looks_ahead=True, prefix_cache=False)
    requests = [request(str(i), length, new=i % 3 + 2) for i, length in enumerate((6, 30, 9, 50, 4, 12, 25, 3, 8, 5))]
    for each in requests:
        llm.scheduler.add(each)
    llm.run()
    assert llm.num_ahead == len(llm.plans) - 1, "all but the first"
    assert sum(plan.kind == "mixed" for plan in llm.plans) > 4
    for each in requests:
        assert each.generated == alone(each.tokens[: each.num_prompt], each.params, llm.groups, 64)


def test_steps_are_full_while_others_wait() -> None:
    llm = make(num_blocks=200, max_num_seqs=3, max_batch_tokens=32, sizes=(4, 8, 16, 32), prefix_cache=False)
    for name, length in (("a", 9), ("b", 2), ("c", 10), ("d", 5)):
        llm.scheduler.add(request(name, length, new=3))
    llm.run()
    works = [{work.request.id: work[2:] for work in plan.works} for plan in llm.plans]
    assert works[0] == {"a": (9, True), "b": (2, True), "c": (5, False)}, "16 of 21 tokens: d waits for a place"
    assert works[1] == {"a": (1, True), "b": (1, True), "c": (2, False)}, "4 of 7"
    assert works[2] == {"a": (1, True), "b": (1, True), "c": (2, False)}
    assert works[3]["c"] == (1, True)
    assert works[3]["d"] == (5, True), "nobody waits: it is not cut"
    assert [plan.num_tokens for plan in llm.plans[:3]] == [16, 4, 4]


def test_a_full_step_leaves_whole_prompts_to_the_next() -> None:
    llm = make(num_blocks=200, max_num_seqs=3, max_batch_tokens=32, sizes=(8, 32), prefix_cache=False)
    for name, length in (("a", 9), ("b", 2), ("c", 10), ("d", 5)):
        llm.scheduler.add(request(name, length, new=3))
    llm.run()
    works = [{work.request.id: work[2:] for work in plan.works} for plan in llm.plans]
    assert works[0] == {"a": (8, False)}, "8 of 21 tokens"
    assert works[1] == {"a": (1, True), "b": (2, True), "c": (5, False)}, "8 of 13"


def test_a_step_is_padded_before_prompts_come_to_a_halt() -> None:
    llm = make(num_blocks=200, max_num_seqs=3, max_batch_tokens=32, sizes=(3, 32), prefix_cache=False)
    for name, length in (("a", 1), ("b", 1), ("c", 9), ("d", 5)):
        llm.scheduler.add(request(name, length, new=9))
    llm.run()
    assert [plan.num_tokens for plan in llm.plans[:2]] == [3, 10], "3 of 11 tokens of prompts, and not 1 of 8"


def test_a_step_is_as_full_as_prompts_leave_it_whose_beginning_is_known() -> None:
    llm = make(num_blocks=200, max_num_seqs=2, max_batch_tokens=32, sizes=(8, 16, 32))
    llm.scheduler.add(request("first", 20, new=1))
    llm.run()
    prompt = llm.plans[0].works[0].request.tokens[:20]
    for name in ("a", "b", "c"):
        llm.scheduler.add(Request(name, prompt, SamplingParams(max_new_tokens=1, ignore_eos=True)))
    plan = llm.scheduler.schedule()
    assert plan is not None
    assert [work[1:] for work in plan.works] == [(16, 4, True), (16, 4, True)], "8 of 8 tokens, and not 32 of 40"


def test_decodes_come_first_and_prompts_fill_the_rest_of_the_step() -> None:
    llm = make()
    llm.scheduler.add(request("a", 6))
    llm.step()
    llm.scheduler.add(request("b", 40))
    llm.step()
    works = {work.request.id: work for work in llm.plans[-1].works}
    assert (works["a"].num_tokens, works["a"].samples) == (1, True)
    assert (works["b"].num_tokens, works["b"].samples) == (15, False)
    assert llm.plans[-1].kind == "mixed"


def test_a_decode_step_has_one_token_of_each_sequence() -> None:
    llm = make()
    for name in "ab":
        llm.scheduler.add(request(name, 6))
    llm.step()
    llm.step()
    assert llm.plans[-1].kind == "decode"
    assert [(work.start, work.num_tokens) for work in llm.plans[-1].works] == [(6, 1), (6, 1)]


def test_a_prompt_of_one_token_is_no_decode() -> None:
    llm = make()
    llm.scheduler.add(request("a", 1))
    llm.step()
    assert llm.plans[-1].kind == "mixed"
    assert llm.plans[-1].works[0].is_first


def test_the_newest_request_gives_way_when_blocks_run_out_and_nothing_is_lost() -> None:
    llm = make(num_blocks=8, prefix_cache=False)
    requests = [request(name, 7, new=12) for name in "abc"]
    for each in requests:
        llm.scheduler.add(each)
    llm.run()
    assert requests[0].num_preemptions == 0
    assert sum(each.num_preemptions for each in requests) > 0
    preempted = [each for plan in llm.plans for each in plan.preempted]
    assert len(preempted) == sum(each.num_preemptions for each in requests)
    for each in requests:
        assert each.generated == alone(each.tokens[:7], each.params, llm.groups, 64)


def test_requests_begin_in_order_of_arrival_and_none_is_overtaken() -> None:
    llm = make(num_blocks=14, max_num_seqs=4, max_batch_tokens=4)
    requests = [request(f"long {i}", 40, new=3) if i % 3 == 0 else request(f"short {i}", 2, new=9) for i in range(9)]
    for each in requests:
        llm.scheduler.add(each)
    first_seen: list[Request] = []
    while llm.step() is not None:
        first_seen += [work.request for work in llm.plans[-1].works if work.request not in first_seen]
    assert sorted(first_seen, key=requests.index) == requests
    begun = {
        each: next(i for i, plan in enumerate(llm.plans) if each in [w.request for w in plan.works])
        for each in requests
    }
    assert list(begun.values()) == sorted(begun.values())


def test_neither_prompts_nor_decodes_starve() -> None:
    """Short requests keep coming; the long prompt still gets a token of every step, and so does every decode."""
    llm = make(num_blocks=400, max_num_seqs=4, max_batch_tokens=4)
    for i in range(3):
        llm.scheduler.add(request(f"old {i}", 2, new=40))
    while not any(plan.kind == "decode" for plan in llm.plans):
        llm.step()
    long = request("long", 30, new=2)
    llm.scheduler.add(long)
    for i in range(60):
        llm.scheduler.add(request(f"new {i}", 2, new=2))
    for _ in range(30):
        llm.step()
        works = llm.plans[-1].works
        assert {f"old {i}" for i in range(3)} <= {work.request.id for work in works}
        assert sum(work.num_tokens for work in works if work.request is long) == 1
    assert len(long.generated) == 1


def test_a_prefix_is_found_again_up_to_a_block_boundary_with_one_token_left_to_compute() -> None:
    llm = make(block_size=4)
    for prompt, cached in ([list(range(1, 13)), 0], [list(range(1, 13)), 8], [list(range(1, 14)), 12]):
        each = Request(f"{len(prompt)} {cached}", prompt, SamplingParams(max_new_tokens=2))
        llm.scheduler.add(each)
        llm.run()
        assert each.num_cached == cached


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize(("length", "cached"), [(3, 0), (13, 12), (40, 36)])
def test_several_answers_compute_their_prompt_once(length: int, cached: int, looks_ahead: bool) -> None:
    llm = make(block_size=4, looks_ahead=looks_ahead)
    answers = [request(name, length) for name in "abc"]
    for each in answers:
        each.first_answer = answers[0] if each is not answers[0] else None
        llm.scheduler.add(each)
    llm.run()
    assert [each.num_cached for each in answers] == [0, cached, cached]


def test_generated_tokens_are_found_again_too() -> None:
    llm = make(block_size=4)
    first = request("a", 6, new=8)
    llm.scheduler.add(first)
    llm.run()
    second = Request("b", [*first.tokens, 1], SamplingParams())
    llm.scheduler.add(second)
    llm.run()
    assert second.num_cached == 12  # 14 tokens, the last of which was never computed


@pytest.mark.parametrize(
    ("first", "second", "cached"), [("", "", 8), ("", "adapter", 0), ("x", "x", 8), (None, None, 0)]
)
def test_prefixes_are_shared_only_under_one_key(first: str | None, second: str | None, cached: int) -> None:
    llm = make(block_size=4)
    for key in (first, second):
        each = Request(repr(key), range(1, 12), SamplingParams(max_new_tokens=1), cache_key=key)
        llm.scheduler.add(each)
        llm.run()
    assert each.num_cached == cached


def test_prompt_logprobs_compute_every_row_once_even_after_a_preemption() -> None:
    llm = make(num_blocks=8)
    requests = [request(name, 9, new=10, prompt_logprobs=1) for name in "ab"]
    for each in requests:
        llm.scheduler.add(each)
    told: dict[str, list[int]] = {"a": [], "b": []}
    while (plan := llm.scheduler.schedule()) is not None:
        for work in plan.works:
            told[work.request.id] += [work.start + row for row in work.new_rows]
        num_tokens = plan.num_seqs if plan.kind == "decode" else plan.num_tokens
        llm.scheduler.commit(plan, llm.forward(plan, Bucket(num_tokens, plan.num_seqs, plan.kind)))
    assert requests[1].num_preemptions > 0
    assert told == {"a": list(range(18)), "b": list(range(18))}


def test_a_request_keeps_its_row_when_others_leave() -> None:
    llm = make(max_num_seqs=4)
    for i, new in enumerate((20, 3, 20, 20)):
        llm.scheduler.add(request(str(i), 3, new=new))
    while len(llm.plans) < 6:
        llm.step()
    assert [work.request.id for work in llm.plans[1].works] == ["0", "1", "2", "3"]
    assert [work.request.id for work in llm.plans[-1].works] == ["0", "3", "2"]


def test_a_sliding_group_holds_no_more_than_its_window_needs() -> None:
    window, size = 6, 4
    llm = FakeLLM([CacheGroup(num_blocks=20, window=window)], block_size=size, max_num_seqs=1, max_batch_tokens=8)
    llm.scheduler.add(request("a", 20, new=30))
    while llm.step() is not None:
        for each in llm.scheduler.running:
            assert each.blocks is not None
            held = len(each.blocks.tables[0]) - each.blocks.num_returned[0]
            assert held <= llm.groups[0].most_blocks(each.num_computed, size) == min(-(-each.num_computed // size), 3)


def test_bad_logits_end_one_request_and_not_the_others() -> None:
    llm = make()
    bad, good = request("bad", 3, new=5), request("good", 3, new=5)
    llm.scheduler.add(bad)
    llm.scheduler.add(good)
    llm.step()
    plan = llm.scheduler.schedule()
    assert plan is not None
    chosen = llm.forward(plan, Bucket(2, 2, "decode"))
    tokens = [-1 if work.request is bad else token for work, token in zip(plan.works, chosen, strict=True)]
    assert llm.scheduler.commit(plan, tokens) == [bad]
    assert (bad.state, bad.finish_reason) == ("failed", "error")
    assert bad.error is not None
    assert bad.error.code == "PG655"
    llm.run()
    assert good.finish_reason == "length"
    assert llm.cache.pools[0].num_free == 49


def test_a_request_that_is_aborted_while_its_step_runs_takes_no_token() -> None:
    llm = make()
    each = request("a", 3)
    llm.scheduler.add(each)
    plan = llm.scheduler.schedule()
    assert plan is not None
    assert llm.scheduler.abort("a")
    assert llm.scheduler.commit(plan, [1]) == []
    assert (each.generated, each.finish_reason, llm.scheduler.schedule()) == ([], "abort", None)
    assert not llm.scheduler.abort("a")


@pytest.mark.parametrize(
    ("prompt", "new", "code"),
    [([1] * 64, 1, "PG652"), ([1, VOCAB_SIZE], 1, "PG653"), ([-1], 1, "PG653"), ([1] * 30, 30, "PG654")],
)
def test_what_can_never_be_served_is_refused_and_the_others_go_on(prompt: list[int], new: int, code: str) -> None:
    llm = make(num_blocks=10)
    good = request("good", 5)
    llm.scheduler.add(good)
    with pytest.raises(RequestError, match=code) as caught:
        llm.scheduler.add(Request("bad", prompt, SamplingParams(max_new_tokens=new)))
    assert "'bad'" in str(caught.value)
    llm.run()
    assert good.finish_reason == "length"


def test_two_requests_of_one_id_are_refused_until_the_first_is_done() -> None:
    llm = make()
    llm.scheduler.add(request("a", 3))
    with pytest.raises(RequestError, match="PG656"):
        llm.scheduler.add(request("a", 3))
    llm.run()
    llm.scheduler.add(request("a", 3))


def test_the_longest_request_that_fits_alone_runs_alone() -> None:
    llm = make(num_blocks=10, block_size=4)
    each = request("a", 30, new=7)  # 36 tokens are computed: nine blocks of four
    llm.scheduler.add(each)
    llm.run()
    assert each.finish_reason == "length"
    with pytest.raises(RequestError, match="PG654"):
        llm.scheduler.add(request("b", 30, new=8))


def test_limits_that_would_starve_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="PG101 max_batch_tokens is 4, less than max_num_seqs"):
        SchedulerLimits(max_num_seqs=8, max_batch_tokens=4, max_model_len=9, vocab_size=9)


def test_state_and_a_prefix_cache_exclude_each_other() -> None:
    limits = SchedulerLimits(max_num_seqs=8, max_batch_tokens=8, max_model_len=9, vocab_size=9)
    with pytest.raises(ConfigError, match="prefix_cache is on"):
        Scheduler(limits, PagedCache([], block_size=4), needs_state=True)


def test_a_model_without_attention_needs_no_blocks() -> None:
    llm = FakeLLM([], block_size=4, max_num_seqs=2, max_batch_tokens=8, prefix_cache=False, needs_state=True)
    requests = [request(str(i), 10, new=5) for i in range(4)]
    for each in requests:
        llm.scheduler.add(each)
    slots: set[int] = set()
    while llm.step() is not None:
        slots |= {work.request.state_slot for work in llm.plans[-1].works}
    assert all(each.finish_reason == "length" for each in requests)
    assert slots <= {0, 1, 2}


def test_a_prompt_whose_every_row_is_wanted_is_computed_though_it_is_known() -> None:
    llm = make(block_size=4)
    for name, params in (("a", {}), ("b", {"prompt_logprobs": 2}), ("c", {"return_hidden_states": True})):
        each = Request(name, range(1, 12), SamplingParams(max_new_tokens=1, **params))
        llm.scheduler.add(each)
        llm.run()
        assert each.num_cached == 0


def test_a_limited_group_gives_back_after_every_chunk_even_of_one_token() -> None:
    llm = FakeLLM([CacheGroup(num_blocks=6, window=2)], block_size=1, max_num_seqs=1, max_batch_tokens=1)
    each = request("a", 12)
    llm.scheduler.add(each)
    llm.run()
    assert each.finish_reason == "length"


def test_whoever_comes_next_is_tried_when_the_front_of_the_queue_is_aborted() -> None:
    llm = make(num_blocks=9, block_size=4)
    running, large, small = request("a", 8, new=20), request("b", 24), request("c", 2)
    for each in (running, large, small):
        llm.scheduler.add(each)
    llm.step()
    llm.step()
    assert [running] == llm.scheduler.running
    llm.scheduler.abort("b")
    llm.step()
    assert [running, small] == llm.scheduler.running


def test_blocks_that_a_limited_group_gives_back_while_it_decodes_let_others_in() -> None:
    llm = FakeLLM([CacheGroup(num_blocks=6, chunk=16)], block_size=4, max_num_seqs=2, max_batch_tokens=16)
    first, second = request("a", 13, new=20), request("b", 9)
    llm.scheduler.add(first)
    llm.scheduler.add(second)
    while second.state == "waiting":
        llm.step()
    assert first.num_computed == 18  # one step behind the one in which it left its first chunk
