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


ROUNDED: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, Tensor]] = {
    "least": (lambda x: x * (x // 8).amin(), torch.arange(1, 6), torch.arange(16, 21)),
    "largest": (lambda x: x * (x // 8).amax(), torch.arange(1, 6), -torch.arange(16, 21)),
    "bytes": (lambda x: x * (x // 8).amin(), torch.arange(1, 6, dtype=torch.uint8), torch.full((5,), 16).byte()),
    "cast": (lambda x: x - (x / 10).long().amin(0), torch.rand(5, 3), torch.rand(5, 3) + 30),
    "floor": (lambda x: x - torch.nan_to_num(x / 10).floor().amin(0), torch.rand(5, 3), torch.rand(5, 3) + 30),
    "half": (lambda x: x - torch.nan_to_num(x / 10).round().amax(0), torch.ones(5, 3).half(), -torch.ones(5, 3).half()),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_rounding_that_hides_padding_from_the_first_call(name: str) -> None:
    function, first, second = ROUNDED[name]
    fast = compiled(function, "trace")
    with torch.no_grad():
        fast(first)
        assert torch.equal(fast(second), function(second))


@pytest.mark.parametrize("number", [lambda n: max(n, 16), lambda n: max(1.0, n / 16), lambda n: min(n // 2, 3)])
def test_numbers_made_of_how_many_rows_there_are(number: Callable[[int], float]) -> None:
    def function(x: Tensor) -> Tensor:
        return x * number(x.shape[0])

    fast = compiled(function, "trace", dynamic_dims={"x": {0: "rows"}})
    with torch.no_grad():
        for n in (13, 9, 24, 20, 17, 3, 1, 30, 13):
            for x in (torch.zeros(n, 3), torch.rand(n, 3)):
                assert torch.equal(fast(x), function(x)), n
    assert "padding of rows: refused (numbers are made of how many rows there are" in fast.explain()


def test_sizes_that_only_shape_something_are_padded_without_another_trial() -> None:
    def function(x: Tensor) -> Tensor:
        return x.view(x.shape[0], 3, 2).expand(x.shape[0], 3, 2).reshape(x.shape[0], 6) * 2

    fast = compiled(function, "trace", capture_sizes=[8])
    with torch.no_grad():
        for n in (8, 5, 4):
            assert torch.equal(fast(torch.ones(n, 6)), torch.full((n, 6), 2.0))
    assert "padding of s0: allowed" in fast.explain()
    assert not fast.stats()["events"]


def test_floats_that_become_indices_stay_those_of_the_call() -> None:
    table = torch.randn(8, 3)

    def function(x: Tensor) -> Tensor:
        return table[(x * 8).long()]

    fast = compiled(function, "trace")
    with torch.no_grad():
        fast(torch.rand(5))
        assert torch.equal(fast(x := torch.rand(6)), function(x))
    assert "padding of s0: allowed" in fast.explain(), "another number would have raised IndexError"


TABLE = torch.randn(64, 3)
INDEXING: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], set[int]]] = {
    "ids": (lambda x, ids: TABLE[ids] + x[:, None], {1}),
    "embedding": (lambda x, ids: torch.nn.functional.embedding(ids + 1, TABLE) * x[:, None], {1}),
    "cast": (lambda x, ids: TABLE[(x * 8).long()] * ids[:, None], {0}),
    "both": (lambda x, ids: TABLE.index_select(0, ids + x.int()), {0, 1}),
    "viewed": (lambda x, ids: TABLE.gather(0, ids.view(-1, 1).expand(-1, 3)) + x[:, None], {1}),
    "written": (lambda x, ids: TABLE[torch.zeros_like(ids).add_(ids)] + x[:, None], {1}),
    "arithmetic": (lambda x, ids: x * (ids // 2 + 1), set()),
    "masked": (lambda x, ids: torch.where(ids > 3, x, -x) * TABLE[(ids > 3).long(), 0], set()),
    "sorted": (lambda x, ids: TABLE[x[:, None].sort(1)[1][:, 0]] * ids[:, None], set()),
    "ranked": (lambda x, ids: TABLE[x[:, None].argmax(1)] * ids[:, None], set()),
    "clamped": (lambda x, ids: TABLE[(x * 99).long().clamp(0, 63)] * ids[:, None], set()),
    "clamped below": (lambda x, ids: TABLE[(x * 9).long().clamp(min=0)] * ids[:, None], {0}),
}


@pytest.mark.parametrize("frontend", ["trace", "breakable"])
@pytest.mark.parametrize("name", INDEXING)
def test_arguments_that_become_indices(name: str, frontend: str) -> None:
    function, expected = INDEXING[name]
    fast = compiled(function, frontend, dynamic_dims={"x": {0: "rows"}, "ids": {0: "rows"}})
    with torch.no_grad():
        for size in (6, 5):
            x, ids = torch.rand(size), torch.arange(size)
            assert torch.equal(fast(x, ids), function(x, ids))
    indices = fast._engine.plans[0].body.indices
    assert indices.shown == expected


GROUPED: dict[str, Callable[[Tensor], Any]] = {
    "pool": lambda x: torch.nn.functional.avg_pool1d(x.T[None], 2, ceil_mode=True)[0].T,
    "chunks": lambda x: x.chunk(2)[-1].mean(0),
    "steps": lambda x: x[::2].amax(0),
    "half": lambda x: x - x[x.shape[0] // 2 :].amax(0),
    "even": lambda x: x * 2 if x.shape[0] % 2 == 0 else x * 3,
    "few": lambda x: x * 2 if x.shape[0] > 10 else x * 3,
}


@pytest.mark.parametrize("frontend", ["trace", "breakable"])
@pytest.mark.parametrize("name", GROUPED)
def test_sizes_at_which_rows_fall_into_other_groups(name: str, frontend: str) -> None:
    """Each size occurs with zeros first, as it does when a program warms up."""
    function = GROUPED[name]
    fast = compiled(function, frontend)
    with torch.no_grad():
        for n in (24, 20, 13, 9, 17, 3, 1, 30, 2, 5, 16):
            for x in (torch.zeros(n, 4), torch.rand(n, 4) - 2):
                torch.testing.assert_close(fast(x), function(x), msg=f"{n} rows")
