"""With ``deterministic=True`` a request gets the same bits, whatever runs beside, before and after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F

import piecegraph
from piecegraph.errors import ConfigError, ModelError, RequestError
from piecegraph.llm import Request, SamplingParams
from piecegraph.llm.kernels import linear
from piecegraph.llm.kernels.attention import fixed
from piecegraph.llm.kernels.attention.registry import choose_kernel
from piecegraph.llm.model.refusals import refuse_deterministic
from piecegraph.llm.run.results import Completion
from piecegraph.llm.specs import AttentionLayer
from tests.cases.attention import Sequences, check, latent_layer, layer
from tests.cases.llm_shelf import Shelf
from tests.llm.test_attention_reference import DECODE, LAYERS, MIXED, PREFILL

LENGTHS = (1, 21, 6, 13, 2)
NUM_NEW = 10
SETTINGS: dict[str, Any] = {"deterministic": True, "max_model_len": 64, "max_num_seqs": 6, "max_batch_tokens": 12}
TIGHT = {"options": {"block_size": 4, "cache_tokens": 44}}
GRAPHS = {"options": {"graph_device": "simulated", "look_ahead": True}}


def prompts() -> list[list[int]]:
    numbers = torch.Generator().manual_seed(0)
    return [torch.randint(4, 128, (length,), generator=numbers).tolist() for length in LENGTHS]


def bits(answer: Completion) -> tuple[Any, ...]:
    """All that is told about a request, to the last bit."""
    assert answer.error is None, answer.error
    assert answer.hidden_states is not None
    return answer.token_ids, answer.logprobs, answer.prompt_logprobs, answer.hidden_states.tolist()


def answers(llm: piecegraph.LLM, which: list[int], **arguments: Any) -> dict[int, tuple[Any, ...]]:
    found = llm.generate(
        [prompts()[i] for i in which],
        max_new_tokens=NUM_NEW,
        ignore_eos=True,
        temperature=[0.0 if i % 2 else 1.2 for i in which],
        seed=which,
        top_k=[5 if i % 4 == 0 else 0 for i in which],
        logprobs=3,
        prompt_logprobs=1,
        return_hidden_states=True,
        **arguments,
    )
    return {i: bits(answer) for i, answer in zip(which, found, strict=True)}


def test_every_bit_is_the_same_alone_and_in_batches_of_any_size(models: Shelf) -> None:
    llm = models.load("llama", **SETTINGS)
    alone = {i: answers(llm, [i])[i] for i in range(len(LENGTHS))}
    for which in ([1, 0], [4, 3, 2, 1, 0], [3, 3, 3, 1, 3]):
        together = answers(llm, which)
        for i in set(which):
            assert together[i] == alone[i], (which, i)
    assert "deterministic: on" in llm.explain()
    tight = models.load("llama", **SETTINGS, **TIGHT)
    assert answers(tight, list(alone)) == alone, "in other blocks, and preempted"
    again = tight.generate(prompts(), max_new_tokens=NUM_NEW, ignore_eos=True)
    assert sum(answer.metrics.num_preemptions for answer in again) > 0
    graphs = models.load("llama", **SETTINGS, **GRAPHS)
    assert answers(graphs, list(alone)) == alone, "recorded, and launched ahead"
    assert graphs.stats()["coverage"] == 1
    assert {key.bucket.num_tokens for key in graphs.started.engine.forward.library.tapes} == {12}


def test_prefixes_that_were_found_and_windows_change_no_bit(models: Shelf) -> None:
    llm = models.load("gemma2", **SETTINGS, options={"block_size": 4})
    prompt = [*prompts()[1], *prompts()[2]]
    arguments: dict[str, Any] = {"max_new_tokens": 5, "ignore_eos": True, "logprobs": 2}
    first, again, beside = (llm.generate(given, **arguments) for given in ([prompt], [prompt], [*prompts(), prompt]))
    assert (first[0].metrics.num_cached_tokens, again[0].metrics.num_cached_tokens) == (0, 24)
    assert first[0].logprobs == again[0].logprobs == beside[-1].logprobs


def test_models_whose_rows_depend_on_others_are_refused(models: Shelf) -> None:
    with pytest.raises(ModelError, match="PG668 .* cannot be kept by this model: what layers with a state make of"):
        models.load("mamba2", **SETTINGS)
    with pytest.raises(ModelError, match="PG668 .* cannot be kept by this model: experts are given"):
        refuse_deterministic(models.reference("llama"), torch.fx.Graph(), (), [torch.nn.Module()])


def test_a_machine_whose_rows_depend_on_others_is_refused(models: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed, "_attend_tile", _by_length(fixed._attend_tile))
    with pytest.raises(ModelError, match="PG668 deterministic=True cannot be kept here: logits .* differ by"):
        models.load("llama", **SETTINGS)


def _by_length(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What rounding does that goes by the number of rows."""
    return lambda q, *args: attend(q, *args) * (1 + 1e-6 * len(q))


