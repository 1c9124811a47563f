"""The record of one process: a JSON file, replaced as a whole whenever there is more to say."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import faulthandler
import os
import sys
import time

from .data import chain_of, now, phases_in, positions, quiet, text_of, to_json, type_name
from .tail import Tail, open_high

TYPE_CHECKING = False  # as type checkers know it, without importing typing
if TYPE_CHECKING:
    from typing import Any

FOLDER_VARIABLE = "PIECEGRAPH_RECORDS"
RECORDER_PACKAGE = "_piecegraph_recorder"
"""What this folder is called where it is laid out."""
SCHEMA = 1
STACK_SIGNAL = _signal.SIGRTMAX - 5
"""Asks for the stacks of all threads. A real-time signal that nothing is known to use: SIGUSR1 stays the program's."""

PRINTED = "told"
"""The kind of an exception that was handled and printed, in the word that records of this schema have for it."""

RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "TORCHELASTIC_RESTART_COUNT"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "TP_RANK", "PP_RANK", "DP_RANK", "VLLM_DP_RANK"),
)
MAX_PRINTED, MAX_NOTED, MAX_WRITES = 8, 200, 100

enable_faulthandler = faulthandler.enable
"""As it was before anybody replaced it."""


class ProcessRecorder:
    """The record of this process."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.owns_faulthandler = not faulthandler.is_enabled()
        self.tail: Any = None
        self.begin()

    def begin(self) -> None:
        """Start the record: when the interpreter starts, and again in a forked child."""
        self.lock = _thread.RLock()
        self.num_writes = 0
        self.exit_call: Any = None
        self.name = ""
        self.path = os.path.join(self.folder, f"{os.getpid()}-{time.monotonic_ns()}")
        self.record: Any = {
            "schema": SCHEMA,
            "state": "started",
            "pid": os.getpid(),
            "ppid": os.getppid(),
            "group": os.getpgrp(),
            "start_ticks": start_ticks(),
            "host": os.uname().nodename,
            "python": sys.version.split()[0],
            "argv": arguments(),
            "started": now(),
            "ended": None,
            "code": None,
            "failures": [],
            "children": [],
            "sent": [],
        }
        self.save()
        if self.tail is not None:  # of the process that this one was forked from
            os.close(self.tail.descriptor)
        self.tail = Tail(self.path + ".tail")
        self.arm()

    def arm(self) -> None:
        """Let fatal signals, and :data:`STACK_SIGNAL`, write stacks to this process's own file."""
        descriptor = open_high(self.path + ".stack", os.O_WRONLY | os.O_APPEND)
        if self.owns_faulthandler:
            enable_faulthandler(file=descriptor)
        faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True)

    def save(self) -> None:
        """Replace the file as a whole: a reader never sees half a record."""
        self.num_writes += 1
        if self.num_writes > MAX_WRITES:
            return
        self.record["ranks"] = {name: os.environ[name] for name in RANK_VARIABLES if name in os.environ}
        self.record["rank"] = distributed_rank()
        self.record["name"] = self.name or process_name()
        if not self.lock.acquire(True, 1):
            return
        try:
            descriptor = os.open(self.path + ".tmp", os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                data = to_json(self.record).encode("ascii")
                while data:
                    data = data[os.write(descriptor, data) :]
            finally:
                os.close(descriptor)
            os.replace(self.path + ".tmp", self.path + ".json")
        finally:
            self.lock.release()

    @quiet
    def note_exception(self, kind: str, error: BaseException, thread: str = "") -> None:
        """Note an exception that ended the process or a thread, or (:data:`PRINTED`) was handled and printed."""
        innermost = (positions(error.__traceback__) or [("", 0, "", {})])[-1][:3]
        key = [type_name(error), *innermost, text_of(error)[:200]]
        failures = self.record["failures"]
        for failure in failures:
            if failure["key"] == key and failure["thread"] == thread:
                if failure["kind"] == PRINTED != kind:
                    failure["kind"] = kind
                    self.save()
                return
        chain = chain_of(error)
        entry = {"kind": kind, "thread": thread, "time": now(), "key": key, "phase": phases_in(chain), "chain": chain}
        printed = [failure for failure in failures if failure["kind"] == PRINTED]
        if len(printed) >= MAX_PRINTED:
            failures.remove(printed[0])
        failures.append(entry)
        if kind != PRINTED:
            self.num_writes = 0  # what ends a process is always written
        self.save()

    @quiet
    def note(self, what: str, entry: dict[str, object]) -> None:
        """Note a child's death or a signal that was sent."""
        if len(self.record[what]) < MAX_NOTED:
            self.record[what].append({**entry, "time": now()})
            self.save()

    @quiet
    def note_output(self, text: str) -> None:
        """Note what was printed; and which rank this is, as soon as it has become one."""
        self.tail.add(text)
        if self.record["rank"] is None and distributed_rank() is not None:
            self.save()

    @quiet
    def note_name(self, name: str) -> None:
        """Note what multiprocessing calls this process, which may be killed before it says anything else."""
        self.name = name
        self.save()

    @quiet
    def set_state(self, state: str) -> None:
        """Note that another program is about to take this process over, or that it failed to."""
        self.record["state"] = state
        self.save()

    @quiet
    def end(self, code: int | None = None) -> None:
        """Note how the process ends; the first word counts."""
        if self.record["state"] == "ended":
            return
        last = getattr(sys, "last_value", None)
        if code is None and last is not None:
            # Somebody else's excepthook did not pass the exception on.
            self.note_exception("interrupted" if isinstance(last, KeyboardInterrupt) else "exception", last)
            code = 1
        called = self.exit_call
        if called is not None and code in (None, called["code"]):
            code = called["code"]
            self.record["exit_call"] = called
        self.record.update(state="ended", code=code, ended=now())
        self.num_writes = 0  # the last word is always written
        self.save()


def start_ticks() -> int | None:
    """When the kernel started this process: with the pid, its identity."""
    try:
        with open("/proc/self/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def arguments() -> list[str]:
    """The command line of this process."""
    found: Any = getattr(sys, "orig_argv", None) or getattr(sys, "argv", None) or ()
    return [str(part)[:500] for part in found[:40]]


@quiet
def process_name() -> str:
    """What multiprocessing calls this process."""
    module = sys.modules.get("multiprocessing.process")
    name = module.current_process().name if module is not None else ""
    return "" if name == "MainProcess" else name


@quiet
def distributed_rank() -> int | None:
    """The rank torch.distributed gave this process."""
    module = sys.modules.get("torch.distributed")
    return module.get_rank() if module is not None and module.is_available() and module.is_initialized() else None
