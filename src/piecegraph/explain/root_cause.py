"""The root cause of a run: the failure that came first, and inside of it the exception that did.

The other failures are often only its echoes in processes that lost a peer; the other exceptions wrap the first, and
borrow its traceback.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from piecegraph.explain.echoes import echo_of, has_lost_a_peer, tells_death
from piecegraph.explain.evidence import Evidence, Failure, Frame, Raised
from piecegraph.explain.frames import place_of
from piecegraph.explain.log.clock import are_comparable
from piecegraph.explain.log.syntax import COMMAND_END, exception_of, frame_of
from piecegraph.explain.stops import is_by_scheduler, is_interrupt, says_of, was_asked_to_end

_AFTERMATH = (signal.SIGTERM, signal.SIGABRT, signal.SIGINT, signal.SIGHUP)
"""Signals that follow from a failure: an abort in the same process, the end of its peers."""
_WENT_ON_LINES = 3
_MIN_QUOTE = 16
_WRAPPERS = re.compile(
    r"(?:BackendCompilerFailed|InductorError|LoweringException|TorchRuntimeError|RayTaskError\(.*\)|RemoteError"
    r"|ActorDiedError|UserError)$"
)
_MAX_QUOTED = 60
_MAX_DETAILS = 4
_MAX_DETAIL = 220
_LONG_MESSAGE = 8
_SAYS_NOTHING = re.compile(r"^(?:at \d+:\d+|Graph execution error):\s*$")
"""The first line of what Triton's compiler and TensorFlow's graphs raise."""
_HELD = re.compile(r"\bProcess (\d+) has ([\d.]+ [KMG]iB) memory in use")
_FIELDS = re.compile(r"\bvalidation errors? for\b")
_ERROR_INSIDE = re.compile(r"\b(?:fatal )?error(?: [A-Z]{1,3}\d+)?: ")
_COMMAND_FAILED = re.compile(r"(?:^|\.)CalledProcessError$")
"""It says that a command failed; what the command said is quoted further on, if anywhere."""
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
    """Whether the root itself says that something else failed."""
    is_stopped: bool = False
    """Whether the run was asked to end, and nothing had failed before."""


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
    """The innermost one outside Python and its libraries, if that is another; else of another library."""
    shown_as: tuple[ShownAs, ...] = ()
    is_asynchronous: bool = False
    """Whether the GPU reports such errors late, so that the frame may be innocent."""
    details: tuple[str, ...] = ()
    """Further lines of the message that say more."""
    user_code: Frame | None = None
    """The innermost line that Dynamo quotes as the user's."""


def triage(evidence: Evidence) -> Triage:
    """The root is the first failure that is no echo and after which the run made no further progress."""
    failures = in_order_of_time(evidence.failures)
    unserious = _lived_with(failures, evidence)
    serious = [failure for failure in failures if failure not in unserious]
    candidates = [failure for failure in serious if not echo_of(failure)]
    candidates = candidates or [failure for failure in serious if echo_of(failure) == "maybe"]
    echoes = [failure for failure in serious if failure not in candidates]
    lost = [failure for failure in candidates if has_lost_a_peer(failure)]
    if len(lost) < len(candidates):
        echoes, candidates = [*echoes, *lost], [failure for failure in candidates if failure not in lost]
    passed_on = [failure for failure in candidates if any(_passes_on(failure, other) for other in candidates)]
    if any(map(_is_death, candidates)):
        passed_on += [failure for failure in candidates if failure.death is None and tells_death(failure)]
    echoes += passed_on
    candidates = [failure for failure in candidates if failure not in passed_on]
    interrupts = [failure for failure in candidates if is_interrupt(failure)]
    candidates = [failure for failure in candidates if failure not in interrupts]
    is_asked = bool(serious) and was_asked_to_end(evidence, interrupts, candidates or echoes)
    if is_asked or (interrupts and not candidates):
        return _stopped(interrupts, serious, unserious)
    echoes += interrupts
    consequences = _deaths_behind(candidates, serious)
    candidates = [failure for failure in candidates if failure not in consequences]
    echoes += consequences
    late = [failure for failure in candidates if failure.line is None or failure.line > _progress(failure, evidence)]
    survived = [failure for failure in candidates if failure not in late] if late else []
    root = next(iter(late or candidates or echoes), None)
    # Another process's output may come late: what is printed again at the end was not survived.
    again = [failure for failure in survived if root is not None and _is_alike(failure, root)]
    candidates, survived = ([f for f in failures if f not in again] for failures in (candidates, survived))
    echoes += again
    return Triage(
        root,
        tuple(failure for failure in echoes if failure is not root),
        tuple(failure for failure in (*candidates, *unserious) if failure is not root),
        (*survived, *unserious),
        root is not None and not candidates,
    )


