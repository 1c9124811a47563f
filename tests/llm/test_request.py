"""What may be asked for, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from piecegraph.errors import ConfigError, PiecegraphWarning, RequestError
from piecegraph.llm.run.request import Request
from piecegraph.llm.run.sampling_params import SamplingParams


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


@pytest.mark.parametrize(
    ("prompt", "code", "why"),
    [
        ([], "PG651", "a model needs a token to go on from"),
        ([1.5], "PG653", "'float' object cannot be interpreted as an integer"),
        (["a"], "PG653", "'str' object cannot be interpreted as an integer"),
        ([2**70], "PG653", "int too big to convert"),
    ],
)
def test_a_prompt_that_is_none_is_refused(prompt: list[Any], code: str, why: str) -> None:
    for given in (prompt, tuple(prompt), iter(prompt)):
        with pytest.raises(RequestError, match=f"{code} the prompt of request 'a' .*: {why}"):
            Request("a", given, SamplingParams())  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), torch.tensor([1, 2, 3]), range(1, 4)])
def test_tokens_are_given_in_whatever_holds_integers(prompt: Any) -> None:
    assert Request("a", prompt, SamplingParams()).tokens.tolist() == [1, 2, 3]
    assert Request("a", list(prompt), SamplingParams()).tokens.tolist() == [1, 2, 3]
    assert Request("a", iter(prompt), SamplingParams()).tokens.tolist() == [1, 2, 3]  # type: ignore[arg-type]


@pytest.mark.parametrize(("token", "is_below"), [(0, True), (9, True), (10, False), (-1, False), (-(2**63), False)])
def test_one_token_among_many_is_not_overlooked(token: int, is_below: bool) -> None:
    for length in (1, 2, 100):
        for place in (0, length - 1):
            prompt = [5] * length
            prompt[place] = token
            request = Request("a", prompt, SamplingParams())
            assert request.has_tokens_below(10) == is_below
            request.tokens.append(1)  # as it grows when nobody looks any more


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
