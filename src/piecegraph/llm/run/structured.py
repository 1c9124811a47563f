"""Answers of a given form: JSON of a schema, a regular expression, one of several texts, a grammar; by llguidance.

What is asked for comes in as :class:`StructuredOutputsParams`; a :class:`Guide` follows the tokens of one request, and
says which may come next. Which those are is written to masks, see Note [Masks behind the decoder].
"""

from __future__ import annotations

import functools
import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from piecegraph.base.coerce import as_list
from piecegraph.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_NUM_KEPT = 256
"""Grammars that stay compiled."""
_MOST_THREADS = 4
"""That compute masks: most take ten microseconds, for which more threads are too slow to wake (64 masks, vocabulary of
151,936, microseconds with 1, 4, 8 and 16 threads: 716, 782, 1046, 1298), but some a thousand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form of an answer: exactly one of these.

    >>> StructuredOutputsParams(choice=["yes", "no"]).grammar_text
    'start: "yes" | "no"'
    """

    json: str | Mapping[str, Any] | bool | type | None = None
    """A JSON schema, as text or not; or a class of pydantic. Kept as text."""
    regex: str | None = None
    """Of the whole answer, in the syntax of Rust's ``regex``."""
    choice: Sequence[str] | None = None
    """Texts, one of which is the answer."""
    grammar: str | None = None
    """In llguidance's variant of Lark, with a rule ``start``."""
    json_object: bool = False
    """Any JSON object."""

    def __post_init__(self) -> None:
        given = [each.name for each in fields(self) if getattr(self, each.name) not in (None, False)]
        if self.json is False:  # a schema that nothing fulfils
            given.append("json")
        if len(given) != 1:
            why = f"one of {', '.join(each.name for each in fields(self))} says what it is, not {given or 'none'}"
            raise ConfigError("PG108", "structured_outputs is not one form", why=why)
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise ConfigError("PG108", f"structured_outputs has {name}={getattr(self, name)!r}", why="it is a text")
        if any(_LONE_SURROGATE.search(text) for text in (self.regex, self.grammar, *(self.choice or ())) if text):
            raise ConfigError("PG108", "structured_outputs has half a character", why="a text must be valid Unicode")
        if not isinstance(self.json_object, bool):
            raise ConfigError("PG108", f"structured_outputs has json_object={self.json_object!r}", why="it is True")

    @staticmethod
    def of(given: Any) -> StructuredOutputsParams | None:
        """What was given: as such, as a dictionary with the same names, or nothing."""
        if given is None or isinstance(given, StructuredOutputsParams):
            return given
        known = [each.name for each in fields(StructuredOutputsParams)]
        if not isinstance(given, Mapping) or not set(given) <= set(known):
            why = f"it must be StructuredOutputsParams, or a dictionary with one of {', '.join(known)}"
            raise ConfigError("PG108", f"structured_outputs is {given!r}", why=why)
        return StructuredOutputsParams(**given)

    @property
    def grammar_text(self) -> str:
        """The same as llguidance reads it."""
        if self.choice is not None:
            return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in self.choice)
        if self.grammar is not None:
            return self.grammar
        from llguidance import LLMatcher

        if self.regex is not None:
            return LLMatcher.grammar_from_regex(self.regex)
        return LLMatcher.grammar_from_json_schema(str(self.json) if self.json is not None else '{"type": "object"}')


class Guide:
    """Follows the answer of one request.

    Args:
        matcher: at the beginning of an answer.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.error: RequestError | None = None
        """Why it cannot be gone on with, which only limits of llguidance can make happen."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return self.matcher.is_stopped()