def in_order_of_time(failures: Sequence[Failure]) -> tuple[Failure, ...]:
    """Those of which the log tells the time in its order; the others stay where they are."""
    timed = [failure for failure in failures if failure.clock_s is not None]
    if not are_comparable(failure.clock_s for failure in timed):
        return tuple(failures)
    ordered = iter(sorted(timed, key=lambda failure: failure.clock_s or 0))
    return tuple(failure if failure.clock_s is None else next(ordered) for failure in failures)


def notice_of(found: Triage) -> Failure | None:
    """The failure in which another process noticed the death that is the root cause."""
    if found.root is None or (found.root.death is None and not _is_death(found.root)):
        return None
    return next((failure for failure in found.echoes if tells_death(failure)), None)


def _progress(failure: Failure, evidence: Evidence) -> int:
    """The line up to which the run had come, as far as it says something about the process that failed."""
    num_logs = len(evidence.sources)
    marks = (mark for mark in (*evidence.milestones, *evidence.progress) if says_of(mark.process, failure, num_logs))
    return max((mark.line for mark in marks if mark.line is not None), default=0)


def _lived_with(failures: Sequence[Failure], evidence: Evidence) -> list[Failure]:
    """Those after which the run went on, unless something ended it that nothing else explains."""
    found = [failure for failure in failures if _is_lived_with(failure, evidence)]
    rest = [failure for failure in failures if failure not in found]
    has_ended = bool(rest) or any(ended.code for ended in evidence.exits)
    if has_ended and all(echo_of(failure) == "sure" for failure in rest):
        # What followed may be of other ranks, or of the main thread on its way down.
        return [failure for failure in found if not failure.went_on and failure.kind != "thread"]
    return found


def _is_lived_with(failure: Failure, evidence: Evidence) -> bool:
    """Whether the process went on: Python or its usual output says so, or a side thread printed it and more came."""
    if failure.kind == "ignored" or failure.went_on:
        return True
    last = evidence.last_line[1] if evidence.last_line is not None else None
    went_on = last is not None and failure.line is not None and last - failure.line >= _WENT_ON_LINES
    return failure.kind in ("logged", "thread") and went_on


def _passes_on(failure: Failure, other: Failure) -> bool:
    """Whether a failure quotes another one's message in its own, as servers and launchers do."""
    if failure is other or not failure.chain or not other.chain:
        return False
    cause = other.chain[0]
    words = _first_line(cause.message)
    told = [raised.message for raised in failure.chain]
    if len(words) < _MIN_QUOTE or any(words == _first_line(raised.message) for raised in failure.chain):
        return False
    return any(words in text for text in told)


def _is_death(failure: Failure) -> bool:
    """Whether a process was ended by a signal, as a line or its own last words tell."""
    return failure.kind == "signal" if failure.death is None else failure.death.signal is not None


def _is_alike(failure: Failure, other: Failure) -> bool:
    """Whether both began with the same exception."""
    firsts = [(f.chain[0].type, _first_line(f.chain[0].message)) for f in (failure, other) if f.chain]
    return len(firsts) == 2 and firsts[0] == firsts[1]


def _stopped(interrupts: list[Failure], serious: list[Failure], unserious: list[Failure]) -> Triage:
    root = next(iter(interrupts), None)
    others = tuple(failure for failure in (*serious, *unserious) if failure is not root)
    return Triage(root, (), others, others, False, is_stopped=True)


