"""Padding that a trial with the numbers of one call would not show to change anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import piecegraph

FLOATS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda x: (x > 0).all(),
    "any": lambda x: (x < 0.5).any(),
    "mean": lambda x: x.mean() > 0.5,
    "nan_to_num": lambda x: torch.nan_to_num(x, nan=-1e9).amax(),
    "isnan": lambda x: torch.where(x.isnan(), float("-inf"), x).amax(),
    "rows": lambda x: torch.where((x > 0).all(), x * 2, x * 3),
}
THRESHOLDS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda x: torch.where((x > 100).all(), x * 2, x),
    "amin": lambda x: x - (x.abs().amin() > 100).float(),
    "sum": lambda x: x * (x > 100).sum(0).eq(x.shape[0]),
    "mean": lambda x: x * (x > 100).float().mean(0),
}


def compiled(function: Callable[[Tensor], Any], frontend: str, **arguments: Any) -> Any:
    options = {"graph_device": "simulated", "cache": False}
    arguments = {"dynamic_dims": {"x": 0}, **arguments}
    return piecegraph.compile(
        function, frontend=frontend, backend="eager", on_fallback="ignore", options=options, **arguments
    )


@pytest.mark.parametrize("frontend", ["trace", "breakable"])
@pytest.mark.parametrize("name", FLOATS)
def test_signs_and_thresholds(name: str, frontend: str) -> None:
    function = FLOATS[name]
    fast = compiled(function, frontend)
    torch.manual_seed(0)
    with torch.no_grad():
        fast(torch.randn(5, 3))
        for x in (torch.rand(5, 3) * 0.4 + 0.6, -torch.rand(5, 3) - 0.6, torch.randn(5, 3)):
            assert torch.equal(fast(x), function(x))


@pytest.mark.parametrize("frontend", ["trace", "breakable"])
@pytest.mark.parametrize("name", THRESHOLDS)
def test_thresholds_that_no_trial_crosses(name: str, frontend: str) -> None:
    function = THRESHOLDS[name]
    fast = compiled(function, frontend)
    with torch.no_grad():
        for x in (torch.ones(5, 3), torch.full((5, 3), 101.0), torch.full((6, 3), 101.0), torch.full((3, 3), -101.0)):
            assert torch.equal(fast(x), function(x))


def test_truth_values_of_another_size_refuse_nothing() -> None:
    def function(x: Tensor, keep: Tensor) -> Tensor:
        return x * torch.where(keep.any(), 2.0, 3.0)

    fast = compiled(function, "trace", dynamic_dims={"x": {0: "rows"}, "keep": {0: "others"}})
    with torch.no_grad():
        fast(torch.ones(5, 3), torch.tensor([True, False, False]))
        assert "padding of rows: allowed" in fast.explain()
        assert "padding of others: refused" in fast.explain()


@pytest.mark.parametrize("frontend", ["trace", "breakable"])
def test_integers(frontend: str) -> None:
    largest, small = compiled(lambda x: x.amax(0), frontend), compiled(lambda x: (x < 5).any(), frontend)
    with torch.no_grad():
        largest(torch.ones(5, dtype=torch.long))
        assert largest(torch.full((5,), -100)) == -100
        small(torch.tensor([1, 2, 3, 1, 2]))
        assert not small(torch.arange(10, 15))


def test_what_has_rows_is_padded_still() -> None:
    """Truth values of rows, and integers that are made of none."""
    fast = compiled(lambda x: (x > 0, torch.arange(3)), "trace")
    with torch.no_grad():
        for size in (5, 6, 7):
            assert fast(torch.ones(size, 3))[0].shape == (size, 3)
    assert list(fast.stats()["plans"][0]["sizes"]) == ["8"]


def test_a_result_given_back_to_be_written_to() -> None:
    def function(hidden: Tensor) -> Tensor:
        hidden.mul_(2)
        return hidden + 1

    options = {"graph_device": "simulated", "cache": False, "clone_outputs": False}
    fast = piecegraph.compile(function, backend="eager", options=options)
    found, expected = torch.ones(4, 2), torch.ones(4, 2)
    with torch.no_grad():
        for _ in range(4):
            found, expected = fast(found), function(expected)
            assert torch.equal(found, expected)


@pytest.mark.parametrize("frontend", ["auto", "breakable"])
def test_another_structure_at_another_size_runs_eagerly(frontend: str) -> None:
    def function(x: Tensor) -> list[Tensor]:
        return [row * 2 for row in x]

    fast = compiled(function, frontend, dynamic_dims="auto")
    with torch.no_grad():
        for size in (4, 1, 5, 3, 8):
            x = torch.randn(size, 2)
            torch.testing.assert_close(fast(x), function(x))
