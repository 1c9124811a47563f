"""Logits processors of the caller's own: what they make of logits is what tokens are chosen from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

import piecegraph
from piecegraph.errors import ConfigError, RequestError
from piecegraph.llm.run.request import Request
from piecegraph.llm.run.sampling_params import SamplingParams
from tests.cases.llm_shelf import Shelf

PROMPT, OTHER = [5, 9, 17, 3, 40], [8, 8, 20]
HOW: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(models: Shelf) -> piecegraph.LLM:
    return models.load("llama", max_num_seqs=4, options={"block_size": 4})


def tokens_of(llm: piecegraph.LLM, **how: Any) -> list[int]:
    return llm.generate([PROMPT], **{**HOW, **how})[0].token_ids


def unchanged(_: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "top_k": 9, "min_p": 0.01}])
def test_one_that_changes_nothing_changes_nothing(llm: piecegraph.LLM, how: dict[str, Any]) -> None:
    how = {"seed": 5, **how}
    before = llm.events.counts.get("PG519", 0)
    assert tokens_of(llm, logits_processors=[unchanged], **how) == tokens_of(llm, **how)
    assert llm.events.counts["PG519"] - before == 8


def test_they_are_called_in_turn_with_the_new_tokens(llm: piecegraph.LLM) -> None:
    seen: list[list[int]] = []

    def only_seven(new: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(new)
        return torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor(7), 0.0)

    def shifted(_: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.roll(len(seen))

    alone = llm.generate([OTHER], **HOW)[0].token_ids
    params = [SamplingParams(**HOW, logits_processors=[only_seven, shifted]), SamplingParams(**HOW)]
    both = llm.generate([PROMPT, OTHER], params)
    assert both[0].token_ids == [8, 9, 10, 11, 12, 13, 14, 15]
    assert seen == [both[0].token_ids[:count] for count in range(8)]
    assert both[1].token_ids == alone


def test_those_of_transformers(llm: piecegraph.LLM) -> None:
    penalty = hf.RepetitionPenaltyLogitsProcessor(penalty=1.7)
    assert tokens_of(llm, logits_processors=[penalty]) == tokens_of(llm, repetition_penalty=1.7)
    listed = hf.LogitsProcessorList([penalty])
    assert tokens_of(llm, logits_processors=listed) == tokens_of(llm, repetition_penalty=1.7)


def test_one_that_fails_ends_its_request_and_no_other(llm: piecegraph.LLM) -> None:
    def failing(new: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(new) == 2:
            raise KeyError("no such token")
        return logits

    alone = tokens_of(llm)
    wrong: dict[str, Any] = {"KeyError: 'no such token'": failing}
    wrong |= {"NoneType": lambda *_: None, r"\[3\]": lambda *_: torch.ones(3)}
    for why, processor in wrong.items():
        params = [SamplingParams(**HOW, logits_processors=[processor]), SamplingParams(**HOW)]
        bad, good = llm.generate([OTHER, PROMPT], params, on_error="return")
        assert good.token_ids == alone
        assert bad.finish_reason == "error"
        with pytest.raises(RequestError, match=f"PG650 the logits processor .* failed .*{why}"):
            raise bad.error  # type: ignore[misc]
    for number in (float("nan"), -float("inf")):

        def spoiling(_: list[int], row: torch.Tensor, number: float = number) -> torch.Tensor:
            return torch.full_like(row, number)

        [spoiled] = llm.generate([PROMPT], **HOW, logits_processors=[spoiling], on_error="return")
        assert "PG655" in str(spoiled.error)
        assert "the logits processor spoiling gave NaN, or forbade every token" in str(spoiled.error)
    llm.started.engine.scheduler.check()


def test_what_is_refused(llm: piecegraph.LLM) -> None:
    for how in ({"logits_processors": "f"}, {"logits_processors": [3]}):
        with pytest.raises(ConfigError, match="PG108 logits_processors is"):
            SamplingParams(**how)
    for name, value in {"min_tokens": 2, "presence_penalty": 1.0, "structured_outputs": {"regex": "a"}}.items():
        with pytest.raises(ConfigError, match="PG108 logits_processors was given with one of these"):
            SamplingParams(logits_processors=[unchanged], **{name: value})
    with pytest.raises(ConfigError, match="hint: here it is logits_processors"):
        llm.generate([PROMPT], logits_processor=[unchanged])  # type: ignore[call-overload]
    scheduler = llm.make_scheduler()
    scheduler.add(Request("mine", PROMPT, SamplingParams(logits_processors=[unchanged])))
    plan = scheduler.schedule()
    assert plan is not None
    with pytest.raises(RequestError, match="PG657 .* has logits_processors"):
        llm.started.engine.run(plan, every_row=False)
    scheduler.abort("mine")
