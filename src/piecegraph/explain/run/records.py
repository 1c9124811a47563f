"""The records that the hook wrote: a folder in, one value for each process out.

See the folder ``hook`` for what is in a record. A record may be of a process that is still being killed, or of a
program that wrote into the folder on its own: what cannot be read is counted, never trusted.
"""

from __future__ import annotations

import json
import linecache
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piecegraph.explain.evidence import Frame, Process, Raised
from piecegraph.explain.run.hook.recorder import RECORDER_PACKAGE, SCHEMA

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
"""Variables that number the processes of a job, the most telling first."""
_MAX_LINE, _MAX_LINES = 400, 20
_FATAL = re.compile(r"^Fatal Python error: (.+)$")
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*most recent call first")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedException:
    """An exception as the hook recorded it."""

    kind: str
    """``exception``, ``interrupted`` or ``thread``: not caught. :data:`~recorder.PRINTED`: handled and printed."""
    thread: str
    wall_ns: int
    time_ns: int
    phases: tuple[str, ...]
    size: str
    chain: tuple[Raised, ...]


@dataclass(frozen=True, slots=True)
class RecordedSignal:
    """A signal this process sent, or a child's death it saw."""

    pid: int
    """0 where a whole group was meant."""
    group: int
    number: int
    """The signal; for a death, the status of ``os.waitpid``."""
    time_ns: int


@dataclass(frozen=True, slots=True)
class StackDump:
    """What one signal wrote."""

    fatal: str
    """``Segmentation fault``; empty for stacks that were asked for."""
    frames: tuple[Frame, ...]
    """Of the thread that was hit, outermost first; of the main thread where none was."""
    num_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """Everything known of one process. Times are monotonic."""

    file: Path
    pid: int
    ppid: int
    group: int
    start_ticks: int | None
    host: str
    name: str
    arguments: tuple[str, ...]
    ranks: dict[str, str]
    rank: int | None
    """What torch.distributed said."""
    state: str
    code: int | None
    started_ns: int
    ended_ns: int | None
    exceptions: tuple[RecordedException, ...]
    children: tuple[RecordedSignal, ...]
    sent: tuple[RecordedSignal, ...]
    exit_call: tuple[str, Frame] | None
    """What ``sys.exit`` was called with, and where."""
    dump: StackDump | None
    last_lines: tuple[str, ...]
    """What it printed last through Python's own streams."""


def read_records(folder: Path) -> tuple[list[ProcessRecord], int]:
    """Every record of a folder, oldest process first, and how many could not be read."""
    records, num_unreadable = [], 0
    for file in sorted(folder.glob("*.json")):
        try:
            data = json.loads(file.read_text(encoding="ascii"))
            if data["schema"] != SCHEMA:
                raise ValueError(data["schema"])
            records.append(_record(file, data))
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
            num_unreadable += 1
    return sorted(records, key=lambda record: record.started_ns), num_unreadable


def _record(file: Path, data: dict[str, Any]) -> ProcessRecord:
    stack_file = file.with_suffix(".stack")
    called = data.get("exit_call")
    return ProcessRecord(
        file=file,
        pid=int(data["pid"]),
        ppid=int(data["ppid"]),
        group=int(data["group"]),
        start_ticks=data["start_ticks"],
        host=_text(data["host"]),
        name=_text(data["name"] or ""),
        arguments=tuple(map(_text, data["argv"])),
        ranks={_text(name): _text(value) for name, value in data["ranks"].items()},
        rank=data["rank"],
        state=data["state"],
        code=data["code"],
        started_ns=int(data["started"]["monotonic_ns"]),
        ended_ns=int(data["ended"]["monotonic_ns"]) if data["ended"] else None,
        exceptions=tuple(read_exception(part) for part in data["failures"]),
        children=tuple(_signal(part, "status") for part in data["children"]),
        sent=tuple(_signal(part, "signal") for part in data["sent"]),
        exit_call=(_text(called["said"]), _frame(called["frame"])) if called else None,
        dump=last_dump(stack_file.read_text(errors="backslashreplace")) if stack_file.exists() else None,
        last_lines=_last_lines(file.with_suffix(".tail")),
    )


def _last_lines(file: Path) -> tuple[str, ...]:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    lines = [line.rpartition("\r")[2].rstrip() for line in text.rstrip().split("\n")]
    return tuple(line[:_MAX_LINE] for line in lines if line)[-_MAX_LINES:]


