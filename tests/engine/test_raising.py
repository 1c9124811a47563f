"""Functions that raise, or would, while a call is planned: what they do before happens once, as if they ran alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecegraph
from piecegraph.engine.runner import PlanRunner
from piecegraph.tape.tape import WeightMovedError

SETTINGS: dict[str, Any] = {"backend": "eager", "options": {"graph_device": "simulated", "cache": False}}


def counted(x: Tensor, log: Tensor) -> Tensor:
    log.add_(1)
    if x.shape[0] > 4:
        raise ValueError("too long")
    return x + log


@pytest.mark.parametrize("first", [3, 5])
def test_what_is_written_before_an_error_stays_written(first: int) -> None:
    fast, log = piecegraph.compile(counted, **SETTINGS), torch.zeros(1)
    with torch.no_grad():
        for number, size in enumerate((first, 5, 3, 5, 3), 1):
            if size > 4:
                with pytest.raises(ValueError, match="too long"):
                    fast(torch.zeros(size), log)
            else:
                assert fast(torch.zeros(size), log).tolist() == [number] * size
            assert log.item() == number


def test_what_only_planning_raises_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def arrange(self: PlanRunner, call: Any) -> Any:
        raise RuntimeError("a defect of ours\nin two lines")

    monkeypatch.setattr(PlanRunner, "arrange", arrange)
    fast, log = piecegraph.compile(counted, **SETTINGS), torch.zeros(1)
    with torch.no_grad(), pytest.warns(UserWarning, match="PG524 call: RuntimeError .*: a defect of ours"):
        assert fast(torch.zeros(2), log).tolist() == [1, 1]
    assert log.item() == 1
    assert fast.stats()["events"] == {"PG524": 1}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_weight_that_moves_as_often_as_it_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def arrange(self: PlanRunner, call: Any) -> Any:
        raise WeightMovedError("PG520", "weight 'log' has moved")

    monkeypatch.setattr(PlanRunner, "arrange", arrange)
    fast, log = piecegraph.compile(counted, **SETTINGS), torch.zeros(1)
    with torch.no_grad():
        assert fast(torch.zeros(2), log).tolist() == [1, 1]
    assert fast.stats()["events"] == {"PG515": 2, "PG524": 1}
    assert fast.stats()["calls"] == 1


@pytest.mark.parametrize("frontend", ["auto", "breakable"])
def test_a_buffer_made_in_inference_mode_may_be_written_to(frontend: str) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(x)
            return self.count * 2

    with torch.inference_mode():
        fast = piecegraph.compile(Counter(), frontend=frontend, on_fallback="ignore", **SETTINGS)
        for number in (1, 2):
            assert fast(torch.ones(2)).tolist() == [2.0 * number] * 2
    assert fast.stats()["events"] == {"PG523": 2}


@pytest.mark.parametrize("frontend", ["auto", "breakable"])
def test_a_result_that_is_a_view_at_another_size_only(frontend: str) -> None:
    def function(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] < 4 else x[:4]

    fast = piecegraph.compile(function, frontend=frontend, on_fallback="ignore", **SETTINGS)
    with torch.no_grad():
        for size in (3, 6, 3):
            found, expected = torch.ones(2, size, 2)
            fast(found).zero_()
            function(expected).zero_()
            assert torch.equal(found, expected)


def test_a_global_with_the_name_of_an_attribute_is_another_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shift

    fast = piecegraph.compile(Shift(), frontend="breakable", **SETTINGS)
    with torch.no_grad():
        for number in range(3):
            monkeypatch.setitem(globals(), "shift", number)
            fast(torch.ones(4, 3))
    assert len(fast.stats()["plans"]) == 1


@pytest.mark.parametrize("frontend", ["auto", "breakable"])
def test_a_result_with_an_attribute_of_its_own_is_made_by_the_function(frontend: Any) -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        y.scale = 2.0  # type: ignore[attr-defined]
        return y

    options = {"graph_device": "simulated", "cache": False}
    fast = piecegraph.compile(function, frontend=frontend, backend="eager", on_fallback="ignore", options=options)
    with torch.no_grad():
        assert [fast(torch.ones(2)).scale for _ in range(3)] == [2.0] * 3
    assert "PG524" in fast.explain()