class Guides:
    """Makes guides for the requests of a model. Any thread may ask for one.

    Args:
        tokenizer: of the model.
        vocab_size: how many tokens the model has.
        eos_token_ids: tokens that end an answer: they may come wherever the form is complete.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = _read_tokenizer(tokenizer, vocab_size, eos_token_ids)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._mutex = threading.Lock()

    def make(self, wanted: StructuredOutputsParams) -> Guide:
        """A guide at the beginning of an answer.

        Raises:
            RequestError: PG660, nothing can be of the form that is asked for.
        """
        try:
            text = wanted.grammar_text
        except ValueError as error:
            raise _impossible(str(error)) from error
        with self._mutex:
            matcher = self._compiled.pop(text, None)
        if matcher is None:
            matcher = self._compile(text)
        with self._mutex:
            self._compiled[text] = matcher
            while len(self._compiled) > _NUM_KEPT:
                self._compiled.popitem(last=False)
            return Guide(matcher.deep_copy())

    def _compile(self, text: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if matcher.is_error():
            raise _impossible(matcher.get_error())
        if not matcher.is_accepting():  # where nothing may come, the end of an answer is all that a mask allows
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")
            if not allowed & ~sum(1 << token for token in self._tokenizer.eos_tokens):
                raise _impossible("nothing is of this form")
        return matcher


def take_tokens(taken: Sequence[tuple[Guide, int]]) -> None:
    """Go on by a token in each of several answers."""
    for guide, token in taken:  # two microseconds for each: threads would take longer
        is_taken = guide.matcher.consume_token(token)
        if not is_taken or guide.matcher.is_error():  # an answer that ends before it is of its form is the second
            what, why = "the structured output cannot be gone on with", _in_short(guide.matcher.get_error())
            guide.error = RequestError("PG660", what, why=why, hint="simplify its form")


def fill_masks(guides: Sequence[tuple[Guide, int]], masks: NDArray[np.int32]) -> None:
    """Write which tokens may come next, a bit for each, to the rows of a table."""
    from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

    if len(guides) == 1:  # to wake threads takes longer
        ((guide, row),) = guides
        fill_next_token_bitmask(guide.matcher, masks, row)
    else:
        fill_next_token_bitmask_par(_executor(), [(guide.matcher, row) for guide, row in guides], masks)


@functools.cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    # Of all cores, which it would take by itself, the others are slow to wake; and in a container it may count too few.
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return LLExecutor(num_threads=max(1, min(_MOST_THREADS, num_cores // 2)))


def _impossible(why: str) -> RequestError:
    return RequestError("PG660", "the structured output that is asked for is not possible", why=_in_short(why))


def _read_tokenizer(tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> LLTokenizer:
    try:
        from llguidance.hf import from_tokenizer
    except ImportError as error:
        why, hint = "llguidance is not installed", "pip install 'piecegraph[guided]'"
        raise ConfigError("PG101", "structured_outputs cannot be used", why=why, hint=hint) from error
    try:
        return from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(eos_token_ids) or None)
    except ValueError as error:
        what = "structured_outputs cannot be used with this model's tokenizer"
        raise RequestError("PG660", what, why=_in_short(str(error))) from error


def _schema_text(given: Any) -> str:
    make_schema = getattr(given, "model_json_schema", None)
    schema = make_schema() if make_schema is not None else given
    try:
        found = json.loads(schema) if isinstance(schema, str) else json.loads(json.dumps(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError("PG108", "structured_outputs has a json that is no JSON schema", why=str(error)) from error
    if not isinstance(found, dict | bool):
        why = f"it is of type {type(found).__name__}"
        raise ConfigError("PG108", "structured_outputs has a json that is no JSON schema", why=why)
    return json.dumps(found)


def _choices(given: Any) -> tuple[str, ...]:
    listed = as_list(given)
    if not listed or not all(isinstance(text, str) and text for text in listed):
        why = "it must be a list of texts, none of them empty"
        raise ConfigError("PG108", f"structured_outputs has choice={given!r}", why=why)
    return tuple(listed)


def _in_short(text: str) -> str:
    """A message of llguidance on one line: it ends with its state."""
    return " ".join(text.partition("<state>")[0].split())[:300] or "llguidance does not say why"
