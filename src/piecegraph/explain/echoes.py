"""Which failures are echoes: they say that something else failed, in a process that lost a peer or was told so.

Note [Echoes that may be causes]: a connection that is lost or refused and a wait that ends are echoes where processes
of one run talk to each other, and a cause where a program talks to a server, a disk or a lock. The words are the same;
the frames, and what else the message names, tell. Where they do not, it is an echo as long as anything else explains
the run.
"""

from __future__ import annotations

import re
from typing import Literal

from piecegraph.explain.evidence import Failure, Frame, Raised
from piecegraph.explain.frames import place_of

Echo = Literal["", "maybe", "sure"]

_SURE_TYPES = re.compile(
    r"(?:ChildFailedError|ProcessRaisedException|ProcessExitedException|EngineDeadError|ActorDiedError|RayActorError"
    r"|WorkerCrashedError|BrokenProcessPool|CancelledError|BrokenBarrierError|DistStoreError|SystemExit"
    r"|ExceptionGroup|CellExecutionError|PapermillExecutionError|ContextTerminated|RayChannel(?:Timeout)?Error"
    r"|NodeDiedError|ActorUnavailableError|OwnerDiedError|LocalRayletDiedError)$"
)
_MAYBE_TYPES = re.compile(r"(?:DistNetworkError|Rendezvous\w*Error)$")
_OWN_FAULTS = re.compile(
    r"EADDRINUSE|(?i:address already in use|name or service not known|no address associated|getaddrinfo)"
    r"|(?i:temporary failure in name resolution|no space left on device|too many open files)"
)
"""What the machine of this very process refuses, whatever the exception is called."""
_PROGRAMMING = re.compile(
    r"(?:ValueError|TypeError|KeyError|IndexError|AttributeError|NameError|AssertionError|ImportError|SyntaxError"
    r"|ModuleNotFoundError|ValidationError|NotImplementedError|ArgumentError)$"
)
"""Raised for what a setting or a program is; their messages may name anything."""
_LOST_PEERS = re.compile(
    r"(?:BrokenPipeError|ConnectionResetError|ConnectionRefusedError|ConnectionAbortedError|EOFError|IncompleteReadError)$"
)
_PEER_FRAMES = re.compile(
    r"multiprocessing[/\\](?!process\.|spawn\.|popen)|torch[/\\]distributed[/\\](?!elastic|run\.|launch)"
    r"|[/\\]ray[/\\]|[/\\]zmq[/\\]|mpi4py"
)
_LOOP_FRAMES = re.compile(r"asyncio|uvloop")
_SERVERS = frozenset(
    ("urllib3", "requests", "httpx", "httpcore", "aiohttp", "huggingface_hub", "botocore", "boto3", "s3fs", "fsspec",
     "gcsfs", "redis", "pymongo", "psycopg", "psycopg2", "sqlalchemy", "asyncpg", "pymysql", "kafka", "paramiko",
     "wandb", "mlflow", "openai", "anthropic", "filelock", "websockets"),
)  # fmt: skip
"""Packages that talk to servers, disks and locks."""
_SERVER_FRAMES = re.compile(r"[/\\](?:http|urllib)[/\\]|[/\\](?:ssl|smtplib|ftplib)\.py$")
"""Python's own that do."""
_SURE_MESSAGES = re.compile(
    r"(?i:remote process exited|failed to recv, got 0 bytes|watchdog caught collective operation timeout"
    r"|wait timeout after|collective operation timeout|monitoredbarrier|peer (?:has )?(?:died|disconnected))"
    r"|(?i:communicator was aborted|application timeout caused pair closure|stop_waiting response is expected)"
    r"|store->get\(.*\) got error|^Socket Timeout$|^cancelled$|RPC call to \w+ timed out|Barrier timed out"
    r"|ncclRemoteError|\[Rank \d+\].*[Tt]imeout|Engine core initialization failed"
    r"|EngineCore encountered an issue|WorkerProc initialization failed"
    r"|(?:[Ss]ee|check) (?:the )?(?:root cause|stack trace) above|EngineCore failed to start"
    r"|Rank \d+ scheduler died|Initialization failed\. Please see the error messages above"
    r"|Engine process failed to start"
    r"|[Ee]ngine loop is not running|Background loop (?:has errored|is not running|is stopped)"
    r"|Executor worker (?:died|returned error)"
    r"|[Ss]ee (?:the )?(?:stack ?trace|errors?|logs?) (?:\(above\)|above|for the root cause|to find the original error)"
    r"|^Command .*(?:python|torchrun|accelerate).* returned non-zero exit status|[Cc]heck server logs for errors"
)
_MAYBE_MESSAGES = re.compile(
    r"(?i:connection (?:was )?(?:closed|reset) by (?:remote )?peer|broken pipe|socket closed"
    r"|connection was likely closed|timed out (?:after \d+ ?m?s )?(?:on|in|while|waiting)|heartbeat)|ncclSystemError"
)
_AMONG_RANKS = re.compile(
    r"NCCL|nccl|[Gg]loo|ProcessGroup|TCPStore|c10d|MPI|\b[Rr]anks? ?\d|[Cc]ollective|[Ww]orker|EngineCore|[Ss]cheduler"
    r"|\[[\d.a-f:]+\]:\d+"
)
_TOLD_DEATH = re.compile(
    r"(?:terminated|killed|died) (?:with|by) (?:signal:? |<Signals\.)|exited with code -\d"
    r"|Failed core proc\(s\): \{.*: -\d"
)
_ENDED_BY_OTHERS = re.compile(r"^sent by (?!no recorded process)|^sent to the run by ")
"""How a record says that a process was ended by its launcher, or together with the whole run."""


