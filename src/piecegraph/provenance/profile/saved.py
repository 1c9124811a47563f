"""A profile with its attribution, saved inside a Chrome trace: read again, it gives the same tables and groups.

The events of a file are what torch.profiler wrote; who launched what is known only to who took the profile. So that is
written beside the events, as members of the file that viewers pass over. Values that many launches share (calls with
their stacks, names, grids) are written once and meant by their number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from piecegraph.base.origin import LaunchCall, Origin
from piecegraph.base.plan import SourceLine
from piecegraph.errors import InputError
from piecegraph.provenance.launch import CapturedCall, KernelProfile, Launch, Member
from piecegraph.provenance.profile.interned import Interned

MEMBER = "piecegraph"
"""The name of the member; those with more launches have a number behind it."""

_VERSION = 2
"""The first had no replays."""
_LAUNCHES_A_MEMBER = 100_000
"""A reader takes a member at once."""
_SHARED = ("kind", "name", "stream", "grid", "block", "phase", "how")
_OWN = ("start", "duration", "instance")


def saved_members(profile: KernelProfile) -> Iterator[tuple[str, Any]]:
    """The members of a file that hold a profile."""
    calls: Interned[LaunchCall] = Interned()
    texts: Interned[Hashable] = Interned()
    of_object: dict[int, int] = {}

    def call_number(call: LaunchCall | None) -> int | None:
        if call is None:
            return None
        if id(call) not in of_object:  # replays share their calls, and one with all its stacks is slow to hash
            of_object[id(call)] = calls.number(call)
        return of_object[id(call)]

    def launch_row(launch: Launch) -> list[Any]:
        own = [getattr(launch, name) for name in _OWN]
        shared = [texts.number(getattr(launch, name)) for name in _SHARED]
        return [*own, *shared, call_number(launch.call), launch.replay]

    rows = [launch_row(launch) for launch in profile.launches]
    captured = [
        [call_number(one.call), one.phase, [dataclasses.astuple(member) for member in one.members]]
        for one in profile.captured
    ]
    yield (
        MEMBER,
        {
            "version": _VERSION,
            "device": profile.device,
            "notes": profile.notes,
            "texts": texts.values,
            "calls": [dataclasses.asdict(call) for call in calls.values],
            "captured": captured,
        },
    )
    for first in range(0, len(rows), _LAUNCHES_A_MEMBER):
        yield f"{MEMBER}.{first}", rows[first : first + _LAUNCHES_A_MEMBER]


def saved_profile(members: Mapping[str, Any], path: str) -> KernelProfile | None:
    """The profile that a file's members hold; None if they hold none, or one of a later version."""
    head = members.get(MEMBER)
    if not isinstance(head, dict) or head.get("version") not in (1, _VERSION):
        return None
    try:
        rows = [row for name, rows in members.items() if name.startswith(f"{MEMBER}.") for row in rows]
        rows = [[*row, -1] for row in rows] if head["version"] == 1 else rows
        calls = [_call(fields) for fields in head["calls"]]
        texts = [_tuple(value) for value in head["texts"]]
        return KernelProfile(
            tuple(_launch(row, texts, calls) for row in rows),
            tuple(
                CapturedCall(calls[number], phase, tuple(Member(*map(_tuple, member)) for member in members))
                for number, phase, members in head["captured"]
            ),
            head["device"],
            tuple(head["notes"]),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        why = f"what piecegraph keeps in it was changed: {error!r}"
        raise InputError("PG703", "the trace cannot be read back", where=path, why=why, hint="save it again") from error


def _launch(row: Sequence[Any], texts: Sequence[Any], calls: Sequence[LaunchCall]) -> Launch:
    start, duration, instance, *numbers, call, replay = row
    shared = {name: texts[number] for name, number in zip(_SHARED, numbers, strict=True)}
    known = None if call is None else calls[call]
    return Launch(start=start, duration=duration, instance=instance, call=known, replay=replay, **shared)


def _call(fields: dict[str, Any]) -> LaunchCall:
    origins = (
        Origin(one["op"], one["module"], tuple(SourceLine(**line) for line in one["stack"]))
        for one in fields["origins"]
    )
    return LaunchCall(fields["op"], tuple(origins), tuple(fields["shapes"]), fields["is_several"])


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
