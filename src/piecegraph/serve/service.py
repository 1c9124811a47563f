"""A model on its way from being loaded to being drained, and what the endpoints ask it for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Literal, Protocol

from piecegraph.errors import ModelError, PiecegraphError
from piecegraph.llm.asking import Asking
from piecegraph.llm.run.answers import Answers
from piecegraph.llm.run.prompts import template_has, unread_value
from piecegraph.llm.run.results import Chunk, Completion, cut_metrics
from piecegraph.llm.run.sampling_params import SamplingParams
from piecegraph.serve.about import About
from piecegraph.serve.failures import ApiError, of_piecegraph, unsupported
from piecegraph.serve.parsing import Reader
from piecegraph.serve.record import Record
from piecegraph.serve.settings import ServeSettings
from piecegraph.serve.tool_choice import ToolUse

_OURS = frozenset({"self", "conversation", "tools", "chat_template"})
"""Values of a template that are not the client's to set there."""

_OF_DEVELOPERS = {"developer": "system"}
"""For templates that do not know the newer name of a role."""

_NO_TOOLS = ToolUse()

State = Literal["loading", "ready", "draining"]


class Counts(Protocol):
    """Where answers are counted."""

    def observe(self, name: str, answer: Completion) -> None:
        """An answer of a model has come to its end."""

    def count_response(self, status: int) -> None:
        """The server has answered."""


class Service:
    """A model that answers requests, once it is there.

    Args:
        name: what requests call it.
        settings: of the server.
        metrics: where its answers are counted.
    """

    def __init__(self, name: str, settings: ServeSettings, metrics: Counts) -> None:
        self.name, self.settings, self.metrics = name, settings, metrics
        self.created = int(time.time())
        self.state: State = "loading"
        self._llm: Asking | None = None
        self._about: About | None = None

    def begin(self, llm: Asking, about: About) -> None:
        """The model is loaded."""
        self._llm, self._about, self.state = llm, about, "ready"

    def end(self) -> None:
        """Take no further requests."""
        self._llm, self.state = None, "draining"

    @property
    def llm(self) -> Asking:
        """The model. Raises if it cannot answer now."""
        if self._llm is None:
            raise ApiError(503, f"the model {self.name!r} is {self.state}", code=f"model_{self.state}")
        return self._llm

    @property
    def about(self) -> About:
        """What is known of it. Raises as long as it is loaded."""
        if self._about is None:
            _ = self.llm
        assert self._about is not None
        return self._about

    @property
    def defaults(self) -> dict[str, Any]:
        """For what a request does not say."""
        return self.about.defaults

    def card(self) -> dict[str, Any]:
        """What a list of models tells of it."""
        card = {"id": self.name, "object": "model", "created": self.created, "owned_by": "piecegraph"}
        length = None if self._llm is None else self.about.max_model_len
        return {**card, "status": self.state, "max_model_len": length}

    # -- prompts

    async def chat_prompt(
        self, messages: Sequence[dict[str, Any]], values: dict[str, Any], record: Record, use: ToolUse = _NO_TOOLS
    ) -> list[int]:
        """The tokens of a conversation.

        Args:
            messages: as chat templates have them.
            values: what the template is given besides.
            record: of the request.
            use: tools that may be called.
        """
        for name in sorted(_OURS & values.keys()):
            message = f"chat_template_kwargs cannot hold {name}: it is said elsewhere, or not a request's to say"
            raise ApiError(400, message, code="invalid_value", param=f"chat_template_kwargs.{name}")
        if (unread := unread_value(self.llm.tokenizer, values, use.values or None)) is not None:
            field = record.names.get(f"template.{unread}", f"chat_template_kwargs.{unread}")
            raise unsupported(field, f"the chat template of this model does not read {unread}")
        if use.values and not use.is_forced and self.about.response_template is None:
            why = "how this model writes its calls is not known: its tokenizer has no response_template"
            raise unsupported("tools", why)
        if not template_has(self.llm.tokenizer, "developer", use.values or None):
            messages = [{**each, "role": _OF_DEVELOPERS.get(each["role"], each["role"])} for each in messages]
        try:
            return await self._written(messages, values, use)
        except RecursionError as error:
            param = record.names.get("prompt", "prompt")
            raise ApiError(400, f"{param} has too much in each other", code="invalid_value", param=param) from error

    async def _written(self, messages: Sequence[dict[str, Any]], values: dict[str, Any], use: ToolUse) -> list[int]:
        """By the template. A call that is forced has its form from its tools, whether the template shows them or not;
        of those that it does not show, the model knows what the conversation says.
        """
        if not use.values:
            return await self.llm.chat_prompt(messages, **values)
        try:
            return await self.llm.chat_prompt(messages, tools=use.values, **values)
        except ModelError as error:
            if not use.is_forced or error.where != "tools":
                raise
        return await self.llm.chat_prompt(messages, **values)

    def reader(self, use: ToolUse, prompt: list[int], *, has_form: bool) -> Reader | None:
        """What reads an answer: see :meth:`ToolUse.reader`."""
        return use.reader(self.about.response_template, self.llm.tokenizer.decode(prompt), has_form=has_form)

    def marks_are_text(self, skip_special_tokens: bool | None = None) -> dict[str, bool]:
        """Settings of a request whose answer is read: special tokens may be the marks.

        Args:
            skip_special_tokens: what the request says of it.
        """
        if self.about.response_template is None:
            return {}
        if skip_special_tokens:
            raise unsupported("skip_special_tokens", "this model marks calls and reasoning with such tokens")
        return {"skip_special_tokens": False}

    def most_new(self, num_prompt: int) -> int:
        """Tokens that can be generated behind a prompt, by the model's length and by its cache."""
        return max(1, self.about.longest - num_prompt)

    # -- answers

    def ask_all(
        self,
        prompts: Sequence[str | list[int]],
        params: SamplingParams,
        record: Record,
        *,
        streams: bool | None,
        priority: int = 0,
    ) -> list[Answers]:
        """Begin to answer several prompts; none of them if there is never room for all."""
        wanted, most = len(prompts) * params.n, self.settings.max_queue
        if wanted > most:
            message = f"{wanted} answers are asked for at once, and no more than {most} may wait"
            raise ApiError(400, message, code="too_many_answers", param=record.names.get("prompt", "prompt"))
        return [self.ask(prompt, params, record, streams=streams, priority=priority) for prompt in prompts]

    def ask(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        record: Record,
        *,
        streams: bool | None,
        priority: int = 0,
    ) -> Answers:
        """Begin to answer a prompt. Raises what the client is told if that cannot be."""
        llm, timeout_s = self.llm, self.settings.timeout_s
        answers = llm.generate(prompt, params, priority=priority, timeout_s=timeout_s, stream=bool(streams))
        record.num_answers += params.n
        return answers

    async def stream(
        self, asked: Sequence[Answers], record: Record, *, each: int = 1, has_new: bool = True
    ) -> AsyncIterator[tuple[int, Chunk]]:
        """What comes of all of them, as it comes, with the number of the answer among all.

        Args:
            asked: one for each prompt.
            record: what is written down of the request.
            each: answers to a prompt.
            has_new: False if the prompt alone was asked about.
        """
        async with AsyncExitStack() as stack:
            for answers in asked:
                await stack.enter_async_context(answers)
            try:
                async for number, each_chunk in _merged(asked):
                    record.has_begun = True
                    chunk = each_chunk if has_new else _of_prompt_alone(each_chunk)
                    if chunk.finished is not None:
                        self._note(chunk.finished, record)
                    yield number * each + chunk.index, chunk
            except PiecegraphError as error:
                raise of_piecegraph(error, record.names) from error

    async def whole(
        self, asked: Sequence[Answers], record: Record, *, each: int = 1, has_new: bool = True
    ) -> list[Completion]:
        """All answers, in order; see :meth:`stream`."""
        found: dict[int, Completion] = {}
        async for index, chunk in self.stream(asked, record, each=each, has_new=has_new):
            if chunk.finished is not None:
                found[index] = chunk.finished
        return [found[index] for index in sorted(found)]

    def _note(self, answer: Completion, record: Record) -> None:
        self.metrics.observe(self.name, answer)
        record.note(answer)
        if answer.finish_reason == "abort":
            raise ApiError(503, "the server was stopped before the answer was done", code="shutting_down")


