"""The root cause of a run: the failure that came first, and inside of it the exception that did.

The other failures are often only its echoes in processes that lost a peer; the other exceptions wrap the first, and
borrow its traceback.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from piecegraph.explain.evidence import Evidence, Failure, Frame, Raised
from piecegraph.explain.frames import place_of
from piecegraph.explain.log.syntax import exception_of, frame_of

_ECHO_TYPES = re.compile(
    r"(?:ChildFailedError|ProcessRaisedException|ProcessExitedException|BrokenPipeError|ConnectionResetError"
    r"|ConnectionRefusedError|ConnectionAbortedError|EOFError|EngineDeadError|ActorDiedError|RayActorError"
    r"|WorkerCrashedError|BrokenProcessPool|CancelledError|BrokenBarrierError|DistStoreError|DistNetworkError|KeyboardInterrupt|SystemExit"
    r"|ExceptionGroup|IncompleteReadError)$"
)
_ECHO_MESSAGES = re.compile(
    r"(?i:connection (?:was )?(?:closed|reset) by (?:remote )?peer|broken pipe|socket closed|remote process exited"
    r"|failed to recv, got 0 bytes|connection was likely closed|watchdog caught collective operation timeout"
    r"|timed out (?:after \d+ ?m?s )?(?:on|in|while|waiting)|wait timeout after|collective operation timeout"
    r"|monitoredbarrier|heartbeat|peer (?:has )?(?:died|disconnected))"
    r"|ncclRemoteError|ncclSystemError|\[Rank \d+\].*[Tt]imeout|Engine core initialization failed"
    r"|EngineCore encountered an issue|WorkerProc initialization failed"
    r"|(?:[Ss]ee|check) (?:the )?(?:root cause|stack trace) above|EngineCore failed to start"
    r"|Rank \d+ scheduler died|Initialization failed\. Please see the error messages above"
)
_ENDED_BY_OTHERS = re.compile(r"^sent by (?!no recorded process)|was sent to the run$")
"""How a record says that a process was ended by its launcher, or together with the whole run."""
_WRAPPERS = re.compile(
    r"(?:BackendCompilerFailed|InductorError|LoweringException|TorchRuntimeError|RayTaskError\(.*\)|RemoteError"
    r"|ActorDiedError|UserError)$"
)
_MAX_QUOTED = 60
_ASYNC = re.compile(r"CUDA error: (?!out of memory)|cudaError|illegal memory access|device-side assert")


@dataclass(frozen=True, slots=True)
class Triage:
    """The failures of a run by the part they play."""

    root: Failure | None
    echoes: tuple[Failure, ...]
    others: tuple[Failure, ...]
    """Failures that are neither: different ways to fail, or survived ones."""
    survived: tuple[Failure, ...]
    """Those of the others after which the run went on."""
    has_only_echoes: bool


@dataclass(frozen=True, slots=True)
class ShownAs:
    """An exception that the root cause came out as."""

    type: str
    message: str
    """Its first line."""
    how: Literal["wraps", "cause", "context"]
    frame: Frame | None


@dataclass(frozen=True, slots=True)
class RootCause:
    """The first thing that went wrong in one failure."""

    type: str
    message: str
    """Its first line."""
    frame: Frame | None
    """The innermost one."""
    reached_from: Frame | None
    """The innermost one outside Python and its libraries, if that is another."""
    shown_as: tuple[ShownAs, ...] = ()
    is_asynchronous: bool = False
    """Whether the GPU reports such errors late, so that the frame may be innocent."""


def _is_echo(failure: Failure) -> bool:
    """Whether a failure says that something else failed.

    A chain that ends in an echo but begins with something else is none.
    """
    if not failure.chain:
        return False
    first = failure.chain[0]
    if failure.kind in ("killed", "interrupted") and _ENDED_BY_OTHERS.search(first.message):
        return True
    return bool(_ECHO_TYPES.search(first.type) or _ECHO_MESSAGES.search(first.message.partition("\n")[0]))


def triage(evidence: Evidence) -> Triage:
    """The root is the first failure that is no echo and after which the run made no further progress."""
    serious = [failure for failure in evidence.failures if failure.kind != "ignored"]
    ignored = [failure for failure in evidence.failures if failure.kind == "ignored"]
    echoes = [failure for failure in serious if _is_echo(failure)]
    candidates = [failure for failure in serious if not _is_echo(failure)]
    if not serious:
        return Triage(None, (), tuple(ignored), tuple(ignored), False)
    progress = max((milestone.line for milestone in evidence.milestones if milestone.line is not None), default=0)
    late = [failure for failure in candidates if failure.line is None or failure.line > progress]
    survived = [failure for failure in candidates if failure not in late] if late else []
    pool = late or candidates or echoes
    root = pool[0]
    return Triage(
        root,
        tuple(failure for failure in echoes if failure is not root),
        tuple(failure for failure in (*candidates, *ignored) if failure is not root),
        (*survived, *ignored),
        not candidates,
    )


def find_root_cause(failure: Failure) -> RootCause:
    """The root cause of a failure that has at least one exception.

    >>> boom = Raised(type="ValueError", message="boom", frames=(Frame("a.py", 3, "f"),))
    >>> find_root_cause(Failure(chain=(boom,))).message
    'boom'
    """
    first = failure.chain[0]
    inner = _wrapped(first)
    origin = inner or first
    shown = [ShownAs(first.type, _first_line(first.message), "wraps", None)] if inner else []
    for raised in failure.chain[1:]:
        how: Literal["cause", "context"] = "cause" if raised.link == "cause" else "context"
        shown.append(ShownAs(raised.type, _first_line(raised.message), how, _innermost(raised.frames)))
    frame = _innermost(origin.frames)
    reached = next((f for f in reversed(origin.frames) if place_of(f.file).owner in ("user", "engine")), None)
    return RootCause(
        origin.type,
        _first_line(origin.message),
        frame,
        reached if reached != frame else None,
        tuple(shown),
        bool(_ASYNC.search(origin.message)) and "NotSupported" not in origin.message,
    )


def _wrapped(raised: Raised) -> Raised | None:
    """The exception that another one quotes in its text, with the frames it quotes or has borrowed."""
    lines = raised.message.split("\n")[:_MAX_QUOTED]
    if "ray::" in lines[0]:
        return _remote(lines)
    innermost_source = raised.frames[-1].source if raised.frames else ""
    for line in lines[1:4]:
        inner = exception_of(line)
        if inner is None or not inner[1]:
            continue
        name = inner[0].rsplit(".", 1)[-1]
        if innermost_source.startswith(("raise " + name, "raise " + inner[0])) or _WRAPPERS.search(raised.type):
            return Raised(type=inner[0], message=inner[1], frames=raised.frames)
    return None


def _first_line(message: str) -> str:
    """The first line that says something."""
    return next((line.strip() for line in message.split("\n") if line.strip()), "")


def _innermost(frames: tuple[Frame, ...]) -> Frame | None:
    """The frame in which it was raised."""
    return frames[-1] if frames else None


def _remote(lines: list[str]) -> Raised | None:
    """Ray quotes the worker's frames and exception below its own."""
    frames = []
    for line, below in zip(lines[1:], [*lines[2:], ""], strict=False):
        found = frame_of(line)
        if found is not None:
            source = "" if frame_of(below) else below.strip()
            frames.append(Frame(*found, source))
    last = next(filter(None, map(exception_of, reversed(lines[1:]))), None)
    return Raised(type=last[0], message=last[1], frames=tuple(frames)) if last else None
