"""Which calls may not be in a graph because the host has a part in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from piecegraph.tape.reads import why_between

X = torch.ones(3)


@pytest.mark.parametrize(
    ("function", "args", "reason"),
    [
        (torch.tensor, ([1.0],), "copies from Python's memory"),
        (torch.as_tensor, (X,), None),
        (torch.Tensor.new_tensor, (X, [1.0]), "copies from Python's memory"),
        (torch.Tensor.new_tensor, (X, X), None),
    ],
)
def test_tensors_that_are_made_of_numbers(function: Callable[..., Any], args: Any, reason: str | None) -> None:
    assert why_between(function, args, {}, torch.device("cuda"), numbers=False) == reason
