"""What really went wrong inside a failure: exceptions wrap others, and borrow their tracebacks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from piecegraph.explain.evidence import Failure, Frame, Raised
from piecegraph.explain.log.parts import exception_of
from piecegraph.explain.log.torn import FRAME
from piecegraph.explain.ownership import place_of

_WRAPPERS = re.compile(
    r"(?:BackendCompilerFailed|InductorError|LoweringException|TorchRuntimeError|RayTaskError\(.*\)|RemoteError"
    r"|ActorDiedError|UserError)$"
)
_MAX_QUOTED = 60
_ASYNC = re.compile(r"CUDA error: (?!out of memory)|cudaError|illegal memory access|device-side assert")


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


def find_root_cause(failure: Failure) -> RootCause:
    """The root cause of a failure that has at least one exception.

    >>> boom = Raised(type="ValueError", message="boom", frames=(Frame("a.py", 3, "f"),))
    >>> find_root_cause(Failure(chain=(boom,))).message
    'boom'
    """
    first = failure.chain[0]
    inner = wrapped(first)
    origin = inner or first
    shown = [ShownAs(first.type, first_line(first.message), "wraps", None)] if inner else []
    for raised in failure.chain[1:]:
        how: Literal["cause", "context"] = "cause" if raised.link == "cause" else "context"
        shown.append(ShownAs(raised.type, first_line(raised.message), how, innermost(raised.frames)))
    frame = innermost(origin.frames)
    reached = next((f for f in reversed(origin.frames) if place_of(f.file).owner in ("user", "engine")), None)
    return RootCause(
        origin.type,
        first_line(origin.message),
        frame,
        reached if reached != frame else None,
        tuple(shown),
        bool(_ASYNC.search(origin.message)) and "NotSupported" not in origin.message,
    )


def wrapped(raised: Raised) -> Raised | None:
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


def first_line(message: str) -> str:
    """The first line that says something."""
    return next((line.strip() for line in message.split("\n") if line.strip()), "")


def innermost(frames: tuple[Frame, ...]) -> Frame | None:
    """The frame in which it was raised."""
    return frames[-1] if frames else None


def _remote(lines: list[str]) -> Raised | None:
    """Ray quotes the worker's frames and exception below its own."""
    frames = []
    for line, below in zip(lines[1:], [*lines[2:], ""], strict=False):
        found = FRAME.match(line)
        if found is not None:
            source = "" if FRAME.match(below) else below.strip()
            frames.append(Frame(found["file"], int(found["line"]), found["function"] or "", source))
    last = next(filter(None, map(exception_of, reversed(lines[1:]))), None)
    return Raised(type=last[0], message=last[1], frames=tuple(frames)) if last else None
