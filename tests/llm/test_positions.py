"""Layers that count the tokens of a row count those of their own sequence."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from piecegraph.errors import ModelError
from piecegraph.graph.example import read_example
from piecegraph.graph.signature import Binder
from piecegraph.graph.sources import FromCall
from piecegraph.graph.tracer import Traced, trace
from piecegraph.llm.model.positions import count_by_sequence, rows_of_positions

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
    assert re.search(r"test_positions\.py:\d+ counts the tokens of a row", decision.reason)
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
    with pytest.raises(ModelError, match=r"PG662 Model cannot be run at test_positions\.py:\d+: .*one sequence"):
        count_by_sequence(traced(knows_no_positions), 1, "Model")


def expands(num_rows: int) -> Function:
    def function(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows = positions[None][None, ...].expand(num_rows, 1, -1)
        return (tokens * rows[-3:, ..., None].float()).sum(0)

    return function


def rotates_three_times(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return (positions[None, None].float().expand(3, 1, -1) * tokens).sum(0)


@pytest.mark.parametrize(
    ("function", "num_rows"),
    [(expands(3), 3), (expands(4), 4), (expands(2), 1), (counts_itself, 1), (rotates_three_times, 1)],
)
def test_rows_of_positions_are_read_from_the_graph(function: Function, num_rows: int) -> None:
    assert rows_of_positions(traced(function), 1) == num_rows


def test_a_model_without_positions_has_one_row() -> None:
    assert rows_of_positions(traced(knows_no_positions), 1) == 1
