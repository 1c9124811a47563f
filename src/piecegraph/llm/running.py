"""A started model and the requests in it: prompts become requests, are queued, stepped and answered.

Any thread may ask. Whoever waits for an answer runs steps for all of them, one thread at a time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import replace
from typing import Any

import torch

from piecegraph.base import torch_compat
from piecegraph.base.collector import collect_all
from piecegraph.errors import ConfigError, ModelError, RequestError
from piecegraph.llm.config import LLMConfig
from piecegraph.llm.run.arguments import SamplingRow
from piecegraph.llm.run.detokenizer import Detokenizer
from piecegraph.llm.run.fair_lock import FairLock
from piecegraph.llm.run.generation import Generation
from piecegraph.llm.run.prompts import (
    name_prompt,
    raise_first,
    refused,
    tokenizer_or_error,
    tokens_of,
    tokens_of_word,
)
from piecegraph.llm.run.request import Request
from piecegraph.llm.run.results import Chunk, Completion
from piecegraph.llm.run.sampling_params import SamplingParams
from piecegraph.llm.run.structured import Guide, Guides, StructuredOutputsParams
from piecegraph.llm.startup import Started

Prompt = str | Sequence[int]
OnNew = Callable[[Generation, str, list[int]], None]

_IDLE_SHARE, _MOST_IDLE_S = 0.05, 0.05
"""Of the time that calls take, so much is used at their ends to record what their steps missed; and at once at most so
much, and what the last recording takes longer."""


class RunningModel:
    """A model that takes requests.

    Args:
        path: of the model.
        config: how it was asked for.
        started: its parts.
        is_shared: whether other ranks run it, too.
        request_numbers: what tells the seeds of requests apart.
    """

    def __init__(
        self, path: str, config: LLMConfig, started: Started, *, is_shared: bool, request_numbers: Iterator[int]
    ) -> None:
        self._path, self._config, self._is_shared = path, config, is_shared
        self._started: Started | None = started
        self.lock = FairLock()
        """Held by whoever uses the engine."""
        self._request_numbers = request_numbers
        self._guides: Guides | None = None
        """Made when a form is first asked for."""
        self._guides_lock = threading.Lock()
        self._idle_s = 0.0
        """What may be used for recording; negative if the last one took longer."""

    @property
    def is_open(self) -> bool:
        """Whether it has not been given up."""
        return self._started is not None

    @property
    def started(self) -> Started:
        """The running parts. Raises after ``close()``."""
        if self._started is None:
            raise ConfigError("PG106", "the model was called after close()", hint="load it again")
        return self._started

    def give_up(self) -> None:
        """Give back weights, cache and graphs."""
        self._started = None
        collect_all()  # a model and its modules refer to each other
        if self._config.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises if it has none."""
        loaded = self.started.loaded
        return tokenizer_or_error(loaded.tokenizer, self._path, loaded.tokenizer_error)

    def answer(
        self, prompts: Sequence[Prompt], rows: Sequence[SamplingRow], raises: bool, *, first_index: int = 0
    ) -> list[Completion]:
        """The answers to prompts.

        Args:
            prompts: texts or lists of token ids.
            rows: how to go on from each of them.
            raises: raise the first error, and not answer with it.
            first_index: by which errors name the first prompt.
        """
        with self._queued(prompts, rows, None, first_index) as queued:
            if raises:
                raise_first(each for each in queued if isinstance(each, Completion))
            waiting = [each for each in queued if isinstance(each, Generation)]
            while self._step(waiting, ()):
                pass
            answers = [each if isinstance(each, Completion) else completion_of(each) for each in queued]
        self._record_missed(answers)
        if raises:
            raise_first(answers)
        return answers

    def stream(self, prompts: Sequence[Prompt], rows: Sequence[SamplingRow], raises: bool) -> Iterator[Chunk]:
        """The same as they come. Nothing is queued before the first chunk is asked for: a stream that nobody reads
        holds nothing.
        """
        chunks: deque[Chunk] = deque()
        finished: list[Completion] = []
        with self._queued(prompts, rows, chunks) as queued:
            waiting = [each for each in queued if isinstance(each, Generation)]
            is_running = True
            while is_running:
                is_running = self._step(waiting, chunks)
                while chunks:
                    chunk = chunks.popleft()
                    if chunk.finished is not None:
                        finished.append(chunk.finished)
                        if raises:
                            raise_first(finished[-1:])
                    yield chunk
        self._record_missed(finished)

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        on_new: Callable[[int], OnNew] | None = None,
        makes_text: bool = True,
        arrival_time: float | None = None,
    ) -> list[Generation]:
        """The requests for the answers to a prompt, which are not queued yet. Any thread may make them, at any time.

        Args:
            prompt: a text or a list of token ids.
            params: how to go on from it.
            on_new: makes what is called with new text and tokens of an answer, given its number.
            makes_text: False to have tokens alone, and ``on_new`` called at the end: the text is made elsewhere.
            arrival_time: see :class:`~piecegraph.llm.run.request.Request`.

        Raises:
            RequestError: the prompt is nothing that a model can go on from, or no answer can have the form that is
                asked for.
            ModelError: it needs a tokenizer, and there is none.
        """
        if params.logits_processors and self._is_shared:
            why = "they would have to choose the same on every rank"
            raise ConfigError("PG108", "logits_processors was given to a model on ranks", why=why)
        text = prompt if isinstance(prompt, str) else None
        needs_text = text is not None or params.stop or any(isinstance(word, str) for word in params.bad_words)
        needs_text = needs_text or params.structured_outputs is not None
        tokenizer: Any = self.tokenizer if needs_text else self.started.loaded.tokenizer
        tokens: Any = tokens_of(text, tokenizer) if text is not None else prompt
        params = params.with_words(lambda word: tokens_of_word(word, tokenizer))
        detokenizer = None
        if tokenizer is not None and makes_text:
            detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        found = [
            self.started.engine.prepare(
                tokens,
                params.of_answer(number),
                seed=(self._config.seed * 1_000_003 + next(self._request_numbers)) % 2**64,
                prompt=text,
                detokenizer=detokenizer,
                on_new=None if on_new is None else on_new(number),
                is_streamed=makes_text,
                arrival_time=arrival_time,
                guide=self._guide(params.structured_outputs),
            )
            for number in range(params.n)
        ]
        for each in found[1:]:
            each.request.first_answer = found[0].request
        return found

    def copy_request(
        self, request_id: str, tokens: list[int], params: SamplingParams, seed: int, mrope_positions: Any
    ) -> Generation:
        """A request as the first rank has it, for the others. Its text is made there."""
        guide = self._guide(params.structured_outputs)
        request = Request(request_id, tokens, params, seed=seed, mrope_positions=mrope_positions, guide=guide)
        return Generation(request, None, None)

    def _guide(self, wanted: StructuredOutputsParams | None) -> Guide | None:
        if wanted is None:
            return None
        with self._guides_lock:  # to read a tokenizer takes a second
            if self._guides is None:
                scheduler = self.started.engine.scheduler
                self._guides = Guides(self.tokenizer, scheduler.limits.vocab_size, scheduler.eos_token_ids)
        return self._guides.make(wanted)

    def _step(self, waiting: list[Generation], chunks: Sized) -> bool:
        """Run a step, for all threads' requests, unless those of others bring what this one waits for: a chunk, or the
        end of all its requests. False if it is the end.
        """

        def is_done() -> bool:
            return all(each.is_done for each in reversed(waiting))

        with self.lock.turn(lambda: len(chunks) > 0 or is_done()) as is_mine, torch_compat.serving():
            _drop_done(waiting)
            if is_mine and waiting:
                has_run = self.started.engine.step()
                assert has_run, "requests are left, but there is nothing to do"
                _drop_done(waiting)
            return bool(waiting)

    def _record_missed(self, answers: Sequence[Completion]) -> None:
        """Record what steps have missed behind the last token of a call, if nobody else is waiting: see
        Note [No request waits for a recording]. Over many calls it takes a small share of their time.
        """
        with self.lock.turn_at_once() as is_mine:
            if not is_mine or self._started is None:
                return
            engine = self._started.engine
            took = max((answer.metrics.total_s for answer in answers), default=0.0)
            self._idle_s = min(self._idle_s + _IDLE_SHARE * took, _MOST_IDLE_S)
            while self._idle_s > 0 and engine.is_idle and not self.lock.is_wanted and engine.forward.missed:
                with torch_compat.serving():
                    self._idle_s -= engine.record_idle(engine.forward.missed[0])

    @contextlib.contextmanager
    def _queued(
        self,
        prompts: Sequence[Prompt],
        rows: Sequence[SamplingRow],
        chunks: deque[Chunk] | None,
        first_index: int = 0,
    ) -> Iterator[list[Generation | Completion]]:
        """Queue prompts, and abort what is not done in the end: after an error, or if a stream is left unread."""
        arrival_time = time.perf_counter()
        # Before it is waited for the lock, and not while it is held: a tokenizer takes its time.
        prepared: list[Generation | Completion] = []
        for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True), first_index):
            prepared += self._prepare(index, prompt, row, len(prepared), chunks, arrival_time)
        queued: list[Generation | Completion] = []
        try:
            with self.lock:
                for index, each in enumerate(prepared):
                    queued.append(each if isinstance(each, Completion) else self._enqueue(each))
                    if chunks is not None and isinstance(queued[-1], Completion):
                        chunks.append(Chunk(index, "", [], queued[-1]))
            yield queued
        finally:
            if left := [each for each in queued if isinstance(each, Generation) and not each.is_done]:
                self._abort(left)

    def _abort(self, generations: Sequence[Generation]) -> None:
        """End requests now; or behind the step of the thread that has the lock. To wait for it might be to wait for
        oneself: garbage collection closes a forgotten stream wherever a thread happens to be, also in line.
        """
        engine = self.started.engine
        engine.abort_later(generations)
        with self.lock.turn_at_once() as is_mine:
            if is_mine:
                engine.abort_left()

    def _prepare(
        self,
        index: int,
        prompt: Prompt,
        row: SamplingRow,
        first: int,
        chunks: deque[Chunk] | None,
        arrival_time: float,
    ) -> Sequence[Generation | Completion]:
        """What one of the prompts asks for, or why it cannot be served: an entry for each of its answers.

        Args:
            index: of the prompt.
            prompt: itself.
            row: how to go on from it.
            first: the number of its first answer.
            chunks: where these are streamed to.
            arrival_time: when it was asked for.
        """
        num_answers = 1
        try:
            if isinstance(row, ConfigError):
                raise row
            num_answers = row.n
            on_new = None if chunks is None else lambda number: _collector(first + number, chunks)
            found = self.prepare(prompt, row, on_new=on_new, arrival_time=arrival_time)
        except (RequestError, ConfigError, ModelError) as error:
            return [refused(prompt, name_prompt(error, index))] * num_answers
        for generation in found:
            generation.prompt_index = index
        return found

    def _enqueue(self, generation: Generation) -> Generation | Completion:
        """The same, once it is queued. The lock is held."""
        try:
            self.started.engine.enqueue(generation)
        except (RequestError, ConfigError, ModelError) as error:
            prompt = generation.prompt if generation.prompt is not None else generation.request.tokens.tolist()
            return refused(prompt, name_prompt(error, generation.prompt_index))
        return generation


