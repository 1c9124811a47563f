"""Calls of attention that the ops cannot express are refused; windows that only a mask would tell are found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf

from piecegraph.errors import ModelError
from piecegraph.llm.model import plug
from piecegraph.llm.model.refusals import refuse_embeddings, refuse_model

create_sliding_window_causal_mask = None
"""As a modeling file imports it that makes such masks."""


class Attention(torch.nn.Module):
    def __init__(self, layer: int, **config: Any) -> None:
        super().__init__()
        self.layer_idx, self.config, self.is_causal = layer, SimpleNamespace(**config), True


def attend(module: torch.nn.Module, **given: Any) -> None:
    rows = torch.zeros(1, 2, 3, 4)
    plug.attention_forward(module, rows, rows, rows, **given)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"attention_mask": torch.zeros(3, 3)}, "Attention of layer 1 brings a mask of its own"),
        ({"position_bias": torch.zeros(3, 3)}, "Attention of layer 1 hands position_bias to its attention"),
        ({"block_indices": torch.zeros(3, 3)}, "Attention of layer 1 hands block_indices to its attention"),
        ({"is_causal": False}, "Attention of layer 1 attends to later tokens"),
    ],
)
def test_calls_that_cannot_be_expressed(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(plug.UnsupportedCallError, match=reason):
        attend(Attention(1), position_ids=torch.arange(3), **given)


def test_a_model_that_is_nothing_without_images() -> None:
    class Captions(torch.nn.Module):
        def forward(self, pixel_values: torch.Tensor, input_ids: torch.Tensor | None = None, **kwargs: Any) -> None: ...

    with pytest.raises(ModelError, match="PG662 Captions cannot be run: its forward cannot do without pixel_values"):
        refuse_model(Captions())


def test_images_that_are_seen_both_ways() -> None:
    whole = torch.nn.Module()
    whole.model = hf.Gemma3Model.__new__(hf.Gemma3Model)
    torch.nn.Module.__init__(whole.model)
    with pytest.raises(ModelError, match="PG662 Module cannot take .* at model: .* both ways in Gemma3Model"):
        refuse_embeddings(whole)


def test_a_module_that_looks_ahead_without_saying_so() -> None:
    module = Attention(1)
    module.is_causal = False
    with pytest.raises(plug.UnsupportedCallError, match="attends to later tokens"):
        attend(module)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"sliding_window": 6}, [6, 6]),
        ({"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}, [0, 6]),
        ({"sliding_window": None}, [0, 0]),
    ],
)
def test_windows_that_only_the_mask_would_tell(config: dict[str, Any], windows: list[int]) -> None:
    model = torch.nn.Sequential(Attention(0, **config), Attention(1, **config))
    plug.note_windows(model)
    assert [getattr(module, plug.WINDOW, 0) for module in model] == windows


def test_no_window_without_such_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(globals(), "create_sliding_window_causal_mask")
    module = Attention(0, sliding_window=6)
    plug.note_windows(module)
    assert not hasattr(module, plug.WINDOW)


def test_an_indexer_is_refused_by_its_path() -> None:
    model = torch.nn.ModuleDict({"layer": torch.nn.ModuleDict({"indexer": torch.nn.Linear(1, 1)})})
    with pytest.raises(
        ModelError, match=r"PG662 ModuleDict cannot be run at layer\.indexer: Linear chooses the tokens"
    ):
        refuse_model(model)
