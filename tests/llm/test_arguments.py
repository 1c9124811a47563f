"""The arguments of ``generate``, of our names and of others: a row for each prompt, or an error that names ours."""

from __future__ import annotations

from typing import Any

import pytest

from piecegraph.errors import ConfigError
from piecegraph.llm import SamplingParams
from piecegraph.llm.run.arguments import SAMPLING_NAMES, sampling_rows

PARAMS = SamplingParams(max_tokens=7, temperature=0.5, stop="x")


def rows(num_prompts: int, params: Any = None, **given: Any) -> list[SamplingParams]:
    found = sampling_rows(num_prompts, params, given)
    assert not any(isinstance(row, ConfigError) for row in found)
    return found  # type: ignore[return-value]


def test_what_is_wrong_in_a_list_is_the_error_of_one_prompt() -> None:
    first, second = sampling_rows(2, None, {"temperature": [0.5, -1.0]})
    assert isinstance(first, SamplingParams)
    assert str(second).startswith("PG108 temperature is -1.0")


def test_arguments_are_those_of_the_parameters() -> None:
    assert set(SamplingParams.__annotations__) == SAMPLING_NAMES


def test_one_value_for_all_or_one_for_each() -> None:
    assert rows(2, max_tokens=7, temperature=0.5, stop="x") == rows(2, PARAMS) == rows(2, [PARAMS, PARAMS])
    found = rows(2, max_tokens=[3, 4], top_k=-1, stop=iter(["x"]))
    assert [(each.max_new_tokens, each.top_k, each.stop) for each in found] == [(3, 0, ("x",)), (4, 0, ("x",))]


@pytest.mark.parametrize(
    ("params", "given", "why"),
    [
        (PARAMS, {"top_k": 3}, "PG108 top_k was given by name: sampling_params were given, too"),
        ([PARAMS], {}, "PG108 sampling_params has 1 values: there are 2 prompts"),
        ({"temperature": 1}, {}, "PG108 sampling_params is .*: it must be SamplingParams, or a list"),
        (0.7, {}, "PG108 sampling_params is 0.7"),
        (None, {"max_tokens": 3, "max_new_tokens": 4}, "PG108 max_new_tokens is 4 and max_tokens 3: they are one"),
        (None, {"temprature": 1}, "PG101 unknown argument 'temprature'. hint: did you mean temperature?"),
        (None, {"do_sample": True}, "PG101 unknown argument 'do_sample'. hint: here it is temperature"),
        (None, {"min_new_tokens": 2}, "PG101 unknown argument 'min_new_tokens'. hint: here it is min_tokens"),
        (None, {"best_of": 2}, "PG101 best_of is not supported: answers would be generated to be thrown away"),
        (None, {"zzz": 2}, "PG101 unknown argument 'zzz'. hint: known arguments: bad_words, frequency_penalty, "),
    ],
)
def test_arguments_that_cannot_be_meant(params: Any, given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        sampling_rows(2, params, given)


def test_what_was_checked_once_is_what_equals_it_in_every_way() -> None:
    first, second = rows(1, max_tokens=1, n=1), rows(2, max_tokens=1, n=1)
    assert second == [*first, *first]
    assert first[0] is second[0]
    with pytest.raises(ConfigError, match="PG108 n is True"):
        rows(1, max_tokens=1, n=True)
    with pytest.raises(ConfigError, match=r"PG108 n is 1.0"):
        rows(1, max_tokens=1, n=1.0)
