"""Torch's own control flow, ``torch.cond`` and ``torch.while_loop``: what runs depends on data, so it runs between
graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import piecegraph
from piecegraph.errors import LowerError


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def chooses_by_sign(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x * 2,)) * 3  # type: ignore[no-any-return]


def chooses_by_threshold(x: Tensor) -> Tensor:
    return torch.cond(x.amin() > 100, lambda y: y + 1, lambda y: y - 1, (x * 2,)) * 3  # type: ignore[no-any-return]


def loops(x: Tensor) -> Tensor:
    _, doubled = torch.while_loop(
        lambda i, y: (y.abs().sum() < 100) & (i < 9),
        lambda i, y: (i + 1, y * 2),
        (torch.zeros((), dtype=torch.long), x),
    )
    return doubled - 1  # type: ignore[no-any-return]


CASES = [chooses_by_sign, chooses_by_threshold, loops]


@pytest.mark.parametrize("function", CASES)
@pytest.mark.parametrize("frontend", ["trace", "breakable"])
@pytest.mark.parametrize("device", ["simulated", "auto"])
def test_it_runs_between_graphs(function: Callable[[Tensor], Tensor], frontend: Any, device: str) -> None:
    options = {"graph_device": device, "cache": False}
    fast = piecegraph.compile(function, frontend=frontend, backend="eager", on_fallback="ignore", options=options)
    for x in (torch.ones(4, 3), -torch.ones(4, 3), torch.ones(6, 3), torch.full((3, 3), 101.0), torch.ones(4, 3)):
        assert torch.equal(fast(x), function(x))  # the function itself, too: torch goes on as before
    assert fast.stats()["coverage"] == 1


def test_padded_rows_take_no_part_in_the_choice() -> None:
    options = {"graph_device": "simulated", "cache": False}
    fast = piecegraph.compile(
        chooses_by_threshold, frontend="trace", backend="eager", on_fallback="ignore", options=options
    )
    fast(torch.ones(5, 3))
    assert torch.equal(fast(torch.full((5, 3), 101.0)), chooses_by_threshold(torch.full((5, 3), 101.0)))
    assert "padded rows would be part of what decides" in fast.explain()


def test_no_full_graph_holds_a_choice() -> None:
    options = {"graph_device": "simulated", "cache": False}
    fast = piecegraph.compile(chooses_by_sign, backend="eager", cudagraph_mode="full", options=options)
    with pytest.raises(LowerError, match="PG301 .*reads on the host what is to run"):
        fast(torch.ones(4, 3))
