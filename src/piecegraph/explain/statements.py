"""Every statement of a page with how sure it is: proven by the source, or only likely."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from piecegraph.explain.page import Page
from piecegraph.explain.wording import headline, sections

Sureness = Literal["certain", "likely", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Certainties:
    """How sure the facts of a page are, by what they are about."""

    root: Sureness
    """That the run failed of this exception, or that nothing failed."""
    place: Sureness
    """Where it was raised."""
    roles: Sureness
    """Which failures are echoes of it, and which the run survived."""
    phase: Sureness
    """What the run was doing when it failed."""
    stack: Sureness
    """The frames, and in which order they called each other."""
    known: Sureness
    """That a known issue is the reason. That its rule holds is certain."""


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement as the page prints it."""

    section: str
    label: str
    text: str
    certainty: Sureness
    """``unknown``: a statement of what the source cannot tell."""


_LABELS: dict[str, dict[str, str]] = {
    "ROOT CAUSE": {
        "": "root",
        "raised at": "place",
        "reached from": "place",
        "ends at": "place",
        "only echoes": "roles",
    }
    | dict.fromkeys(("shown as", "then"), "stack")
    | dict.fromkeys(("mind", "error line", "last line", "last printed"), "certain"),
    "WHO": dict.fromkeys(("", "failed", "seen", "also seen", "launcher", "ended", "certain"), "certain")
    | dict.fromkeys(("also failed", "echo", "survived"), "roles")
    | {"likely": "likely", "cannot tell": "unknown"},
    "PHASE": {"": "certain", "done": "certain", "begun": "certain", "passed": "likely", "FAILED": "phase"}
    | {"inside": "stack"},
    "STACK": {"": "stack"},
    "ADVICE": {
        "known issue": "known",
        "also matches": "known",
        "elsewhere": "certain",
        "rule": "certain",
        "source": "certain",
    },
    "ARTEFACTS": {"": "certain"},
}
"""What decides on a statement: a certainty, or a field of :class:`Certainties`. What is not here is called likely."""


def certainties_of(page: Page) -> Certainties:
    """How sure the facts of a page are."""
    groups = page.who.groups
    kind = groups[0].certainty if groups else "printed"
    stack: Sureness = "likely" if kind == "reconstructed" else "certain"
    is_one_of_several = sum(group.role in ("root", "other") for group in groups) > 1 and kind != "recorded"
    root: Sureness = "likely" if page.who.has_only_echoes or is_one_of_several or stack == "likely" else "certain"
    is_late = page.root is not None and page.root.is_asynchronous
    return Certainties(
        root=root,
        place="likely" if is_late else stack,
        roles="certain" if len(groups) < 2 else "likely",
        phase="certain" if kind == "recorded" else "likely",
        stack=stack,
        known="likely",
    )


def statements_of(page: Page) -> tuple[Statement, ...]:
    """Everything that the page says, in the order in which it is printed."""
    return tuple(_statements(page, certainties_of(page)))


def _statements(page: Page, sure: Certainties) -> Iterator[Statement]:
    yield Statement("HEADLINE", "", headline(page), sure.root)
    for section in sections(page):
        label = ""
        for row in section.rows:
            label = row.label if row.label or not row.is_detail else label
            decider = _LABELS[section.title].get(label, "likely")
            certainty: Sureness = getattr(sure, decider) if hasattr(sure, decider) else decider  # type: ignore[assignment]
            yield Statement(section.title, row.label, row.text, certainty)
    for note in page.notes:
        yield Statement("NOTES", "note", note, "certain")
    for run in page.other_runs:
        yield Statement("NOTES", "other run", run, "likely")
