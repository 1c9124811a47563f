"""How the tokens of a request are chosen: validated once, and never changed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, replace
from typing import Any

import torch

from piecegraph.base.coerce import as_integer, as_list, as_real
from piecegraph.base.user_code import user_stack_level
from piecegraph.errors import ConfigError, PiecegraphWarning, describe
from piecegraph.llm.run.structured import StructuredOutputsParams

LogitsProcessor = Callable[[list[int], torch.Tensor], torch.Tensor] | Callable[..., Any]
"""Takes the new tokens so far, and the logits [vocabulary] of the next one, which it gives back changed."""

_LARGEST_SEED = 2**64 - 1
_NEW_TOKENS = 16
"""How many there are if nobody says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, when it ends, and what is told about it.

    >>> SamplingParams(temperature=0.7, stop="###").stop
    ('###',)
    >>> SamplingParams(top_p=1.5)
    Traceback (most recent call last):
        ...
    piecegraph.errors.ConfigError: PG108 top_p is 1.5: it must be a number above 0 and at most 1
    """

    max_new_tokens: int = _NEW_TOKENS
    n: int = 1
    """How many answers there are to a prompt. With a seed, each but the first has the next one."""
    temperature: float = 0.0
    """0: always the most likely token."""
    top_p: float = 1.0
    """Only the most likely tokens that together reach this probability. 1: all."""
    top_k: int = 0
    """Only so many of the most likely tokens. 0, or -1: all."""
    min_p: float = 0.0
    """Only tokens at least this likely, relative to the most likely one. 0: all."""
    repetition_penalty: float = 1.0
    """Logits of tokens of prompt and answer are divided by it where they are positive, and multiplied elsewhere."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens of the answer."""
    frequency_penalty: float = 0.0
    """The same, as many times as the answer has the token."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of tokens, from -100 to 100. Given as a dictionary."""
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    """Texts, or lists of tokens, that the answer may not hold, also where one begins in the prompt."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form of the answer, which ends when it is complete, whatever ``min_tokens`` says. Also as a dictionary."""
    logits_processors: tuple[LogitsProcessor, ...] = ()
    """Called with the new tokens so far and the logits of the next, which they give back changed; outside of recorded
    steps. Also those of transformers.
    """
    seed: int | None = None
    """Fixes the random numbers that tokens are drawn by. None: the engine chooses one."""
    stop: tuple[str, ...] = ()
    """Texts at which the answer ends; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens at which it ends, besides those of the model."""
    include_stop_str_in_output: bool = False
    """Whether what ended the answer is part of its text."""
    skip_special_tokens: bool = True
    """Whether the text is without the tokens that mark its parts."""
    ignore_eos: bool = False
    min_tokens: int = 0
    """So many tokens nothing ends the answer: tokens that would are not chosen, and texts not looked for."""
    logprobs: int | None = None
    """For each new token: its log-probability, and those of so many most likely tokens."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    return_hidden_states: bool = False
    max_tokens: InitVar[int | None] = None
    """Another name for ``max_new_tokens``, which is the one to read."""

    def __post_init__(self, max_tokens: int | None) -> None:
        plain: dict[str, Any] = {
            "max_new_tokens": _num_new(self.max_new_tokens, max_tokens),
            "n": _integer("n", self.n, 1),
            "top_k": max(_integer("top_k", self.top_k, -1), 0),
            "temperature": _temperature(self.temperature),
            "top_p": _top_p(self.top_p),
            "min_p": _between("min_p", self.min_p, 0, 1),
            "repetition_penalty": _positive("repetition_penalty", self.repetition_penalty),
            "presence_penalty": _between("presence_penalty", self.presence_penalty, -2, 2),
            "frequency_penalty": _between("frequency_penalty", self.frequency_penalty, -2, 2),
            "logit_bias": _biases(self.logit_bias),
            "bad_words": _bad_words(self.bad_words),
            "structured_outputs": StructuredOutputsParams.of(self.structured_outputs),
            "logits_processors": _processors(self.logits_processors),
            "stop": _stop_texts(self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
        }
        plain["min_tokens"] = _integer("min_tokens", self.min_tokens, 0, plain["max_new_tokens"])
        for name, largest in (("logprobs", None), ("prompt_logprobs", None), ("seed", _LARGEST_SEED)):
            if getattr(self, name) is not None:
                plain[name] = _integer(name, getattr(self, name), 0, largest)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "return_hidden_states"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "True or False")
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        if self.logits_processors and (self.adjusts or self.structured_outputs is not None):
            why = "the model's own logits are processed, without penalties, biases, forbidden tokens, or a form"
            raise ConfigError(
                "PG108", "logits_processors was given with one of these", why=why, hint="process them, too"
            )

    def of_answer(self, number: int) -> SamplingParams:
        """The same for one of the ``n`` answers."""
        return self if not number or self.seed is None else replace(self, seed=(self.seed + number) % 2**64)

    @property
    def without_effect(self) -> tuple[str, ...]:
        """What was asked for and changes nothing: without a temperature there is nothing to choose from."""
        asked = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": self.min_p > 0}
        return tuple(name for name, is_asked in asked.items() if is_asked and self.temperature == 0)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before a token is chosen. See Note [Adjusted logits]."""
        return self.has_penalties or bool(self.logit_bias or self.bad_words or self.min_tokens)

    @property
    def adjusts_by_tokens(self) -> bool:
        """Whether that depends on which tokens came before, and not only on how many."""
        return self.has_penalties or any(len(word) > 1 for word in self.bad_words)

    def with_words(self, tokens_of: Callable[[str], Sequence[int]]) -> SamplingParams:
        """The same with ``bad_words`` as tokens: of the word as it is, and behind a space."""
        if not any(isinstance(word, str) for word in self.bad_words):
            return self
        listed = [
            tuple(ids)
            for word in self.bad_words
            for ids in ((tokens_of(word), tokens_of(f" {word.lstrip()}")) if isinstance(word, str) else (word,))
        ]
        return replace(self, bad_words=tuple(dict.fromkeys(ids for ids in listed if ids)))

    @property
    def token_limits(self) -> tuple[str, ...]:
        """The settings because of which some tokens may not come."""
        names = ("structured_outputs", "bad_words", "min_tokens", "logit_bias", "logits_processors")
        return tuple(name for name in names if getattr(self, name))

    @property
    def named_tokens(self) -> dict[str, int]:
        """The largest token of each setting that names some."""
        named = {
            "logit_bias": [token for token, _ in self.logit_bias],
            "bad_words": [token for word in self.bad_words for token in word if isinstance(token, int)],
            "stop_token_ids": self.stop_token_ids,
        }
        return {name: max(tokens) for name, tokens in named.items() if tokens}

    @property
    def wants_every_row(self) -> bool:
        """Whether something is told about every token of the prompt, so that each has to be computed."""
        return self.prompt_logprobs is not None or self.return_hidden_states


