"""A profile for Perfetto, in which each kernel says who launched it.

The file that was read is copied, event by event, with the attribution added; beside the events stands all that is
known, so that it can be read again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from piecegraph.provenance.launch import KernelProfile, Launch
from piecegraph.provenance.profile.event import decode_whole
from piecegraph.provenance.profile.file import ProfileFile
from piecegraph.provenance.profile.saved import saved_members

JsonEvent = dict[str, Any]


def write_perfetto(source: Path, profile: KernelProfile, groups: Mapping[int, str], file: TextIO) -> None:
    """Copy a profile with what is known of its launches.

    Args:
        source: the file that the profile was read from.
        profile: what was found in it.
        groups: from :attr:`Launch.instance <piecegraph.provenance.launch.Launch.instance>` to the label of a group.
        file: where to write to.
    """
    known = {
        (launch.name, launch.start): launch_args(launch, groups.get(launch.instance, "")) for launch in profile.launches
    }

    def extra(event: JsonEvent) -> Mapping[str, str] | None:
        return known.get((event["name"], event["ts"])) if event.get("ph") == "X" and "ts" in event else None

    copied = ProfileFile(str(source), decode_whole, make=dict)
    events: Iterator[Any] = (event for batch in copied.batches() for event in batch)
    write_events(annotate(events, extra), file, dict(saved_members(profile)))


def launch_args(launch: Launch, group: str = "") -> dict[str, str]:
    """What is added to an event: ``call``, ``module``, ``py``, ``group`` and ``how``, as far as they are known."""
    origins = launch.call.origins if launch.call else ()
    found = {
        "call": launch.call.op if launch.call else "",
        "module": ", ".join(dict.fromkeys(origin.module for origin in origins if origin.module)),
        "py": ", ".join(dict.fromkeys(f"{origin.line.file}:{origin.line.line}" for origin in origins if origin.line)),
        "group": group,
        "how": launch.how,
    }
    return {name: value for name, value in found.items() if value}


def annotate(
    events: Iterable[JsonEvent], extra: Callable[[JsonEvent], Mapping[str, str] | None]
) -> Iterator[JsonEvent]:
    """The same events, with ``extra(event)`` added to the ``args`` of those for which it gives something."""
    for event in events:
        added = extra(event)
        yield {**event, "args": {**(event.get("args") or {}), **added}} if added else event


def write_events(events: Iterable[JsonEvent], file: TextIO, head: Mapping[str, Any] | None = None) -> int:
    """Write a profile, one event after the other, so that none but the current one is in memory.

    Args:
        events: in the order of the file.
        file: where to write to.
        head: what stands beside the events in a profile's file, such as ``deviceProperties``.

    Returns:
        How many events were written.
    """
    start = json.dumps({name: value for name, value in (head or {}).items() if name != "traceEvents"})[:-1]
    file.write(start + (", " if len(start) > 1 else "") + '"traceEvents": [')
    num_events = 0
    for event in events:
        file.write(("," if num_events else "") + "\n" + json.dumps(event))
        num_events += 1
    file.write("\n]}\n")
    return num_events
