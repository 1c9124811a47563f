"""What a page can hold, as plain values. Whoever has something to show makes a :class:`Report` of it.

A part that is empty is not on the page. Texts are shown as they are, whatever characters they hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from piecegraph.base.events import Event, EventLog
from piecegraph.base.plan import Cut, Decision, Piece
from piecegraph.base.text import duration
from piecegraph.errors import NOTES
from piecegraph.report.statements import Section, Tone


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that matters."""

    value: str
    label: str
    note: str = ""
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class PlanStrip:
    """The pieces and cuts of one plan, in order."""

    title: str
    about: str
    steps: tuple[Piece | Cut, ...]

    @property
    def reasons(self) -> tuple[tuple[str, str, int], ...]:
        """Each distinct op and reason of a cut, and how many cuts have it."""
        counts = Counter((step.op, step.reason) for step in self.steps if isinstance(step, Cut))
        return tuple((op, reason, count) for (op, reason), count in counts.items())


@dataclass(frozen=True, slots=True)
class Point:
    """A measured value with its spread."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """The points of one line of a chart."""

    name: str
    points: tuple[Point, ...]
    is_floor: bool = False
    """Drawn as a limit: nothing can be below."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over one axis. Both axes begin at zero, or are logarithmic where values differ by more than that shows."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """What a whole is made of."""

    label: str
    parts: tuple[tuple[str, float], ...]
    """Name and amount."""

    @property
    def total(self) -> float:
        return sum(amount for _, amount in self.parts)


@dataclass(frozen=True, slots=True)
class DataTable:
    """Rows under a head. Columns in which all cells begin like a number are set as numbers."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class GroupCard:
    """Kernels that come from one call."""

    label: str
    title: str
    members: tuple[tuple[str, str, str], ...]
    """Name, share, role."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything on one page, in the order in which it stands there."""

    title: str
    about: str = ""
    figures: tuple[Figure, ...] = ()
    """The numbers that matter, three of them."""
    failure: tuple[Section, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader must know."""
    plans: tuple[PlanStrip, ...] = ()
    latency: tuple[Chart, ...] = ()
    tables: tuple[DataTable, ...] = ()
    startup: tuple[Bar, ...] = ()
    """Seconds."""
    memory: tuple[Bar, ...] = ()
    """Bytes."""
    kernels: Mapping[str, Any] | None = None
    """A table of kernels and every launch: see :mod:`piecegraph.provenance.show.report`."""
    groups: tuple[GroupCard, ...] = ()
    decisions: tuple[Decision, ...] = ()
    losses: tuple[tuple[Event, int], ...] | None = None
    """What was lost, and how often. None: nothing could be; empty: nothing was."""
    machine: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    """What all this was made from, in plain types: a reader may take it from the page."""

    def beside(self, other: Report) -> Report:
        """Both on one page: what this one says of itself, and the parts of both."""
        own = ("title", "about", "figures")
        parts = {part.name: (getattr(self, part.name), getattr(other, part.name)) for part in fields(self)}
        return Report(**{name: mine if name in own else _both(mine, theirs) for name, (mine, theirs) in parts.items()})


def _both(mine: Any, theirs: Any) -> Any:
    if mine is None or theirs is None:
        return theirs if mine is None else mine
    return (*mine, *theirs) if isinstance(mine, tuple) else {**theirs, **mine}


def run_figures(what: str, number: int, num_replays: int, events: EventLog, seconds: float) -> tuple[Figure, ...]:
    """The numbers that matter of something that runs.

    Args:
        what: a call, a step.
        number: of them.
        num_replays: of them, those that were replayed.
        events: what was lost.
        seconds: what it took to start.
    """
    lost = sum(times for event, times in events.distinct if event.code not in NOTES)
    share = f"{100 * num_replays / number:.1f} %" if number else "none yet"
    return (
        Figure(share, f"{what}s replayed", f"{num_replays:,} of {number:,}"),
        Figure(f"{lost:,}", "fallbacks", "each with its reason below" if lost else "", "bad" if lost else ""),
        Figure(duration(1e6 * seconds), "start-up"),
    )
