"""Many names in few words."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from piecegraph.explain.evidence import Process

_NUMBERED = re.compile(r"^(?P<stem>.*?)(?P<number>\d+)$")
_MAX_NAMES = 12


def describe_processes(processes: Iterable[Process]) -> str:
    """Names with consecutive numbers as spans.

    >>> describe_processes([Process("rank0"), Process("rank1"), Process("rank2"), Process("Worker_TP0", pid=7)])
    'rank0 to rank2, Worker_TP0 (pid 7)'
    """
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    names: list[str] = []
    for process in processes:
        found = _NUMBERED.match(process.label)
        if found is not None and process.pid is None and process.host is None:
            if found["stem"] not in numbers:
                names.append(found["stem"])
            numbers[found["stem"]].append(int(found["number"]))
        else:
            names.append(_full_name(process))
    parts = [part for name in names for part in (_spans(name, numbers[name]) if name in numbers else [name])]
    if len(parts) > _MAX_NAMES:
        parts = [*parts[:_MAX_NAMES], f"and {len(parts) - _MAX_NAMES} more"]
    return ", ".join(parts)


def _spans(stem: str, numbers: list[int]) -> list[str]:
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return [
        f"{stem}{first}" if first == last else f"{stem}{first}{', ' if last == first + 1 else ' to '}{stem}{last}"
        for first, last in found
    ]


def _full_name(process: Process) -> str:
    more = [f"pid {process.pid}"] * (process.pid is not None) + [f"on {process.host}"] * (process.host is not None)
    return f"{process.label} ({', '.join(more)})" if more else process.label
