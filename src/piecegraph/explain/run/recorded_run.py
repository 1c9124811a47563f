"""A command run under the recorder: folders are made, the hook is laid out, the command runs, its records are read.

Nothing of the user's is modified: the hook lies in a private folder that is gone afterwards, and is found through the
environment of the command alone.
"""

from __future__ import annotations

import contextlib
import os
import py_compile
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from piecegraph.errors import CommandError
from piecegraph.explain.evidence import Evidence
from piecegraph.explain.run import hook
from piecegraph.explain.run.hook.recorder import FOLDER_VARIABLE, RECORDER_PACKAGE, STACK_SIGNAL
from piecegraph.explain.run.launch import Ended, launch
from piecegraph.explain.run.memory import count_oom_kills
from piecegraph.explain.run.records import is_running, read_records
from piecegraph.explain.run.run_evidence import evidence_of_records

_GRACE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What came of a run."""

    ended: Ended
    evidence: Evidence | None
    """None if the command succeeded."""
    problem: CommandError | None = None
    """Why records may be missing."""


def run_recorded(command: Sequence[str], records: Path, environment: Mapping[str, str]) -> RecordedRun:
    """Run a command with recording in every Python process it starts.

    Args:
        command: the program and its arguments.
        records: an empty folder of ours.
        environment: what the command would get without us.
    """
    kills_before = count_oom_kills()
    with _hook_folder() as folder:
        own = {**environment, FOLDER_VARIABLE: str(records), "PYTHONPATH": str(folder)}
        if environment.get("PYTHONPATH"):
            own["PYTHONPATH"] += os.pathsep + environment["PYTHONPATH"]
        try:
            ended = launch(command, own, lambda: _ask_for_stacks(records))
        except OSError as error:
            raise _not_started(command[0], error) from error
        if ended.exit_code == 0:
            return RecordedRun(ended, None)
        _wait_for_ends(records, _GRACE_SECONDS)
    found, num_unreadable = read_records(records)
    evidence = evidence_of_records(found, ended, count_oom_kills().since(kills_before))
    return RecordedRun(ended, evidence, _why_incomplete(records, num_unreadable))


def _not_started(program: str, error: OSError) -> CommandError:
    hint = "give a program on PATH, or the path of one that may be executed"
    failed = CommandError("PG612", f"{program} cannot be started", why=error.strerror or str(error), hint=hint)
    failed.exit_code = 127 if isinstance(error, FileNotFoundError) else 126  # as a shell does
    return failed


def _wait_for_ends(folder: Path, seconds: float) -> None:
    """Give processes that are going down too the time to write their last record."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(is_running(record) for record in read_records(folder)[0]):
        time.sleep(0.05)


def _ask_for_stacks(folder: Path, seconds: float = 0.3) -> None:
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


def _why_incomplete(records: Path, num_unreadable: int) -> CommandError | None:
    """A process cannot say that it could not write. So see whether we can."""
    try:
        (records / "probe").write_bytes(bytes(65536))
    except OSError as error:
        return CommandError("PG613", "records are missing", where=str(records), why=error.strerror or str(error))
    finally:
        (records / "probe").unlink(missing_ok=True)
    if num_unreadable:
        return CommandError("PG613", f"{num_unreadable} records cannot be read", where=str(records))
    return None


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A folder that only we can enter, and that is gone afterwards."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="piecegraph-run-"))
    except OSError as error:
        why = error.strerror or str(error)
        raise CommandError("PG611", "records cannot be kept", where=tempfile.gettempdir(), why=why) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fresh_folder(parent: Path) -> Path:
    """A new folder for the records of one run. Its parent must be the user's alone: records name files and commands."""
    why = ""
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = parent.stat()
        if found.st_uid != os.geteuid():
            why = "the folder belongs to somebody else, who could replace what is written there"
        elif found.st_mode & stat.S_IWOTH:
            why = "everybody may write to the folder, and could replace what is written there"
        else:
            return Path(tempfile.mkdtemp(prefix=time.strftime("run-%Y%m%d-%H%M%S-"), dir=parent))
    except OSError as error:
        why = error.strerror or str(error)
    hint = "name a folder of your own; it is made if it does not exist"
    raise CommandError("PG611", "records cannot be kept", where=str(parent), why=why, hint=hint)


@contextlib.contextmanager
def _hook_folder() -> Iterator[Path]:
    with private_folder() as folder:
        if os.pathsep in str(folder):
            why = f"PYTHONPATH cannot hold a folder with {os.pathsep!r} in its name"
            raise CommandError(
                "PG611", "the recorder cannot be laid out", where=str(folder), why=why, hint="set TMPDIR"
            )
        source, package = Path(hook.__file__).parent, folder / RECORDER_PACKAGE
        package.mkdir(mode=0o700)
        for file in sorted(source.glob("*.py")):
            target = (folder if file.name == "sitecustomize.py" else package) / file.name
            shutil.copyfile(file, target)
            py_compile.compile(str(target))  # or every process would, where bytecode is not written
        yield folder
