"""What a caller has chosen for code of its own changes no answer: inference mode, autocast, a default device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import piecegraph
from piecegraph.llm import Request, SamplingParams
from tests.cases.byte_llm import write_byte_llm

MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": lambda: torch.device("meta"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_byte_llm(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder: str) -> piecegraph.LLM:
    return load(folder)


def load(folder: str, *, capture_sizes: Any = (2, 16)) -> piecegraph.LLM:
    limits = {"max_num_seqs": 2, "max_batch_tokens": 64}
    options = {"graph_device": "simulated", "record_seconds": 0}
    return piecegraph.LLM(folder, backend="eager", capture_sizes=capture_sizes, options=options, **limits)


def answers(llm: piecegraph.LLM) -> list[list[int]]:
    how: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True, "seed": 3}
    drawn = [{"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9, "logit_bias": {7: 2.0}}, {"logprobs": 2}]
    found = [answer for more in ({}, *drawn) for answer in llm.generate(["hello", "x"], **how, **more)]
    return [answer.token_ids for answer in found]


def tokens_of_an_own_scheduler(llm: piecegraph.LLM) -> list[int]:
    scheduler = llm.make_scheduler()
    request = Request("first", [5, 6, 7], SamplingParams(max_new_tokens=6, ignore_eos=True))
    scheduler.add(request)
    while plan := scheduler.schedule():
        scheduler.commit(plan, llm.forward(plan).tokens.tolist())
    return request.generated


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_is_loaded_in_a_mode(mode: str, folder: str, llm: piecegraph.LLM) -> None:
    with MODES[mode]():
        loaded = load(folder)
        inside = answers(loaded)
    assert inside == answers(loaded) == answers(llm)
    assert loaded.stats()["coverage"] == 1.0
    assert not loaded.stats()["fallbacks"]


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_is_called_in_a_mode(mode: str, llm: piecegraph.LLM) -> None:
    expected = answers(llm), tokens_of_an_own_scheduler(llm)
    with MODES[mode]():
        assert (answers(llm), tokens_of_an_own_scheduler(llm)) == expected


@pytest.mark.parametrize("mode", MODES)
def test_sizes_that_are_recorded_in_a_mode(mode: str, folder: str, llm: piecegraph.LLM) -> None:
    loaded = load(folder, capture_sizes="auto")
    assert loaded.stats()["num_missing"] > 0
    with MODES[mode]():
        assert loaded.record_missing() == 0
    assert answers(loaded) == answers(llm)
    assert loaded.stats()["coverage"] == 1.0
