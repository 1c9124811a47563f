"""Chrome and Perfetto traces in which each kernel says who launched it.

Either an existing trace is copied, event by event, with the attribution added; or a new one is written from launches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TextIO

from piecegraph.kernels.launch import Launch
from piecegraph.kernels.rows import shown_name

Event = dict[str, Any]

CATEGORIES = {"kernel": "kernel", "memset": "gpu_memset", "memcpy": "gpu_memcpy", "op": "cpu_op"}
"""What torch.profiler calls each kind of work."""


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


def annotate(events: Iterable[Event], extra: Callable[[Event], Mapping[str, str] | None]) -> Iterator[Event]:
    """The same events, with ``extra(event)`` added to the ``args`` of those for which it gives something."""
    for event in events:
        added = extra(event)
        yield {**event, "args": {**(event.get("args") or {}), **added}} if added else event


def launch_events(launches: Iterable[Launch], groups: Mapping[int, str], device: str = "") -> Iterator[Event]:
    """A new trace of these launches: one process, a thread for each stream."""
    yield {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": device or "GPU"}}
    threads: dict[str, int] = {}
    for launch in launches:
        if launch.stream not in threads:
            threads[launch.stream] = len(threads)
            name = {"name": f"stream {launch.stream}"}
            yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": threads[launch.stream], "args": name}
        shape = {name: value for name, value in (("grid", launch.grid), ("block", launch.block)) if value is not None}
        yield {
            "ph": "X",
            "cat": CATEGORIES[launch.kind],
            "name": launch.name or shown_name(launch),
            "pid": 0,
            "tid": threads[launch.stream],
            "ts": launch.start,
            "dur": launch.duration,
            "args": {**shape, "stream": launch.stream, **launch_args(launch, groups.get(launch.instance, ""))},
        }


def write_events(events: Iterable[Event], file: TextIO, head: Mapping[str, Any] | None = None) -> int:
    """Write a trace, one event after the other, so that none but the current one is in memory.

    Args:
        events: in the order of the file.
        file: where to write to.
        head: what stands beside the events in a trace's file, such as ``deviceProperties``.

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
