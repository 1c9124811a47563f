"""One claim about calls that belong together: members, slots, shares, conditions, and the verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from piecegraph.provenance.groups.conditions import MAX_VALUES, Sample, by_grid_z, by_value
from piecegraph.provenance.groups.group import Condition, GroupMember, GroupVerdict
from piecegraph.provenance.groups.seen_calls import SeenCall, Variant, View


@dataclass(frozen=True, slots=True)
class Rules:
    """What it takes to make a claim."""

    min_support: int
    usually: float


@dataclass(frozen=True, slots=True)
class Claim:
    """What holds for a set of calls."""

    members: tuple[GroupMember, ...]
    is_ordered: bool
    verdict: GroupVerdict
    anchor: str


def make_claim(views: Sequence[View], variants: Sequence[Variant], rules: Rules) -> Claim | None:
    """The strongest claim that these calls support, or None.

    Args:
        views: All calls by each level of names, the finest first; the last is the one that the variants use.
        variants: The calls.
        rules: What it takes.
    """
    order = _common_order(variants)
    slots = _slots(variants, order, views[-1].generic, rules.min_support)
    if not slots.required:
        return None
    calls = [call for variant in variants for call in variant.calls]
    plain = [_member(views[-1], calls, name, slots) for name in order]
    members = [
        refined for member in plain for refined in _explained(views, calls, member, _reference(plain, member), rules)
    ]
    members.sort(key=lambda member: member.slot)
    judged = _judge(members, rules)
    if judged is None:
        return None
    return Claim(tuple(members), _is_ordered(variants, order), *judged)


@dataclass(frozen=True, slots=True)
class _MemberSlots:
    of: dict[str, int]
    """The place of each name in the order; names that stand for each other share one."""
    required: frozenset[int]
    """The places that no call leaves empty."""


def _common_order(variants: Sequence[Variant]) -> list[str]:
    """All names, in an order that agrees with the most frequent variants."""
    order: list[str] = []
    for variant in sorted(variants, key=lambda variant: -variant.times):
        at = 0
        for name in variant.names:
            if name not in order:
                order.insert(at, name)
            at = order.index(name) + 1
    return order


def _is_ordered(variants: Iterable[Variant], order: list[str]) -> bool:
    places = {name: place for place, name in enumerate(order)}
    ranks = [[places[name] for name in variant.names] for variant in variants]
    return all(one == sorted(one) for one in ranks)


def _slots(variants: Sequence[Variant], order: list[str], generic: set[str], min_support: int) -> _MemberSlots:
    core = set.intersection(*(set(variant.names) for variant in variants))
    of = {name: place for place, name in enumerate(order)}
    required = {of[name] for name in core}
    between: dict[int, list[str]] = {}
    num_core = 0
    for name in order:
        num_core += name in core
        if name not in core and name not in generic:
            seen = sum(variant.times for variant in variants if name in variant.names)
            if seen >= min_support:
                between.setdefault(num_core, []).append(name)
    for names in between.values():
        if len(names) > 1 and all(len(set(names) & set(variant.names)) == 1 for variant in variants):
            of |= dict.fromkeys(names, of[names[0]])
            required.add(of[names[0]])
    return _MemberSlots(of, frozenset(required))


def _member(view: View, calls: Iterable[SeenCall], name: str, slots: _MemberSlots) -> GroupMember:
    counts = [(view.names(call).count(name), call.times) for call in calls]
    repeats = [count for count, _ in counts if count]
    return GroupMember(
        name=name,
        level=view.level,
        kind=view.kinds[name],
        slot=slots.of[name],
        is_optional=slots.of[name] not in slots.required,
        is_generic=name in view.generic,
        repeats=(min(repeats), max(repeats)),
        calls=sum(times for count, times in counts if count),
        launches=sum(count * times for count, times in counts),
        launches_in_all=view.launches[name],
    )


def _reference(members: Sequence[GroupMember], optional: GroupMember) -> GroupMember | None:
    """The member whose launches may tell whether an optional one comes: one that is always there."""
    sole = [m for m in members if not m.is_optional and not m.is_generic and m.kind == "kernel" and m is not optional]
    return next((m for m in sole if sum(other.slot == m.slot for other in members) == 1), None)


def _explained(
    views: Sequence[View],
    calls: Sequence[SeenCall],
    member: GroupMember,
    reference: GroupMember | None,
    rules: Rules,
) -> list[GroupMember]:
    """The member with the condition that separates, or under finer names that need none."""
    view = views[-1]
    if member.is_generic:
        return [member]
    if member.is_sure:
        if not member.is_optional or reference is None:
            return [member]
        having = [call for call in calls if member.name in view.names(call)]
        lacking = [call for call in calls if member.name not in view.names(call)]
        return [_with(member, _condition(view, reference.name, having, lacking, rules))]
    mine = set(calls)
    others = [call for call in view.calls if call not in mine]
    inside, outside = _samples(view, member.name, calls), _samples(view, member.name, others)
    by_z = by_grid_z(member.name, inside, outside)
    if by_z is not None:
        return [_with(member, by_z)]
    return _under_finer_names(views, calls, member, rules) or [
        _with(member, by_value(member.name, inside, outside, rules.min_support))
    ]


def _condition(
    view: View, name: str, having: Sequence[SeenCall], lacking: Sequence[SeenCall], rules: Rules
) -> Condition | None:
    inside, outside = _samples(view, name, having), _samples(view, name, lacking)
    return by_grid_z(name, inside, outside) or by_value(name, inside, outside, rules.min_support)


def _with(member: GroupMember, condition: Condition | None) -> GroupMember:
    return dataclasses.replace(member, condition=condition)


def _samples(view: View, name: str, calls: Iterable[SeenCall]) -> list[Sample]:
    return [
        Sample(member.grid, call.shapes, call.times)
        for call in calls
        for member in call.members
        if view.name(member) == name
    ]


def _under_finer_names(
    views: Sequence[View], calls: Sequence[SeenCall], member: GroupMember, rules: Rules
) -> list[GroupMember]:
    """The few finer names that run in these calls alone, each often enough to say so; else nothing."""
    coarse = views[-1]
    for view in reversed(views[:-1]):
        per_call = [{view.name(one) for one in call.members if coarse.name(one) == member.name} for call in calls]
        names = list(dict.fromkeys(name for found in per_call for name in sorted(found)))
        if len(names) > MAX_VALUES or any(len(found) > 1 for found in per_call):
            continue
        required = frozenset[int]() if member.is_optional else frozenset({member.slot})
        slots = _MemberSlots(dict.fromkeys(names, member.slot), required)
        finer = [_member(view, calls, name, slots) for name in names]
        if all(one.is_sure and one.calls >= rules.min_support and not one.is_generic for one in finer):
            return finer
    return []


def _judge(members: Sequence[GroupMember], rules: Rules) -> tuple[GroupVerdict, str] | None:
    """The verdict and its anchor."""
    core = [member for member in members if not member.is_optional]
    if len({member.slot for member in core}) > 1 or all(member.repeats[0] > 1 for member in core):
        candidates = [*members]
        is_always = all(member.is_sure for member in core)
    else:
        # The one thing that all calls launch: nothing follows from it, it follows from the others.
        candidates = [member for member in members if member.is_optional]
        is_always = False
    candidates = [member for member in candidates if not member.is_generic and member.calls >= rules.min_support]
    if not candidates:
        return None
    anchor = max(candidates, key=lambda member: (member.confidence, not member.is_optional, member.calls))
    if anchor.is_sure:
        return ("always" if is_always and not anchor.is_optional else "always given"), anchor.name
    return ("usually", anchor.name) if anchor.confidence >= rules.usually else None
