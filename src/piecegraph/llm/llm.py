"""What a user calls: :class:`LLM`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, Unpack, overload

import torch

from piecegraph.base import torch_compat
from piecegraph.base.config import CudagraphMode
from piecegraph.base.events import EventLog
from piecegraph.base.progress import StageClock
from piecegraph.engine.eager_interception import unintercepted
from piecegraph.engine.recorded import RecordedTapes
from piecegraph.graph import interception
from piecegraph.llm.config import check_path, make_llm_config, refuse_names
from piecegraph.llm.job import join_job, leave_at_exit, take_place
from piecegraph.llm.model.loader import LoadFormat
from piecegraph.llm.ranks.group import Ranks, Replicas
from piecegraph.llm.report import explain_llm, stats_of_llm
from piecegraph.llm.run.arguments import SAMPLING_NAMES, OnError, SamplingArguments, check_flags, sampling_rows
from piecegraph.llm.run.detokenizer import Detokenizer
from piecegraph.llm.run.fair_lock import FairLock
from piecegraph.llm.run.generation import text_behind
from piecegraph.llm.run.prompts import (
    conversation_tokens,
    conversations_of,
    one_for_each,
)
from piecegraph.llm.run.request import Request
from piecegraph.llm.run.results import Chunk, Completion, StepResult
from piecegraph.llm.run.sampling_params import SamplingParams
from piecegraph.llm.run.scheduler import Scheduler
from piecegraph.llm.run.step import StepPlan
from piecegraph.llm.run.stop import IncrementalText
from piecegraph.llm.running import Prompt, RunningModel
from piecegraph.llm.startup import Started, start
from piecegraph.provenance.live import LiveKernels

if TYPE_CHECKING:
    from piecegraph.provenance.trace import Trace

Conversation = str | Sequence[Mapping[str, Any]]


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
        data_parallel_size: so many models, of so many processes each, share out the prompts of every call.
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
        data_parallel_size: int = 1,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
        **unknown: Never,
    ) -> None:
        clock = StageClock()
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
            data_parallel_size=data_parallel_size,
            seed=seed,
            options=options,
        )
        self.path = check_path(path)
        self.events = EventLog("ignore")
        self._job = join_job(self.path, self.config)
        if not self._job.is_first:
            self.config = replace(self.config, options=replace(self.config.options, progress=False))
        with interception.off(), self._job.together("loading a model"):
            started = unintercepted(start)(self.path, self.config, self.events, self.ranks, clock)
        started = replace(started, decisions=(*started.decisions, *self._job.decisions))
        self.running = RunningModel(
            self.path,
            self.config,
            started,
            is_shared=self.ranks is not None,
            request_numbers=self._job.request_numbers,
        )
        self._place = take_place(self._job, self.running)
        if self._job.watch is not None:
            leave_at_exit(self)

    @property
    def ranks(self) -> Ranks | None:
        """The processes that run the model together; None if it is this one."""
        return self._job.ranks

    @property
    def replicas(self) -> Replicas | None:
        """The models that share out calls with this one; None if it is alone."""
        return self._job.replicas

    @property
    def follows(self) -> bool:
        """Whether another rank schedules and answers, and this one does its part."""
        return self._place.follows

    def follow(self) -> None:
        """Do what the first rank's model does, until it is closed: for ranks that make no calls of their own."""
        if self.follows and self.running.is_open:
            self._place.follow()
            self._close()

    @property
    def started(self) -> Started:
        """The running parts. Raises after ``close()``."""
        return self.running.started

    @property
    def lock(self) -> FairLock:
        """Held by whoever uses the engine."""
        return self.running.lock

    def close(self) -> None:
        """Give back weights, cache and graphs. Requests that run in other threads end with ``"abort"``."""
        if self.running.is_open:
            if self.follows:
                self.follow()
            else:
                self._close()

    def _close(self) -> None:
        with self.lock:
            self.started.engine.close()
            self._place.close()
            self.running.give_up()
            self._job.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Ranks that go on miss the one that failed, and are not told to close.
        if kind is None or self._job.watch is None:
            self.close()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises if it has none."""
        return self.running.tokenizer

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
        place = self._place
        return place.stream(each, rows, raises) if stream else place.answer(each, rows, raises)

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
        return conversation_tokens(self.tokenizer, conversation, tools, template_values)

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
            params = request.params
            detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=params.skip_special_tokens)
            return text_behind(request.tokens, params, detokenizer)

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
        with self.lock, torch_compat.serving():
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
            with self.lock, torch_compat.serving():
                engine = self.started.engine
                missing = engine.forward.missing
                if not missing or not engine.is_idle or self.follows:  # the first rank says when
                    return len(missing)
                engine.record_idle(missing[0])
                if time.perf_counter() >= end or self.lock.is_wanted:
                    return len(engine.forward.missing)
