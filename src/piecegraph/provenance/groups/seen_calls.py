"""A profile as evidence for mining: calls with what they launched, and nothing whose call is in doubt.

What a replay launched is no evidence, whatever stands next to what in it: layers repeat, so neighbours that have
nothing to do with each other are always neighbours. Of a graph, the calls that were seen at its capture count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from piecegraph.base.origin import LaunchCall, WorkKind
from piecegraph.provenance.launch import KernelProfile, Launch, Member
from piecegraph.provenance.names import fold_layers

Levels = Sequence[tuple[str, Callable[[str], str]]]
"""Ways to name a kernel, the finest first."""

_GENERIC = re.compile(r"FillFunctor|(?<!masked_)(?<!index_)fill_kernel|(?<!index_)copy_kernel|CatArrayBatchedCopy")


@dataclass(frozen=True, slots=True)
class SeenCall:
    """Calls that are alike in everything that is mined."""

    op: str
    shapes: tuple[str, ...]
    members: tuple[Member, ...]
    """In the order of their launch; memsets and memcpys are called by what they are."""
    times: int
    places: tuple[tuple[str, int], ...]
    """Where in the model, with how often."""

    @property
    def signature(self) -> tuple[str, tuple[str, ...]]:
        """The same for calls of one op that launched the same."""
        return signature(self.op, self.members)


@dataclass(frozen=True, slots=True)
class Variant:
    """The calls of one op that launched the same names in the same order."""

    op: str
    names: tuple[str, ...]
    """Without repeats."""
    calls: tuple[SeenCall, ...]

    @property
    def times(self) -> int:
        return sum(call.times for call in self.calls)


class View:
    """All calls by the names of one level."""

    def __init__(self, calls: Sequence[SeenCall], level: tuple[str, Callable[[str], str]]) -> None:
        self.level, self._rename = level
        self._names: dict[tuple[WorkKind, str], str] = {}
        self.calls = calls
        self.launches: Counter[str] = Counter()
        self.kinds: dict[str, WorkKind] = {}
        self.generic: set[str] = set()
        for call in calls:
            for member in call.members:
                name = self.name(member)
                self.launches[name] += call.times
                self.kinds[name] = member.kind
                if is_generic(member):
                    self.generic.add(name)

    def name(self, member: Member) -> str:
        key = (member.kind, member.name)
        if key not in self._names:
            self._names[key] = self._rename(member.name) if member.kind == "kernel" else member.name
        return self._names[key]

    def names(self, call: SeenCall) -> tuple[str, ...]:
        """Of what a call launched, in order, with repeats."""
        return tuple(map(self.name, call.members))

    def variants(self, calls: Iterable[SeenCall]) -> list[Variant]:
        together: dict[tuple[str, tuple[str, ...]], list[SeenCall]] = {}
        for call in calls:
            together.setdefault((call.op, tuple(dict.fromkeys(self.names(call)))), []).append(call)
        return [Variant(op, names, tuple(alike)) for (op, names), alike in together.items()]


def seen_calls(profile: KernelProfile) -> tuple[SeenCall, ...]:
    """The calls whose kernels are known for sure, alike ones as one."""
    places: dict[tuple[str, tuple[str, ...], tuple[Member, ...]], Counter[str]] = {}
    for call, members in _each_call(profile):
        places.setdefault((call.op, call.shapes, members), Counter())[_place(call)] += 1
    return tuple(
        SeenCall(op, shapes, members, counted.total(), tuple(counted.items()))
        for (op, shapes, members), counted in places.items()
    )


def instances(launches: Iterable[Launch]) -> dict[int, list[Launch]]:
    """The launches of each call; those of which no call is known are left out."""
    by_instance: dict[int, list[Launch]] = {}
    for launch in launches:
        if launch.instance >= 0 and launch.call is not None and launch.kind != "op":
            by_instance.setdefault(launch.instance, []).append(launch)
    return by_instance


def ran_in_graph(launch: Launch) -> bool:
    """Whether it was attributed as part of a replay, or not at all."""
    return launch.how not in ("call", "stack")


def signature(op: str, members: Iterable[Member | Launch]) -> tuple[str, tuple[str, ...]]:
    """The op and what it launched. The order is left out: in a replay, streams overlap."""
    return op, tuple(sorted(_name(member) for member in members))


def is_generic(member: Member) -> bool:
    """Whether all sorts of calls launch it, so that nothing follows from it."""
    return member.kind != "kernel" or (
        _GENERIC.search(member.name) is not None and not member.name.startswith("triton_")
    )


def _each_call(profile: KernelProfile) -> Iterator[tuple[LaunchCall, tuple[Member, ...]]]:
    direct = instances(launch for launch in profile.launches if not ran_in_graph(launch))
    for launches in direct.values():
        call = launches[0].call
        assert call is not None  # instances() keeps no other
        if not call.is_several:
            yield call, tuple(map(_member, launches))
    for captured in profile.captured:
        if captured.members:
            yield captured.call, tuple(map(_member, captured.members))


def _member(work: Member | Launch) -> Member:
    return Member(kind=work.kind, name=_name(work), grid=work.grid, block=None)


def _name(work: Member | Launch) -> str:
    return work.name if work.kind == "kernel" else work.kind.capitalize()


def _place(call: LaunchCall) -> str:
    """Module and line of a call, equal for the layers of a stack."""
    if not call.origins:
        return ""
    origin = call.origins[0]
    module = fold_layers(origin.module)
    return " ".join(part for part in (module, f"({origin.line})" if origin.line else "") if part)
