"""What is generated stays right when steps fail, are run again by somebody else, or share the cache with others."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import piecegraph
from piecegraph.base.events import Event
from piecegraph.errors import KernelError, RequestError
from piecegraph.llm import Request, SamplingParams, Scheduler, StepPlan
from piecegraph.llm.cache.paged import PagedCache
from piecegraph.llm.run.engine import LLMEngine
from piecegraph.llm.run.generation import Generation
from tests.cases.llm_shelf import Shelf

PROMPT = [5, 6, 7, 8, 9]
OTHER = [(7 * i) % 100 + 5 for i in range(12)]
NUM_NEW = 12
GRAPHS: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "capture_sizes": [1, 4, 16],
    "options": {"graph_device": "simulated", "look_ahead": True, "provenance": True},
}
PARAMS = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)
STATEFUL = ["llama", "qwen3_next", "bamba"]


def generate(llm: piecegraph.LLM, at: int, disturb: Callable[[], None]) -> list[int]:
    """Generate, with something else between two steps."""
    tokens: list[int] = []
    for i, chunk in enumerate(llm.generate([PROMPT], max_new_tokens=NUM_NEW, ignore_eos=True, stream=True)):
        tokens += chunk.token_ids
        if i == at:
            disturb()
    return tokens


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_steps_are_timed_while_others_generate(models: Shelf, family: str) -> None:
    llm = models.load(family, **GRAPHS)

    def time_a_step() -> None:
        assert llm.kernels.select(op="aten::silu", size="decode 1 token").time(rounds=1)

    assert generate(llm, 4, time_a_step) == models.greedy(family, PROMPT, NUM_NEW)


def test_a_dump_of_a_step_leaves_what_is_generated_alone(models: Shelf, tmp_path: Path) -> None:
    llm = models.load("llama", **GRAPHS)

    def dump() -> None:
        llm.kernels.select(size="decode 1 token").dump(tmp_path)

    assert generate(llm, 4, dump) == models.greedy("llama", PROMPT, NUM_NEW)


def test_a_state_has_gone_on_when_its_step_is_dumped(models: Shelf, tmp_path: Path) -> None:
    llm = models.load("qwen3_next", **GRAPHS)

    def dump() -> None:
        with pytest.raises(KernelError, match="PG733 .*keep a state have gone on"):
            llm.kernels.select(size="decode 1 token").dump(tmp_path)

    assert generate(llm, 4, dump) == models.greedy("qwen3_next", PROMPT, NUM_NEW)


# ------------------------------------------------------------------ steps that fail


def failing(call: Callable[..., Any], error: BaseException, after: int = 0) -> Callable[..., Any]:
    """The same, but one call raises."""
    count = 0

    def function(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == after + 1:
            raise error
        return call(*args, **kwargs)

    return function


def run_all(engine: LLMEngine) -> None:
    while engine.step():
        if not engine._ahead:
            engine.scheduler.check()


@pytest.mark.parametrize("family", STATEFUL)
def test_memory_that_one_request_lacks_harms_no_other(
    models: Shelf, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = models.load(family)
    engine = llm.started.engine
    with torch.inference_mode():
        good = engine.add(PROMPT, PARAMS, seed=0)
        engine.step()
        engine.step()
        hungry = engine.add(OTHER, SamplingParams(max_new_tokens=4, ignore_eos=True, prompt_logprobs=1), seed=0)
        monkeypatch.setattr(
            engine.forward.step, "head", failing(engine.forward.step.head, torch.OutOfMemoryError("no memory"))
        )
        with pytest.raises(torch.OutOfMemoryError):
            engine.step()
        engine.abort(hungry)
        run_all(engine)
    assert good.request.generated == models.greedy(family, PROMPT, NUM_NEW)
    assert good.request.num_preemptions == 1


@pytest.mark.parametrize("family", STATEFUL)
@pytest.mark.parametrize("place", ["commit", "schedule", "schedule_ahead"])
def test_an_interrupted_step_is_computed_anew(
    models: Shelf, family: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**GRAPHS, "options": {"graph_device": "simulated", "look_ahead": True}}
    engine = models.load(family, **options).started.engine
    broken = failing(getattr(engine.scheduler, place), KeyboardInterrupt(), after=2 if place != "schedule" else 0)
    monkeypatch.setattr(engine.scheduler, place, broken)
    with torch.inference_mode():
        both = [engine.add(prompt, PARAMS, seed=0) for prompt in (PROMPT, OTHER)]
        with pytest.raises(KeyboardInterrupt):
            run_all(engine)
        engine.scheduler.check()
        run_all(engine)
    for generation, prompt in zip(both, (PROMPT, OTHER), strict=True):
        assert generation.request.generated == models.greedy(family, prompt, NUM_NEW)


def test_an_interrupt_inside_the_cache_loses_no_block(models: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = models.load("llama", options={"block_size": 4}).started.engine
    with monkeypatch.context() as patched, torch.inference_mode():
        generation = engine.add(PROMPT, PARAMS, seed=0)
        extend = PagedCache.extend

        def interrupted(cache: PagedCache, blocks: Any, num_tokens: int) -> None:
            extend(cache, blocks, num_tokens)
            blocks.tables[0].pop()  # allocated, and not kept yet
            raise KeyboardInterrupt

        patched.setattr(PagedCache, "extend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    with torch.inference_mode():
        run_all(engine)
    assert generation.request.generated == models.greedy("llama", PROMPT, NUM_NEW)


def test_who_ended_in_a_step_that_fails_is_told(models: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = models.load("llama").started.engine
    told: list[tuple[bool, list[int]]] = []

    def on_new(generation: Generation, text: str, tokens: list[int]) -> None:
        told.append((generation.is_done, tokens))

    with torch.inference_mode():
        engine.add(PROMPT, SamplingParams(max_new_tokens=1, ignore_eos=True), seed=0, on_new=on_new)
        monkeypatch.setattr(engine, "_emit_tokens", failing(engine._emit_tokens, RuntimeError("no words")))
        with pytest.raises(RuntimeError):
            engine.step()
        assert not engine.step()
    assert told == [(True, models.greedy("llama", PROMPT, 1))]


def test_a_forgotten_stream_is_closed_in_the_middle_of_a_step(models: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = models.load("llama")
    steady_decode = Scheduler._steady_decode

    def collecting(*args: Any) -> Any:
        gc.collect()
        return steady_decode(*args)

    monkeypatch.setattr(Scheduler, "_steady_decode", collecting)
    circle: list[Any] = [llm.generate([OTHER], max_new_tokens=40, ignore_eos=True, stream=True)]
    circle.append(circle)
    next(circle[0])
    del circle
    (answer,) = llm.generate([PROMPT], max_new_tokens=NUM_NEW, ignore_eos=True)
    assert answer.token_ids == models.greedy("llama", PROMPT, NUM_NEW)
    llm.started.engine.scheduler.check()
    assert llm.started.engine.scheduler.num_unfinished == 0


def test_a_head_that_cannot_be_captured_is_run_without_graphs(models: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = models.load("llama", **GRAPHS)
    forward, events = llm.started.engine.forward, list[Event]()
    monkeypatch.setattr(forward._events, "emit", events.append)
    choose, device = forward.step._sample, forward._device

    def choose_outside(*args: Any) -> Any:
        if device is not None and device.is_capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        return choose(*args)

    monkeypatch.setattr(forward.step, "_sample", choose_outside)
    forward.library.forget()
    (answer,) = llm.generate([PROMPT], max_new_tokens=NUM_NEW, ignore_eos=True)
    assert answer.token_ids == models.greedy("llama", PROMPT, NUM_NEW)
    assert {event.code for event in events} == {"PG401", "PG503"}


# ------------------------------------------------------------------ one cache, several schedulers


def run(llm: piecegraph.LLM, scheduler: Scheduler, prompt: list[int], num_new: int = 4) -> Request:
    request = Request("mine", prompt, SamplingParams(max_new_tokens=num_new, ignore_eos=True))
    scheduler.add(request)
    while plan := scheduler.schedule():
        scheduler.commit(plan, llm.forward(plan).tokens.tolist())
    return request


@pytest.fixture(scope="module")
def small(models: Shelf) -> piecegraph.LLM:
    return models.load("llama", max_model_len=64, max_num_seqs=2, options={"block_size": 4, "cache_tokens": 64})


def test_prefixes_are_forgotten_once_others_used_the_cache(models: Shelf, small: piecegraph.LLM) -> None:
    prompt = [(7 * i) % 100 + 5 for i in range(20)]
    other = [(11 * i) % 100 + 5 for i in range(30)]
    expected = models.greedy("llama", prompt, 4)
    mine, yours = small.make_scheduler(), small.make_scheduler()
    assert run(small, mine, prompt).generated == expected
    assert run(small, mine, prompt).num_cached == 16  # nobody came in between
    small.generate([other], max_new_tokens=20, ignore_eos=True)
    again = run(small, mine, prompt)
    assert (again.generated, again.num_cached) == (expected, 0)
    run(small, yours, other, 20)
    again = run(small, mine, prompt)
    assert (again.generated, again.num_cached) == (expected, 0)
    (answer,) = small.generate([prompt], max_new_tokens=4, ignore_eos=True)
    assert answer.token_ids == expected


def test_the_cache_of_running_requests_is_not_given_to_others(models: Shelf, small: piecegraph.LLM) -> None:
    mine, yours = small.make_scheduler(), small.make_scheduler()
    request = Request("mine", PROMPT, PARAMS)
    mine.add(request)
    plan = mine.schedule()
    assert plan is not None
    mine.commit(plan, small.forward(plan).tokens.tolist())
    with pytest.raises(RequestError, match="PG657 the cache is in use.*another scheduler has 1 request running"):
        small.generate([OTHER])
    yours.add(Request("yours", OTHER, PARAMS))
    with pytest.raises(RequestError, match="PG657 the cache is in use"):
        small.forward(yours.schedule() or StepPlan((), 0, "mixed"))
    yours.abort("yours")
    while plan := mine.schedule():
        mine.commit(plan, small.forward(plan).tokens.tolist())
    assert request.generated == models.greedy("llama", PROMPT, NUM_NEW)
    assert small.generate([OTHER], max_new_tokens=4)[0].error is None


def test_a_scheduler_that_is_gone_holds_nothing(small: piecegraph.LLM) -> None:
    mine = small.make_scheduler()
    request = Request("mine", PROMPT, PARAMS)
    mine.add(request)
    small.forward(mine.schedule() or StepPlan((), 0, "mixed"))
    del mine
    assert small.generate([OTHER], max_new_tokens=4)[0].error is None


def test_what_a_scheduler_is_told_wrongly(small: piecegraph.LLM) -> None:
    scheduler = small.make_scheduler()
    request = Request("mine", PROMPT, PARAMS)
    scheduler.add(request)
    plan = scheduler.schedule()
    assert plan is not None
    with pytest.raises(RequestError, match="PG657 the step cannot be committed: there are 0 tokens for 1 sequences"):
        scheduler.commit(plan, [])
    scheduler.commit(plan, [10**6])
    assert "PG653 request 'mine' was given token 1000000" in str(request.error)
    with pytest.raises(RequestError, match="PG656 request 'mine' has ended"):
        scheduler.add(request)


def test_steps_are_followed_while_others_wait_for_a_place(models: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**GRAPHS, "max_num_seqs": 2, "options": {"graph_device": "simulated", "look_ahead": True}}
    llm = models.load("llama", **options)
    followed: list[bool] = []
    schedule_ahead = Scheduler.schedule_ahead

    def counted(scheduler: Scheduler, plan: StepPlan) -> StepPlan | None:
        found = schedule_ahead(scheduler, plan)
        followed.append(found is not None)
        return found

    monkeypatch.setattr(Scheduler, "schedule_ahead", counted)
    answers = llm.generate([PROMPT, OTHER] * 3, max_new_tokens=NUM_NEW, ignore_eos=True)
    expected = [models.greedy("llama", prompt, NUM_NEW) for prompt in (PROMPT, OTHER)] * 3
    assert [answer.token_ids for answer in answers] == expected
    assert followed == [True] * (len(followed) - 1) + [False], "all but the last, also where others take a place"
