"""What was lost, counted: fallbacks, refusals and other events.

An event goes in; counts, and the first reason of each distinct event, come out. The invariant: nothing that makes a
call slower or different from what was asked happens without passing through here.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

from piecegraph.base.user_code import user_stack_level
from piecegraph.errors import NOTES, FallbackError, PiecegraphWarning, describe

OnFallback = Literal["warn", "raise", "ignore"]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, with a stable code (see :data:`piecegraph.errors.CODES`)."""

    code: str
    subject: str
    """What it happened to: a piece, a size, an input."""
    reason: str
    hint: str = ""

    def __str__(self) -> str:
        return describe(self.code, self.subject, why=self.reason, hint=self.hint)


class EventLog:
    """Counts events and applies the ``on_fallback`` policy.

    Events with the same code and subject are one event: its first reason is kept, so a server that sees thousands of
    sizes keeps (and warns of) one line for each kind of loss.

    >>> log = EventLog("ignore")
    >>> log.emit(Event("PG501", "call", "an input requires gradients"))
    >>> log.counts
    {'PG501': 1}
    """

    def __init__(self, policy: OnFallback) -> None:
        self.policy = policy
        self._first: dict[tuple[str, str], Event] = {}
        self._times: dict[tuple[str, str], int] = {}

    def emit(self, event: Event) -> None:
        """Count an event. If it is a fallback: warn once for each distinct one, or raise, as the policy says."""
        key = (event.code, event.subject)
        is_new = key not in self._first
        self._first.setdefault(key, event)
        self._times[key] = self._times.get(key, 0) + 1
        if event.code in NOTES:
            return
        if self.policy == "raise":
            raise FallbackError(event.code, event.subject, why=event.reason, hint=event.hint)
        if self.policy == "warn" and is_new:
            warnings.warn(str(event), PiecegraphWarning, stacklevel=user_stack_level())

    @property
    def counts(self) -> dict[str, int]:
        """How often each code occurred."""
        totals: dict[str, int] = {}
        for (code, _), times in self._pairs():
            totals[code] = totals.get(code, 0) + times
        return totals

    @property
    def distinct(self) -> tuple[tuple[Event, int], ...]:
        """Every distinct event with its count, in order of first occurrence."""
        return tuple((self._first[key], times) for key, times in self._pairs())

    def _pairs(self) -> list[tuple[tuple[str, str], int]]:
        """Copied in one go: a server asks while the engine's thread emits."""
        return list(self._times.items())
