"""A benchmark's result on a page."""

from __future__ import annotations

from piecegraph.report.bench import bench_report
from piecegraph.report.page import to_html
from tests.cases.reports import bench_document

TIMES = "\N{MULTIPLICATION SIGN}"


def test_what_matters_comes_first() -> None:
    quickest, most, lost = bench_report(bench_document()).figures
    assert (quickest.value, quickest.label) == ("2.12 ms", "a step of decoding, batch 1")
    assert quickest.note == f"piecewise, 3.82 {TIMES} as fast as eager, 1.42 {TIMES} the floor"
    assert most.note.startswith("piecewise, batch 8")
    assert (lost.value, lost.note, lost.tone) == ("12", "1 of 16 rows have no time", "bad")


def test_every_mode_and_the_floors_are_drawn_over_tokens() -> None:
    report = bench_report(bench_document())
    assert [chart.title for chart in report.latency] == [
        "Prefill, batch 1",
        "Prefill, batch 8",
        "A step of decoding behind 128 tokens",
        "A step of decoding behind 1024 tokens",
    ]
    eager, piecewise, weights, kernels = report.latency[1].series
    assert [(point.x, point.y) for point in eager.points] == [(1024, 9.0), (8192, 16.0)]
    assert [point.x for point in piecewise.points] == [1024]  # what is wrong has no time
    assert (weights.is_floor, kernels.is_floor) == (True, True)
    assert [point.x for point in report.latency[2].series[0].points] == [1, 8]


def test_what_is_wrong_is_told() -> None:
    report = bench_report(bench_document())
    assert report.notes == ("piecewise: differs: off by 0.3",)
    assert report.losses is not None
    ((event, count),) = report.losses
    assert (event.code, event.subject, count) == ("PG501", "piecewise: call", 12)
    (table,) = report.tables
    assert len(table.rows) == 16
    assert "memory" in table.head
    assert "padding" not in table.head  # nowhere known
    assert [row[-1] for row in table.rows].count("differs: off by 0.3") == 1
    html = to_html(report)
    assert "Benchmark of tiny" in html
    assert '"fingerprint":"ab12"' in html  # the document itself
