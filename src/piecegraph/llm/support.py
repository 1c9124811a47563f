"""Whether something can do a job, and if not, why: the reason is shown to the user."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accepted:
    """It can."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """It cannot."""

    reason: str


Verdict = Accepted | Rejected


def first_rejection(*verdicts: Verdict) -> Verdict:
    """The first of several verdicts that says no.

    >>> first_rejection(Accepted(), Rejected("too wide"), Rejected("too long"))
    Rejected(reason='too wide')
    """
    return next((verdict for verdict in verdicts if isinstance(verdict, Rejected)), Accepted())
