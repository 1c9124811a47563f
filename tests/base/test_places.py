"""Errors of ``piecegraph.compile`` say where they happened: phase, piece, size, op, line."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import piecegraph
from piecegraph.errors import PLACE, FallbackError, LowerError, PiecegraphError, RecordError, TraceError
from piecegraph.tape.simulated import SimulatedGraphs
from tests.cases.modules import Stack, attention

SIMULATED = {"graph_device": "simulated"}


def place_of(error: PiecegraphError) -> dict[str, Any]:
    """What is known, with the file of the line only: line numbers change with every edit."""
    found = {name: getattr(error, name) for name in PLACE if getattr(error, name) not in ("", None)}
    return {name: value.partition(":")[0] if name == "line" else value for name, value in found.items()}


def capture(model: Any, expected: type[PiecegraphError], **arguments: Any) -> PiecegraphError:
    fast = piecegraph.compile(model, **{"dynamic_dims": {"x": 0}, "capture_sizes": [8, 4], **arguments})
    with torch.no_grad(), pytest.raises(expected) as raised:
        fast.capture(torch.ones(8, 12))
    return raised.value


def test_a_trace_that_fails() -> None:
    def branches(x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x

    assert place_of(capture(branches, TraceError, frontend="trace")) == {"phase": "trace", "line": "test_places.py"}


def test_a_full_graph_that_must_be_cut() -> None:
    def reads(x: Tensor) -> Tensor:
        return x * x.sum().item()

    error = capture(reads, LowerError, cudagraph_mode="full")
    assert place_of(error) == {"phase": "compile", "op": "aten::item", "line": "test_places.py"}


def test_a_piece_that_cannot_be_compiled() -> None:
    def broken(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        raise KeyError("no such kernel")

    arguments = {"backend": broken, "on_fallback": "raise", "splitting_ops": [attention]}
    error = capture(Stack(attention, 2), FallbackError, **arguments)
    assert place_of(error) == {"phase": "compile", "piece": 0, "line": "modules.py"}


class ForbidsMultiplication(SimulatedGraphs):
    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "mul" in getattr(getattr(function, "__self__", None), "code", "") and 4 in (args[0], len(args[-1])):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return super().call(function, args, kwargs)


def test_a_piece_that_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piecegraph.engine.mode.SimulatedGraphs", ForbidsMultiplication)
    arguments = {"backend": "eager", "options": SIMULATED, "on_fallback": "raise", "splitting_ops": ["aten::relu"]}
    error = capture(lambda x: x.add(1).relu().mul(2), FallbackError, **arguments)
    assert place_of(error) == {"phase": "capture", "piece": 2, "size": "4", "line": "test_places.py"}


@torch.library.custom_op("pgtest::fails_second", mutates_args=())
def fails_second(x: Tensor) -> Tensor:
    fails_second.num_calls += 1  # type: ignore[attr-defined]
    if fails_second.num_calls > 4:  # type: ignore[attr-defined] # watched, compared, tuned, warmed up, and now recorded
        raise RuntimeError("no workspace")
    return x.clone()


fails_second.register_fake(torch.empty_like)
fails_second.num_calls = 0  # type: ignore[attr-defined]


def test_a_cut_op_that_fails_while_a_size_is_recorded() -> None:
    arguments = {"backend": "eager", "options": SIMULATED, "splitting_ops": ["pgtest::fails_second"]}
    error = capture(lambda x: fails_second(x + 1) * 2, RecordError, **arguments)
    expected = {"phase": "capture", "piece": 1, "size": "8", "op": "pgtest::fails_second", "line": "test_places.py"}
    assert place_of(error) == expected
    assert place_of(pickle.loads(pickle.dumps(error))) == expected
