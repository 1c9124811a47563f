"""What a check found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FindingState = Literal["ok", "warn", "broken", "not applicable"]
STATES: tuple[FindingState, ...] = ("broken", "warn", "ok", "not applicable")
"""The worst first."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One row: what was seen and, if that is not well, what follows from it and what to do."""

    name: str
    state: FindingState
    evidence: str
    """What was seen on this machine."""
    consequence: str = ""
    """What breaks, or what is lost; for a check that does not apply, what it would be about."""
    mend: str = ""
    """The command or the step that mends it."""


def ok(name: str, evidence: str) -> Finding:
    """All is well."""
    return Finding(name, "ok", evidence)


def warn(name: str, evidence: str, consequence: str, mend: str) -> Finding:
    """It works, but slower, or not everywhere, or it is not known whether."""
    return Finding(name, "warn", evidence, consequence, mend)


def broken(name: str, evidence: str, consequence: str, mend: str) -> Finding:
    """Something will fail."""
    return Finding(name, "broken", evidence, consequence, mend)


def not_applicable(name: str, evidence: str, consequence: str = "") -> Finding:
    """Nothing to check here."""
    return Finding(name, "not applicable", evidence, consequence)


def joined(name: str, findings: Sequence[Finding]) -> Finding:
    """Several findings under one name: the worst state, and what each of those in it says."""
    state = min((finding.state for finding in findings), key=STATES.index)
    worst = [finding for finding in findings if finding.state == state]
    return Finding(
        name,
        state,
        "; ".join(dict.fromkeys(finding.evidence for finding in worst)),
        "; ".join(dict.fromkeys(filter(None, (finding.consequence for finding in worst)))),
        "; ".join(dict.fromkeys(filter(None, (finding.mend for finding in worst)))),
    )


def counts(findings: tuple[Finding, ...]) -> dict[FindingState, int]:
    """How many findings are in each state, the worst first."""
    counted = Counter(finding.state for finding in findings)
    return {state: counted[state] for state in STATES}
