"""What requests add to their logits, against the plainest loop over transformers' logits; also in recorded steps."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import piecegraph
from piecegraph.errors import ConfigError, RequestError
from piecegraph.llm import Request, SamplingParams
from piecegraph.llm.run.adjustment_buffers import Entries, adjust
from piecegraph.llm.run.adjustments import Adjustments
from tests.cases.llm_shelf import Shelf

PROMPT = [5, 6, 7, 5, 9, 30]
OTHERS = [[(7 * i + 3 * j) % 100 + 5 for i in range(5 + j)] for j in range(3)]
EOS = 2
NUM_NEW = 14

WISHES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "rewarded repetition": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "all penalties": {"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.4},
    "bias": {"logit_bias": {11: 100.0, 12: 99.5, 40: -3}},
    "banned": {"logit_bias": dict.fromkeys(range(60, 128), -100)},
    "bad words": {"bad_words": [[93], [17, 18], [30, 50]]},
    "min tokens": {"logit_bias": {EOS: 60.0}, "min_tokens": 9, "ignore_eos": False},
    "stop tokens": {"logit_bias": {41: 60.0, 50: 59.0}, "min_tokens": 4, "stop_token_ids": [41]},
}


def greedy(models: Shelf, prompt: Sequence[int], wish: dict[str, Any], num_new: int = NUM_NEW) -> list[int]:
    """One plain forward for each token, and each rule as its definition has it."""
    tokens = list(prompt)
    stops = {*wish.get("stop_token_ids", ()), *(() if wish.get("ignore_eos", True) else (EOS,))}
    while len(tokens) < len(prompt) + num_new:
        logits, answer = models.logits("llama", tokens)[-1].clone(), tokens[len(prompt) :]
        for token in set(tokens):
            penalty = wish.get("repetition_penalty", 1.0)
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        for token in set(answer):
            logits[token] -= wish.get("presence_penalty", 0.0)
            logits[token] -= wish.get("frequency_penalty", 0.0) * answer.count(token)
        for token, bias in wish.get("logit_bias", {}).items():
            logits[token] += bias
        for *before, last in wish.get("bad_words", []):
            if not before or tokens[-len(before) :] == before:
                logits[last] = -torch.inf
        if len(answer) < wish.get("min_tokens", 0):
            logits[list(stops)] = -torch.inf
        tokens.append(int(logits.argmax()))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


@pytest.fixture(scope="module", params=["called", "recorded"])
def llm(request: pytest.FixtureRequest, models: Shelf) -> piecegraph.LLM:
    if request.param == "called":
        return models.load("llama", max_num_seqs=4)
    recorded = {"graph_device": "simulated", "look_ahead": True}
    return models.load("llama", max_num_seqs=4, capture_sizes=[1, 4, 16, 32], options=recorded)


@pytest.mark.parametrize("name", WISHES)
def test_each_rule(llm: piecegraph.LLM, models: Shelf, name: str) -> None:
    wish = WISHES[name]
    expected = greedy(models, PROMPT, wish)
    (answer,) = llm.generate([PROMPT], max_new_tokens=NUM_NEW, **{"ignore_eos": True, **wish})
    assert answer.token_ids == expected
    assert expected != models.greedy("llama", PROMPT, NUM_NEW)


def test_rows_do_not_touch_each_other(llm: piecegraph.LLM, models: Shelf) -> None:
    wishes: list[dict[str, Any]] = [WISHES["all penalties"], {}, WISHES["stop tokens"], WISHES["bias"]]
    prompts = [PROMPT, *OTHERS]
    rows = [
        SamplingParams(max_new_tokens=NUM_NEW + 2 * i, **{"ignore_eos": True, **wish}) for i, wish in enumerate(wishes)
    ]
    expected = [greedy(models, prompts[i], wish, NUM_NEW + 2 * i) for i, wish in enumerate(wishes)]
    for order in (range(4), [3, 1, 0, 2]):  # rows that are gone leave nothing behind
        answers = llm.generate([prompts[i] for i in order], [rows[i] for i in order])
        assert [answer.token_ids for answer in answers] == [expected[i] for i in order]
    (plain,) = llm.generate([PROMPT], max_new_tokens=NUM_NEW, ignore_eos=True)
    assert plain.token_ids == models.greedy("llama", PROMPT, NUM_NEW)


def test_they_are_part_of_recorded_steps(models: Shelf) -> None:
    options = {"graph_device": "simulated", "look_ahead": True}
    llm = models.load("llama", max_num_seqs=4, capture_sizes=[1, 4, 16], options=options)
    engine = llm.started.engine
    (answer,) = llm.generate([PROMPT], max_new_tokens=NUM_NEW, ignore_eos=True, **WISHES["all penalties"])
    assert answer.metrics.graph_coverage == 1
    keys = [key for key in engine.forward.library.tapes if key.num_adjusted]
    assert {str(key) for key in keys} >= {"decode 1 token, 4096 adjusted logits"}
    assert not [key for key in models.load("llama").started.engine.forward.library.tapes if key.num_adjusted]


def test_steps_are_launched_ahead_unless_tokens_matter(models: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = models.load("llama", max_num_seqs=4, options={"graph_device": "simulated", "look_ahead": True})
    engine, ahead = llm.started.engine, list[bool]()
    launch = engine._launch_ahead

    def counted(current: Any) -> Any:
        found = launch(current)
        ahead.append(found is not None)
        return found

    monkeypatch.setattr(engine, "_launch_ahead", counted)
    for wish, is_ahead in ((WISHES["bias"], True), (WISHES["presence"], False), (WISHES["min tokens"], True)):
        ahead.clear()
        llm.generate([PROMPT], max_new_tokens=NUM_NEW, **{"ignore_eos": True, **wish})
        assert any(ahead) == is_ahead
    assert engine._num_following == 0


def test_draws_are_made_from_what_is_left(models: Shelf) -> None:
    llm = models.load("llama")
    allowed = [11, 40, 41]
    banned = [[token] for token in range(128) if token not in allowed]
    answers = llm.generate([PROMPT], n=8, temperature=3.0, seed=1, bad_words=banned, max_new_tokens=8)
    assert {token for answer in answers for token in answer.token_ids} == set(allowed)
    (answer,) = llm.generate([PROMPT], bad_words=[[token] for token in range(128)], on_error="return")
    assert "PG660 no token may follow" in str(answer.error)


def test_a_preempted_request_goes_on_as_it_would(models: Shelf) -> None:
    options = {"block_size": 4, "cache_tokens": 48}
    llm = models.load("llama", max_model_len=40, max_num_seqs=4, options=options)
    wish = WISHES["all penalties"]
    answers = llm.generate([PROMPT, *OTHERS], max_new_tokens=20, ignore_eos=True, **wish)
    assert sum(answer.metrics.num_preemptions for answer in answers) > 0
    assert [answer.token_ids for answer in answers] == [greedy(models, each, wish, 20) for each in (PROMPT, *OTHERS)]


def test_many_entries_take_a_longer_buffer(models: Shelf) -> None:
    request = Request("long", range(100), SamplingParams(repetition_penalty=2.0, logit_bias={300: 1}))
    assert request.adjustments is not None
    tokens, scale, shift = request.adjustments.entries(request.tokens, 100)
    assert len(tokens) == 101
    assert (scale[tokens.tolist().index(300)], shift[tokens.tolist().index(300)]) == (1, 1)
    assert set(scale.tolist()) == {1.0, 2.0}
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5)
    lists = Adjustments(params, array("q", [1, 2]))
    for _ in range(2):  # what was read is not read again
        tokens, _, shift = lists.entries(array("q", [1, 2, 3, 3, 4]), 5)
    assert dict(zip(tokens.tolist(), shift.tolist(), strict=True)) == {3: -2.0, 4: -1.5}


def test_padding_changes_no_logit() -> None:
    logits = torch.randn(3, 7).to(torch.bfloat16)
    entries = Entries(
        torch.tensor([-1, 2, -1, 0]),
        torch.tensor([3, 6, 0, 0]),
        torch.tensor([9.0, 1.0, 1.0, 2.0]),
        torch.tensor([9.0, -1.0, 0.0, 0.0]),
    )
    expected = logits.float()
    expected[2, 6] -= 1
    expected[0, 0] *= 0.5 if expected[0, 0] > 0 else 2
    assert torch.equal(adjust(logits, entries), expected)


def test_min_p_is_that_of_transformers() -> None:
    from transformers import MinPLogitsWarper, TopKLogitsWarper

    from piecegraph.llm.kernels.truncate import truncate

    scaled = torch.randn(5, 40).log_softmax(-1)
    scaled -= scaled.amax(-1, keepdim=True)
    for min_p in (0.01, 0.2, 1.0):
        for top_k in (0, 3):
            kept = MinPLogitsWarper(min_p)(None, TopKLogitsWarper(top_k)(None, scaled) if top_k else scaled)
            top_ks, min_ps = torch.tensor([top_k] * 5), torch.full((5,), min_p)
            found = truncate(scaled, scaled.exp(), top_ks, torch.ones(5), min_ps)
            assert torch.equal(found > 0, kept.isfinite())
    params = SamplingParams(min_p=0.1, temperature=1.0)
    assert (params.min_p, SamplingParams().min_p) == (0.1, 0.0)


# ------------------------------------------------------------------ where an answer ends


def test_stop_tokens_and_texts(models: Shelf) -> None:
    llm = models.load("llama")
    (plain,) = llm.generate([PROMPT], max_new_tokens=NUM_NEW, ignore_eos=True)
    text, token = str(plain.text), plain.token_ids[5]
    first = plain.token_ids.index(token)
    (answer,) = llm.generate([PROMPT], max_new_tokens=NUM_NEW, stop_token_ids=[token], ignore_eos=True)
    assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == (plain.token_ids[: first + 1], "stop", token)
    assert answer.text == llm.tokenizer.decode(plain.token_ids[:first])
    how: dict[str, Any] = {"max_new_tokens": NUM_NEW, "stop_token_ids": [token], "include_stop_str_in_output": True}
    assert llm.generate([PROMPT], **how)[0].text == llm.tokenizer.decode(plain.token_ids[: first + 1])
    stop = text[3]
    (answer,) = llm.generate([PROMPT], max_new_tokens=NUM_NEW, stop=stop, ignore_eos=True)
    assert (answer.text, answer.stop_reason) == (text[: text.index(stop)], stop)
    how = {"max_new_tokens": NUM_NEW, "stop": stop, "include_stop_str_in_output": True, "ignore_eos": True}
    assert llm.generate([PROMPT], **how)[0].text == text[: text.index(stop) + 1]
    (answer,) = llm.generate([PROMPT], max_new_tokens=NUM_NEW, stop=stop, min_tokens=NUM_NEW - 1, ignore_eos=True)
    assert len(answer.token_ids) == NUM_NEW


def test_words_are_banned_with_and_without_a_space() -> None:
    params = SamplingParams(bad_words=["ab", [7], " c"]).with_words(lambda word: [ord(letter) for letter in word])
    assert params.bad_words == ((97, 98), (32, 97, 98), (7,), (32, 99))
    assert params.adjusts_by_tokens


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty is 0: it must be a finite number above 0"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5: it must be a number from -2 to 2"),
        ({"frequency_penalty": "1"}, "frequency_penalty is '1'"),
        ({"min_p": -0.1}, "min_p is -0.1: it must be a number from 0 to 1"),
        ({"logit_bias": {1: 101}}, "logit_bias is .*: it must be a dictionary from token ids to numbers"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": 7}, "logit_bias"),
        ({"bad_words": [""]}, "bad_words is .*none of them empty"),
        ({"bad_words": [7]}, "bad_words is .*a list of texts, or of lists of token ids"),
        ({"stop_token_ids": 7}, "stop_token_ids is 7: it must be a list of token ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"min_tokens": 17}, "min_tokens is 17: it must be an integer that is at least 0 and at most 16"),
        ({"n": 0}, "n is 0"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output is 1"),
    ],
)
def test_what_is_out_of_range(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"PG108 {why}"):
        SamplingParams(**given)


def test_tokens_that_the_model_does_not_have(models: Shelf) -> None:
    llm = models.load("llama")
    for given in ({"logit_bias": {500: 1}}, {"stop_token_ids": [500]}, {"bad_words": [[1, 500]]}):
        with pytest.raises(RequestError, match=rf"PG653 {next(iter(given))} names token 500 at prompts\[0\]"):
            llm.generate([PROMPT], **given)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="PG108 bad_words holds the text 'no'"):
        Request("by hand", PROMPT, SamplingParams(bad_words=("no",)))
