"""The page about a failing run as one to share."""

from __future__ import annotations

from piecegraph.base.text import count_of
from piecegraph.explain.as_json import to_dict
from piecegraph.explain.page import Page
from piecegraph.explain.render import about
from piecegraph.explain.wording import headline, sections
from piecegraph.report.content import Figure, Report
from piecegraph.report.page import to_html as html_of
from piecegraph.report.statements import Tone


def to_html(page: Page) -> str:
    """The page as one file without references to others."""
    return html_of(to_report(page))


def to_report(page: Page) -> Report:
    """The page as a part of one to share."""
    notes = (*page.notes, *(f"other run, {run}" for run in page.other_runs))
    return Report(
        title=headline(page),
        about=about(page),
        figures=_figures(page),
        failure=sections(page),
        notes=notes,
        data={"failure": to_dict(page)},
    )


def _figures(page: Page) -> tuple[Figure, ...]:
    """How many failed, how many ways to fail there are, and how many of them are known."""
    groups = page.who.groups
    if not groups:
        return ()
    failed = [group for group in groups if group.role in ("root", "other")]
    num_failed = sum(group.num_processes for group in failed)
    num_echoes = sum(group.count for group in groups if group.role == "echo")
    echoes = f"and {count_of(num_echoes, 'echo', 'echoes')}" if num_echoes else ""
    tracebacks = count_of(page.who.num_tracebacks, "traceback")
    known = page.known[0].title if page.known else ""
    tone: Tone = "bad" if page.outcome == "failure" else "quiet"
    return (
        Figure(f"{num_failed:,}", _plural(num_failed, "process failed", "processes failed"), tracebacks, tone),
        Figure(f"{len(failed):,}", _plural(len(failed), "distinct failure", "distinct failures"), echoes, "quiet"),
        Figure(f"{len(page.known):,}", _plural(len(page.known), "known issue", "known issues"), known, "quiet"),
    )


def _plural(number: int, one: str, many: str) -> str:
    return one if number == 1 else many
