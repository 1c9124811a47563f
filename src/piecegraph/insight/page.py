"""Evidence in, a page out."""

from __future__ import annotations

from dataclasses import dataclass

from piecegraph.insight.failure import Evidence


@dataclass(frozen=True, slots=True)
class Page:
    """What is known of a failing run."""

    evidence: Evidence


def compose(evidence: Evidence) -> Page:
    """Put a page together."""
    return Page(evidence)
