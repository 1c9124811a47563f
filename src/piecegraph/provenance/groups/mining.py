"""Mining groups: from the calls of a profile to the kernels that come from one call together.

Calls that launch several kernels become one group if they share a kernel that does not run without company. What all
of them launch is the core, the rest is optional, and kernels that stand for each other share a slot. Coarse names are
tried first: a claim about ``nvjet_*_splitK`` says more than one about a single tile size. Calls that a claim covers are
not looked at again with finer names; every share is a share of *all* launches whose call is known.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from piecegraph.provenance.groups.claim import Claim, Rules, make_claim
from piecegraph.provenance.groups.group import Group, Groups, OwningOp
from piecegraph.provenance.groups.seen_calls import (
    Levels,
    SeenCall,
    Variant,
    View,
    instances,
    ran_in_graph,
    seen_calls,
    signature,
)
from piecegraph.provenance.launch import KernelProfile
from piecegraph.provenance.names import family, short

LEVELS: Levels = (("raw", str), ("short", short), ("family", family))
MAX_PLACES = 3


@dataclass(frozen=True, slots=True)
class _Found:
    claim: Claim
    calls: tuple[SeenCall, ...]


def mine(profile: KernelProfile, levels: Levels = LEVELS, *, min_support: int = 5, usually: float = 0.9) -> Groups:
    """Find the groups of a profile.

    Args:
        profile: What ran. Only calls that were seen as they launched, or at capture, are evidence.
        levels: Ways to name a kernel, the finest first.
        min_support: How many calls a claim needs.
        usually: The least share of a kernel's launches for which a group is worth a claim.
    """
    calls = seen_calls(profile)
    rules = Rules(min_support, usually)
    views = [View(calls, level) for level in levels]
    left = dict.fromkeys(call for call in calls if len(call.members) > 1)
    num_several = len(left)
    found: list[_Found] = []
    for depth in reversed(range(len(views))):
        for variants in _linked(views[depth], left, usually, with_repeats=depth == 0):
            for settled in _settle(views[: depth + 1], variants, rules):
                found.append(settled)
                for call in settled.calls:
                    del left[call]
    return _numbered(profile, calls, found, _reason(profile, calls, num_several, rules))


def _linked(view: View, calls: Iterable[SeenCall], usually: float, with_repeats: bool) -> list[list[Variant]]:
    """Variants that share a kernel which (hardly) ever runs without company, together."""
    several = [call for call in calls if with_repeats or len(set(view.names(call))) > 1]
    accompanied: Counter[str] = Counter()
    for call in view.calls:
        names = view.names(call)
        if len(names) > 1 if with_repeats else len(set(names)) > 1:
            for name in names:
                accompanied[name] += call.times
    clusters: list[tuple[set[str], list[Variant]]] = []
    for variant in view.variants(several):
        links = {name for name in variant.names if accompanied[name] >= usually * view.launches[name]} - view.generic
        if not links:
            continue
        touched = [cluster for cluster in clusters if not cluster[0].isdisjoint(links)]
        clusters = [cluster for cluster in clusters if cluster[0].isdisjoint(links)]
        merged = [one for _, variants in touched for one in variants]
        clusters.append((links.union(*(names for names, _ in touched)), [*merged, variant]))
    return [variants for _, variants in clusters]


def _settle(views: Sequence[View], variants: list[Variant], rules: Rules) -> list[_Found]:
    """One claim about all variants, or else claims about those of each op, or else about each variant."""
    claim = make_claim(views, variants, rules)
    if claim is not None:
        return [_Found(claim, tuple(call for variant in variants for call in variant.calls))]
    parts: dict[str | tuple[str, ...], list[Variant]] = {}
    by_op = len({variant.op for variant in variants}) > 1
    for variant in variants:
        parts.setdefault(variant.op if by_op else variant.names, []).append(variant)
    if len(parts) == 1:
        return []
    return [found for part in parts.values() for found in _settle(views, part, rules)]


def _numbered(profile: KernelProfile, calls: Sequence[SeenCall], found: list[_Found], reason: str) -> Groups:
    """The claims as groups, with labels, owners, places and time."""
    claim_of = {call.signature: number for number, one in enumerate(found) for call in one.calls}
    claim_of_instance, time = _carried_over(profile, claim_of)
    num_op_calls: Counter[str] = Counter()
    for call in calls:
        num_op_calls[call.op] += call.times
    groups = [_group(one, num_op_calls, time[number]) for number, one in enumerate(found)]
    order = sorted(range(len(found)), key=lambda number: (-time[number], -groups[number].support, groups[number].op))
    labels = {number: f"G{rank}" for rank, number in enumerate(order, start=1)}
    return Groups(
        groups=tuple(dataclasses.replace(groups[number], label=labels[number]) for number in order),
        num_calls=num_op_calls.total(),
        reason="" if groups else reason,
        group_of_instance={instance: labels[number] for instance, number in claim_of_instance.items()},
    )


def _carried_over(
    profile: KernelProfile, claim_of: dict[tuple[str, tuple[str, ...]], int]
) -> tuple[dict[int, int], dict[int, float]]:
    """Which claim each call instance belongs to, and the time of each claim.

    A replay shows a group where one of its instances is, by op and names, a call that was seen at capture.
    """
    captured = {signature(one.call.op, one.members) for one in profile.captured}
    claim_of_instance: dict[int, int] = {}
    time: dict[int, float] = defaultdict(float)
    for instance, launches in instances(profile.launches).items():
        call = launches[0].call
        key = signature(call.op if call else "", launches)
        number = claim_of.get(key)
        if number is None or (ran_in_graph(launches[0]) and key not in captured):
            continue
        claim_of_instance[instance] = number
        time[number] += sum(launch.duration for launch in launches)
    return claim_of_instance, time


def _group(found: _Found, num_op_calls: Counter[str], time: float) -> Group:
    support: Counter[str] = Counter()
    places: Counter[str] = Counter()
    for call in found.calls:
        support[call.op] += call.times
        for place, times in call.places:
            places[place] += times
    places.pop("", None)
    claim = found.claim
    return Group(
        label="",
        owners=tuple(OwningOp(op, times, num_op_calls[op]) for op, times in support.most_common()),
        members=claim.members,
        is_ordered=claim.is_ordered,
        verdict=claim.verdict,
        anchor=claim.anchor,
        places=tuple(place for place, _ in places.most_common(MAX_PLACES)),
        num_places=len(places),
        time_us=time,
    )


def _reason(profile: KernelProfile, calls: Sequence[SeenCall], num_several: int, rules: Rules) -> str:
    if num_several:
        return (
            f"no kernels were seen together in at least {rules.min_support} calls and in at least "
            f"{rules.usually:.0%} of the launches of one of them"
        )
    if calls:
        return "no call launches more than one kernel"
    if any(launch.kind != "op" for launch in profile.launches):
        return "of no kernel the call is known: replays alone are no evidence, trace the capture or an eager run too"
    return "no kernel was seen"
