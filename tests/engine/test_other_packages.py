"""Models of packages that know nothing of this one: graph networks of PyG, and x-transformers."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecegraph


def load(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what other packages warn of when they are imported is no matter of ours
        return importlib.import_module(name)


def network(name: str) -> nn.Module:
    model: nn.Module = getattr(load("torch_geometric.nn.models"), name)(8, 16, 2, 4)
    return model


def language_model(**options: Any) -> nn.Module:
    package = load("x_transformers")
    layers = package.Decoder(dim=16, depth=1, heads=2, **options)
    model: nn.Module = package.TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=layers)
    return model


def graph(num_nodes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(num_nodes, 8), torch.randint(0, num_nodes, (2, 3 * num_nodes))


def tokens(batch: int) -> tuple[Tensor]:
    return (torch.randint(0, 50, (batch, 12)),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "GraphSAGE": (lambda: network("GraphSAGE"), graph),
    "GAT": (lambda: network("GAT"), graph),
    "decoder": (lambda: language_model(use_rmsnorm=True, ff_glu=True), tokens),
    "alibi": (lambda: language_model(alibi_pos_bias=True), tokens),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_as_it_comes(name: str) -> None:
    make, inputs = MODELS[name]
    model = make().eval()
    options = {"graph_device": "simulated"}
    fast = piecegraph.compile(model, backend="eager", on_fallback="ignore", options=options)
    calls = [inputs(size) for size in (10, 10, 12, 10)]
    with torch.no_grad():
        for call in calls:
            torch.testing.assert_close(fast(*call), model(*call), rtol=1e-4, atol=1e-5)
    assert fast.stats()["replayed"] == len(calls)
