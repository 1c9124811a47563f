"""No request waits for a recording: what is missing is covered, counted, and recorded when nothing runs."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any, cast

import pytest

import piecegraph
from piecegraph.errors import ConfigError
from piecegraph.llm import parts, running
from piecegraph.llm.cache.memory import EachKindOnce, Memory
from piecegraph.llm.run import batch, sizing, step
from piecegraph.llm.run.forward import Forward
from piecegraph.llm.run.step import Bucket
from piecegraph.llm.specs import AttentionLayer
from piecegraph.tape.library import TapeLibrary
from tests.cases.llm_shelf import Shelf

PROMPT = list(range(60, 100))
"""Of 40 tokens: between two powers of two."""
SETTINGS: dict[str, Any] = {"max_batch_tokens": 100, "max_num_seqs": 2}


def load(models: Shelf, **options: Any) -> piecegraph.LLM:
    return models.load("llama", **SETTINGS, options={"graph_device": "simulated", **options})


def answer(llm: piecegraph.LLM, **arguments: Any) -> piecegraph.Completion:
    return llm.generate([PROMPT], **{"max_new_tokens": 4, "ignore_eos": True, **arguments})[0]


def test_a_first_pass_waits_for_no_recording(models: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(models, look_ahead=True)
    record, begun = TapeLibrary._record_or_drop, list[tuple[float, Bucket]]()

    def slowly(library: Any, key: Any, source: Any) -> None:
        begun.append((time.perf_counter(), key.bucket))
        time.sleep(0.5)
        record(library, key, source)

    monkeypatch.setattr(TapeLibrary, "_record_or_drop", slowly)
    arguments: dict[str, Any] = {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0.7, "seed": 1}
    times, tokens = list[float](), list[int]()
    for chunk in llm.generate([PROMPT], stream=True, **arguments):
        times.append(time.perf_counter())
        tokens += chunk.token_ids
        metrics = chunk.finished.metrics if chunk.finished is not None else None
    assert metrics is not None
    assert metrics.token_times_s[-1] < 0.5
    assert metrics.graph_coverage == 1
    assert len({bucket for _, bucket in begun}) == 1, "and then one, as the time that may be used for it is spent"
    assert begun[0][0] > times[-1], "behind the last token"
    monkeypatch.undo()
    assert tokens == answer(models.load("llama"), temperature=0.7, seed=1).token_ids


@pytest.mark.parametrize("most", [2, 16])
def test_a_long_sequence_that_decodes_is_kept_apart(models: Shelf, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    for module in (sizing, step):
        monkeypatch.setattr(module, "LONG_CONTEXT", 32)
    fill, buckets = Forward.fill, list[Bucket]()

    def watched(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        filled = fill(forward, *args, **kwargs)
        buckets.append(filled.key.bucket)
        return filled

    monkeypatch.setattr(Forward, "fill", watched)
    prompts = [PROMPT, [*PROMPT[::-1], *PROMPT]]  # the second goes on in a step in which the first decodes
    arguments: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True}
    llm = models.load(
        "llama", max_batch_tokens=100, max_num_seqs=most, options={"graph_device": "simulated", "look_ahead": False}
    )
    found = llm.generate(prompts, **arguments)
    assert any(bucket.separates_prompts and bucket.num_tokens < 100 for bucket in buckets)
    assert all(answer.metrics.graph_coverage == 1 for answer in found)
    plain = models.load("llama")
    assert [answer.token_ids for answer in found] == [
        plain.generate([each], **arguments)[0].token_ids for each in prompts
    ]


def test_short_contexts_have_sizes_of_their_own(models: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five sequences decode together; behind the 48th token of the longest their steps have another size."""
    for module in (sizing, step, batch):
        monkeypatch.setattr(module, "SHORT_CONTEXT", 48)
    choose, bounds = parts.choose_step_sizes, dict[Bucket, set[int]]()
    monkeypatch.setattr(parts, "choose_step_sizes", lambda *a, **k: choose(*a, **{**k, "short_seqs": 8}))
    fill, used = Forward.fill, list[tuple[Bucket, int]]()

    def watched(forward: Forward, plan: step.StepPlan, **kwargs: Any) -> Any:
        filled = fill(forward, plan, **kwargs)
        bucket, longest = filled.key.bucket, max(work.start + work.num_tokens for work in plan.works)
        used.append((bucket, longest))
        bounds.setdefault(bucket, set()).update(
            each.max_seq_len for each in forward.step._buffers.views(bucket).attention
        )
        return filled

    monkeypatch.setattr(Forward, "fill", watched)
    llm = models.load("llama", max_num_seqs=8, options={"graph_device": "simulated"})
    used.clear()
    prompts = [PROMPT, PROMPT[:9], PROMPT[5:30], PROMPT[:3], PROMPT[2:8]]
    found = llm.generate(prompts, max_new_tokens=20, ignore_eos=True)
    assert [each.token_ids for each in found] == [models.greedy("llama", prompt, 20) for prompt in prompts]
    assert all(each.metrics.graph_coverage == 1 for each in found)
    decoded = [(bucket, longest) for bucket, longest in used if bucket.kind == "decode"]
    assert {bucket.is_short for bucket, _ in decoded} == {True, False}
    assert all(bucket.is_short == (longest <= 48) for bucket, longest in decoded)
    assert {max(bounds[bucket]) for bucket, _ in decoded if bucket.is_short} == {48}
    assert {min(bounds[bucket]) for bucket, _ in decoded if not bucket.is_short} == {llm.started.limits.max_model_len}


