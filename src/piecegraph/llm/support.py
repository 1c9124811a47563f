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


Support = Accepted | Rejected
