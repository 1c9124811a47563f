"""Recorded processes that still run: waiting for them, and asking them where they are."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from piecegraph.explain.run.hook import STACK_SIGNAL
from piecegraph.explain.run.records import ProcessRecord, read_records


def is_running(record: ProcessRecord) -> bool:
    """Whether the very process of a record is still there, and not only its number."""
    try:
        fields = Path(f"/proc/{record.pid}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0] not in (b"Z", b"X") and int(fields[19]) == record.start_ticks
    except (OSError, IndexError):
        return False


def wait_for_ends(folder: Path, seconds: float) -> None:
    """Give processes that are going down too the time to write their last record."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(is_running(record) for record in read_records(folder)[0]):
        time.sleep(0.05)


def ask_for_stacks(folder: Path, seconds: float = 0.3) -> None:
    """Have every recorded process write the stacks of its threads, and give them a moment to do so."""
    waiting = []
    for record in read_records(folder)[0]:
        # Unhandled, the signal would end the process: another program may have taken its place.
        if is_running(record) and _catches(record.pid, STACK_SIGNAL):
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.pid, STACK_SIGNAL)
            waiting.append(record.file.with_suffix(".stack"))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(file.exists() and file.stat().st_size for file in waiting):
        time.sleep(0.02)
    time.sleep(0.05 if waiting else 0)  # the rest of the threads


def _catches(pid: int, number: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