def _deaths_behind(candidates: list[Failure], serious: list[Failure]) -> list[Failure]:
    """Deaths that another failure explains: an abort behind it, a launcher that ends the others, news of a death."""
    has_scheduler = any(is_by_scheduler(failure) and failure.kind != "interrupted" for failure in candidates)
    has_signal = any(f.death is not None and f.death.signal not in (None, *_AFTERMATH) for f in candidates)
    is_for_memory = any(f.death is not None and f.death.name == "OUT_OF_MEMORY" for f in candidates)
    found, is_explained, has_died = [], False, False
    for failure in serious:
        death = failure.death
        if death is None:
            is_explained = True
        elif failure in candidates and (
            (death.signal in _AFTERMATH and (is_explained or has_scheduler))
            or (death.signal == signal.SIGKILL and is_for_memory)
            or (death.name == "CANCELLED" and (is_explained or has_died))
            or (death.name == "process died" and (is_explained or has_signal))
            or (death.name.startswith("0x") and is_explained)
        ):
            found.append(failure)
        else:
            has_died = True
    return found


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
    reached = _reached_from(origin.frames, failure.chain[1:])
    return RootCause(
        origin.type,
        _first_line(origin.message),
        frame,
        reached if reached != frame else None,
        tuple(shown),
        bool(_ASYNC.search(origin.message)) and "NotSupported" not in origin.message,
        (*_held_by_others(origin.message), *(_details(origin.message) or _quoted_errors(origin, failure))),
        next(filter(None, (_user_code(raised.message) for raised in failure.chain)), None),
    )


def _reached_from(frames: tuple[Frame, ...], later: Sequence[Raised]) -> Frame | None:
    """The innermost frame that is the user's or an engine's; without one, the innermost of another library.

    The exceptions raised later have the callers that an exception caught on the way had not come to yet.
    """
    for chain in (frames, *(raised.frames for raised in later)):
        own = next((frame for frame in reversed(chain) if place_of(frame.file).owner in ("user", "engine")), None)
        if own is not None or not frames:
            return own
    innermost = place_of(frames[-1].file).package
    others = (frame for frame in reversed(frames) if place_of(frame.file).package not in (innermost, "python"))
    return next(others, None)


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
    """The first line that says something: rules are drawn around tables."""
    return next((line.strip() for line in message.split("\n") if line.strip(" =-*#")), "")


def _details(message: str) -> tuple[str, ...]:
    """The lines indented right below the first, as pydantic has them; of a long text the first that names an error."""
    first, *lines = message.split("\n")[:_MAX_QUOTED]
    found: list[str] = []
    for line in lines:
        is_field = _FIELDS.search(first) is not None and line.strip()  # pydantic names the field in a line of its own
        if not (line.startswith((" ", "\t")) or is_field) or frame_of(line) or len(found) == _MAX_DETAILS:
            break
        found.append(line.strip()[:_MAX_DETAIL])
    if _SAYS_NOTHING.match(first):
        found += _told_at_the_end(lines)
    if "Last error:" in lines:  # NCCL's
        found += lines[lines.index("Last error:") + 1 :][:1]
    found += [line.strip() for line in lines if COMMAND_END.search(line)][:1]
    if not found and len(lines) >= _LONG_MESSAGE:
        found = [line.strip()[:_MAX_DETAIL] for line in lines if _ERROR_INSIDE.search(line)][:2]
    return tuple(line for line in found if line and line not in first)


def _told_at_the_end(lines: list[str]) -> list[str]:
    """What stands behind the source that Triton quotes up to its carets, and behind TensorFlow's list of frames."""
    carets = [at for at, line in enumerate(lines) if line.strip() == "^"]
    told = [
        line for line in lines[carets[-1] + 1 if carets else 0 :] if line.strip() and not line.startswith((" ", "\t"))
    ]
    return [line[:_MAX_DETAIL] for line in told[-1:]]


def _held_by_others(message: str) -> tuple[str, ...]:
    """The other processes that torch names where the memory of a GPU is used up: they may be the whole reason."""
    found = dict.fromkeys(_HELD.findall(message))
    return tuple(f"process {number} held {size} of this GPU" for number, size in found)[:_MAX_DETAILS]


def _quoted_errors(origin: Raised, failure: Failure) -> tuple[str, ...]:
    """What a command that failed had said, as an exception raised for it quotes it."""
    if not _COMMAND_FAILED.search(origin.type):
        return ()
    lines = [line for raised in failure.chain[1:] for line in raised.message.split("\n")[:_MAX_QUOTED]]
    return tuple(line.strip()[:_MAX_DETAIL] for line in lines if _ERROR_INSIDE.search(line))[:2]


def _user_code(message: str) -> Frame | None:
    quoted = message.partition("from user code:")[2].strip("\n").split("\n\n")[0].split("\n")
    found = [(frame_of(line), below) for line, below in zip(quoted, [*quoted[1:], ""], strict=True)]
    return next((Frame(*frame, below.strip()) for frame, below in reversed(found) if frame is not None), None)


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
