"""What a user calls: :class:`LLM`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from piecegraph.config import CudagraphMode
from piecegraph.errors import ConfigError, ModelError, PiecegraphError, RequestError
from piecegraph.events import EventLog
from piecegraph.llm.chat import chat_tokens
from piecegraph.llm.config import make_llm_config
from piecegraph.llm.engine import Engine, Generation
from piecegraph.llm.loader import LoadFormat
from piecegraph.llm.report import explain_llm, stats_of_llm
from piecegraph.llm.request import SamplingParams
from piecegraph.llm.results import Chunk, Completion, RequestMetrics, StepResult
from piecegraph.llm.startup import Started, start
from piecegraph.llm.step import StepPlan

Prompt = str | Sequence[int]


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
        max_model_len: tokens of a request at most, prompt and answer; by default what the model was made for.
        max_num_seqs: requests that run together at most (256 on a GPU, else 16).
        max_batch_tokens: tokens of a step at most (4096 on a GPU, else 512); longer prompts are split.
        memory_fraction: of the GPU's memory, weights and cache together (0.9); of the free host memory on a CPU (0.25).
        prefix_cache: whether beginnings that prompts have in common are computed once.
        capture_sizes: sizes of steps to record; ``"auto"`` is a ladder.
        cudagraph_mode: ``"full"`` and ``"piecewise"`` for all steps; ``"auto"`` decides for each kind; ``"none"``.
        seed: what sampling without a seed of its own starts from.
        options: rarely needed settings, see :class:`piecegraph.llm.config.LLMOptions`.

    Example:
        llm = piecegraph.LLM("path/to/model")
        print(llm.generate(["The capital of France is"], max_new_tokens=8)[0].text)
    """

    def __init__(
        self,
        path: str,
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
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
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
            seed=seed,
            options=options,
        )
        self.path = str(path)
        self.events = EventLog("ignore")
        self.started: Started = start(self.path, self.config, self.events)
        self._lock = threading.RLock()
        self._num_requests = 0

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises if it has none."""
        if self.started.loaded.tokenizer is None:
            raise ModelError(
                "PG666",
                f"the model at {self.path} has no tokenizer",
                why=self.started.loaded.tokenizer_error,
                hint="give prompts as lists of token ids",
            )
        return self.started.loaded.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | Sequence[int] = 16,
        temperature: float | Sequence[float] = 0.0,
        top_p: float | Sequence[float] = 1.0,
        top_k: int | Sequence[int] = 0,
        seed: int | Sequence[int | None] | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        return_hidden_states: bool = False,
        stream: bool = False,
    ) -> Any:
        """Go on from prompts.

        Args:
            prompts: texts, lists of token ids, or both mixed; one of them or a list.
            max_new_tokens: of each answer. This and the next four may be a list with one value for each prompt.
            temperature: 0 always takes the most likely token.
            top_p: sample from the most likely tokens that together reach this probability.
            top_k: sample from so many of the most likely tokens; 0 for all.
            seed: fixes what is sampled, whatever else runs beside it.
            stop: texts at which an answer ends.
            ignore_eos: go on behind the token that ends a text.
            logprobs: tell the log-probability of each new token, and of so many most likely ones.
            prompt_logprobs: the same for the tokens of the prompt.
            return_hidden_states: give the last layer's hidden states of all tokens.
            stream: return an iterator of :class:`Chunk` instead.

        Returns:
            A list of :class:`Completion` in the order of the prompts. A request that cannot be served has
            ``finish_reason="error"`` and its ``error``; the others are answered.
        """
        each = _one_for_each(prompts)
        values = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "seed": seed,
        }
        shared = {
            "stop": stop,
            "ignore_eos": ignore_eos,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "return_hidden_states": return_hidden_states,
        }
        tables = [_spread(name, value, len(each)) for name, value in values.items()]
        rows = [dict(zip(values, row, strict=True)) for row in zip(*tables, strict=True)]
        if len(each) == 1:
            SamplingParams(**rows[0], **shared)  # a wrong number for the only prompt is a wrong call
        generations = [self._queue(prompt, row | shared) for prompt, row in zip(each, rows, strict=True)]
        stepping = self._stream(generations)
        if stream:
            return stepping
        for _ in stepping:
            pass
        return [g if isinstance(g, Completion) else g.completion() for g in generations]

    def chat_prompt(self, conversation: str | Sequence[Mapping[str, str]]) -> list[int]:
        """A prompt as the model was taught to answer them, by the chat template of its tokenizer.

        Args:
            conversation: what the user says; or messages with a ``role`` and a ``content`` each.

        Example:
            llm.generate(llm.chat_prompt("What is the capital of France?"))
        """
        said = [{"role": "user", "content": conversation}] if isinstance(conversation, str) else list(conversation)
        return chat_tokens(self.tokenizer, said)

    def explain(self) -> str:
        """How the model is run, as text: stages, pieces, cuts, sizes, every decision and every fallback."""
        return explain_llm(self.started, self.events)

    def stats(self) -> dict[str, Any]:
        """The same as numbers."""
        return stats_of_llm(self.started, self.events)

    def forward(self, plan: StepPlan) -> StepResult:
        """Run one step of a scheduler of your own.

        Args:
            plan: which tokens of which requests run; their blocks must be of this model's cache
                (``llm.started.cache_groups`` tells how many there are). It must not be mixed with ``generate``.

        Returns:
            Tokens, logits and hidden states, valid until the next step.
        """
        with self._lock, torch.inference_mode():
            return self._engine.run(plan)

    @property
    def _engine(self) -> Engine:
        return self.started.engine

    def _queue(self, prompt: Prompt, params: dict[str, Any]) -> Generation | Completion:
        """Queue one prompt, or say why it cannot be served."""
        text = prompt if isinstance(prompt, str) else None
        tokenizer = self.started.loaded.tokenizer
        try:
            tokens = self.tokenizer(text)["input_ids"] if text is not None else prompt
            checked = SamplingParams(**params)
            with self._lock:
                self._num_requests += 1
                seed = self.config.seed * 1_000_003 + self._num_requests
                decode = (lambda ids: tokenizer.decode(ids, skip_special_tokens=True)) if tokenizer else None
                return self._engine.add(tokens, checked, seed=seed % 2**64, prompt=text, decode=decode)
        except (RequestError, ConfigError) as error:
            return _refused(text, prompt, error)

    def _stream(self, generations: Sequence[Generation | Completion]) -> Iterator[Chunk]:
        chunks: list[Chunk] = []
        for index, generation in enumerate(generations):
            if isinstance(generation, Completion):
                chunks.append(Chunk(index, "", [], generation))
            else:
                generation.on_new = _collector(index, chunks)
        waiting = [generation for generation in generations if isinstance(generation, Generation)]
        try:
            while True:
                while chunks:
                    yield chunks.pop(0)
                with self._lock, torch.inference_mode():
                    if all(generation.request.is_done for generation in waiting):
                        break
                    self._engine.step()
            while chunks:
                yield chunks.pop(0)
        finally:
            with self._lock:
                for generation in waiting:
                    if not generation.request.is_done:
                        self._engine.abort(generation)


def _collector(index: int, chunks: list[Chunk]) -> Callable[[Generation, str, list[int]], None]:
    def on_new(generation: Generation, text: str, tokens: list[int]) -> None:
        is_last = generation.request.is_done and not tokens
        if text or tokens or is_last:
            chunks.append(Chunk(index, text, tokens, generation.completion() if is_last else None))

    return on_new


def _one_for_each(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, also where one was given."""
    if isinstance(prompts, str):
        return [prompts]
    found = list(prompts)
    if found and all(isinstance(item, int) for item in found):
        return [found]  # type: ignore[list-item]
    return found  # type: ignore[return-value]


def _spread(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ConfigError("PG108", f"{name} has {len(value)} values", why=f"there are {count} prompts")
    return list(value)


def _refused(text: str | None, prompt: Prompt, error: PiecegraphError) -> Completion:
    tokens = [] if isinstance(prompt, str) else [token for token in prompt if isinstance(token, int)]
    metrics = RequestMetrics(
        num_prompt_tokens=len(tokens),
        num_new_tokens=0,
        num_cached_tokens=0,
        num_preemptions=0,
        time_to_first_token_s=None,
        seconds_per_token=None,
        total_s=0.0,
        graph_coverage=0.0,
    )
    return Completion(
        prompt=text,
        prompt_token_ids=tokens,
        text=None,
        token_ids=[],
        finish_reason="error",
        error=error,
        logprobs=None,
        prompt_logprobs=None,
        hidden_states=None,
        metrics=metrics,
    )
