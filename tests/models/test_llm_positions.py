"""Layers that count the tokens of a row count those of their own sequence."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from piecegraph.errors import ModelError
from piecegraph.example import read_example
from piecegraph.llm.positions import count_by_sequence
from piecegraph.signature import Binder
from piecegraph.sources import FromCall
from piecegraph.tracer import Traced, trace

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def traced(function: Function) -> Traced:
    tensors = (torch.zeros(16, dtype=torch.long), torch.arange(16))
    names = {"tokens": 0, "positions": 0}
    example = read_example(
        function, Binder(function), tensors, {}, dynamic_dims=names, static_inputs=(), training=False
    )
    return trace(function, example, {})


def counts_itself(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return tokens + 10 * torch.arange(len(tokens)).float() + 100 * positions


def counts_something_else(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return tokens[:, None] + torch.arange(4) + torch.arange(1, len(tokens) + 1)[:, None] + positions[:, None]


def knows_no_positions(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return tokens + torch.arange(len(tokens))


def test_a_count_becomes_the_positions() -> None:
    found = traced(counts_itself)
    (decision,) = count_by_sequence(found, 1, "Model")
    assert re.search(r"test_llm_positions\.py:\d+ counts the tokens of a row", decision.reason)
    tensors = (torch.zeros(5, dtype=torch.long), torch.tensor([0, 1, 2, 0, 1]))
    given = [tensors[source.index] if isinstance(source, FromCall) else 5 for source in found.inputs.values()]
    result = torch.fx.GraphModule(found.owner, found.graph)(*given)[0]
    assert result.tolist() == [0, 110, 220, 0, 110]


def test_other_counts_are_left() -> None:
    found = traced(counts_something_else)
    before = str(found.graph)
    assert count_by_sequence(found, 1, "Model") == ()
    assert str(found.graph) == before


def test_a_count_without_positions_is_refused() -> None:
    with pytest.raises(ModelError, match=r"PG662 Model cannot be run at test_llm_positions\.py:\d+: .*one sequence"):
        count_by_sequence(traced(knows_no_positions), 1, "Model")
