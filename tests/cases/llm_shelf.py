"""Language models for tests: each family is written, loaded and traced once, and then served with any settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import piecegraph
from piecegraph.llm import startup
from tests.cases.checkpoints import save_checkpoint


class Shelf:
    """Keeps checkpoints, what transformers makes of them, and their traces: tracing is nine tenths of loading."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._references: dict[str, Any] = {}
        self._expected: dict[tuple[str, tuple[int, ...], int], list[int]] = {}
        self._loaded: dict[Any, Any] = {}
        self._traced: dict[Any, Any] = {}

    def path(self, name: str) -> Path:
        self.reference(name)
        return self._folder / name

    def reference(self, name: str) -> Any:
        """The model as transformers runs it."""
        if name not in self._references:
            self._references[name] = save_checkpoint(name, self._folder / name)
        return self._references[name]

    def load(self, name: str, **arguments: Any) -> piecegraph.LLM:
        options = {"progress": False, **arguments.pop("options", {})}
        return piecegraph.LLM(self.path(name), **{"backend": "eager", "device": "cpu", **arguments}, options=options)

    @torch.inference_mode()
    def logits(self, name: str, tokens: Sequence[int]) -> torch.Tensor:
        return self.reference(name)(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].float()

    def greedy(self, name: str, prompt: Sequence[int], num_new: int) -> list[int]:
        """What transformers goes on with, one plain forward for each token, whatever ends a text."""
        key = (name, tuple(prompt), num_new)
        if key not in self._expected:
            tokens = list(prompt)
            for _ in range(num_new):
                tokens.append(int(self.logits(name, tokens)[-1].argmax()))
            self._expected[key] = tokens[len(prompt) :]
        return self._expected[key]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, loading a family again with the same options takes what was traced the first time."""
        load, trace_model = startup.load, startup.trace_model

        def load_once(path: str, **arguments: Any) -> Any:
            key = (path, *arguments.values())
            if key not in self._loaded:
                self._loaded[key] = load(path, **arguments)
            return self._loaded[key]

        def trace_once(
            model: Any, cache: Any, *, options: Any, events: Any, on_traced: Any = None, **arguments: Any
        ) -> Any:
            arguments.pop("clock", None)  # on_traced, too, is for what is traced: it starts compilers, on a GPU
            key = (id(model), cache.decisions, options.fuse_linears, options.provenance, *arguments.values())
            if key not in self._traced:
                self._traced[key] = trace_model(model, cache, options=options, events=events, **arguments)
            return self._traced[key]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(startup, "load", load_once)
            patch.setattr(startup, "trace_model", trace_once)
            yield


@contextmanager
def shelf(folder: Path) -> Iterator[Shelf]:
    """A shelf of one's own, for those who damage what is on it."""
    found = Shelf(folder)
    with found.in_use():
        yield found
