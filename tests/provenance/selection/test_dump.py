"""Taking a trace changes nothing about what can run inside it."""

from __future__ import annotations

from pathlib import Path

import torch

import piecegraph
from piecegraph.provenance.selection.dump import dump_calls

ONES = torch.ones(3)


def test_ops_that_take_functions_run_inside_a_trace() -> None:
    with torch.no_grad(), piecegraph.trace() as taken:
        result = torch.ops.higher_order.cond(torch.tensor(True), torch.sin, torch.cos, (ONES,))
    assert torch.equal(result, ONES.sin())
    assert any("sin" in row.kernel for row in taken.table().rows)


def test_ops_that_take_functions_run_inside_a_dump(tmp_path: Path) -> None:
    with torch.no_grad():
        assert (
            dump_calls(
                tmp_path, set(), lambda: torch.ops.higher_order.cond(torch.tensor(True), torch.sin, torch.cos, (ONES,))
            )
            == []
        )
