"""How places, processes and exit codes are called on a page."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from piecegraph.explain.evidence import Exit, Frame, Process, signal_name
from piecegraph.explain.frames import place_of
from piecegraph.report.statements import PageRow

_NUMBERED = re.compile(r"^(?P<stem>.*?)(?P<number>\d+)$")
_MAX_NAMES = 12


def frame_rows(label: str, frame: Frame, note: str = "") -> list[PageRow]:
    """A place in the code, and what stands there."""
    rows = [PageRow(label, f"{describe_frame(frame)}{note}")]
    return [*rows, PageRow("", frame.source, "quiet", is_code=True, is_detail=True)] if frame.source else rows


def describe_frame(frame: Frame) -> str:
    """File, line and function."""
    name = f" in {frame.function}" if frame.function else ""
    return f"{place_of(frame.file).path}:{frame.line}{name}"


def describe_line(line: int | None) -> str:
    """A place in the log."""
    return f"line {line}" if line is not None else "unknown line"


def describe_code(code: int) -> str:
    """An exit code in words.

    >>> describe_code(-9)
    'killed by SIGKILL'
    >>> describe_code(1), describe_code(-1)
    ('exit code 1', 'exit code -1')
    """
    if code >= -1:  # hardly ever SIGHUP, and what many programs exit with
        return f"exit code {code}"
    return f"killed by {signal_name(-code)}"


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
    is_named_so = process.pid is None or process.label == f"pid {process.pid}"
    more = [f"pid {process.pid}"] * (not is_named_so) + [f"on {process.host}"] * (process.host is not None)
    return f"{process.label} ({', '.join(more)})" if more else process.label


def describe_exits(exits: Sequence[Exit]) -> str:
    """How a launcher saw the processes end."""
    first = next((exit for exit in exits if exit.is_first), None)
    first_words = (
        f"{describe_processes([first.process])} was the first to end ({describe_code(first.code)}); " if first else ""
    )
    by_code: dict[int, int] = {}
    for exit in exits:
        by_code[exit.code] = by_code.get(exit.code, 0) + 1
    return first_words + ", ".join(f"{number} x {describe_code(code)}" for code, number in by_code.items())
