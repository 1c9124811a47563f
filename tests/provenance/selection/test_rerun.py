"""Running a recorded size again, to time it or to look into it, leaves no trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import piecegraph
from piecegraph.tape.tape import Tape

OPTIONS = {"provenance": True, "graph_device": "simulated"}


def count_up(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


def compiled() -> piecegraph.api.CompiledFunction:
    fast: piecegraph.api.CompiledFunction = piecegraph.compile(
        count_up, backend="eager", dynamic_dims={"x": 0}, capture_sizes=[4], padding="always", options=OPTIONS
    )
    return fast


def inputs_of_add(fast: piecegraph.api.CompiledFunction, folder: Path) -> torch.Tensor:
    (path,) = fast.kernels.select(op="aten::add_").dump(folder)
    value: torch.Tensor = torch.load(path)["inputs"][0][0]
    return value


def test_an_input_that_is_written_to_is_the_same_each_time(tmp_path: Path) -> None:
    fast = compiled()
    fast(torch.zeros(4))
    first = inputs_of_add(fast, tmp_path / "first")
    fast.kernels.select().time(rounds=2)
    assert torch.equal(inputs_of_add(fast, tmp_path / "second"), first)


def test_the_checks_of_a_first_replay_are_not_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    num_checked = 0
    checked = Tape.check_and_replay

    def count(tape: Tape) -> object:
        nonlocal num_checked
        num_checked += 1
        return checked(tape)

    monkeypatch.setattr(Tape, "check_and_replay", count)
    fast = compiled().capture(torch.zeros(4))
    fast.kernels.select().time(rounds=2)
    assert num_checked == 1


def pick(x: torch.Tensor) -> torch.Tensor:
    both = torch.cat([x, x], dim=-1)
    values, _ = torch.max(both[:, 1:3], dim=-1)
    return values.to(torch.float64, memory_format=torch.preserve_format)


def test_whatever_an_op_takes_or_returns_can_be_loaded(tmp_path: Path) -> None:
    fast = piecegraph.compile(pick, backend="eager", dynamic_dims={"x": 0}, options=OPTIONS)
    fast(torch.ones(4, 2))
    saved = [torch.load(path) for path in fast.kernels.select().dump(tmp_path)]
    joined = next(one for one in saved if one["op"] == "aten::cat")
    assert [tuple(part.shape) for part in joined["inputs"][0][0]] == [(4, 2), (4, 2)]
    largest = next(one for one in saved if one["op"] == "aten::max")
    assert torch.equal(largest["outputs"][0], torch.ones(4))
