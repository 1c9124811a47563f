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


_HANG = ("waited", "behind", "mismatch", "never joined", "silent", "complete")
_DECIDERS: dict[str, dict[str, tuple[str, ...]]] = {
    "ROOT CAUSE": {
        "root": ("",),
        "place": ("raised at", "reached from", "user code", "ends at"),
        "stack": ("shown as", "then"),
        "roles": ("only echoes", "went on after", "noticed as", "noticed at"),
        "certain": (
            *(
                "mind",
                "error line",
                "error before",
                "line before",
                "driver said",
                "last line",
                "last printed",
                "told by",
                "kernel said",
                *_HANG,
            ),
            "asked to end",
        ),
    },
    "WHO": {
        "certain": ("", "failed", "seen", "also seen", "launcher", "ended", "certain", *_HANG),
        "roles": ("also failed", "echo", "survived"),
        "likely": ("likely",),
        "unknown": ("cannot tell",),
    },
    "PHASE": {"certain": ("", "done", "begun"), "likely": ("passed",), "phase": ("FAILED",), "stack": ("inside",)},
    "STACK": {"stack": ("",)},
    "ADVICE": {"known": ("known issue", "also matches"), "certain": ("elsewhere", "rule", "source")},
    "ARTEFACTS": {"certain": ("",)},
}
"""By section, the labels that a certainty, or a field of :class:`Certainties`, decides on. The others are likely."""


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
            yield Statement(section.title, row.label, row.text, _certainty(section.title, label, sure))
    for note in page.notes:
        yield Statement("NOTES", "note", note, "certain")
    for run in page.other_runs:
        yield Statement("NOTES", "other run", run, "likely")


def _certainty(section: str, label: str, sure: Certainties) -> Sureness:
    decider = next((name for name, labels in _DECIDERS[section].items() if label in labels), "likely")
    found: Sureness = getattr(sure, decider) if hasattr(sure, decider) else decider  # type: ignore[assignment]
    return found
