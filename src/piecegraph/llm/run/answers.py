"""The event loop's side of a request: tokens come in, a task reads text, and goes away.

Note [Text is made where it is read]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The engine knows tokens. Their text is made here, off the thread that runs steps, and when somebody reads it: tokens
that have come meanwhile are one chunk, so that a reader that is behind has less to do. Where texts may end an answer,
each token is looked at as it comes, whether it is read or not. The engine is told of an answer that has ended so, and
has gone on by then: the tokens behind the stop text are never seen, nor counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from piecegraph.errors import PiecegraphError
from piecegraph.llm.run.results import Chunk, Completion, Ending, TokenLogprob, cut_metrics
from piecegraph.llm.run.sampling_params import SamplingParams
from piecegraph.llm.run.stop import IncrementalText


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a call goes on from."""

    text: str | None
    """If it was given as one."""
    tokens: list[int]
    params: SamplingParams


class Answer:
    """One answer of a call: tokens come in, chunks go out.

    Args:
        prompt: what it answers.
        text: what makes text of its tokens; None without a tokenizer.
    """

    def __init__(self, prompt: Prompt, text: IncrementalText | None) -> None:
        self.prompt = prompt
        self._text = text
        self.is_watched = bool(prompt.params.stop)
        """Whether each token is looked at as it comes."""
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None if prompt.params.logprobs is None else []
        self._num_read = 0
        """Tokens that the text has, or that are not part of it."""
        self._unread = ""
        self._num_told = 0
        """Tokens that chunks had."""
        self.ending: Ending | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether a stop text was found."""
        return self._text is not None and self._text.is_stopped

    def add(self, tokens: list[int], logprobs: Sequence[TokenLogprob] | None, ending: Ending | None) -> None:
        """Take what is new. Raises what the tokenizer makes of it, where its text is looked at."""
        if not self.is_stopped:
            self._tokens += tokens
            if self._logprobs is not None:
                self._logprobs += logprobs or ()
        self.ending = ending
        if self.is_watched:
            self._read()

    def take(self, index: int) -> Chunk:
        """All that was not told yet."""
        self._read()
        text, self._unread = self._unread, ""
        first, self._num_told = self._num_told, len(self._tokens)
        logprobs = None if self._logprobs is None else self._logprobs[first:]
        finished = None if self.ending is None else self._completion(self.ending)
        return Chunk(index, text, self._tokens[first:], finished, logprobs)

    def _read(self) -> None:
        """Make text of the tokens that have come."""
        text, ending = self._text, self.ending
        if text is None or text.is_stopped:
            return
        end = len(self._tokens) - (ending is not None and ending.ends_with_mark)
        if not self.is_watched:
            self._unread += text.add(self._tokens[self._num_read : end])
        else:
            for position in range(self._num_read, end):
                self._unread += text.add(self._tokens[position : position + 1])
                if text.is_stopped:
                    self._cut(position + 1)
                    return
        self._num_read = end
        if ending is not None:
            self._unread += text.finish()

    def _cut(self, num_tokens: int) -> None:
        del self._tokens[num_tokens:]
        if self._logprobs is not None:
            del self._logprobs[num_tokens:]

    def _completion(self, ending: Ending) -> Completion:
        text, prompt = self._text, self.prompt
        return Completion(
            prompt=prompt.text,
            prompt_token_ids=prompt.tokens,
            text=None if text is None else text.text,
            token_ids=self._tokens,
            finish_reason="stop" if self.is_stopped else ending.finish_reason,
            stop_reason=text.stopped_at if text is not None and text.is_stopped else ending.stop_reason,
            error=None,
            logprobs=self._logprobs,
            prompt_logprobs=ending.prompt_logprobs,
            hidden_states=ending.hidden_states,
            metrics=cut_metrics(ending.metrics, len(self._tokens)),
        )


@dataclass(eq=False)
class Inbox:
    """What an event loop has been sent of one call. Only its own thread touches it, once its prompt is read."""

    num_answers: int
    is_streamed: bool = True
    """Whether there is something to read before an answer has ended."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    cancel: Callable[[], None] = lambda: None
    """Ends the call. Any thread may call it, and a destructor."""
    stop: Callable[[int], None] = lambda _: None
    """Ends one of its answers."""
    answers: list[Answer] = field(default_factory=list)
    unread: dict[int, None] = field(default_factory=dict)
    """The answers that there is something new of, in the order in which it came."""
    finished: dict[int, Completion] = field(default_factory=dict)
    """Those that were read to their end."""
    error: PiecegraphError | None = None
    """What keeps all answers from coming, or one of them from coming to its end."""
    _waiter: asyncio.Future[None] | None = None

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return self.error is not None or (
            bool(self.answers) and all(answer.ending is not None for answer in self.answers)
        )

    def receive(
        self,
        index: int,
        tokens: list[int],
        logprobs: Sequence[TokenLogprob] | None,
        ending: Ending | PiecegraphError | None,
    ) -> None:
        """Take what is new of an answer."""
        if isinstance(ending, PiecegraphError):
            self.refuse(ending)
            return
        answer = self.answers[index]
        if ending is not None or answer.is_watched:
            self._look_at(index, answer, tokens, logprobs, ending)
        else:
            answer.add(tokens, logprobs, None)
        if (self.is_streamed or ending is not None) and self.error is None:
            self.unread[index] = None
            self._wake()

    def _look_at(
        self,
        index: int,
        answer: Answer,
        tokens: list[int],
        logprobs: Sequence[TokenLogprob] | None,
        ending: Ending | None,
    ) -> None:
        """Take what ends an answer, or may do so."""
        was_stopped = answer.is_stopped
        if ending is not None and ending.error is not None and not was_stopped:
            self.refuse(ending.error)  # it is raised, and is not part of a chunk
            return
        try:
            answer.add(tokens, logprobs, ending)
        except PiecegraphError as error:
            self.cancel()
            self.refuse(error)
            return
        if answer.is_stopped and not was_stopped and ending is None:
            self.stop(index)

    def refuse(self, error: PiecegraphError) -> None:
        """Nothing more will come."""
        self.error = error
        self._wake()

    def take(self) -> Chunk:
        """What is new of the answer that has waited longest."""
        index = next(iter(self.unread))
        del self.unread[index]
        chunk = self.answers[index].take(index)
        if chunk.finished is not None:
            self.finished[index] = chunk.finished
        return chunk

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return when something new has come."""
        self._waiter = self.loop.create_future()
        await self._waiter


class Answers:
    """What comes of one call of :meth:`piecegraph.AsyncLLM.generate`.

    Iterate over it for chunks as they are generated, or await it for the list of answers; either raises the error of a
    request that cannot be served, or not to its end. A request is ended, and its memory given back before the next
    step, when the task that reads it is cancelled, by :meth:`aclose`, or once nobody holds this any more.
    """

    def __init__(self, inbox: Inbox, accepted: asyncio.Future[None] | None) -> None:
        self._inbox = inbox
        self._accepted = accepted
        self._is_closed = False

    async def accepted(self) -> None:
        """Return once the request is queued. Raises why it is refused."""
        # A refusal is sent like everything else, and is received when the loop comes to it.
        await (asyncio.sleep(0) if self._accepted is None else asyncio.shield(self._accepted))
        if self._inbox.error is not None:
            raise self._inbox.error

    @property
    def prompt_token_ids(self) -> list[int]:
        """Of the prompt, once something has come of it."""
        return self._inbox.answers[0].prompt.tokens

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        inbox = self._inbox
        while not inbox.unread:
            if inbox.error is not None:
                raise inbox.error
            if inbox.is_done or self._is_closed:
                raise StopAsyncIteration
            try:
                await inbox.wait()
            except asyncio.CancelledError:
                self._close()
                raise
        try:
            return inbox.take()
        except PiecegraphError as error:
            inbox.cancel()
            inbox.refuse(error)
            raise

    async def _all(self) -> Sequence[Completion]:
        async for _ in self:
            pass
        return [self._inbox.finished[index] for index in sorted(self._inbox.finished)]

    def __await__(self) -> Generator[Any, None, Sequence[Completion]]:
        return self._all().__await__()

    async def aclose(self) -> None:
        """End the request, if it has not ended."""
        self._close()

    async def __aenter__(self) -> Answers:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        """Nothing is waited for: a destructor runs wherever a thread happens to be."""
        if not self._is_closed:
            self._is_closed = True
            if not self._inbox.is_done:
                self._inbox.cancel()
