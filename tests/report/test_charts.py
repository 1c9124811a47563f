"""Drawings: where things stand, and what is said of them."""

from __future__ import annotations

import re

from piecegraph.report.charts import line_chart, series_classes, size_axis, stacked_bar, value_axis
from piecegraph.report.content import Bar, Chart, Point, Series


def test_a_value_is_where_it_belongs() -> None:
    points = (Point(1, 0.0), Point(4, 5.0, 4.0, 6.0), Point(16, 10.0))
    chart = Chart("t", "tokens", "ms", (Series("a", points), Series("low", (Point(1, 2.0),), is_floor=True)))
    drawn = line_chart(chart, series_classes([chart]))
    places = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)%" cy="([\d.]+)"', drawn)]
    assert [x for x, _ in places[:3]] == [3.0, 50.0, 97.0]  # sizes double
    top, middle, bottom = sorted(y for _, y in places[:3])
    assert middle - top == bottom - middle
    assert 'class="series floor f0"' in drawn
    assert 'data-tip="a\n4 tokens: 5 ms\np10 4, p90 6"' in drawn


def test_axes() -> None:
    assert value_axis([0.0]).ticks == (0.0, 1.0)
    assert value_axis([3.0, 70.0]).ticks == (0.0, 20.0, 40.0, 60.0, 80.0)
    assert value_axis([1.0, 1000.0]).is_log
    assert size_axis([7.0]).place(7.0) == 0.0
    assert not size_axis([1.0, 2.0, 3.0]).is_log


def test_a_line_has_one_colour_in_all_charts() -> None:
    first = Chart("", "", "", (Series("eager", ()), Series("full", ())))
    second = Chart("", "", "", (Series("full", ()), Series("new", ()), Series("floor", (), is_floor=True)))
    assert series_classes([first, second]) == {"eager": "c0", "full": "c1", "new": "c2", "floor": "floor f0"}


def test_a_bar_is_as_long_as_its_share() -> None:
    drawn = stacked_bar(Bar("plan", (("a", 1.0), ("b", 3.0))), 8.0, ["c0", "c1"], ["1 s", "3 s"])
    assert re.findall(r'x="([\d.]+)%" width="([\d.]+)%"', drawn) == [("0.000", "12.500"), ("12.500", "37.500")]
    assert 'data-tip="b\n3 s, 75 % of plan"' in drawn
    assert "<rect" not in stacked_bar(Bar("nothing", ()), 0.0, [], [])
