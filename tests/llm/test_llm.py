"""Language models through the tape give what transformers gives, whatever runs beside, before and around a request."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import piecegraph
from piecegraph.errors import RequestError
from piecegraph.llm import Request, SamplingParams
from tests.cases.llm_shelf import Shelf

FAMILIES = (
    "llama",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "gpt2",
    "qwen3_next",
    "mamba2",
    "bamba",
)
LENGTHS = (1, 21, 6, 13, 2)
NUM_NEW = 12
TIGHT: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_batch_tokens": 16,
    "max_model_len": 64,
    "capture_sizes": [1, 2, 4, 16],
    "options": {"block_size": 4, "cache_tokens": 44, "graph_device": "simulated", "look_ahead": True},
}
"""Prompts in chunks, steps padded and recorded, one step launched behind another, and too few blocks."""


def prompts(seed: int = 0) -> list[list[int]]:
    numbers = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 128, (length,), generator=numbers).tolist() for length in LENGTHS]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Of the module, so that all tests of a family run one behind the other and share its trace."""
    return str(request.param)


@pytest.fixture(scope="module")
def llama(models: Shelf) -> piecegraph.LLM:
    return models.load("llama")


def tokens_of(answers: Any) -> list[list[int]]:
    assert all(answer.error is None for answer in answers), [answer.error for answer in answers]
    return [answer.token_ids for answer in answers]


def assert_nothing_is_held(llm: piecegraph.LLM) -> None:
    scheduler = llm.started.engine.scheduler
    scheduler.check()
    assert scheduler.num_unfinished == 0
    assert all(pool.num_free == pool.num_blocks - 1 for pool in scheduler.cache.pools)


# ------------------------------------------------------------------ every family


def test_tokens_and_logits_are_those_of_transformers(family: str, models: Shelf) -> None:
    llm = models.load(family)
    answers = llm.generate(prompts(), max_new_tokens=NUM_NEW, ignore_eos=True, return_hidden_states=True)
    for prompt, answer in zip(prompts(), answers, strict=True):
        assert answer.token_ids == models.greedy(family, prompt, NUM_NEW)
        with torch.inference_mode():
            found = llm.started.model.head(answer.hidden_states)
        torch.testing.assert_close(
            found, models.logits(family, [*prompt, *answer.token_ids[:-1]]), rtol=1e-3, atol=1e-3
        )


def test_the_same_in_chunks_padded_recorded_and_preempted(family: str, models: Shelf) -> None:
    llm = models.load(family, **TIGHT)
    expected = [models.greedy(family, prompt, NUM_NEW) for prompt in prompts()]
    first = llm.generate(prompts(), max_new_tokens=NUM_NEW, ignore_eos=True)
    assert tokens_of(first) == expected
    longest = prompts()[1]
    alone = llm.generate(longest, max_new_tokens=NUM_NEW, ignore_eos=True)
    shared = llm.generate([*longest[:18], 7, 9], max_new_tokens=NUM_NEW, ignore_eos=True)
    assert tokens_of(alone) == expected[1:2]
    assert tokens_of(shared) == [models.greedy(family, [*longest[:18], 7, 9], NUM_NEW)]
    assert all(answer.metrics.graph_coverage == 1 for answer in (*first, *alone, *shared))
    if llm.started.model.layers:  # otherwise there are no blocks to run out of
        assert sum(answer.metrics.num_preemptions for answer in first) > 0
    if not llm.started.model.states:
        assert shared[0].metrics.num_cached_tokens == 16
    assert llm.stats()["fallbacks"] == {}
    assert_nothing_is_held(llm)


def test_compiled_pieces_answer_alike(models: Shelf) -> None:
    llm = models.load("qwen3", backend="inductor", capture_sizes=[4, 32])
    answers = llm.generate(prompts(), max_new_tokens=NUM_NEW, ignore_eos=True)
    assert tokens_of(answers) == [models.greedy("qwen3", prompt, NUM_NEW) for prompt in prompts()]
    assert llm.stats()["num_distinct"] < llm.stats()["num_pieces"]


def test_dummy_weights_need_only_a_configuration(models: Shelf, tmp_path: Path) -> None:
    shutil.copy(models.path("llama") / "config.json", tmp_path)
    llm = piecegraph.LLM(tmp_path, load_format="dummy", dtype="float64", backend="eager", device="cpu")
    (answer,) = llm.generate(prompts()[1], max_new_tokens=4, ignore_eos=True, return_hidden_states=True)
    assert (len(answer.token_ids), answer.hidden_states.dtype) == (4, torch.float64)
    assert llm.stats()["dtype"] == "float64"


