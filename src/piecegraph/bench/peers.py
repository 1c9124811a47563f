"""Modes that are not ours: a language model as transformers runs it, eagerly or through ``torch.compile``.

Each mode is given the best that transformers documents for it: eager a cache that grows, ``torch.compile`` one of fixed
addresses and sizes, and no token is read by the host before the last.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from piecegraph.base import torch_compat
from piecegraph.base.text import count_of
from piecegraph.bench.config import COMPILE_MODES
from piecegraph.bench.result import Fallback, Mode, Phase
from piecegraph.bench.runner import Counts
from piecegraph.bench.timing import wait


class TransformersRunner:
    """One mode of a model of transformers.

    Args:
        mode: ``eager``, ``compile`` or ``reduce-overhead``.
        model: as transformers loads it.
        load_s: what loading it took.
        output_len: tokens that a sample of decoding generates.
    """

    def __init__(self, mode: Mode, model: Any, load_s: float, output_len: int) -> None:
        self.mode = mode
        self.stages_s = {"load": load_s}
        self.weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        self._model = model
        self._output_len = output_len
        self._forward = model.forward
        self._cache: Any = None
        self._cache_key: tuple[int, ...] = ()
        self.ran_as = "transformers, eager"
        self._settings = contextlib.ExitStack()
        if mode in COMPILE_MODES:
            self._settings.enter_context(torch_compat.no_silent_eager())
            self._forward = torch.compile(model.forward, mode=COMPILE_MODES[mode])
            self.stages_s["compile"] = 0.0
            self.ran_as = _described(mode)

    @torch.inference_mode()
    def greedy(self, prompts: torch.Tensor) -> torch.Tensor:
        """The most likely tokens behind prompts, [prompts, new tokens]."""
        cache = self._new_cache(prompts)
        tokens = [self._step(prompts, cache).argmax(-1, keepdim=True)]
        while len(tokens) < self._output_len:
            tokens.append(self._step(tokens[-1], cache).argmax(-1, keepdim=True))
        return torch.cat(tokens, 1)

    @torch.inference_mode()
    def logits(self, prompts: torch.Tensor, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        """Logits behind prompts and behind each of given tokens but the last: valid until the next are asked for."""
        if self.mode in COMPILE_MODES:
            self._compile(prompts, tokens)
        cache = self._new_cache(prompts)
        yield self._step(prompts, cache)
        for index in range(tokens.shape[1] - 1):
            yield self._step(tokens[:, index : index + 1].clone(), cache)

    @torch.inference_mode()
    def sample_s(self, phase: Phase, inputs: torch.Tensor) -> float:
        cache = self._new_cache(inputs)
        wait()
        start = time.perf_counter()
        token = self._step(inputs, cache).argmax(-1, keepdim=True)
        if phase == "prefill":
            token.tolist()
            return time.perf_counter() - start
        wait()
        start, num_steps = time.perf_counter(), self._output_len - 1
        for _ in range(num_steps):
            token = self._step(token, cache).argmax(-1, keepdim=True)
        token.tolist()
        return (time.perf_counter() - start) / num_steps

    def counts(self, phase: Phase) -> Counts:
        return Counts()

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        return ()

    def close(self) -> None:
        self._cache = self._model = self._forward = None
        self._settings.close()
        if self.mode in COMPILE_MODES:
            torch.compiler.reset()  # what was compiled holds weights

    def _step(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        out = self._forward(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def _compile(self, prompts: torch.Tensor, tokens: torch.Tensor) -> None:
        """Twice, as a graph is captured at the second call."""
        start, skipped = time.perf_counter(), torch_compat.num_skipped_cudagraphs()
        for _ in range(2):
            cache = self._new_cache(prompts)
            self._step(prompts, cache)
            self._step(tokens[:, :1].clone(), cache)
            self._step(tokens[:, :1].clone(), cache)
        wait()
        self.stages_s["compile"] += time.perf_counter() - start
        skipped = torch_compat.num_skipped_cudagraphs() - skipped
        if skipped:
            self.ran_as = f"{_described(self.mode)}; {count_of(skipped, 'graph')} left out by torch"

    def _new_cache(self, prompts: torch.Tensor) -> Any:
        """An empty cache; the same memory for the same size where code was compiled for its addresses."""
        config = self._model.config.get_text_config()
        if self.mode == "eager":
            return transformers.DynamicCache(config=config)
        key = (*prompts.shape, self._output_len)
        if key != self._cache_key:
            self._cache_key = key
            self._cache = transformers.StaticCache(config=config, max_cache_len=prompts.shape[1] + self._output_len)
            # It takes its memory at the first call, which is to be outside of what is compiled.
            self._model(input_ids=prompts[:, :1], past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache.reset()
        return self._cache


def _described(mode: Mode) -> str:
    return f"torch.compile, mode={COMPILE_MODES[mode]}, static cache"
