"""The head of a language model: from rows of hidden states to rows of logits."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from piecegraph.engine.eager_interception import CallLog, ShownCalls
from piecegraph.errors import ModelError
from piecegraph.graph import interception
from piecegraph.graph.interception import Interception
from piecegraph.llm.kernels.linear import early_linears, fixed_linears


class Head:
    """The model's own forward without its decoder, so that every family's scaling and capping of logits stays."""

    def __init__(self, model: Any) -> None:
        self._model = copy.copy(model)
        self._model.__dict__["_modules"] = dict(model._modules)
        self._model._modules[decoder_name(model)] = _NoDecoder(decoder_of(model))
        self._calls: CallLog | None = None
        self._num_rows: int | None = None

    def fixed(self, num_rows: int) -> Head:
        """The same, run on so many rows whatever it is given: see Note [Steps that are all alike]."""
        other = copy.copy(self)
        other._num_rows = num_rows
        return other

    @property
    def root(self) -> torch.nn.Module:
        """Where the paths of its modules start."""
        root: torch.nn.Module = self._model
        return root

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._num_rows is None:
            return self._logits(hidden)
        with fixed_linears() if hidden.is_cuda else contextlib.nullcontext():
            parts = hidden.split(self._num_rows)
            padding = self._num_rows * len(parts) - len(hidden)
            found = [self._logits(part) for part in parts[:-1]]
            found.append(self._logits(F.pad(parts[-1], (0, 0, 0, padding)) if padding else parts[-1]))
        return torch.cat(found)[: len(hidden)] if len(found) > 1 else found[0][: len(hidden)]

    def of_one_row(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same for steps of one sequence, by our kernels (on an H200, Qwen3-0.6B: 72.5 us instead of 81.1)."""
        assert self._num_rows is None, "rows of steps that are all alike are not computed otherwise"
        with early_linears():
            return self._logits(hidden)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model(inputs_embeds=hidden[None], use_cache=False, return_dict=True).logits
        return logits[0]

    def num_places(self, each: Interception) -> int:
        """How many calls an interception is for, as seen in a run on one row."""
        if self._calls is None:
            self._calls = CallLog()
            row = torch.zeros(1, self._model.get_input_embeddings().weight.shape[1], dtype=self._model.dtype)
            with torch.inference_mode(), interception.off(), ShownCalls(self._calls.run):
                self(row.to(self._model.device))
        return self._calls.num_places(each, self.root)


class _Hidden(dict):  # type: ignore[type-arg]
    """Whatever a head may read of its decoder's result; only the hidden states are there."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else None


class _NoDecoder(torch.nn.Module):
    """Stands where the decoder was: gives back the hidden states it is given. Its attributes are the decoder's."""

    def __init__(self, decoder: torch.nn.Module) -> None:
        super().__init__()
        self.__dict__["_decoder"] = decoder

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["_decoder"], name)
        # Some heads call a decoder within the decoder.
        return _NoDecoder(found) if isinstance(found, PreTrainedModel) else found

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> _Hidden:
        return _Hidden(inputs_embeds)


def decoder_of(model: Any) -> torch.nn.Module:
    """The part of a causal language model below its head."""
    decoder: torch.nn.Module = getattr(model, decoder_name(model))
    return decoder


def decoder_name(model: Any) -> str:
    """Under which name a model has its decoder. Most say it themselves, some of them wrongly."""
    if model.base_model_prefix in model._modules:
        return str(model.base_model_prefix)
    for name, module in model._modules.items():
        if isinstance(module, PreTrainedModel):
            return str(name)
    raise ModelError(
        "PG662",
        f"{type(model).__name__} has no decoder apart from its head",
        why=f"it has no submodule {model.base_model_prefix!r}, nor another that is a model",
    )
