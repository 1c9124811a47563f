"""The nouns of a failing run. A log and a folder of records both end in one :class:`Evidence`, from which the page is
written.

The one invariant: nothing is claimed that the source does not prove. What is unknown is ``None`` or empty, and what
was put together again from interleaved pieces says so in :attr:`Failure.certainty`.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

Phase = Literal["init", "load", "kv cache", "compile", "capture", "serve"]
PHASES: tuple[Phase, ...] = ("init", "load", "kv cache", "compile", "capture", "serve")
"""In the order in which a healthy start passes them."""

Certainty = Literal["recorded", "printed", "unwoven", "reconstructed"]
FailureKind = Literal["exception", "thread", "signal", "killed", "interrupted", "ignored", "logged"]
Teller = Literal["process", "shell", "kernel", "launcher", "scheduler", "parent"]


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a call stack."""

    file: str
    line: int
    function: str
    source: str = ""
    """The text of the line; empty where the source does not give it. Never used to tell frames apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """One exception with the stack it was raised through."""

    type: str
    """As printed: ``torch.OutOfMemoryError``."""
    message: str
    frames: tuple[Frame, ...]
    """Outermost first."""
    link: Literal["", "cause", "context"] = ""
    """How this exception follows the one before it in the chain; empty for the first."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Process:
    """As much of a process's identity as is proven."""

    label: str = ""
    """As the source names it: ``rank3``, ``Worker_TP0``, ``Process-4``."""
    rank: int | None = None
    pid: int | None = None
    host: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The end of a process, or of a whole job, that a line of the log tells; the process itself could raise nothing."""

    name: str
    """``SIGKILL``; where no signal is named, the scheduler's word for the state of the job (``TIMEOUT``)."""
    teller: Teller
    text: str
    """The line that tells it."""
    signal: int | None = None
    code: int | None = None
    """The exit code as printed, where there is one."""
    process: Process = Process()
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One way in which one or more processes failed."""

    chain: tuple[Raised, ...]
    """In the order in which they were raised; the last is what the process died of. Empty for a fatal signal alone."""
    kind: FailureKind = "exception"
    """``ignored``: printed by Python itself, which went on (an exception in ``__del__``, in logging).
    ``logged``: printed by a logger, as something less than an error."""
    count: int = 1
    """How often it was printed; how many processes had it, if it is recorded."""
    num_writers: int = 1
    """How many processes are known to have printed it: named apart, or at the same time."""
    num_unnamed: int = 0
    """How many of the prints carry no name."""
    processes: tuple[Process, ...] = ()
    """Those that are known."""
    certainty: Certainty = "printed"
    line: int | None = None
    """The line of the log at which the first of them was complete; None for a record."""
    last_line: int | None = None
    """The same of the last of them."""
    is_caught: bool = False
    """Whether every print begins where the exception was caught, and not at the start of a program."""
    went_on: bool = False
    """Whether it was caught and the run printed what it had printed before."""
    time_ns: int | None = None
    clock_s: int | None = None
    """When the first of them was printed, in seconds since the year began, as times in the log say."""
    death: Death | None = None
    """Set if a line tells it, and not an exception."""
    last_lines: tuple[str, ...] = ()
    """What the first of them printed last, where it left no exception."""


@dataclass(frozen=True, slots=True)
class Milestone:
    """Something a process said it had begun, finished or failed at."""

    phase: Phase
    state: Literal["begun", "done", "failed"]
    text: str
    line: int | None = None
    size: str = ""
    """The size being captured or compiled, as printed: ``bs=1``."""
    process: Process = Process()
    """Who says it, as far as a prefix proves it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a launcher says that one of its processes ended."""

    process: Process
    code: int
    """As printed; a negative one is the number of a signal."""
    is_first: bool = False
    """Whether the launcher observed it before the others."""
    line: int | None = None


@dataclass(frozen=True, slots=True)
class LinesAbove:
    """The last lines that say something above the one that tells of an end, whoever printed them."""

    line: int
    """Of the one that tells of it."""
    lines: tuple[tuple[str, int | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A line that says that the run, or a process of it, was asked to end."""

    text: str
    line: int | None
    process: Process = Process()
    """Who says it, as far as a prefix proves it."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One operation of all ranks of a process group, as one of them entered it."""

    op: str
    """As torch names it: ``ALLREDUCE``."""
    number: int | None
    """Which of the group's operations it is; every rank counts them alike. None where the log does not say."""
    num_in: int | None = None
    num_out: int | None = None
    """Elements of this rank's input and output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """What the watchdog of one rank says of a process group."""

    group: str
    """The name that is the same on all ranks of the group; empty where the log does not say."""
    rank: int
    """In the group."""
    world_rank: int | None
    """In the job, as a prefix proves it."""
    waited: Collective | None = None
    """The operation that took too long."""
    waited_ms: int | None = None
    num_enqueued: int | None = None
    """The last operation that the rank had entered; -1 if none."""
    num_completed: int | None = None
    line: int | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class TreeLine:
    """One line of the stacks of several processes laid on top of each other."""

    depth: int
    count: int
    """How many processes came through here."""
    frame: Frame | None
    text: str = ""
    """The exception that ended it there; empty for a frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything a log, or a folder of records, proves about a run."""

    sources: tuple[str, ...]
    num_lines: int = 0
    first_line: int = 1
    """Where the run begins in a log that holds several."""
    may_go_on: bool = False
    """Whether it may be a part of the run before it, of which a late process printed the first line again."""
    processes: tuple[Process, ...] = ()
    """Every process seen, failing or not."""
    failures: tuple[Failure, ...] = ()
    """In the order in which they were complete."""
    milestones: tuple[Milestone, ...] = ()
    progress: tuple[Milestone, ...] = ()
    """Of each process the last."""
    suggestions: tuple[tuple[str, int | None], ...] = ()
    """What the framework itself advised, with the line it stands at."""
    memory_signs: tuple[tuple[str, int | None], ...] = ()
    """Lines that speak of memory running out."""
    artefacts: tuple[str, ...] = ()
    """Files the source names: dumps, logs, reproducers."""
    num_call_chains: int = 0
    """Stacks that belong to no exception."""
    num_cut_off: int = 0
    """Those of them that are tracebacks whose exception is missing."""
    call_chains: tuple[tuple[Frame, ...], ...] = ()
    """The first few of them, outermost frame first."""
    exits: tuple[Exit, ...] = ()
    free_memory: tuple[str, int | None] | None = None
    """The last statement about free device memory: ``12.33 GB``."""
    stops: tuple[Stop, ...] = ()
    """Of each process the first that it says."""
    device_asserts: tuple[tuple[str, int | None], ...] = ()
    """Checks that failed inside kernels, each once."""
    xids: tuple[tuple[str, int | None], ...] = ()
    """What the driver reported of a GPU."""
    error_lines: tuple[tuple[str, int | None], ...] = ()
    """The first lines logged as errors outside of any traceback."""
    above: tuple[LinesAbove, ...] = ()
    """What stands above the lines that tell of deaths and exit codes."""
    group_states: tuple[GroupState, ...] = ()
    """What the ranks said of their process groups when a collective took too long."""
    world_size: int | None = None
    """How many ranks the job had, as it said itself."""
    known_issue_lines: tuple[tuple[str, int | None], ...] = ()
    """Lines outside of any traceback by which a known issue is recognised."""
    last_line: tuple[str, int | None] | None = None
    tree: tuple[TreeLine, ...] = ()
    """Set when stacks had to be reconstructed: an ordering of the frames that explains the log, not the only one."""
    notes: tuple[str, ...] = ()
    """What limits the evidence: a file that ends early, failures that were counted and not kept."""


def signal_name(number: int) -> str:
    """A signal as people call it.

    >>> signal_name(9), signal_name(99)
    ('SIGKILL', 'signal 99')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
