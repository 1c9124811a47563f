"""``piecegraph.intercept`` on a language model: as on a module, in its decoder and in its head."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import piecegraph
from piecegraph.errors import CallError, RequestError
from piecegraph.llm import Request, SamplingParams
from tests.cases.llm_shelf import Shelf

PROMPT, OTHER = [5, 6, 7, 8, 9], [40, 41, 42]
NUM_NEW = 5
GRAPHS: dict[str, Any] = {"capture_sizes": [1, 2, 8], "max_num_seqs": 2, "options": {"graph_device": "simulated"}}
WAYS = {"direct": {}, "graphs": GRAPHS, "ahead": {"options": {"look_ahead": True}}}


def generate(llm: Any, *prompts: list[int]) -> list[list[int]]:
    answers = llm.generate(list(prompts or (PROMPT,)), max_new_tokens=NUM_NEW, ignore_eos=True)
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("way", WAYS)
def test_observing_changes_nothing_and_sees_every_call(models: Shelf, way: str) -> None:
    llm = models.load("llama", **WAYS[way])
    expected = [models.greedy("llama", PROMPT, NUM_NEW)]
    assert generate(llm) == expected
    tapes = dict(llm.started.engine.forward.library.tapes)
    rows: list[int] = []
    with piecegraph.intercept(F.linear, module="lm_head", after=lambda result, x, *_: rows.append(len(x))) as handle:
        assert generate(llm) == expected
        assert handle.num_calls == len(rows) >= NUM_NEW
        assert set(rows) == {1}, "one row has logits, and nothing is padded"
        assert "1 cut in " in repr(handle)
    assert generate(llm) == expected
    assert dict(llm.started.engine.forward.library.tapes) == tapes, "it goes on with the tapes it had"
    assert len(rows) == handle.num_calls


@pytest.mark.parametrize("way", ["direct", "graphs"])
def test_layers_are_told_apart(models: Shelf, way: str) -> None:
    llm = models.load("llama", **WAYS[way])
    before = generate(llm, PROMPT, OTHER)
    with piecegraph.intercept(F.silu, module="layers.1.mlp", after=lambda result, x: torch.zeros_like(result)) as one:
        without = generate(llm, PROMPT, OTHER)
    with piecegraph.intercept(F.silu, after=lambda result, x: None) as both:
        assert generate(llm, PROMPT, OTHER) == before
    assert without != before
    assert both.num_calls == 3 * one.num_calls > 0
    assert generate(llm, PROMPT, OTHER) == before


@pytest.mark.parametrize("way", WAYS)
def test_the_head_is_replaced(models: Shelf, way: str) -> None:
    llm = models.load("llama", **WAYS[way])

    def always_three(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return F.one_hot(torch.full(x.shape[:-1], 3), weight.shape[0]).to(x.dtype)

    with piecegraph.intercept(F.linear, module="lm_head", replace=always_three):
        assert generate(llm, PROMPT, OTHER) == [[3] * NUM_NEW] * 2
    assert generate(llm) == [models.greedy("llama", PROMPT, NUM_NEW)]


def test_attention_is_an_op_like_others(models: Shelf) -> None:
    llm = models.load("llama", **GRAPHS)
    expected, shapes = generate(llm), []

    def before(query: torch.Tensor, *rest: Any) -> None:
        shapes.append(tuple(query.shape))

    with piecegraph.intercept("piecegraph::attention", before=before):
        assert generate(llm) == expected
        text = llm.explain()
    assert shapes[:3] == [(len(PROMPT), 4, 16)] * 3
    assert shapes[3:6] == [(1, 4, 16)] * 3
    assert "interception: 3 calls (intercept('piecegraph::attention'))" in text
    assert "interception" not in llm.explain()


def test_what_is_run_for_nobody_calls_nobody_back(models: Shelf) -> None:
    with piecegraph.intercept(F.linear, after=lambda *_: None) as handle:
        llm = models.load("llama", **GRAPHS)
        assert handle.num_calls == 0, "loading traces, records and checks"
        generate(llm)
        assert handle.num_calls > 0


def test_steps_of_ones_own_scheduler_are_intercepted(models: Shelf) -> None:
    llm = models.load("llama", **GRAPHS)
    scheduler = llm.make_scheduler()
    scheduler.add(piecegraph.llm.Request("mine", PROMPT, piecegraph.llm.SamplingParams(max_new_tokens=1)))
    plan = scheduler.schedule()
    with piecegraph.intercept(F.silu, after=lambda *_: None) as handle:
        llm.forward(plan)
    assert handle.num_calls == 3


def test_kernels_can_be_chosen_while_ops_are_intercepted(models: Shelf) -> None:
    llm = models.load("llama", **GRAPHS | {"options": {"graph_device": "simulated", "provenance": True}})
    expected = generate(llm)
    before = len(llm.kernels.select(module="layers.0.mlp", size="decode 1 token"))
    with piecegraph.intercept(F.silu, after=lambda *_: None):
        generate(llm)
        during = len(llm.kernels.select(module="layers.0.mlp", size="decode 1 token"))
    assert 0 < during < before, "the op itself is no part of a graph now"
    assert len(llm.kernels.select(module="layers.0.mlp", size="decode 1 token")) == before
    assert generate(llm) == expected


def test_a_callback_that_returns_something_else_ends_the_request_and_not_the_model(models: Shelf) -> None:
    llm = models.load("llama", **GRAPHS)
    with piecegraph.intercept(F.silu, after=lambda result, x: result[:, :1]):
        with pytest.raises(CallError, match="PG722"):
            generate(llm)
    assert generate(llm) == [models.greedy("llama", PROMPT, NUM_NEW)]


def test_a_closed_model_is_reached_no_more(models: Shelf) -> None:
    llm = models.load("llama")
    with piecegraph.intercept(F.silu, after=lambda *_: None) as handle:
        assert "3 cuts in " in repr(handle)
        llm.close()
        assert "cuts in " not in repr(handle)


LONG = [(number * 7) % 50 + 1 for number in range(40)]


def test_prefixes_are_those_of_the_model_alone(models: Shelf) -> None:
    llm, plain = models.load("llama", **GRAPHS), models.load("llama", prefix_cache=False, **GRAPHS)
    expected = generate(llm, LONG)
    with piecegraph.intercept(F.silu, after=lambda result, x: -result):
        altered = generate(plain, LONG), generate(plain, LONG[::-1])
        assert (generate(llm, LONG), generate(llm, LONG[::-1])) == altered, "also of a beginning that was remembered"
    assert altered[0] != expected == generate(plain, LONG)
    assert generate(llm, LONG[::-1]) == generate(plain, LONG[::-1])
    answer = llm.generate([LONG], max_new_tokens=NUM_NEW, ignore_eos=True)[0]
    assert answer.token_ids == expected[0]
    assert answer.metrics.num_cached_tokens == 32, "what was remembered before is good still"


def test_prefixes_are_those_of_all_kernels(models: Shelf) -> None:
    options = {"graph_device": "simulated", "provenance": True, "fuse_linears": False}
    llm = models.load("llama", **{**GRAPHS, "options": options})
    with llm.kernels.select(op="aten::silu").disable(), contextlib.suppress(RequestError):  # what is there may be NaN
        generate(llm, LONG)
    answer = llm.generate([LONG], max_new_tokens=NUM_NEW, ignore_eos=True)[0]
    assert answer.token_ids == models.greedy("llama", LONG, NUM_NEW)
    assert answer.metrics.num_cached_tokens == 0
    assert llm.generate([LONG], max_new_tokens=1)[0].metrics.num_cached_tokens == 32


def test_a_request_that_saw_an_alteration_is_nobodys_prefix(models: Shelf) -> None:
    llm = models.load("llama", max_num_seqs=2)
    scheduler = llm.make_scheduler()
    scheduler.add(Request("first", LONG, SamplingParams(max_new_tokens=3)))
    with piecegraph.intercept(F.silu, after=lambda result, x: -result):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, llm.forward(plan).tokens.tolist())
    while plan := scheduler.schedule():
        scheduler.commit(plan, llm.forward(plan).tokens.tolist())
    scheduler.add(again := Request("again", LONG, SamplingParams(max_new_tokens=3)))
    while plan := scheduler.schedule():
        scheduler.commit(plan, llm.forward(plan).tokens.tolist())
    assert again.num_cached == 0
    assert list(again.tokens[len(LONG) :]) == models.greedy("llama", LONG, 3)