def test_a_step_between_two_sizes_runs_in_the_larger_one(models: Shelf) -> None:
    llm = load(models)
    tapes = llm.started.engine.forward.library.tapes
    assert Bucket(48, 2) not in {key.bucket for key in tapes}
    first = answer(llm)
    mixed = llm.stats()["steps"]["mixed"]
    assert mixed == {"num_steps": 1, "num_replays": 1, "num_larger": 1, "num_tokens": 40, "num_padding": 24}
    assert Bucket(48, 2) in {key.bucket for key in tapes}, "recorded once the answer was there"
    assert llm.stats()["num_recorded_idle"] == 4, "with every sampler"
    llm.started.engine.scheduler.cache.forget()
    second = answer(llm)
    mixed = llm.stats()["steps"]["mixed"]
    assert mixed == {"num_steps": 2, "num_replays": 2, "num_larger": 1, "num_tokens": 80, "num_padding": 32}
    assert first.token_ids == second.token_ids == models.greedy("llama", PROMPT, 4)
    assert (first.metrics.graph_coverage, second.metrics.graph_coverage) == (1, 1)
    assert llm.stats()["fallbacks"] == {}
    assert "  mixed: 2, 1 in a larger size than the best, 0 without graphs, 29% padding\n" in llm.explain()


def test_steps_are_as_full_as_what_is_recorded_while_others_wait(models: Shelf) -> None:
    llm = load(models)
    prompts = [[number, *PROMPT] for number in range(1, 9)]
    answers = llm.generate(prompts, max_new_tokens=2, ignore_eos=True)
    mixed = llm.stats()["steps"]["mixed"]
    assert mixed["num_steps"] > 8
    assert mixed["num_larger"] <= 1, "none but the last, for which nobody waits"
    assert mixed["num_padding"] < 30
    assert [each.token_ids for each in answers] == [models.greedy("llama", prompt, 2) for prompt in prompts]


def test_what_nothing_covers_runs_without_graphs_once(models: Shelf) -> None:
    llm = load(models)
    first = answer(llm, return_hidden_states=True)
    ((loss, count),) = llm.stats()["fallbacks"].items()
    assert loss.startswith("PG513 a mixed step: mixed 48 tokens of 2 sequences, every row is not recorded yet")
    assert (count, first.metrics.graph_coverage) == (1, 3 / 4)
    second = answer(llm, return_hidden_states=True)
    assert second.metrics.graph_coverage == 1
    assert sum(llm.stats()["fallbacks"].values()) == 1
    assert first.token_ids == second.token_ids == models.greedy("llama", PROMPT, 4)


