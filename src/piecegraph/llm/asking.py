"""A model as event loops see it, wherever its steps run: prompts become tokens here, and tokens text."""

from __future__ import annotations

import asyncio
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Unpack

from piecegraph.base.coerce import as_integer, as_real
from piecegraph.errors import ConfigError
from piecegraph.llm.run.answers import Answer, Answers, Inbox, Prompt
from piecegraph.llm.run.arguments import SamplingArguments, sampling_rows
from piecegraph.llm.run.detokenizer import Detokenizer
from piecegraph.llm.run.generation import text_behind
from piecegraph.llm.run.prompts import conversation_tokens, tokens_of, tokens_of_word
from piecegraph.llm.run.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How a prompt is to be answered. Times are of ``time.perf_counter()``."""

    params: SamplingParams
    priority: int
    arrival_time: float
    deadline: float | None
    is_streamed: bool
    """Whether its tokens are sent as they come."""


class Asking(ABC):
    """What asks a model for answers.

    Args:
        tokenizer: of the model; None if it has none.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer_if_any = tokenizer
        self._tokenizing = ThreadPoolExecutor(1, "piecegraph-tokenizer")

    @property
    @abstractmethod
    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises if it has none."""

    @abstractmethod
    def _ask(self, prompt: str | Sequence[int], asked: Asked, inbox: Inbox) -> asyncio.Future[None] | None:
        """Have the engine answer a prompt; what is done once it has taken it or has refused it, None for at once."""

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        stream: bool = True,
        **sampling: Unpack[SamplingArguments],
    ) -> Answers:
        """Go on from a prompt. Call it where an event loop is running.

        Args:
            prompt: a text or a list of token ids.
            sampling_params: how, in one value; or by name, as for :meth:`piecegraph.LLM.generate`.
            priority: requests with a lower number are let in first, those with the same number as they come.
            timeout_s: seconds from now after which the request ends with an error (PG659).
            stream: False to have each answer in one chunk, at its end: for whoever awaits them, which costs less.
            **sampling: in the place of ``sampling_params``.

        Raises:
            RequestError: PG658, as many requests wait as may.
            ConfigError: an argument is wrong, or the model was closed.
        """
        (params,) = sampling_rows(1, sampling_params, sampling)
        if isinstance(params, ConfigError):
            raise params
        now = time.perf_counter()
        asked = Asked(
            params=params,
            priority=_priority(priority),
            arrival_time=now,
            deadline=None if timeout_s is None else now + _seconds(timeout_s),
            is_streamed=stream,
        )
        inbox = Inbox(params.n, is_streamed=stream)
        return Answers(inbox, self._ask(prompt, asked, inbox))

    async def chat_prompt(
        self,
        conversation: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        **template_values: Any,
    ) -> list[int]:
        """The same as :meth:`piecegraph.LLM.chat_prompt`, which takes its time."""
        loop = asyncio.get_running_loop()
        read = functools.partial(conversation_tokens, self.tokenizer, conversation, tools, template_values)
        return await loop.run_in_executor(self._tokenizing, read)

    async def tokens_of(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text."""
        loop = asyncio.get_running_loop()
        read = functools.partial(tokens_of, text, self.tokenizer, add_special_tokens=add_special_tokens)
        return list(await loop.run_in_executor(self._tokenizing, read))

    def _tokens(self, prompt: str | Sequence[int], params: SamplingParams) -> Any:
        """Of a prompt. What was not given as a text is checked by the engine."""
        if params.stop:
            _ = self.tokenizer  # raises if there is none
        return tokens_of(prompt, self.tokenizer) if isinstance(prompt, str) else prompt

    def _for_engine(self, asked: Asked) -> Asked:
        """The same as tokens alone. See Note [Text is made where it is read]."""
        params = asked.params.with_words(lambda word: tokens_of_word(word, self.tokenizer))
        if not params.stop:
            return replace(asked, params=params)
        return replace(asked, params=replace(params, stop=()), is_streamed=True)

    def _open(self, inbox: Inbox, prompt: str | Sequence[int], params: SamplingParams, tokens: list[int]) -> None:
        """Have an inbox make text of what comes."""
        found = Prompt(text=prompt if isinstance(prompt, str) else None, tokens=tokens, params=params)
        detokenizer = None
        if self.tokenizer_if_any is not None:
            detokenizer = Detokenizer(self.tokenizer_if_any, skip_special_tokens=params.skip_special_tokens)
        inbox.answers = [
            Answer(found, None if detokenizer is None else text_behind(tokens, params, detokenizer))
            for _ in range(params.n)
        ]


def _priority(given: Any) -> int:
    found = as_integer(given)
    if found is None:
        raise ConfigError("PG101", f"priority is {given!r}", why="it must be an integer")
    return found


def _seconds(given: Any) -> float:
    found = as_real(given)
    if found is None or not found > 0:
        raise ConfigError("PG101", f"timeout_s is {given!r}", why="it must be a positive number")
    return found
