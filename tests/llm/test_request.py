"""What may be asked for, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from piecegraph.errors import ConfigError, PiecegraphWarning, RequestError
from piecegraph.llm.run.request import Request, SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        pytest.param("temperature", 10**400, id="temperature-no float"),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("top_k", 2.0),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", ""),
        ("stop", ["ok", ""]),
        ("stop", [3]),
        ("stop", 3),
        ("logprobs", -1),
        ("prompt_logprobs", True),
        ("ignore_eos", 1),
        ("return_hidden_states", None),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^PG108 {name} is .*it must be"):
        SamplingParams(**{name: value})


def test_the_extremes_that_make_sense_are_taken() -> None:
    params = SamplingParams(
        max_new_tokens=1, temperature=1e-9, top_p=1, top_k=0, seed=2**64 - 1, stop=["a"], logprobs=0
    )
    assert params.stop == ("a",)
    assert SamplingParams(top_k=-1).top_k == 0


def test_the_number_of_tokens_has_two_names() -> None:
    params = SamplingParams(max_tokens=7)
    assert params == SamplingParams(max_new_tokens=7) == SamplingParams(max_new_tokens=7, max_tokens=7)
    assert replace(params, max_new_tokens=9).max_new_tokens == 9
    for given in ({"max_tokens": 0}, {"max_new_tokens": 7, "max_tokens": 8}):
        with pytest.raises(ConfigError, match="PG108 .*max_tokens"):
            SamplingParams(**given)


@pytest.mark.parametrize("name", ["top_p", "top_k"])
def test_what_has_no_effect_is_told(name: str) -> None:
    params = SamplingParams(**{name: {"top_p": 0.5, "top_k": 3}[name]})
    with pytest.warns(PiecegraphWarning, match=f"PG109 {name} is .* and has no effect: at a temperature of 0"):
        Request("a", [1], params)
    Request("b", [1], replace(params, temperature=0.5))


@pytest.mark.parametrize(("prompt", "code"), [([], "PG651"), ([1.5], "PG653"), (["a"], "PG653"), ([2**70], "PG653")])
def test_a_prompt_that_is_none_is_refused(prompt: list[Any], code: str) -> None:
    with pytest.raises(RequestError, match=f"{code} the prompt of request 'a'"):
        Request("a", prompt, SamplingParams())


@pytest.mark.parametrize(
    ("positions", "reason"),
    [
        (np.zeros((3, 2), np.int64), r"they are of shape \(3, 2\), not \(3, 4\)"),
        (torch.zeros(4, dtype=torch.long), r"they are of shape \(4,\)"),
        (torch.zeros(3, 4), "they are of type float32"),
        (np.arange(12).reshape(3, 4) - 1, "one of them is -1"),
    ],
)
def test_positions_that_are_none_are_refused(positions: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=f"PG653 .* of request 'r' .*{reason}"):
        Request("r", [1, 2, 3, 4], SamplingParams(), mrope_positions=positions)


def test_the_seed_of_the_parameters_comes_before_the_engine_s() -> None:
    assert Request("a", [1], SamplingParams(seed=0), seed=7).seed == 0
    assert Request("a", [1], SamplingParams(), seed=7).seed == 7