def read_exception(data: dict[str, Any]) -> RecordedException:
    """An exception as the hook wrote it down."""
    fields = [part["fields"] for part in data["chain"]]
    return RecordedException(
        kind=data["kind"],
        thread=_text(data["thread"]),
        wall_ns=int(data["time"]["wall_ns"]),
        time_ns=int(data["time"]["monotonic_ns"]),
        phases=tuple(map(_text, data["phase"])),
        size=next((_text(str(part["size"])) for part in fields if "size" in part), ""),
        chain=tuple(map(_raised, data["chain"])),
    )


def _raised(data: dict[str, Any]) -> Raised:
    notes = [_text(note) for note in data["notes"]]
    if data["frames_left_out"]:
        notes.append(f"{data['frames_left_out']} frames in the middle of the stack are left out")
    return Raised(
        type=_text(data["type"]),
        message=_text(data["message"]),
        frames=tuple(map(_frame, data["frames"])),
        link=data["link"],
        notes=tuple(notes),
    )


def _frame(data: Sequence[Any]) -> Frame:
    file, line, function, source = data
    return Frame(_text(file), int(line), _text(function), _text(source))


def _signal(data: dict[str, Any], number: str) -> RecordedSignal:
    time_ns = int(data["time"]["monotonic_ns"])
    return RecordedSignal(int(data.get("pid", 0)), int(data.get("group", 0)), int(data[number]), time_ns)


def _text(value: str) -> str:
    """Text that can be printed: file names may hold bytes that are no text."""
    return value.encode("utf-8", "backslashreplace").decode()


# -- the stacks that faulthandler wrote


def last_dump(text: str) -> StackDump | None:
    """The last complete dump of a file that dumps were appended to.

    >>> last_dump('Current thread 0x1 (most recent call first):\\n  File "a.py", line 3 in f\\n').frames
    (Frame(file='a.py', line=3, function='f', source=''),)
    """
    fatal, before = "", ""
    threads: list[tuple[bool, list[Frame]]] = []
    for line in text.splitlines():
        if found := _FATAL.match(line):
            fatal, threads = found[1], []
        elif found := _THREAD.match(line):
            if before:  # the threads of one dump are apart: here the next dump begins
                fatal, threads = "", []
            threads.append((found[1] == "Current thread", []))
        elif (found := _FRAME.match(line)) and threads and f"/{RECORDER_PACKAGE}/" not in found[1]:
            file, number = found[1], int(found[2])
            threads[-1][1].append(Frame(file, number, found[3], linecache.getline(file, number).strip()))
        before = line
    if not threads:
        return StackDump(fatal, (), 0) if fatal else None
    frames = next((frames for current, frames in threads if current), threads[-1][1])
    return StackDump(fatal, tuple(reversed(frames)), len(threads))


# -- who is who


def identify(records: Sequence[ProcessRecord]) -> dict[Path, Process]:
    """Who each process is. A rank's own children inherit its variables, but they are not that rank."""
    variable = next((name for name in _RANKS if any(name in record.ranks for record in records)), "")
    by_pid = {record.pid: record for record in records}
    found = {}
    for record in records:
        parent = by_pid.get(record.ppid)
        value = record.ranks.get(variable, "")
        inherited = parent is not None and parent.ranks.get(variable, "") == value
        rank = record.rank if record.rank is not None else int(value) if value.isdigit() and not inherited else None
        label = f"rank{rank}" if rank is not None else record.name or program_of(record.arguments)
        if rank is None and inherited and value:
            label += f" (child of rank{value})"
        found[record.file] = Process(label, rank, record.pid, record.host)
    return found


def program_of(arguments: Sequence[str]) -> str:
    """What a Python process runs, in a word.

    >>> program_of(["python", "-u", "/jobs/serve.py", "-p"]), program_of(["python", "-m", "torch.distributed"])
    ('serve.py', 'torch.distributed')
    >>> program_of(["python", "-c", "print(1)"])
    'python -c'
    """
    rest = iter(arguments[1:])
    for part in rest:
        if part == "-m":
            return next(rest, "python -m")
        if part == "-c":
            return "python -c"
        if not part.startswith("-"):
            return part.rpartition("/")[2]
    return "python"


def is_running(record: ProcessRecord) -> bool:
    """Whether the very process of a record is still there, and not only its number."""
    try:
        fields = Path(f"/proc/{record.pid}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0] not in (b"Z", b"X") and int(fields[19]) == record.start_ticks
    except (OSError, IndexError):
        return False