def test_steps_have_their_own_number_of_threads(models: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = models.load("llama", options={"num_threads": 1})
    assert "threads: 1 (asked for)" in llm.explain()
    step, seen, before = llm.started.engine.forward.step, set(), torch.get_num_threads()
    run = step.run
    monkeypatch.setattr(step, "run", lambda key: (seen.add(torch.get_num_threads()), run(key))[1])
    torch.set_num_threads(2)
    try:
        llm.generate(prompts()[0], max_new_tokens=4, ignore_eos=True)
        assert (seen, torch.get_num_threads()) == ({1}, 2)
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------ what goes in


def test_texts_token_ids_and_both_mixed(llama: piecegraph.LLM) -> None:
    tokens = llama.tokenizer("to be")["input_ids"]
    assert llama.tokenizer.decode(tokens) == "to be"
    text, ids, mixed = (
        llama.generate("to be"),
        llama.generate(tokens),
        llama.generate(["to be", tokens, torch.tensor(tokens)]),
    )
    assert [len(text), len(ids), len(mixed)] == [1, 1, 3]
    assert text[0].prompt == mixed[0].prompt == "to be"
    assert ids[0].prompt is None
    assert {tuple(answer.prompt_token_ids) for answer in (*text, *ids, *mixed)} == {tuple(tokens)}
    decoded = llama.tokenizer.decode(text[0].token_ids, skip_special_tokens=True)
    assert {answer.text for answer in (*text, *ids, *mixed)} == {decoded}
    assert llama.generate([]) == []


def test_a_value_for_each_prompt(llama: piecegraph.LLM, models: Shelf) -> None:
    several = llama.generate(prompts()[:3], max_new_tokens=[1, 5, 3], temperature=[0.0, 0.9, 0.0], seed=[None, 3, None])
    assert [len(answer.token_ids) for answer in several] == [1, 5, 3]
    assert several[2].token_ids == models.greedy("llama", prompts()[2], 3)
    assert several[1].token_ids == llama.generate(prompts()[1], max_new_tokens=5, temperature=0.9, seed=3)[0].token_ids
    with pytest.raises(piecegraph.errors.ConfigError, match="PG108 temperature has 2 values: there are 3 prompts"):
        llama.generate(prompts()[:3], temperature=[0.0, 1.0])


# ------------------------------------------------------------------ what comes out


def test_logprobs_are_those_of_transformers(models: Shelf) -> None:
    llm = models.load("llama", **TIGHT)
    beside, prompt, other = prompts()[1:4]
    answers = llm.generate([beside, prompt, other], max_new_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    for answer in answers:
        tokens = [*answer.prompt_token_ids, *answer.token_ids]
        table = models.logits("llama", tokens).log_softmax(-1)
        told = [*answer.prompt_logprobs, *answer.logprobs]
        assert told[0] is None
        assert [entry.token_id for entry in told[1:]] == tokens[1:]
        for entry, row in zip(told[1:], table, strict=False):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
            best = row.topk(len(entry.top))
            assert [token for token, _ in entry.top] == best.indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert {len(entry.top) for entry in answer.logprobs} == {3}
        assert {len(entry.top) for entry in answer.prompt_logprobs[1:]} == {2}
    quiet = llm.generate(prompt)[0]
    assert quiet.logprobs is quiet.prompt_logprobs is quiet.hidden_states is None


def test_hidden_states_of_every_token_also_after_preemption(models: Shelf) -> None:
    llm = models.load("llama", **TIGHT)
    answers = llm.generate(prompts(), max_new_tokens=NUM_NEW, ignore_eos=True, return_hidden_states=True)
    assert sum(answer.metrics.num_preemptions for answer in answers) > 0
    decoder = models.reference("llama").model
    for answer in answers:
        tokens = torch.tensor([[*answer.prompt_token_ids, *answer.token_ids[:-1]]])
        with torch.inference_mode():
            expected = decoder(input_ids=tokens, use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(answer.hidden_states, expected, rtol=1e-3, atol=1e-3)


def test_metrics(llama: piecegraph.LLM) -> None:
    (answer,) = llama.generate(prompts(seed=1)[1], max_new_tokens=4, ignore_eos=True)
    metrics = answer.metrics
    assert (metrics.num_prompt_tokens, metrics.num_new_tokens, metrics.num_cached_tokens) == (LENGTHS[1], 4, 0)
    assert 0 < metrics.time_to_first_token_s < metrics.total_s
    expected = metrics.time_to_first_token_s + 3 * metrics.seconds_per_token
    assert metrics.total_s == pytest.approx(expected)
    assert len(metrics.token_times_s) == 4
    assert metrics.token_times_s[0] == metrics.time_to_first_token_s
    assert list(metrics.token_times_s) == sorted(metrics.token_times_s)


def test_metrics_count_from_the_call_on_also_while_it_waits_for_others(models: Shelf) -> None:
    llm, goes_on = models.load("llama", max_num_seqs=2), threading.Event()
    with ThreadPoolExecutor(2) as threads:
        with llm.lock:
            found = [threads.submit(llm.generate, prompts()[2], max_new_tokens=4) for _ in range(2)]
            goes_on.wait(0.3)
        answers = [each.result()[0] for each in found]
    assert all(answer.metrics.time_to_first_token_s > 0.25 for answer in answers)
    assert all(answer.metrics.total_s > 0.25 for answer in answers)


def test_who_is_served_by_others_waits_for_no_turn(models: Shelf) -> None:
    llm = models.load("llama")
    stream = llm.generate(prompts()[1], max_new_tokens=NUM_NEW, ignore_eos=True, stream=True)
    started = [next(stream)]
    engine, goes_on = llm.started.engine, threading.Event()
    with ThreadPoolExecutor(1) as threads:
        with llm.lock, torch.inference_mode():
            rest = threads.submit(lambda: next(stream))
            while not llm.lock._line:
                goes_on.wait(0.001)
            engine.step()
        found = [*started, rest.result(10), *stream]
    assert [token for chunk in found for token in chunk.token_ids] == models.greedy("llama", prompts()[1], NUM_NEW)


# ------------------------------------------------------------------ where answers end


def set_eos(llm: piecegraph.LLM, patch: pytest.MonkeyPatch, *tokens: int) -> None:
    patch.setattr(llm.started.engine.scheduler, "eos_token_ids", frozenset(tokens))


@pytest.mark.parametrize("look_ahead", [True, False])
def test_a_token_that_ends_the_text(look_ahead: bool, models: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = models.load("llama", options={"look_ahead": look_ahead, "block_size": 4})
    wanted = [models.greedy("llama", prompt, NUM_NEW) for prompt in prompts()]
    end = wanted[1][4]
    cut = [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in wanted]
    assert {len(tokens) for tokens in cut} > {NUM_NEW}, "one ends early, another does not"
    set_eos(llm, monkeypatch, end)
    answers = llm.generate(prompts(), max_new_tokens=NUM_NEW)
    assert tokens_of(answers) == cut
    for answer in answers:
        is_stopped = end in answer.token_ids
        assert answer.finish_reason == ("stop" if is_stopped else "length")
        assert answer.text == llm.tokenizer.decode(answer.token_ids[:-1] if is_stopped else answer.token_ids)
    assert_nothing_is_held(llm)
    assert tokens_of(llm.generate(prompts(), max_new_tokens=NUM_NEW, ignore_eos=True)) == wanted


@pytest.mark.parametrize("look_ahead", [True, False])
def test_stop_texts(look_ahead: bool, models: Shelf) -> None:
    llm = models.load("llama", options={"look_ahead": look_ahead})
    (whole,) = llm.generate(prompts()[3], max_new_tokens=NUM_NEW, ignore_eos=True)
    stop = whole.text[5:7]
    first = whole.text.index(stop)
    (answer,) = llm.generate(prompts()[3], max_new_tokens=NUM_NEW, ignore_eos=True, stop=["never", stop])
    assert (answer.text, answer.finish_reason) == (whole.text[:first], "stop")
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    (last,) = llm.generate(prompts()[3], max_new_tokens=first + 2, ignore_eos=True, stop=stop)
    assert (last.text, last.finish_reason) == (whole.text[:first], "stop"), "completed by the last token allowed"
    assert_nothing_is_held(llm)


def test_stop_texts_with_a_scheduler_of_one_s_own(models: Shelf) -> None:
    llm = models.load("llama")
    (whole,) = llm.generate(prompts()[3], max_new_tokens=NUM_NEW, ignore_eos=True)
    stop = whole.text[5:7]
    (wanted,) = llm.generate(prompts()[3], max_new_tokens=NUM_NEW, ignore_eos=True, stop=["never", stop])
    last = len(wanted.token_ids)
    for num_new in (NUM_NEW, last):
        scheduler = llm.make_scheduler()
        params = SamplingParams(max_new_tokens=num_new, ignore_eos=True, stop=("never", stop))
        request = Request("mine", prompts()[3], params)
        scheduler.add(request)
        while plan := scheduler.schedule():
            scheduler.commit(plan, llm.forward(plan).tokens.tolist())
        assert (request.generated, request.finish_reason) == (wanted.token_ids, "stop")
        scheduler.check()


def test_stop_texts_need_a_tokenizer_also_with_a_scheduler_of_one_s_own(
    models: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = models.load("llama")
    untold = replace(llm.started, loaded=replace(llm.started.loaded, tokenizer=None))
    monkeypatch.setattr(llm.running, "_started", untold)
    scheduler = llm.make_scheduler()
    with pytest.raises(piecegraph.errors.ModelError, match="PG666"):
        scheduler.add(Request("mine", prompts()[3], SamplingParams(stop=("never",))))
    assert scheduler.num_unfinished == 0


# ------------------------------------------------------------------ sampling


def sampled(llm: piecegraph.LLM, which: slice = slice(None), **arguments: Any) -> list[list[int]]:
    params = {"temperature": 1.3, "max_new_tokens": 8, "ignore_eos": True, **arguments}
    return tokens_of(llm.generate(prompts()[which], **params))


def test_samples_depend_on_seed_alone(models: Shelf, llama: piecegraph.LLM) -> None:
    seeds = [11, 12, 13, 14, 15]
    together = sampled(llama, seed=seeds)
    assert [sampled(llama, slice(i, i + 1), seed=seed)[0] for i, seed in enumerate(seeds)] == together
    assert sampled(models.load("llama", **TIGHT), seed=seeds) == together, "in chunks, padded, preempted, looking ahead"
    assert sampled(llama, seed=21) != together


def test_without_seeds_the_model_s_own_decides(models: Shelf) -> None:
    first, same, other = (sampled(models.load("llama", seed=seed)) for seed in (1, 1, 2))
    assert first == same != other


def test_truncated_samples(llama: piecegraph.LLM, models: Shelf) -> None:
    greedy = [models.greedy("llama", prompt, 8) for prompt in prompts()]
    assert (
        sampled(llama, top_k=1, seed=1) == sampled(llama, top_p=1e-6, seed=2) == sampled(llama, temperature=0) == greedy
    )
    few = llama.generate(prompts(), max_new_tokens=20, temperature=5.0, top_k=3, seed=1, logprobs=3, ignore_eos=True)
    ranks = [[t for t, _ in entry.top].index(entry.token_id) for answer in few for entry in answer.logprobs]
    assert set(ranks) == {0, 1, 2}


def test_recorded_sampling_is_used_from_its_first_decode_step(models: Shelf) -> None:
    llm = models.load("llama", **TIGHT)
    (answer,) = llm.generate(prompts()[2], max_new_tokens=9, temperature=1.0, seed=1, ignore_eos=True)
    assert answer.metrics.graph_coverage == 1
    assert llm.stats()["fallbacks"] == {}


# ------------------------------------------------------------------ streams, threads, the end


def test_chunks_add_up(llama: piecegraph.LLM) -> None:
    arguments: dict[str, Any] = {"max_new_tokens": [3, 6, 9], "ignore_eos": True, "stop": "never", "on_error": "return"}
    expected = llama.generate(["one", "two", []], **arguments)
    chunks = list(llama.generate(["one", "two", []], stream=True, **arguments))
    for index, answer in enumerate(expected):
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert "".join(chunk.text for chunk in mine) == (answer.text or "")
        assert [token for chunk in mine for token in chunk.token_ids] == answer.token_ids
        assert [chunk.finished is not None for chunk in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1].finished.token_ids == answer.token_ids
        assert mine[-1].finished.finish_reason == answer.finish_reason
    assert len(chunks) == 3 + 6 + 1, "one for each token, and the refusal"


@pytest.mark.parametrize("look_ahead", [True, False])
def test_a_stream_that_is_left_frees_its_blocks(look_ahead: bool, models: Shelf) -> None:
    llm = models.load("llama", options={"look_ahead": look_ahead})
    unread = llm.generate(prompts(), stream=True)
    assert llm.started.engine.scheduler.num_unfinished == 0
    stream = llm.generate(prompts(), max_new_tokens=50, ignore_eos=True, stream=True)
    for _ in range(12):
        next(stream)
    assert llm.started.engine.scheduler.num_unfinished == len(prompts())
    stream.close()
    assert_nothing_is_held(llm)
    expected = [models.greedy("llama", prompt, NUM_NEW) for prompt in prompts()]
    assert tokens_of(llm.generate(prompts(), max_new_tokens=NUM_NEW, ignore_eos=True)) == expected
    assert sum(len(chunk.token_ids) for chunk in unread) > 0, "it can still be read"


def test_an_error_in_the_middle_is_nobody_else_s(models: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = models.load("llama", options={"look_ahead": True})
    scheduler = llm.started.engine.scheduler
    stream = llm.generate(prompts()[1], max_new_tokens=NUM_NEW, ignore_eos=True, stream=True)
    started = [next(stream) for _ in range(3)]

    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    commit = scheduler.commit
    for num_steps in (0, 1, 3):
        calls = iter([commit] * num_steps + [interrupt])
        with monkeypatch.context() as patch:
            patch.setattr(scheduler, "commit", lambda *args: next(calls)(*args))  # noqa: B023
            with pytest.raises(KeyboardInterrupt):
                llm.generate(prompts()[2:4], max_new_tokens=NUM_NEW, ignore_eos=True)
        assert scheduler.num_unfinished == 1, "only the stream's"
    found = [token for chunk in (*started, *stream) for token in chunk.token_ids]
    assert found == models.greedy("llama", prompts()[1], NUM_NEW)
    assert_nothing_is_held(llm)


def test_threads_share_a_model_and_models_share_a_process(models: Shelf) -> None:
    names = ("llama", "gemma3", "llama", "gemma3")
    llms = {name: models.load(name, max_num_seqs=3) for name in set(names)}
    expected = [[models.greedy(name, p, NUM_NEW) for p in prompts(seed)] for seed, name in enumerate(names)]

    def answer(seed: int) -> list[list[int]]:
        llm = llms[names[seed]]
        if seed < 2:
            return tokens_of(llm.generate(prompts(seed), max_new_tokens=NUM_NEW, ignore_eos=True))
        found: list[list[int]] = [[] for _ in LENGTHS]
        for chunk in llm.generate(prompts(seed), max_new_tokens=NUM_NEW, ignore_eos=True, stream=True):
            found[chunk.index] += chunk.token_ids
        return found

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(answer, range(4))) == expected


def test_bad_logits_end_one_request_also_when_looking_ahead(models: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = models.load("llama", options={"look_ahead": True})
    model, calls = llm.started.model, []

    def head(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(len(hidden))
        logits = model.head(hidden)
        return logits.index_fill(0, torch.tensor([0]), float("nan")) if len(calls) == 3 else logits

    monkeypatch.setattr(llm.started.engine.forward.step, "head", head)
    asked = [prompts()[1], prompts()[3]]
    bad, good = llm.generate(asked, max_new_tokens=6, ignore_eos=True, on_error="return")
    assert calls[:4] == [2, 2, 2, 2], "a step was launched with the bad token"
    assert (bad.finish_reason, bad.error.code) == ("error", "PG655")
    assert str(bad.error).startswith("PG655 the logits are not numbers at prompts[0]: ")
    assert bad.token_ids == models.greedy("llama", prompts()[1], 2)
    assert good.token_ids == models.greedy("llama", prompts()[3], 6)
    calls.clear()
    with pytest.raises(RequestError, match=r"PG655 the logits are not numbers at prompts\[0\]"):
        llm.generate(asked, max_new_tokens=6, ignore_eos=True)
    assert_nothing_is_held(llm)


# ------------------------------------------------------------------ conversations


def test_conversations_are_answered(llama: piecegraph.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ messages[0].content }}{% if asks %}?{% endif %}"
    monkeypatch.setattr(llama.tokenizer, "chat_template", template, raising=False)
    messages = [{"role": "user", "content": "to be"}]
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    plain, asked = llama.generate(["to be", "to be?"], params)
    (answer,) = llama.chat(messages, params)
    assert (answer.token_ids, answer.prompt_token_ids) == (plain.token_ids, plain.prompt_token_ids)
    several = llama.chat([messages, "to be"], max_new_tokens=[3, 3], ignore_eos=True, asks=True)
    assert [each.token_ids for each in several] == [asked.token_ids] * 2
    chunks = llama.chat(messages, max_tokens=3, ignore_eos=True, stream=True)
    assert [token for chunk in chunks for token in chunk.token_ids] == plain.token_ids