def warn_without_effect(params: SamplingParams) -> None:
    """Tell the user of what is asked for and changes nothing."""
    for name in params.without_effect:
        what = f"{name} is {getattr(params, name)} and has no effect"
        why = "at a temperature of 0 the most likely token is always taken"
        warnings.warn(describe("PG109", what, why=why), PiecegraphWarning, stacklevel=user_stack_level())


def _num_new(given: Any, by_other_name: Any) -> int:
    if by_other_name is None:
        return _integer("max_new_tokens", given, 1)
    if given not in (_NEW_TOKENS, by_other_name):
        raise ConfigError("PG108", f"max_new_tokens is {given!r} and max_tokens {by_other_name!r}", why="they are one")
    return _integer("max_tokens", by_other_name, 1)


def _stop_texts(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    texts = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (None,)
    if not all(isinstance(text, str) and text for text in texts):
        raise _bad("stop", given, "a text or a list of texts, none of them empty")
    return texts


def _temperature(given: Any) -> float:
    found = as_real(given)
    if found is None or not 0 <= found < math.inf:
        raise _bad("temperature", given, "a finite number that is not negative")
    return found


def _top_p(given: Any) -> float:
    found = as_real(given)
    if found is None or not 0 < found <= 1:
        raise _bad("top_p", given, "a number above 0 and at most 1")
    return found


def _between(name: str, given: Any, smallest: float, largest: float) -> float:
    found = as_real(given)
    if found is None or not smallest <= found <= largest:
        raise _bad(name, given, f"a number from {smallest} to {largest}")
    return found


def _positive(name: str, given: Any) -> float:
    found = as_real(given)
    if found is None or not 0 < found < math.inf:
        raise _bad(name, given, "a finite number above 0")
    return found


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    must_be = "a dictionary from token ids to numbers from -100 to 100"
    try:
        pairs = [(as_integer(token), as_real(bias)) for token, bias in dict(given or ()).items()]
    except (TypeError, ValueError) as error:
        raise _bad("logit_bias", given, must_be) from error
    found = [(token, bias) for token, bias in pairs if token is not None and bias is not None]
    if len(found) < len(pairs) or not all(token >= 0 and -100 <= bias <= 100 for token, bias in found):
        raise _bad("logit_bias", given, must_be)
    return tuple(found)


def _token_ids(name: str, given: Any) -> tuple[int, ...]:
    listed = as_list(given if given is not None else ())
    found = [token for each in listed or () if (token := as_integer(each)) is not None and token >= 0]
    if listed is None or len(found) < len(listed):
        raise _bad(name, given, "a list of token ids")
    return tuple(found)


def _bad_words(given: Any) -> tuple[str | tuple[int, ...], ...]:
    words = [given] if isinstance(given, str) else as_list(given if given is not None else ())
    if words is None or not all(isinstance(word, str) or as_list(word) is not None for word in words):
        raise _bad("bad_words", given, "a list of texts, or of lists of token ids")
    found = tuple(word if isinstance(word, str) else _token_ids("bad_words", word) for word in words)
    if not all(found):
        raise _bad("bad_words", given, "a list of texts, or of lists of token ids, none of them empty")
    return found


def _processors(given: Any) -> tuple[LogitsProcessor, ...]:
    found = tuple(as_list(given) or ()) if given is not None else ()
    if not all(map(callable, found)) or (given and not found):
        raise _bad("logits_processors", given, "a list of functions")
    return found


def _integer(name: str, given: Any, smallest: int, largest: int | None = None) -> int:
    found = as_integer(given)
    if found is None or found < smallest or (largest is not None and found > largest):
        limits = f"an integer that is at least {smallest}" + (f" and at most {largest}" if largest is not None else "")
        raise _bad(name, given, limits)
    return found


def _bad(name: str, value: Any, must_be: str) -> ConfigError:
    return ConfigError("PG108", f"{name} is {value!r}", why=f"it must be {must_be}")