def _drop_done(waiting: list[Generation]) -> None:
    """Forget requests that have ended: those at the end, as the others are waited for anyway."""
    while waiting and waiting[-1].is_done:
        waiting.pop()


def completion_of(generation: Generation) -> Completion:
    """The answer to a prompt: in plain tensors, also where a stream makes it in the middle of a step."""
    with torch.inference_mode(False):
        found = generation.completion()
    return found if found.error is None else replace(found, error=name_prompt(found.error, generation.prompt_index))


def chunk_of(index: int, generation: Generation, text: str, tokens: list[int]) -> Chunk | None:
    """What is new of an answer, if anything is.

    Args:
        index: of the answer.
        generation: whose it is.
        text: what is new.
        tokens: the same, as tokens.
    """
    finished = completion_of(generation) if generation.is_done else None
    if not text and not tokens and finished is None:
        return None
    logprobs = None
    if generation.request.params.logprobs is not None:
        logprobs = generation.logprobs[len(generation.logprobs) - len(tokens) :]
    return Chunk(index, text, tokens, finished, logprobs)


def _collector(index: int, chunks: deque[Chunk]) -> OnNew:
    def on_new(generation: Generation, text: str, tokens: list[int]) -> None:
        chunk = chunk_of(index, generation, text, tokens)
        if chunk is not None:
            chunks.append(chunk)

    return on_new