def echo_of(failure: Failure) -> Echo:
    """Whether a failure says that something else failed: see Note [Echoes that may be causes].

    A chain that ends in an echo but begins with something else is none.

    >>> lost = Raised(type="RuntimeError", message="[gloo] Connection closed by peer", frames=())
    >>> echo_of(Failure(chain=(lost,)))
    'sure'
    """
    if not failure.chain:
        return ""
    first = failure.chain[0]
    if failure.kind in ("killed", "interrupted") and _ENDED_BY_OTHERS.search(first.message):
        return "sure"
    if tells_death(failure):
        return ""  # nothing else may tell of this death
    said = first.message.partition("\n")[0]
    if _OWN_FAULTS.search(said):
        return ""
    if _SURE_TYPES.search(first.type) or _SURE_MESSAGES.search(said):
        return "sure"
    if _MAYBE_TYPES.search(first.type):
        return "maybe"
    if _LOST_PEERS.search(first.type):
        return _among_frames(first.frames)
    return _of_wait(first, said) if _MAYBE_MESSAGES.search(said) else ""


def has_lost_a_peer(failure: Failure) -> bool:
    """Whether it was raised for a peer, or for a file, that ended early: the frames do not tell."""
    if not failure.chain or not _LOST_PEERS.search(failure.chain[0].type):
        return False
    return not _talks_to_a_server(_called(failure.chain[0].frames))


def tells_death(failure: Failure) -> bool:
    """Whether an exception tells of another process's death by a signal."""
    return bool(failure.chain) and _TOLD_DEATH.search(failure.chain[0].message) is not None


def _of_wait(first: Raised, said: str) -> Echo:
    """A message about a connection or a wait, of an exception that says nothing by its type."""
    if _PROGRAMMING.search(first.type):
        return ""
    found = _among_frames(first.frames)
    if _AMONG_RANKS.search(said):
        return "sure"
    return found if first.frames else "maybe"


def _among_frames(frames: tuple[Frame, ...]) -> Echo:
    """What the frames say that the user's own code had called last."""
    called = _called(frames)
    if _talks_to_a_server(called):
        return ""
    if any(_PEER_FRAMES.search(frame.file) for frame in called):
        return "sure"
    return "maybe" if any(_LOOP_FRAMES.search(frame.file) for frame in called) else ""


def _called(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The frames inside of the user's innermost."""
    own = max((at for at, frame in enumerate(frames) if place_of(frame.file).owner == "user"), default=-1)
    return frames[own + 1 :]


def _talks_to_a_server(called: tuple[Frame, ...]) -> bool:
    return any(place_of(frame.file).package in _SERVERS or _SERVER_FRAMES.search(frame.file) for frame in called)
