"""Two results: a verdict for each row that respects the spread."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piecegraph.bench.compare import compare_results, comparison_text
from piecegraph.bench.result import BenchResult
from tests.cases.bench import made_result, made_row


def with_rows(*rows: object) -> BenchResult:
    return replace(made_result(), rows=rows)  # type: ignore[arg-type]


def test_a_result_does_not_differ_from_itself() -> None:
    found = compare_results(made_result(), made_result())
    assert found.counts == {"no change": 4, "no number": 2}
    assert found.notes == ()


@pytest.mark.parametrize(
    ("after_ms", "spread", "verdict"),
    [(0.8, 0.05, "faster"), (1.2, 0.05, "slower"), (1.08, 0.05, "no change"), (0.8, 0.3, "no change")],
)
def test_a_change_must_be_larger_than_the_spread(after_ms: float, spread: float, verdict: str) -> None:
    before, after = made_row("full", "decode", 1.0), made_row("full", "decode", after_ms, spread=spread)
    (row,) = compare_results(with_rows(before), with_rows(after)).rows
    assert (row.change, row.ratio) == (verdict, pytest.approx(after_ms))


def test_rows_of_one_run_alone_and_other_machines_are_told() -> None:
    before, after = made_row("full", "decode", 1.0), made_row("full", "prefill", 1.0)
    other = replace(with_rows(after), machine=replace(made_result().machine, fingerprint="another"), model="another")
    found = compare_results(with_rows(before), other)
    assert [each.change for each in found.rows] == ["only before", "only after"]
    text = comparison_text(found)
    assert "1 only before, 1 only after" in text
    assert "different machines, or with different versions: 0123456789ab and another" in text
    assert "of different models" in text
