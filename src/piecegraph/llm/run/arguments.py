"""The arguments of one call of ``generate``: given once for all prompts or once for each, and one row for each out.

A name that nobody knows is an error that says which was meant, also if it is the name of another library.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeAlias, TypedDict

from piecegraph.base.coerce import as_list
from piecegraph.errors import ConfigError
from piecegraph.llm.run.prompts import check_lengths
from piecegraph.llm.run.sampling_params import LogitsProcessor, SamplingParams
from piecegraph.llm.run.structured import StructuredOutputsParams

OnError = Literal["raise", "return"]
"""What becomes of a prompt that cannot be served: its error is raised, or is part of its answer."""


class SamplingArguments(TypedDict, total=False):
    """As :class:`SamplingParams`; where a sequence may be given, it has one value for each prompt."""

    max_new_tokens: int | Sequence[int]
    max_tokens: int | Sequence[int]
    n: int
    temperature: float | Sequence[float]
    top_p: float | Sequence[float]
    top_k: int | Sequence[int]
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    bad_words: Sequence[str | Sequence[int]] | None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None
    logits_processors: Sequence[LogitsProcessor] | None
    seed: int | Sequence[int | None] | None
    stop: str | Iterable[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    ignore_eos: bool
    min_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    return_hidden_states: bool


SAMPLING_NAMES = frozenset(SamplingArguments.__annotations__)

_PLAIN = frozenset({bool, int, float, str, type(None)})
"""Types of values that are equal for good, and never a list."""

_ONE_FOR_EACH = ("max_new_tokens", "max_tokens", "temperature", "top_p", "top_k", "seed")

_OTHER_NAMES = {
    "bad_words_ids": "bad_words",
    "do_sample": "temperature",
    "eos_token_id": "stop_token_ids",
    "guided_choice": "structured_outputs={'choice': ...}",
    "guided_decoding": "structured_outputs",
    "guided_grammar": "structured_outputs={'grammar': ...}",
    "guided_json": "structured_outputs={'json': ...}",
    "guided_regex": "structured_outputs={'regex': ...}",
    "logits_processor": "logits_processors",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "sequence_bias": "logit_bias",
    "stop_strings": "stop",
}
"""What transformers and vLLM call ours, where it is not alike."""

_REFUSED = {"best_of": "answers would be generated to be thrown away", "num_beams": "there is no beam search"}
_REFUSED |= {"use_beam_search": _REFUSED["num_beams"], "length_penalty": _REFUSED["num_beams"]}
"""What others know and we do not have, with the reason."""


SamplingRow: TypeAlias = SamplingParams | ConfigError
"""How to go on from a prompt, or what is wrong with that."""


def sampling_rows(num_prompts: int, params: Any, given: Mapping[str, Any]) -> list[SamplingRow]:
    """How to go on from each prompt.

    What is wrong for all prompts is raised here; what is wrong in a list is left to be the error of one request.

    Args:
        num_prompts: how many there are.
        params: one for all prompts, a list with one for each, or None.
        given: arguments by name, in the place of ``params``.
    """
    if params is not None:
        return _given_params(num_prompts, params, given)
    unknown = sorted(set(given) - SAMPLING_NAMES)
    if unknown and unknown[0] in _REFUSED:
        raise ConfigError("PG101", f"{unknown[0]} is not supported", why=_REFUSED[unknown[0]], hint="ask for n answers")
    if unknown:
        raise unknown_argument(unknown[0], SAMPLING_NAMES, _OTHER_NAMES)
    if _PLAIN.issuperset(map(type, given.values())):
        return [_plain_params(**given)] * num_prompts
    lists = {name: found for name in _ONE_FOR_EACH if (found := as_list(given.get(name))) is not None}
    shared = {name: value for name, value in given.items() if name not in lists}
    if isinstance(shared.get("stop"), Iterator):
        shared["stop"] = tuple(shared["stop"])  # it is read for every prompt
    for_all = SamplingParams(**shared)
    check_lengths(lists, num_prompts)
    if not lists:
        return [for_all] * num_prompts
    return [
        _params_or_error(shared | {name: values[index] for name, values in lists.items()})
        for index in range(num_prompts)
    ]


@lru_cache(maxsize=256, typed=True)
def _plain_params(**given: Any) -> SamplingParams:
    """What was checked once: calls have the same arguments time and again. One is equal to True, but is no flag."""
    return SamplingParams(**given)


def _params_or_error(row: Mapping[str, Any]) -> SamplingRow:
    try:
        return SamplingParams(**row)
    except ConfigError as error:
        return error


def check_flags(stream: Any, on_error: Any) -> None:
    """Raise if how answers are given back is not told clearly."""
    if not isinstance(stream, bool):
        raise ConfigError("PG101", f"stream is {stream!r}", why="it must be True or False")
    if on_error not in ("raise", "return"):
        raise ConfigError("PG101", f"on_error is {on_error!r}", why="it must be 'raise' or 'return'")


def unknown_argument(name: str, known: Collection[str], others: Mapping[str, str]) -> ConfigError:
    """What to say of a name that is no argument.

    >>> print(unknown_argument("temprature", ["temperature", "top_p"], {}))
    PG101 unknown argument 'temprature'. hint: did you mean temperature?

    Args:
        name: what was given.
        known: what may be given.
        others: names of other libraries, and what is ours.
    """
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"known arguments: {', '.join(sorted(known))}"
    if name in others:
        hint = f"here it is {others[name]}"
    elif close:
        hint = f"did you mean {close[0]}?"
    return ConfigError("PG101", f"unknown argument {name!r}", hint=hint)


def _given_params(num_prompts: int, params: Any, given: Mapping[str, Any]) -> list[SamplingRow]:
    listed = [params] * num_prompts if isinstance(params, SamplingParams) else as_list(params)
    if listed is None or not all(isinstance(each, SamplingParams) for each in listed):
        why = "it must be SamplingParams, or a list of them with one for each prompt"
        raise ConfigError("PG108", f"sampling_params is {params!r}", why=why)
    if given:
        why = "sampling_params were given, too, and hold all of it"
        raise ConfigError("PG108", f"{min(given)} was given by name", why=why, hint="give one or the other")
    check_lengths({"sampling_params": listed}, num_prompts)
    return listed
