"""Padding that is tried on a GPU, which does not survive an index that is out of range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import piecegraph

pytestmark = pytest.mark.gpu

SETTINGS: dict[str, Any] = {"dynamic_dims": {"x": {0: "rows"}}, "options": {"cache": False}}


@pytest.mark.parametrize("frontend", ["trace", "breakable"])
@pytest.mark.parametrize(
    "rows",
    [
        lambda table, x: table[(x * 8).long()],
        lambda table, x: table[torch.nan_to_num(x * 8).int()] + x[:, None],
        lambda table, x: torch.nn.functional.embedding((x * 8).floor().long() // 2, table),
    ],
)
def test_floats_that_become_indices(rows: Callable[[Tensor, Tensor], Tensor], frontend: str) -> None:
    table = torch.randn(8, 3, device="cuda")

    def function(x: Tensor) -> Tensor:
        return rows(table, x)

    fast = piecegraph.compile(function, frontend=frontend, **SETTINGS)
    with torch.no_grad():
        for size in (13, 9, 24, 20, 9):
            x = torch.rand(size, device="cuda")
            torch.testing.assert_close(fast(x), function(x))
    torch.cuda.synchronize()
    assert "padding of rows: allowed" in fast.explain()


def test_numbers_made_of_how_many_rows_there_are() -> None:
    def function(x: Tensor) -> Tensor:
        return x * max(1.0, x.shape[0] / 16)

    fast = piecegraph.compile(function, **SETTINGS)
    with torch.no_grad():
        for size in (13, 9, 24, 20, 17, 3, 20):
            x = torch.rand(size, 4, device="cuda")
            torch.testing.assert_close(fast(x), function(x))
    assert "padding of rows: refused" in fast.explain()
