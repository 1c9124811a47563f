"""Kernels that come from one call, always or usually: the nouns of a claim about them.

A claim has a direction. That ``splitKreduce_kernel`` never runs without a matrix product before it says nothing about
the product, which may well run alone; so each member carries its own share, and the *anchor* is the member from which
the others follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from piecegraph.base.origin import WorkKind

GroupVerdict = Literal["always", "always given", "usually"]
"""``always``: no member runs outside of the group. ``always given``: the anchor does not. ``usually``: hardly."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What tells launches of a kernel with the group from those without, with no exception on either side."""

    member: str
    """Whose launches were told apart."""
    holds: str
    """``grid.z > 1``"""
    num_with: int
    """Launches for which it holds; all are with the group, or with the optional member."""
    otherwise: str
    """``grid.z = 1``"""
    num_without: int
    """Launches for which it does not hold; none is."""


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A kernel, memset or memcpy of a group."""

    name: str
    level: str
    """At which level of names the claim is made: the coarsest at which it holds."""
    kind: WorkKind
    slot: int
    """Its place in the order. Members that share one stand for each other: a call launches one of them."""
    is_optional: bool
    """Whether some calls of the group go without it, and without another one in its place."""
    is_generic: bool
    """A memset, a fill or a copy: all sorts of calls launch these, so nothing follows from one."""
    repeats: tuple[int, int]
    """How often one call launches it, at least and at most, where it does."""
    calls: int
    """Calls of the group that launch it."""
    launches: int
    """In calls of the group."""
    launches_in_all: int
    """Wherever the call is known."""
    condition: Condition | None = None

    @property
    def confidence(self) -> float:
        """The share of its launches that belong to the group."""
        return self.launches / self.launches_in_all

    @property
    def is_sure(self) -> bool:
        return self.launches == self.launches_in_all


@dataclass(frozen=True, slots=True)
class OwningOp:
    """An op whose calls launch a group: a place to intercept it."""

    op: str
    support: int
    """Its calls that launch the group."""
    calls: int
    """Its calls in all."""


@dataclass(frozen=True, slots=True)
class Group:
    """Kernels that one call launches together."""

    label: str
    """``G1``"""
    owners: tuple[OwningOp, ...]
    """Most calls first. Several where several ops launch the same kernels."""
    members: tuple[GroupMember, ...]
    """In the order of their launch."""
    is_ordered: bool
    """Whether all calls launch them in this order."""
    verdict: GroupVerdict
    anchor: str
    """The member from which the others follow."""
    places: tuple[str, ...]
    """Modules and lines where it occurs, the most frequent ones."""
    num_places: int
    time_us: float = 0.0
    """Of all its launches, those of replays too; 0 if no time is known."""

    @property
    def op(self) -> str:
        """The call that owns it."""
        return self.owners[0].op

    @property
    def support(self) -> int:
        """The calls in which it was seen."""
        return sum(owner.support for owner in self.owners)

    @property
    def anchor_member(self) -> GroupMember:
        return next(member for member in self.members if member.name == self.anchor)

    @property
    def slots(self) -> tuple[tuple[GroupMember, ...], ...]:
        """The members by their place in the order."""
        by_slot: dict[int, list[GroupMember]] = {}
        for member in self.members:
            by_slot.setdefault(member.slot, []).append(member)
        return tuple(tuple(members) for _, members in sorted(by_slot.items()))

    @property
    def bound(self) -> float | None:
        """With 95 % confidence there are fewer exceptions than this share: 3 / n after n calls without one."""
        return None if self.verdict == "usually" else min(3 / self.anchor_member.calls, 1.0)


@dataclass(frozen=True, slots=True)
class Groups:
    """What was mined from one profile."""

    groups: tuple[Group, ...]
    """The one that takes the most time first."""
    num_calls: int
    """Calls that were looked at."""
    reason: str = ""
    """Why there are no groups; empty if there are some."""
    group_of_instance: Mapping[int, str] = field(default_factory=dict)
    """From ``Launch.instance`` to a group's label."""
