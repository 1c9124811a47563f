"""Drawings: values in, SVG out.

A drawing is as wide as its place, and its text keeps its size: what lies along the width is in percent, which SVG takes
for lines, rectangles, circles and texts, so that nothing is drawn anew on a phone or on paper.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from piecegraph.report.content import Bar, Chart, Point, Series

NUM_COLOURS = 10
"""Classes ``c0`` to ``c9`` of the style sheet; what comes behind them begins anew."""
HEIGHT = 260
_BAR_HEIGHT = 26
_LOG_FROM = 24.0
"""An axis whose values differ by more is logarithmic."""


@dataclass(frozen=True, slots=True)
class Axis:
    """From values to a place between 0 and 1."""

    low: float
    high: float
    is_log: bool
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        if self.is_log:
            return math.log(max(value, self.low) / self.low) / (math.log(self.high / self.low) or 1.0)
        return (value - self.low) / ((self.high - self.low) or 1.0)


def value_axis(values: Sequence[float]) -> Axis:
    """For values of the height: from zero if that shows them all.

    >>> value_axis([2.0, 7.5]).ticks
    (0.0, 2.0, 4.0, 6.0, 8.0)
    >>> value_axis([0.3, 45.0]).ticks
    (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
    """
    high, low = max(values), min(values)
    if low > 0 and high / low > _LOG_FROM:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        every = [float(f"{factor}e{power}") for power in powers for factor in (1, 2, 5)]
        first = max(tick for tick in every if tick <= low)
        last = min(tick for tick in every if tick >= high)
        return Axis(first, last, True, tuple(tick for tick in every if first <= tick <= last))
    step = _round_step(high / 4 if high > 0 else 1.0)
    ticks = tuple(step * number for number in range(max(math.ceil(round(high / step, 9)), 1) + 1))
    return Axis(0.0, ticks[-1], False, ticks)


def size_axis(values: Iterable[float]) -> Axis:
    """For sizes along the width, which are marked where something was measured.

    >>> size_axis([1.0, 8.0, 64.0]).place(8.0)
    0.5
    """
    ticks = tuple(sorted(set(values)))
    is_log = ticks[0] > 0 and ticks[-1] / ticks[0] > 4
    return Axis(ticks[0], ticks[-1], is_log, ticks)


def _round_step(about: float) -> float:
    power = 10.0 ** math.floor(math.log10(about))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= about * 0.999)


def series_classes(charts: Iterable[Chart]) -> dict[str, str]:
    """The class that colours each line, by its name: the same in all charts."""
    names = dict.fromkeys(series.name for chart in charts for series in chart.series if not series.is_floor)
    floors = dict.fromkeys(series.name for chart in charts for series in chart.series if series.is_floor)
    colours = {name: f"c{number % NUM_COLOURS}" for number, name in enumerate(names)}
    return colours | {name: f"floor f{number}" for number, name in enumerate(floors)}


def line_chart(chart: Chart, classes: Mapping[str, str]) -> Markup:
    """Lines with the spread of each point; a limit is dashed. Every point can be pointed at and be reached by keys.

    Args:
        chart: what to draw.
        classes: see :func:`series_classes`.
    """
    points = [point for series in chart.series for point in series.points]
    across = size_axis(point.x for point in points)
    up = value_axis([value for point in points for value in (point.y, point.low, point.high) if value is not None])
    marks = [_grid(across, up)]
    marks += [_series(series, classes[series.name], across, up, chart) for series in chart.series]
    name = f"{chart.title}: {chart.y_label} over {chart.x_label}, {', '.join(series.name for series in chart.series)}"
    labels = Markup().join(
        Markup('<text x="44" y="{}" class="axis end">{}</text>').format(_pixels(up.place(tick)) + 4, f"{tick:g}")
        for tick in up.ticks
    )
    return Markup(
        '<div class="chart"><svg class="scale" aria-hidden="true" height="{height}">{labels}</svg>'
        '<svg class="plot" role="group" aria-label="{name}" height="{height}">{marks}</svg></div>'
    ).format(height=HEIGHT + 30, labels=labels, name=name, marks=Markup().join(marks))


def _grid(across: Axis, up: Axis) -> Markup:
    rows = [
        Markup('<line x1="0" x2="100%" y1="{0}" y2="{0}" class="grid"/>').format(_pixels(up.place(tick)))
        for tick in up.ticks
    ]
    shown = _spaced(across)
    columns = [
        Markup('<text x="{}%" y="{}" class="axis middle">{}</text>').format(
            _percent(across, tick), HEIGHT + 22, f"{tick:g}"
        )
        for tick in shown
    ]
    return Markup().join([*rows, *columns])


def _spaced(axis: Axis) -> list[float]:
    """The marks of an axis whose labels do not stand in each other's way; the last is always there."""
    shown: list[float] = []
    for tick in reversed(axis.ticks):
        if not shown or axis.place(shown[-1]) - axis.place(tick) >= 0.09:
            shown.append(tick)
    return shown


def _series(series: Series, colour: str, across: Axis, up: Axis, chart: Chart) -> Markup:
    places = [(_percent(across, point.x), _pixels(up.place(point.y))) for point in series.points]
    marks = [
        Markup('<line x1="{}%" y1="{}" x2="{}%" y2="{}" class="line"/>').format(*start, *end)
        for start, end in itertools.pairwise(places)
    ]
    for point, (x, y) in zip(series.points, places, strict=True):
        if point.low is not None and point.high is not None:
            ends = (_pixels(up.place(point.low)), _pixels(up.place(point.high)))
            marks.append(Markup('<line x1="{0}%" x2="{0}%" y1="{1}" y2="{2}" class="spread"/>').format(x, *ends))
        tip = _tip(series, point, chart)
        marks.append(
            Markup('<circle cx="{}%" cy="{}" r="4" tabindex="0" role="img" aria-label="{}" data-tip="{}"/>').format(
                x, y, tip.replace("\n", ", "), tip
            )
        )
    return Markup('<g class="series {}">{}</g>').format(colour, Markup().join(marks))


def _tip(series: Series, point: Point, chart: Chart) -> str:
    lines = [series.name, f"{point.x:g} {chart.x_label}: {point.y:.4g} {chart.y_label}"]
    if point.low is not None and point.high is not None:
        lines.append(f"p10 {point.low:.4g}, p90 {point.high:.4g}")
    return "\n".join([*lines, point.note] if point.note else lines)


def stacked_bar(bar: Bar, longest: float, colours: Sequence[str], shown: Sequence[str]) -> Markup:
    """One bar, as long as its share of the longest.

    Args:
        bar: what to draw.
        longest: the total of the longest bar beside it.
        colours: for each part, the class that colours it.
        shown: for each part, its amount in words.
    """
    parts, start = [], 0.0
    for (name, amount), colour, text in zip(bar.parts, colours, shown, strict=True):
        width = 100 * amount / longest if longest else 0.0
        tip = f"{name}\n{text}, {100 * amount / (bar.total or 1):.0f} % of {bar.label or 'all'}"
        parts.append(
            Markup(
                '<rect x="{:.3f}%" width="{:.3f}%" height="{}" class="part {}" tabindex="0" role="img"'
                ' aria-label="{}" data-tip="{}"/>'
            ).format(start, width, _BAR_HEIGHT, colour, tip.replace("\n", ": "), tip)
        )
        start += width
    return Markup('<svg class="bar" role="group" aria-label="{}" height="{}">{}</svg>').format(
        bar.label, _BAR_HEIGHT, Markup().join(parts)
    )


def _percent(axis: Axis, value: float) -> str:
    """Across; a single size stands in the middle."""
    return f"{3 + 94 * axis.place(value) if axis.high > axis.low else 50.0:.3f}"


def _pixels(place: float) -> float:
    """Down from the top, with room for a point at the edge."""
    return round(8 + (HEIGHT - 8) * (1 - place), 2)