def test_what_is_missing_is_recorded_when_it_is_asked_for(models: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_IDLE_SHARE", 0.0)
    llm = load(models)
    answer(llm, temperature=0.7)
    assert llm.stats()["num_recorded_idle"] == 0
    missing = [str(key) for key in llm.started.engine.forward.missing]
    assert missing[0] == "mixed 48 tokens of 2 sequences, plain", "most wanted first"
    assert "mixed 48 tokens of 2 sequences" in missing
    assert llm.record_missing(seconds=0) == len(missing) - 4, "one size with every sampler"
    assert (
        f"\n  {llm.stats()['num_recorded'] - 4} at the start, 4 while idle, {len(missing) - 4} not yet\n"
        in llm.explain()
    )
    assert llm.record_missing() == 0
    assert llm.stats()["num_recorded_idle"] == len(missing)
    num_larger = llm.stats()["steps"]["mixed"]["num_larger"]
    llm.started.engine.scheduler.cache.forget()
    assert answer(llm, temperature=0.7).metrics.graph_coverage == 1
    assert llm.stats()["steps"]["mixed"]["num_larger"] == num_larger == 1


def test_nothing_is_recorded_while_requests_are_there(models: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = models.load("llama", **{**SETTINGS, "max_batch_tokens": 200}, options={"graph_device": "simulated"})
    stream = llm.generate([PROMPT], max_new_tokens=4, ignore_eos=True, stream=True)
    tokens = next(stream).token_ids
    missing = llm.stats()["num_missing"]
    assert llm.record_missing() == missing > 1
    record_idle = llm.started.engine.record_idle

    def meet_a_request(*args: Any) -> float:
        thread.start()
        while not llm.lock.is_wanted:
            time.sleep(0.001)
        return record_idle(*args)

    thread = threading.Thread(target=answer, args=(llm,))
    tokens += [token for chunk in stream for token in chunk.token_ids]
    assert tokens == models.greedy("llama", PROMPT, 4)
    missing = llm.stats()["num_missing"]
    monkeypatch.setattr(llm.started.engine, "record_idle", meet_a_request)
    left = llm.record_missing()
    thread.join()
    assert left == missing - 4 > 0, "one size, and then it is somebody else's turn"


def test_samplers_are_recorded_behind_the_greedy_step(models: Shelf) -> None:
    llm, plain = load(models), models.load("llama")
    tapes = llm.started.engine.forward.library.tapes
    drawing = [key for key in tapes if key != key.greedy]
    assert {key.sampling for key in drawing} == {"plain", "truncated"}
    for key in drawing:
        greedy = tapes[key.greedy].steps
        assert tapes[key].steps[: len(greedy)] == greedy
    drawn: dict[str, Any] = {"temperature": 0.7, "seed": 1}
    for how in ({}, drawn, {**drawn, "top_p": 0.8}, {**drawn, "logit_bias": {5: 100.0}}, drawn, {}):
        assert answer(llm, **how).token_ids == answer(plain, **how).token_ids, how
    assert llm.stats()["fallbacks"] == {}


def test_graphs_whose_kernels_can_be_switched_off_are_not_shared(models: Shelf) -> None:
    llm = models.load("llama", capture_sizes=[4], options={"graph_device": "simulated", "provenance": True})
    steps = [id(step) for tape in llm.started.engine.forward.library.tapes.values() for step in tape.steps]
    assert len(set(steps)) == len(steps)


def test_everything_is_recorded_at_the_start_if_there_is_time(models: Shelf) -> None:
    llm = load(models, record_seconds=60)
    assert llm.stats()["num_missing"] == 0
    answer(llm)
    assert llm.stats()["steps"]["mixed"]["num_larger"] == 0


@pytest.mark.parametrize("wrong", [-1, "soon", None, True])
def test_seconds_that_are_none(wrong: Any, models: Shelf) -> None:
    with pytest.raises(ConfigError, match=r"PG101 options\['record_seconds'\] is .* not negative, or \"auto\""):
        load(models, record_seconds=wrong)


def test_a_warm_up_attends_once_for_equal_layers() -> None:
    layer = AttentionLayer(index=0, group=0, num_heads=2, num_kv_heads=1, key_width=16, value_width=16, scale=0.25)
    layers = [layer, replace(layer, index=1), replace(layer, index=2, num_heads=4), replace(layer, index=3)]
    ran: list[tuple[str, int]] = []

    class Counting:
        def __init__(self) -> None:
            self.layers = layers

        def run(self, op: str, site: int, inputs: tuple[Any, ...]) -> None:
            ran.append((op, site))

    once = EachKindOnce(cast("Memory", Counting()))
    for site in range(4):
        once.run("attention", site, ())
        once.run("experts", site, ())
    assert ran == [("attention", 0), ("experts", 0), ("experts", 1), ("attention", 2), ("experts", 2), ("experts", 3)]
