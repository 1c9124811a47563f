"""What a user calls: :class:`LLM`."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, Unpack, overload

import torch

from piecegraph.base.coerce import as_list
from piecegraph.base.config import CudagraphMode
from piecegraph.base.events import EventLog
from piecegraph.engine.eager_interception import unintercepted
from piecegraph.engine.recorded import RecordedTapes
from piecegraph.errors import ConfigError, ModelError, PiecegraphError, RankError, RequestError
from piecegraph.graph import interception
from piecegraph.llm.config import check_path, make_llm_config, refuse_names
from piecegraph.llm.following import Follower, join_ranks, leave_at_exit, together
from piecegraph.llm.model.loader import LoadFormat
from piecegraph.llm.ranks.group import Ranks
from piecegraph.llm.ranks.orders import Orders
from piecegraph.llm.report import explain_llm, stats_of_llm
from piecegraph.llm.run.arguments import SAMPLING_NAMES, OnError, SamplingArguments, check_flags, sampling_rows
from piecegraph.llm.run.fair_lock import FairLock
from piecegraph.llm.run.generation import Generation, text_behind
from piecegraph.llm.run.prompts import (
    chat_tokens,
    conversations_of,
    decoder_of,
    name_prompt,
    one_for_each,
    raise_first,
    refused,
    tokens_of,
)
from piecegraph.llm.run.request import Request, SamplingParams
from piecegraph.llm.run.results import Chunk, Completion, StepResult
from piecegraph.llm.run.scheduler import Scheduler
from piecegraph.llm.run.step import StepPlan
from piecegraph.llm.run.stop import IncrementalText
from piecegraph.llm.run.structured import Guide, Guides, StructuredOutputsParams
from piecegraph.llm.startup import Started, start
from piecegraph.provenance.live import LiveKernels

if TYPE_CHECKING:
    from piecegraph.provenance.trace import Trace

Prompt = str | Sequence[int]
Conversation = str | Sequence[Mapping[str, Any]]
OnNew = Callable[[Generation, str, list[int]], None]

_IDLE_SHARE, _MOST_IDLE_S = 0.05, 0.25
"""Of the time that calls take, so much is used at their ends to record what their steps missed; and at once at most so
much, and what the last recording takes longer."""


class LLM:
    """A causal language model of transformers, run through the tape.

    Args:
        path: a folder with a model, a name that transformers can find, or ``"demo"``: a small model from a package
            (a folder of that name is ``"./demo"``).
        dtype: of weights and cache; ``"auto"`` takes the checkpoint's, on a CPU float32 in place of half precision.
        device: ``"auto"`` takes a GPU if there is one.
        backend: what compiles the pieces: ``"inductor"``, ``"eager"`` (nothing) or a callable.
        attention: the name of an attention kernel; ``"auto"`` takes the fastest that supports the model.
        load_format: ``"dummy"`` fills the weights with random numbers.
        max_model_len: tokens of a request at most, prompt and answer; by default what the model was made for, up to
            32768, and with a ``longrope`` rotation its original length.
        max_num_seqs: requests that run together at most (256 on a GPU, else 16).
        max_batch_tokens: tokens of a step at most (4096 on a GPU, else 512); longer prompts are split.
        memory_fraction: of the GPU's memory, weights and cache together (0.9); of the free host memory on a CPU (0.25).
        prefix_cache: whether beginnings that prompts have in common are computed once.
        capture_sizes: sizes of steps to record; ``"auto"`` is a ladder, of which some may be recorded later.
        cudagraph_mode: ``"full"`` and ``"piecewise"`` for all steps; ``"auto"`` decides for each kind; ``"none"``.
        deterministic: what a request gets does not depend on what runs beside it, bit by bit. Every step is then as
            large as the largest (``max_batch_tokens``, by default ``max_num_seqs``), and takes as long.
        tensor_parallel_size: so many processes run the model together, started by ``torchrun``; each calls this with
            the same arguments. See docs/ranks.md.
        seed: what sampling without a seed of its own starts from.
        options: rarely needed settings, see :class:`piecegraph.llm.config.LLMOptions`.

    Several threads may call it at once. ``close()`` gives back its memory; it is also a context manager.

    Example:
        with piecegraph.LLM("path/to/model") as llm:
            print(llm.generate(["The capital of France is"], max_new_tokens=8)[0].text)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str = "auto",
        backend: str | Callable[..., Any] = "inductor",
        attention: str = "auto",
        load_format: LoadFormat = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_batch_tokens: int | None = None,
        memory_fraction: float | None = None,
        prefix_cache: bool = True,
        capture_sizes: Literal["auto"] | Sequence[int] = "auto",
        cudagraph_mode: CudagraphMode = "auto",
        deterministic: bool = False,
        tensor_parallel_size: int = 1,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
        **unknown: Never,
    ) -> None:
        refuse_names(unknown)
        self.config = make_llm_config(
            dtype=dtype,
            device=device,
            backend=backend,
            attention=attention,
            load_format=load_format,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            memory_fraction=memory_fraction,
            prefix_cache=prefix_cache,
            capture_sizes=capture_sizes,
            cudagraph_mode=cudagraph_mode,
            deterministic=deterministic,
            tensor_parallel_size=tensor_parallel_size,
            seed=seed,
            options=options,
        )
        self.path = check_path(path)
        self.events = EventLog("ignore")
        self.ranks = join_ranks(self.path, self.config)
        """The processes that run the model together; None if it is this one."""
        if self.ranks is not None and not self.ranks.leads:
            self.config = replace(self.config, options=replace(self.config.options, progress=False))
        with interception.off(), together(self.ranks, "loading a model"):
            self._started: Started | None = unintercepted(start)(self.path, self.config, self.events, self.ranks)
        self._follower: Follower | None = None
        """On the other ranks than the first."""
        if self.ranks is not None:
            self._take_place(self.ranks)
        self.lock = FairLock()
        """Held by whoever uses the engine."""
        self._request_numbers = itertools.count(1)
        self._guides: Guides | None = None
        """Made when a form is first asked for."""
        self._guides_lock = threading.Lock()
        self._idle_s = 0.0
        """What may be used for recording; negative if the last one took longer."""

    def _take_place(self, ranks: Ranks) -> None:
        """The first rank leads, and the others follow: see Note [One schedule]."""
        orders, engine = Orders(ranks), self.started.engine
        if ranks.leads:
            engine.orders = orders
        else:
            self._follower = Follower(orders, engine, self._make_replica)
        leave_at_exit(self)

    @property
    def follows(self) -> bool:
        """Whether another rank schedules and answers, and this one does its part."""
        return self._follower is not None

    def follow(self) -> None:
        """Do what the first rank's model does, until it is closed: for ranks that make no calls of their own."""
        if self._follower is not None:
            self._follower.until("close")
            self._give_up()

    @property
    def started(self) -> Started:
        """The running parts. Raises after ``close()``."""
        if self._started is None:
            raise ConfigError("PG106", "the model was called after close()", hint="load it again")
        return self._started

    def close(self) -> None:
        """Give back weights, cache and graphs. Requests that run in other threads end with ``"abort"``."""
        if self._started is None:
            return
        if self._follower is not None:
            self.follow()
            return
        with self.lock:
            engine = self.started.engine
            engine.close()
            if engine.orders is not None:
                engine.orders.tell("close")
            self._give_up()

    def _give_up(self) -> None:
        self._started = self._follower = None
        gc.collect()  # a model and its modules refer to each other
        if self.config.device.type == "cuda":
            torch.cuda.empty_cache()
        if self.ranks is not None:
            self.ranks.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or self.ranks is None:  # ranks that go on miss the one that failed, and are not told to close
            self.close()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises if it has none."""
        if self.started.loaded.tokenizer is None:
            raise ModelError(
                "PG666",
                f"the model at {self.path} has no tokenizer",
                why=self.started.loaded.tokenizer_error,
                hint="give prompts as lists of token ids; piecegraph trace has --prompt-tokens",
            )
        return self.started.loaded.tokenizer

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: Literal[False] = False,
        on_error: OnError = "raise",
        **sampling: Unpack[SamplingArguments],
    ) -> list[Completion]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: Literal[True],
        on_error: OnError = "raise",
        **sampling: Unpack[SamplingArguments],
    ) -> Iterator[Chunk]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: bool,
        on_error: OnError = "raise",
        **sampling: Unpack[SamplingArguments],
    ) -> list[Completion] | Iterator[Chunk]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: bool = False,
        on_error: OnError = "raise",
        **sampling: Unpack[SamplingArguments],
    ) -> list[Completion] | Iterator[Chunk]:
        """Go on from prompts.

        Args:
            prompts: texts, lists of token ids, or both mixed; one of them or a list.
            sampling_params: what follows in one value, or in a list with one value for each prompt. Otherwise by name:
            max_new_tokens: of each answer (16); ``max_tokens`` is the same. This and the next four may be a list or an
                array, with one value for each prompt.
            n: answers to each prompt (1). They follow each other; with a seed, each but the first has the next one.
            temperature: 0 always takes the most likely token (0).
            top_p: sample from the most likely tokens that together reach this probability (1).
            top_k: sample from so many of the most likely tokens; 0 or -1 for all (0).
            min_p: sample from tokens that are at least this likely, relative to the most likely one (0).
            repetition_penalty: of tokens of prompt and answer, as transformers has it (1).
            presence_penalty, frequency_penalty: of tokens of the answer, as OpenAI's API has them (0).
            logit_bias: what is added to the logits of tokens, by their ids.
            bad_words: texts, or lists of token ids, that an answer may not hold.
            structured_outputs: the form of an answer, as a dictionary with one of ``json`` (a schema), ``regex``,
                ``choice``, ``grammar`` and ``json_object``, or :class:`StructuredOutputsParams`. An answer ends when
                it is complete.
            logits_processors: functions that are called with the new tokens so far and the logits of the next, which
                they give back changed. Also those of transformers.
            seed: fixes what is sampled, up to rounding; with ``deterministic=True``, wholly.
            stop: texts at which an answer ends.
            stop_token_ids: tokens at which an answer ends, besides those of the model.
            include_stop_str_in_output: leave what ended an answer in its text.
            skip_special_tokens: leave the tokens that mark parts of a text out of it (True).
            min_tokens: so many tokens nothing ends an answer (0).
            ignore_eos: go on behind the token that ends a text.
            logprobs: tell the log-probability of each new token, and of so many most likely ones.
            prompt_logprobs: the same for the tokens of the prompt.
            return_hidden_states: give the last layer's hidden states of all tokens.
            stream: return an iterator of :class:`Chunk` instead.
            on_error: ``"raise"`` raises the error of a prompt that cannot be served, and ends the others; with
                ``"return"``, its answer has ``finish_reason="error"`` and the ``error``, and the others are answered.

        Returns:
            A list of :class:`Completion` in the order of the prompts, also for one prompt.
        """
        check_flags(stream, on_error)
        each = one_for_each(prompts)
        rows = sampling_rows(len(each), sampling_params, sampling)
        _ = self.started  # raises after close(), and not only when a stream is read
        raises = on_error == "raise"
        if self._follower is not None:
            return self._followed_stream() if stream else self._followed()
        return self._stream(each, rows, raises) if stream else self._answer(each, rows, raises)

    @overload
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Any] | None = None,
        stream: Literal[False] = False,
        on_error: OnError = "raise",
        **arguments: Any,
    ) -> list[Completion]: ...

    @overload
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Any] | None = None,
        stream: Literal[True],
        on_error: OnError = "raise",
        **arguments: Any,
    ) -> Iterator[Chunk]: ...

    @overload
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Any] | None = None,
        stream: bool,
        on_error: OnError = "raise",
        **arguments: Any,
    ) -> list[Completion] | Iterator[Chunk]: ...

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Any] | None = None,
        stream: bool = False,
        on_error: OnError = "raise",
        **arguments: Any,
    ) -> list[Completion] | Iterator[Chunk]:
        """Answer conversations, by the chat template of the model's tokenizer.

        Args:
            messages: with a ``role`` and a ``content`` each, or what the user says; or a list of several conversations.
            sampling_params: as for :meth:`generate`.
            tools: functions that the model may ask for, or descriptions of them, as transformers takes them.
            stream: as for :meth:`generate`.
            on_error: as for :meth:`generate`. A conversation that the template refuses is raised.
            **arguments: those of :meth:`generate` by name, and what the template reads (``enable_thinking=False``).

        Example:
            llm.chat([{"role": "user", "content": "What is the capital of France?"}], max_new_tokens=32)[0].text
        """
        sampling: Any = {name: value for name, value in arguments.items() if name in SAMPLING_NAMES}
        values = {name: value for name, value in arguments.items() if name not in SAMPLING_NAMES}
        prompts = [self.chat_prompt(each, tools=tools, **values) for each in conversations_of(messages)]
        return self.generate(prompts, sampling_params, stream=stream, on_error=on_error, **sampling)

    def chat_prompt(
        self, conversation: Conversation, *, tools: Sequence[Any] | None = None, **template_values: Any
    ) -> list[int]:
        """A prompt as the model was taught to answer them, by the chat template of its tokenizer.

        Args:
            conversation: what the user says; or messages with a ``role`` and a ``content`` each.
            tools: functions that the model may ask for, as for :meth:`chat`.
            **template_values: what else the template reads.

        Example:
            llm.generate(llm.chat_prompt("What is the capital of France?"))
        """
        said = [{"role": "user", "content": conversation}] if isinstance(conversation, str) else as_list(conversation)
        if said is None or not all(isinstance(message, Mapping) for message in said):
            why = "it must be a text, or a list of messages with a role and a content each"
            raise ConfigError("PG101", f"conversation is {conversation!r}", why=why)
        return chat_tokens(self.tokenizer, said, tools, template_values)

    def explain(self) -> str:
        """How the model is run, as text: stages, pieces, cuts, sizes, every decision and every fallback."""
        return explain_llm(self.started, self.events)

    def stats(self) -> dict[str, Any]:
        """The same as numbers."""
        return stats_of_llm(self.started, self.events)

    def report(self, path: str | os.PathLike[str], *, trace: Trace | None = None) -> Path:
        """Write the same as one HTML file to share, which needs no network.

        Args:
            path: where to.
            trace: what :func:`piecegraph.trace` has seen of it: its timeline and kernels come on the page, too.
        """
        # They take a while to import, and few write a page.
        from piecegraph.llm.report_page import report_of_llm
        from piecegraph.provenance.trace import report_with

        return report_with(report_of_llm(self.path, self.started, self.events), trace, path)

    @property
    def kernels(self) -> LiveKernels:
        """The kernels of the recorded graphs, to choose some, leave them out and see what they cost.

        It takes ``options={"provenance": True}``.
        """
        _ = self.started  # raises after close()
        return LiveKernels(RecordedTapes(self.path, self.lock, lambda: self.started.engine.libraries))

    def make_scheduler(self, *, prefix_cache: bool = True) -> Scheduler:
        """A scheduler over this model's cache, for use with :meth:`forward`.

        Args:
            prefix_cache: whether beginnings that prompts have in common are computed once.
        """

        def text_of(request: Request) -> IncrementalText:
            return text_behind(
                request, decoder_of(self.tokenizer, skip_special_tokens=request.params.skip_special_tokens)
            )

        return self.started.engine.make_scheduler(prefix_cache=prefix_cache, text_of=text_of)

    def forward(self, plan: StepPlan, *, hidden_states: bool = False) -> StepResult:
        """Run one step of a scheduler of your own.

        The model has one cache: while requests of your scheduler are running, ``generate`` refuses others, and when
        one takes over from the other, what was remembered of prompts is forgotten.

        Args:
            plan: which tokens of which requests run, as a scheduler of :meth:`make_scheduler` plans it.
            hidden_states: give those of all tokens, and not only of the last token of each sequence. Such steps take
                longer, and are recorded when they are first used.

        Returns:
            Tokens, logits and hidden states of the plan's works in their order, valid until the next step.

        Raises:
            RequestError: ``generate`` is running, or the plan cannot be run by this model.

        Example:
            scheduler = llm.make_scheduler()
            scheduler.add(Request("first", [1, 2, 3], SamplingParams(max_new_tokens=8)))
            while plan := scheduler.schedule():
                result = llm.forward(plan)
                scheduler.commit(plan, result.tokens.tolist())
        """
        with self.lock, torch.inference_mode():
            return self.started.engine.run(plan, every_row=hidden_states)

    def record_missing(self, seconds: float | None = None) -> int:
        """Record steps that others have run larger than needed for, or without graphs, and sizes that were left out
        when the model was loaded: something to do while there is nothing to do.

        It ends as soon as a request comes, which waits for one recording at most. Results of :meth:`forward` are not
        valid behind it.

        Args:
            seconds: behind which nothing more is begun; 0 records one, None all.

        Returns:
            How many are still missing.

        Example:
            while queue.empty() and llm.record_missing(seconds=0):
                pass
        """
        end = math.inf if seconds is None else time.perf_counter() + seconds
        while True:
            with self.lock, torch.inference_mode():
                engine = self.started.engine
                missing = engine.forward.missing
                if not missing or not engine.is_idle or self.follows:  # the first rank says when
                    return len(missing)
                engine.record_idle(missing[0])
                if time.perf_counter() >= end or self.lock.is_wanted:
                    return len(engine.forward.missing)

    # -- requests

    def _answer(self, prompts: Sequence[Prompt], rows: Sequence[dict[str, Any]], raises: bool) -> list[Completion]:
        with self._told_to_others() as told:
            with self._queued(prompts, rows, None) as queued:
                if raises:
                    raise_first(each for each in queued if isinstance(each, Completion))
                waiting = [each for each in queued if isinstance(each, Generation)]
                while self._step(waiting, ()):
                    pass
                answers = [each if isinstance(each, Completion) else completion_of(each) for each in queued]
            self._record_missed(answers)
            if raises:
                raise_first(answers)
            told += answers
        return answers

    @contextlib.contextmanager
    def _told_to_others(self) -> Iterator[list[Completion]]:
        """Around a call: its answers, or its error, are those of the same call on the other ranks."""
        found: list[Completion] = []
        try:
            yield found
        except RankError:
            raise
        except (PiecegraphError, GeneratorExit) as error:  # the latter: a stream was left unread
            self._tell_answers(error if isinstance(error, PiecegraphError) else [])
            raise
        self._tell_answers(found)

    def _tell_answers(self, found: list[Completion] | PiecegraphError) -> None:
        if self._started is not None and (orders := self._started.engine.orders) is not None:
            with self.lock:
                orders.tell("answers", found)

    def _followed(self) -> list[Completion]:
        """What the first rank answers."""
        assert self._follower is not None
        found: list[Completion] | PiecegraphError = self._follower.until("answers")
        if isinstance(found, PiecegraphError):
            raise found
        return found

    def _followed_stream(self) -> Iterator[Chunk]:
        """Nothing: chunks are the first rank's alone."""
        self._followed()
        yield from ()

    def _stream(self, prompts: Sequence[Prompt], rows: Sequence[dict[str, Any]], raises: bool) -> Iterator[Chunk]:
        """Nothing is queued before the first chunk is asked for: a stream that nobody reads holds nothing."""
        chunks: deque[Chunk] = deque()
        finished: list[Completion] = []
        with self._told_to_others():
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

    def _step(self, waiting: list[Generation], chunks: Sized) -> bool:
        """Run a step, for all threads' requests, unless those of others bring what this one waits for: a chunk, or the
        end of all its requests. False if it is the end.
        """

        def is_done() -> bool:
            return all(each.is_done for each in reversed(waiting))

        with self.lock.turn(lambda: len(chunks) > 0 or is_done()) as is_mine, torch.inference_mode():
            while waiting and waiting[-1].is_done:
                waiting.pop()
            if is_mine and waiting:
                has_run = self.started.engine.step()
                assert has_run, "requests are left, but there is nothing to do"
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
                with torch.inference_mode():
                    self._idle_s -= engine.record_idle(engine.forward.missed[0])

    @contextlib.contextmanager
    def _queued(
        self, prompts: Sequence[Prompt], rows: Sequence[dict[str, Any]], chunks: deque[Chunk] | None
    ) -> Iterator[list[Generation | Completion]]:
        """Queue prompts, and abort what is not done in the end: after an error, or if a stream is left unread."""
        arrival_time = time.perf_counter()
        # Before it is waited for the lock, and not while it is held: a tokenizer takes its time.
        prepared: list[Generation | Completion] = []
        for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
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

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        on_new: Callable[[int], OnNew] | None = None,
        is_streamed: bool = True,
        arrival_time: float | None = None,
    ) -> list[Generation]:
        """The requests for the answers to a prompt, which are not queued yet. Any thread may make them, at any time.

        Args:
            prompt: a text or a list of token ids.
            params: how to go on from it.
            on_new: makes what is called with new text and tokens of an answer, given its number.
            is_streamed: False to have that called at the end alone.
            arrival_time: see :class:`~piecegraph.llm.run.request.Request`.

        Raises:
            RequestError: the prompt is nothing that a model can go on from, or no answer can have the form that is
                asked for.
            ModelError: it needs a tokenizer, and there is none.
        """
        if params.logits_processors and self.ranks is not None:
            why = "they would have to choose the same on every rank"
            raise ConfigError("PG108", "logits_processors was given to a model on ranks", why=why)
        text = prompt if isinstance(prompt, str) else None
        needs_text = text is not None or params.stop or any(isinstance(word, str) for word in params.bad_words)
        needs_text = needs_text or params.structured_outputs is not None
        tokenizer: Any = self.tokenizer if needs_text else self.started.loaded.tokenizer
        tokens: Any = tokens_of(text, tokenizer) if text is not None else prompt
        params = params.with_words(lambda word: tokens_of(word, tokenizer, add_special_tokens=False))
        decode = None
        if tokenizer is not None:
            decode = decoder_of(tokenizer, skip_special_tokens=params.skip_special_tokens)
        found = [
            self.started.engine.prepare(
                tokens,
                params.of_answer(number),
                seed=(self.config.seed * 1_000_003 + next(self._request_numbers)) % 2**64,
                prompt=text,
                decode=decode,
                on_new=None if on_new is None else on_new(number),
                is_streamed=is_streamed,
                arrival_time=arrival_time,
                guide=self._guide(params.structured_outputs),
            )
            for number in range(params.n)
        ]
        for each in found[1:]:
            each.request.first_answer = found[0].request
        return found

    def _make_replica(
        self, request_id: str, tokens: list[int], params: SamplingParams, seed: int, mrope_positions: Any
    ) -> Generation:
        """A request as the first rank has it. Its text is made there."""
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

    def _prepare(
        self,
        index: int,
        prompt: Prompt,
        row: dict[str, Any],
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
            params = SamplingParams(**row)
            num_answers = params.n
            on_new = None if chunks is None else lambda number: _collector(first + number, chunks)
            found = self.prepare(prompt, params, on_new=on_new, arrival_time=arrival_time)
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
    if finished is not None and not generation.is_streamed:
        text = finished.text or ""
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
