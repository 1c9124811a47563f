"""A scheduler of one's own drives a model step by step, with token ids or with embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import piecegraph
from piecegraph.errors import ModelError, RequestError
from piecegraph.llm import PagedCache, Request, SamplingParams, Scheduler, StepPlan, Work
from tests.cases.llm_shelf import Shelf, shelf

PROMPTS = [[9] * 3 + [17, 80, 33], [40, 41, 60, 7] * 5, [100]]
OTHERS = [[50, 12, 99, 4, 31, 77], [8, 9, 10, 11] * 5, [63]]
NUM_NEW = 13
SMALL: dict[str, Any] = {
    "max_num_seqs": 3,
    "max_batch_tokens": 8,
    "max_model_len": 64,
    "capture_sizes": [4, 8],
    "options": {"block_size": 4, "cache_tokens": 36, "graph_device": "simulated"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    with shelf(tmp_path_factory.mktemp("models")) as found:
        yield found


def make_request(name: str, prompt: list[int], **arguments: Any) -> Request:
    return Request(name, prompt, SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True), **arguments)


def run(llm: piecegraph.LLM, requests: list[Request], scheduler: Scheduler | None = None) -> list[list[int]]:
    scheduler = scheduler if scheduler is not None else llm.make_scheduler()
    for request in requests:
        scheduler.add(request)
    while plan := scheduler.schedule():
        result = llm.forward(plan)
        assert len(result.tokens) == len(result.logits) == plan.num_seqs
        assert len(result.hidden) == plan.num_tokens
        scheduler.commit(plan, result.tokens.tolist())
        scheduler.check()
    return [request.generated for request in requests]


def test_the_loop_of_the_docs(models: Shelf) -> None:
    llm = models.load("llama")
    scheduler = llm.make_scheduler()
    request = Request("first", PROMPTS[0], SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True))
    scheduler.add(request)
    while plan := scheduler.schedule():
        result = llm.forward(plan)
        scheduler.commit(plan, result.tokens.tolist())
    assert request.generated == models.greedy("llama", PROMPTS[0], NUM_NEW)
    with torch.inference_mode():
        expected = models.logits("llama", [*PROMPTS[0], *request.generated[:-1]])[-1]
    torch.testing.assert_close(result.logits[0], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["gemma3", "mamba2"])
def test_ragged_batches_of_an_own_scheduler(family: str, models: Shelf) -> None:
    llm = models.load(family, **SMALL)
    found = run(llm, [make_request(str(i), prompt) for i, prompt in enumerate(PROMPTS)])
    assert found == [models.greedy(family, prompt, NUM_NEW) for prompt in PROMPTS]
    assert llm.stats()["coverage"] == 1


def test_plans_made_by_hand(models: Shelf) -> None:
    """Without any scheduler: a prompt in two parts, behind each other."""
    llm = models.load("llama")
    cache = PagedCache(llm.started.cache_groups, block_size=16)
    request = make_request("mine", PROMPTS[1])
    request.blocks = cache.begin([])
    cache.extend(request.blocks, 20)
    llm.forward(StepPlan((Work(request, 0, 13, False),), 13, "mixed"))
    result = llm.forward(StepPlan((Work(request, 13, 7, True),), 7, "mixed"))
    assert result.tokens.tolist() == models.greedy("llama", PROMPTS[1], 1)
    torch.testing.assert_close(result.logits[0], models.logits("llama", PROMPTS[1])[-1], rtol=1e-3, atol=1e-3)


def test_generate_does_not_trust_what_it_remembered_before(models: Shelf) -> None:
    llm = models.load("llama", **SMALL)
    expected = models.greedy("llama", PROMPTS[1], NUM_NEW)
    for _ in range(2):
        (answer,) = llm.generate(PROMPTS[1], max_new_tokens=NUM_NEW, ignore_eos=True)
        assert answer.token_ids == expected
    assert answer.metrics.num_cached_tokens > 0
    run(llm, [make_request("other", OTHERS[1])])
    (answer,) = llm.generate(PROMPTS[1], max_new_tokens=NUM_NEW, ignore_eos=True)
    assert (answer.token_ids, answer.metrics.num_cached_tokens) == (expected, 0)


def test_what_cannot_be_run_is_refused(models: Shelf) -> None:
    llm = models.load("llama", **SMALL)
    request = make_request("mine", PROMPTS[0])
    with pytest.raises(RequestError, match="PG657 .* request 'mine' is not running. hint: plan it with llm.make_sch"):
        llm.forward(StepPlan((Work(request, 0, 6, True),), 6, "mixed"))
    with pytest.raises(RequestError, match="PG657 .* it has 9 tokens of 1 sequences, .*max_batch_tokens=8"):
        llm.forward(StepPlan((Work(request, 0, 9, True),), 9, "mixed"))
    flat = make_request("flat", PROMPTS[0], mrope_positions=np.zeros((3, 6), np.int64))
    with pytest.raises(RequestError, match="PG657 .* request 'flat' has positions in three dimensions"):
        run(llm, [flat])
    wide = make_request("wide", PROMPTS[0], input_embeds=torch.zeros(6, 65))
    with pytest.raises(RequestError, match=r"PG657 .* request 'wide' are of shape \(6, 65\), not \(6, 64\)"):
        run(llm, [wide])
    stream = llm.generate(PROMPTS[0], max_new_tokens=NUM_NEW, stream=True)
    next(stream)
    with pytest.raises(RequestError, match=r"PG657 .* generate\(\) is running"):
        run(llm, [make_request("mine", PROMPTS[0])])
    assert list(stream)[-1].finished.token_ids == models.greedy("llama", PROMPTS[0], NUM_NEW)


# ------------------------------------------------------------------ embeddings


def embeds_of(models: Shelf, family: str, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return models.reference(family).get_input_embeddings()(torch.tensor(tokens))


@pytest.mark.parametrize("settings", [{}, SMALL], ids=["plain", "small"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_embeddings_take_the_place_of_tokens(family: str, settings: dict[str, Any], models: Shelf) -> None:
    """Some requests have the embeddings of other tokens than their own: they must go on as those do."""
    llm = models.load(family, **settings)
    requests = [
        make_request(f"{i} embeds", prompt, input_embeds=embeds_of(models, family, other))
        for i, (prompt, other) in enumerate(zip(PROMPTS, OTHERS, strict=True))
    ]
    requests[1:1] = [make_request("ids", PROMPTS[0]), make_request("ids again", PROMPTS[0])]
    found = run(llm, requests)
    prompts = [OTHERS[0], PROMPTS[0], PROMPTS[0], *OTHERS[1:]]
    assert found == [models.greedy(family, prompt, NUM_NEW) for prompt in prompts]
    if settings:
        assert llm.stats()["coverage"] == 1
        assert sum(request.num_preemptions for request in requests) > 0


def test_embeddings_share_prefixes_only_by_key(models: Shelf) -> None:
    llm = models.load("llama", options={"block_size": 4})
    scheduler = llm.make_scheduler()
    embeds = embeds_of(models, "llama", OTHERS[1])
    expected = models.greedy("llama", OTHERS[1], NUM_NEW)
    for name, key, cached in (("a", "", 0), ("b", "", 0), ("c", "image 1", 0), ("d", "image 1", 16)):
        request = make_request(name, PROMPTS[1], input_embeds=embeds, cache_key=key)
        assert run(llm, [request], scheduler) == [expected]
        assert request.num_cached == cached, name
    assert run(llm, [make_request("ids", PROMPTS[1])], scheduler) == [models.greedy("llama", PROMPTS[1], NUM_NEW)]


def test_a_model_that_needs_its_tokens_takes_no_embeddings(models: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = models.load("llama")
    forward = llm.started.engine.forward
    monkeypatch.setattr(forward, "_trace_embeds", lambda: WithoutTokens())
    request = make_request("mine", PROMPTS[0], input_embeds=embeds_of(models, "llama", PROMPTS[0]))
    for _ in range(2):
        scheduler = llm.make_scheduler()
        with pytest.raises(ModelError, match="PG662 the model cannot take embeddings in the place of tokens"):
            run(llm, [make_request("mine", PROMPTS[0], input_embeds=request.input_embeds)], scheduler)


class WithoutTokens:
    def run(self, inputs: Any, sizes: Any, run_step: Any) -> list[torch.Tensor]:
        return [torch.ones(len(inputs[0]), 64)]
