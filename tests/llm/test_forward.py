"""A scheduler of one's own drives a model step by step, with token ids or with embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import piecegraph
from piecegraph.errors import ModelError, RequestError
from piecegraph.llm import PagedCache, Request, SamplingParams, Scheduler, StepPlan, Work
from tests.cases.llm_shelf import Shelf
from tests.cases.llms import IMAGE_TOKEN

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


def make_request(name: str, prompt: list[int], **arguments: Any) -> Request:
    return Request(name, prompt, SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True), **arguments)


def run(llm: piecegraph.LLM, requests: list[Request], scheduler: Scheduler | None = None) -> list[list[int]]:
    scheduler = scheduler if scheduler is not None else llm.make_scheduler()
    for request in requests:
        scheduler.add(request)
    while plan := scheduler.schedule():
        result = llm.forward(plan)
        assert len(result.tokens) == len(result.logits) == plan.num_seqs
        assert len(result.hidden) == plan.num_seqs
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
    with pytest.raises(RequestError, match="PG657 .* it has 9 tokens of 1 sequence, .*max_batch_tokens=8"):
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
    monkeypatch.setattr(forward._embeds, "_trace", lambda: WithoutTokens())
    request = make_request("mine", PROMPTS[0], input_embeds=embeds_of(models, "llama", PROMPTS[0]))
    for _ in range(2):
        scheduler = llm.make_scheduler()
        with pytest.raises(ModelError, match="PG662 the model cannot take embeddings in the place of tokens"):
            run(llm, [make_request("mine", PROMPTS[0], input_embeds=request.input_embeds)], scheduler)


class WithoutTokens:
    @property
    def decoder(self) -> WithoutTokens:
        return self

    def run(self, inputs: Any, num_tokens: int, run_step: Any) -> list[torch.Tensor]:
        return [torch.ones(num_tokens, 64)]

    def finish(self, values: Any, num_tokens: int, run_step: Any) -> torch.Tensor:
        return values[0]


# ------------------------------------------------------------------ positions in three dimensions


def places(num_tokens: int) -> np.ndarray:
    """Six tokens from the third on are a picture of two columns and three rows."""
    positions = np.arange(num_tokens)[None].repeat(3, 0)
    positions[:, 2:8] = [[2] * 6, [2, 2, 3, 3, 4, 4], [2, 3, 2, 3, 2, 3]]
    positions[:, 8:] = np.arange(num_tokens - 8) + 5
    return positions


def greedy_at(model: Any, rows: torch.Tensor, positions: np.ndarray) -> tuple[list[int], list[torch.Tensor]]:
    """What transformers goes on with behind embeddings at positions, and the logits of each new token."""
    tokens, logits, at = [], [], torch.tensor(positions)
    with torch.inference_mode():
        for _ in range(NUM_NEW):
            logits.append(model(inputs_embeds=rows[None], position_ids=at[:, None], use_cache=False).logits[0, -1])
            tokens.append(int(logits[-1].argmax()))
            rows = torch.cat((rows, model.get_input_embeddings()(torch.tensor(tokens[-1:]))))
            at = torch.cat((at, (at.max() + 1).expand(3, 1)), 1)
    return tokens, logits


@pytest.mark.parametrize("settings", [{}, SMALL], ids=["plain", "small"])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_5"])
def test_positions_in_three_dimensions(family: str, settings: dict[str, Any], models: Shelf) -> None:
    """With ids or embeddings, beside text, in pieces of a prompt, after a preemption."""
    llm, model = models.load(family, **settings), models.reference(family)
    prompts = [[9, 17, 80, 33] * 3, [40, 41, 60, 7] * 4, PROMPTS[0]]
    embeds = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    requests = [
        make_request("ids", prompts[0], mrope_positions=places(12)),
        make_request("embeds", prompts[1], mrope_positions=torch.tensor(places(16)), input_embeds=embeds),
        make_request("text", prompts[2]),
    ]
    ids = embeds_of(models, family, prompts[0])
    expected = [greedy_at(model, ids, places(12)), greedy_at(model, embeds, places(16))]
    found: dict[str, list[torch.Tensor]] = {request.id: [] for request in requests}
    scheduler = llm.make_scheduler()
    for request in requests:
        scheduler.add(request)
    while plan := scheduler.schedule():
        result = llm.forward(plan)
        for work, logits in zip(plan.works, result.logits, strict=True):
            if work.samples:
                found[work.request.id].append(logits.clone())
        scheduler.commit(plan, result.tokens.tolist())
    for request, (tokens, logits) in zip(requests, expected, strict=False):
        assert request.generated == tokens
        torch.testing.assert_close(torch.stack(found[request.id]), torch.stack(logits), rtol=1e-3, atol=1e-3)
    assert requests[2].generated == models.greedy(family, prompts[2], NUM_NEW)
    assert requests[0].generated != models.greedy(family, prompts[0], NUM_NEW), "the positions change nothing"
    if settings:
        assert llm.stats()["coverage"] == 1
        assert sum(request.num_preemptions for request in requests) > 0


def test_an_image(models: Shelf) -> None:
    """Embeddings and positions made by the loaded model itself, as a caller would: the same as transformers."""
    prompt = [11, 12, *[IMAGE_TOKEN] * 6, 14, 15, 16]
    tokens, kinds = torch.tensor([prompt]), torch.tensor([[int(token == IMAGE_TOKEN) for token in prompt]])
    image = {
        "pixel_values": torch.randn(24, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0)),
        "image_grid_thw": torch.tensor([[1, 6, 4]]),
    }
    expected = models.reference("qwen2_vl").generate(
        input_ids=tokens, mm_token_type_ids=kinds, max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, **image
    )
    llm = models.load("qwen2_vl")
    model = llm.started.loaded.model.model
    with torch.inference_mode():
        embeds = model.get_input_embeddings()(tokens)[0]
        embeds[kinds[0].bool()] = torch.cat(model.get_image_features(**image).pooler_output)
        positions, _ = model.get_rope_index(tokens, kinds, image_grid_thw=image["image_grid_thw"])
    request = make_request("image", prompt, input_embeds=embeds, mrope_positions=positions[:, 0])
    assert run(llm, [request]) == [expected[0, len(prompt) :].tolist()]
    assert run(llm, [make_request("text", PROMPTS[0])]) == [models.greedy("qwen2_vl", PROMPTS[0], NUM_NEW)]


def test_positions_share_prefixes_only_by_key(models: Shelf) -> None:
    llm = models.load("qwen2_vl", options={"block_size": 4})
    scheduler = llm.make_scheduler()
    prompt = PROMPTS[1]
    expected, _ = greedy_at(models.reference("qwen2_vl"), embeds_of(models, "qwen2_vl", prompt), places(20))
    assert run(llm, [make_request("text", prompt)], scheduler) == [models.greedy("qwen2_vl", prompt, NUM_NEW)]
    for name, key, cached in (("a", "", 0), ("b", "grid 3 x 2", 0), ("c", "grid 3 x 2", 16)):
        request = make_request(name, prompt, mrope_positions=places(20), cache_key=key)
        assert run(llm, [request], scheduler) == [expected]
        assert request.num_cached == cached, name


def test_images_that_are_more_than_embeddings_are_refused(models: Shelf) -> None:
    llm = models.load("qwen3_vl")
    (answer,) = llm.generate(PROMPTS[0], max_new_tokens=NUM_NEW, ignore_eos=True)
    assert answer.token_ids == models.greedy("qwen3_vl", PROMPTS[0], NUM_NEW)
    with pytest.raises(ModelError, match="PG662 .* at model.language_model: .* deepstack_visual_embeds"):
        run(llm, [make_request("image", PROMPTS[0], input_embeds=torch.zeros(6, 64))])