def test_what_cannot_go_with_it(models: Shelf) -> None:
    with pytest.raises(ConfigError, match=r"PG101 capture_sizes is \[4, 8\]: with deterministic=True every step"):
        models.load("llama", **SETTINGS, capture_sizes=[4, 8])
    with pytest.raises(ConfigError, match="PG101 deterministic is 1: it must be one of True, False"):
        models.load("llama", deterministic=1)
    llm = models.load("llama", **SETTINGS)
    scheduler = llm.make_scheduler()
    scheduler.add(Request("pixels", [0] * 3, SamplingParams(), input_embeds=torch.zeros(3, 64)))
    plan = scheduler.schedule()
    assert plan is not None
    with pytest.raises(RequestError, match="PG657 .*brings embeddings, which deterministic=True does not know"):
        llm.forward(plan)


# ------------------------------------------------------------------ its kernels


@pytest.mark.parametrize("spec", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("sequences", [MIXED, PREFILL, DECODE], ids=lambda each: each.name)
def test_the_fixed_reference_matches_the_definition(spec: Any, sequences: Sequences) -> None:
    if isinstance(spec, AttentionLayer):
        check(fixed.KERNEL, spec, sequences, torch.float32)


def test_kernels_that_may_look_at_their_neighbours_are_not_chosen() -> None:
    cpu = torch.device("cpu")
    kernel, why = choose_kernel("auto", [layer(2, 2, 64)], torch.float32, cpu, deterministic=True)
    assert kernel is fixed.KERNEL
    assert "varlen (what a query gets may depend on what runs beside it)" in why
    with pytest.raises(ConfigError, match="'varlen' cannot serve this model: what a query gets may depend"):
        choose_kernel("varlen", [], torch.float32, cpu, deterministic=True)
    with pytest.raises(ConfigError, match="PG101 deterministic is True: no attention kernel can do that"):
        choose_kernel("auto", [latent_layer(2, 16, 8, 8, 8)], torch.float32, cpu, deterministic=True)


def test_linears_of_a_head_are_those_of_fixed_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    with linear.fixed_linears(), torch.inference_mode():
        monkeypatch.setattr(linear, "launch_tiles", lambda x, linear, added, out, *_, **__: calls.append(out.zero_()))
        found = torch.nn.Linear(4, 6)(torch.ones(2, 3, 4))
    assert found.shape == (2, 3, 6)
    assert [each.shape for each in calls] == [(6, 6)]


def test_products_that_are_no_linears_are_found() -> None:
    class Products(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, x) @ x

    graph = torch.fx.symbolic_trace(Products()).graph
    for node in graph.nodes:
        node.meta["example_value"] = torch.empty(4, 4) if node.op != "output" else None
    found = linear.other_product(graph)
    assert found is not None
    assert found.name == "matmul"
    for node in graph.nodes:
        node.meta["example_value"] = torch.empty(4, 1) if node.op != "output" else None
    assert linear.other_product(graph) is None
