"""Stages of a pipeline: parts of a model that hand each other several tensors in one value."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import piecegraph


class IntermediateTensors(NamedTuple):
    hidden: torch.Tensor
    residuals: tuple[torch.Tensor, ...]


class Stage(torch.nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self._kind = kind

    def forward(self, tensors: Any) -> Any:
        is_dict = self._kind is dict
        hidden = tensors["hidden"] if is_dict else tensors.hidden
        residuals = tensors["residuals"] if is_dict else tensors.residuals
        made = torch.relu(self.linear(hidden)) + residuals[0]
        return {"hidden": made, "residuals": (hidden,)} if is_dict else IntermediateTensors(made, (hidden,))


@pytest.mark.parametrize("kind", [dict, IntermediateTensors])
@torch.no_grad()
def test_stages_hand_on_what_they_make(kind: type) -> None:
    torch.manual_seed(0)
    stages = [Stage(kind), Stage(kind)]
    compiled = [
        piecegraph.compile(
            stage,
            backend="eager",
            capture_sizes=[4, 8],
            dynamic_dims={"tensors.hidden": 0, "tensors.residuals[0]": 0},
            options={"graph_device": "simulated"},
        )
        for stage in stages
    ]
    for num_rows in (8, 3, 5, 8):
        given = kind(hidden=torch.randn(num_rows, 8), residuals=(torch.randn(num_rows, 8),))
        expected, found = given, given
        for stage, fast in zip(stages, compiled, strict=True):
            expected, found = stage(expected), fast(found)
        assert type(found) is type(expected)
        (wanted, (other,)), (hidden, (residual,)) = (
            (each["hidden"], each["residuals"]) if kind is dict else each for each in (expected, found)
        )
        torch.testing.assert_close(hidden, wanted)
        torch.testing.assert_close(residual, other)
    assert [fast.stats()["coverage"] for fast in compiled] == [1.0, 1.0]
