"""Which front end takes a function if nobody says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import piecegraph
from piecegraph.errors import RecordError, TraceError
from piecegraph.tape.simulated import SimulatedGraphs

SIMULATED = {"backend": "eager", "on_fallback": "raise", "options": {"graph_device": "simulated"}}
X = torch.arange(4.0)


def branch(x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x - 1


def test_what_can_be_traced_is() -> None:
    fast = piecegraph.compile(lambda x: x + 1, **SIMULATED)
    with torch.no_grad():
        fast(X)
    assert fast.plan.frontend == "trace"


@pytest.mark.parametrize("options", [{}, {"graph_device": "simulated"}], ids=str)
def test_what_cannot_runs_as_it_is(options: dict[str, str]) -> None:
    fast = piecegraph.compile(branch, backend="eager", on_fallback="raise", options=options)
    with torch.no_grad():
        for x in (X, -X, X, -X):
            torch.testing.assert_close(fast(x), branch(x))
    assert fast.plan.frontend == "breakable"
    assert fast.stats()["coverage"] == 1.0
    text = fast.explain()
    assert "breakable front end" in text
    assert "front end: breakable (PG201 branch cannot be traced at test_frontend.py:" in text
    assert "its pieces would be compiled" in text


@piecegraph.eager_op
def marked(x: Tensor) -> Tensor:
    return x * 2


def test_a_function_with_an_eager_op_needs_no_argument() -> None:
    fast = piecegraph.compile(lambda x: marked(x + 1) + 1, **SIMULATED)
    with torch.no_grad():
        assert fast(X).tolist() == [3, 5, 7, 9]
    assert "front end: breakable (PG107" in fast.explain()


def test_a_trace_can_be_insisted_on() -> None:
    with torch.no_grad(), pytest.raises(TraceError, match="PG201.*frontend=.breakable"):
        piecegraph.compile(branch, frontend="trace", **SIMULATED)(X)


calls: list[int] = []


def counts(x: Tensor) -> Tensor:
    calls.append(1)
    return x + 1


def counts_and_branches(x: Tensor) -> Tensor:
    calls.append(1)
    return branch(x)


def test_python_state_is_refused_by_both() -> None:
    with torch.no_grad():
        with pytest.raises(TraceError, match="PG202.*calls"):
            piecegraph.compile(counts, **SIMULATED)(X)
        with pytest.raises(TraceError, match="PG201.*branching.*nor can it run as it is: PG202.*calls"):
            piecegraph.compile(counts_and_branches, **SIMULATED)(X)
    assert calls == []


def test_a_recording_that_fails_says_both_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("not permitted when stream is capturing")

    monkeypatch.setattr(SimulatedGraphs, "record", fail)
    with torch.no_grad(), pytest.raises(RecordError, match="PG403.*not permitted.*; nor can it be traced: PG201"):
        piecegraph.compile(branch, **SIMULATED)(X)


def test_dims_that_were_asked_for_are_no_matter_of_tracing() -> None:
    weight = torch.ones(4)
    with torch.no_grad(), pytest.raises(TraceError, match="PG205"):
        piecegraph.compile(lambda x: x * weight, dynamic_dims={"x": 0}, **SIMULATED)(X)


@pytest.mark.parametrize(
    ("module", "dims", "shapes"),
    [
        (torch.nn.MaxPool1d(2), {"input": 2}, [(2, 3, 6), (2, 3, 9), (2, 3, 4)]),
        (torch.nn.GRU(4, 5, batch_first=True), {"input": (0, 1)}, [(2, 6, 4), (3, 6, 4), (2, 7, 4)]),
    ],
)
def test_a_size_that_only_the_trace_of_an_op_fixes(module: torch.nn.Module, dims: Any, shapes: Any) -> None:
    fast = piecegraph.compile(module, dynamic_dims=dims, **SIMULATED)
    with torch.no_grad():
        for shape in (*shapes, *shapes):
            x = torch.randn(shape)
            torch.testing.assert_close(fast(x), module(x))
    assert fast.stats()["coverage"] == 1
    assert fast.plan.frontend == "breakable"
