"""What ``explain()`` prints, word for word. ``UPDATE_GOLDEN=1 make test`` writes the files anew; read the diff."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecegraph
from tests.cases.modules import MLP, MixesRows, Stack, TwoSizes, attention, eager_attention, unsafe

FOLDER = Path(__file__).parents[1] / "golden"


class Mixed(nn.Module):
    """Several kinds of cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        y = unsafe(self.mlp(x))
        y = y + y[y > 0].sum() * y.argmax().item()
        return self.mlp(torch.linalg.inv(y @ y.T + torch.eye(y.shape[0])) @ y)


class Attends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q = (x * 2).view(-1, 2, 6)
        return eager_attention(q, q, q)["out"] + 1


def stack() -> Any:
    model = Stack(attention, 12)
    fast = piecegraph.compile(model, splitting_ops=[attention], capture_sizes=[8, 4], **SIMULATED)
    for size in (8, 3, 20):
        fast(torch.randn(size, 12))
    fast(torch.randn(8, 12, dtype=torch.float64).float())
    return fast


def mixed() -> Any:
    fast = piecegraph.compile(Mixed(), dynamic_dims={"x": 0}, capture_sizes=[6], **SIMULATED)
    fast(torch.randn(6, 12))
    return fast


def refused() -> Any:
    fast = piecegraph.compile(MixesRows(), capture_sizes=[4], **SIMULATED)
    fast(torch.ones(4, 12))
    fast(torch.ones(3, 12))
    return fast


def two_sizes() -> Any:
    fast = piecegraph.compile(TwoSizes(), dynamic_dims={"x": {0: "rows"}, "y": {0: "columns"}}, **SIMULATED)
    fast(torch.ones(3, 12), torch.ones(5, 12))
    return fast


def breakable() -> Any:
    fast = piecegraph.compile(Attends(), frontend="breakable", capture_sizes=[4], **SIMULATED)
    fast(torch.ones(4, 12))
    return fast


SIMULATED: dict[str, Any] = {"backend": "eager", "on_fallback": "ignore", "options": {"graph_device": "simulated"}}


@pytest.mark.parametrize("make", [stack, mixed, refused, two_sizes, breakable], ids=lambda make: make.__name__)
def test_explain(make: Any) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        text = _settle(make().explain())
    path = FOLDER / f"{make.__name__}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def _settle(text: str) -> str:
    """Leave out what differs from run to run: seconds, keys, line numbers, digits of rounding."""
    text = re.sub(r"\d+\.\d\d s", "0.00 s", text)
    text = re.sub(r"  \d\.\d{3}  ", "  0.000  ", text)
    text = re.sub(r"  [0-9a-f]{8}(  |$)", r"  ########\1", text, flags=re.MULTILINE)
    text = re.sub(r"(\.py):\d+", r"\1:0", text)
    return re.sub(r"\d\.\de[+-]\d\d", "0.0e+00", text) + "\n"