async def accepted(asked: Sequence[Answers]) -> None:
    """Return once all are queued: what is refused must have its own status."""
    for answers in asked:
        await answers.accepted()


def _of_prompt_alone(chunk: Chunk) -> Chunk:
    """Nothing follows a prompt alone, whatever the token was that had to be made; nor is it counted anywhere."""
    none: list[Any] | None = None if chunk.logprobs is None else []
    answer = chunk.finished
    if answer is not None:
        answer = replace(
            answer,
            text=None if answer.text is None else "",
            token_ids=[],
            logprobs=none,
            finish_reason="abort" if answer.finish_reason == "abort" else "length",
            stop_reason=None,
            metrics=cut_metrics(answer.metrics, 0),
        )
    return replace(chunk, text="", token_ids=[], logprobs=none, finished=answer)


async def _merged(asked: Sequence[Answers]) -> AsyncIterator[tuple[int, Chunk]]:
    """The chunks of several streams, each with the number of its own."""
    if len(asked) == 1:
        async for chunk in asked[0]:
            yield 0, chunk
        return
    news: asyncio.Queue[tuple[int, Chunk | BaseException | None]] = asyncio.Queue(len(asked))

    async def read(number: int) -> None:
        try:
            async for chunk in asked[number]:
                await news.put((number, chunk))
        except PiecegraphError as error:
            await news.put((number, error))
        else:
            await news.put((number, None))

    tasks = [asyncio.ensure_future(read(number)) for number in range(len(asked))]
    try:
        num_left = len(tasks)
        while num_left:
            number, new = await news.get()
            if isinstance(new, BaseException):
                raise new
            if new is None:
                num_left -= 1
            else:
                yield number, new
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
