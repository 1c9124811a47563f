"""Deaths that no Python exception tells of: faulthandler's dumps (most recent call first) and C++ exceptions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from piecegraph.explain.evidence import Failure, Frame, Process, Raised
from piecegraph.explain.log.lines import Line
from piecegraph.explain.log.torn import FRAME

_FATAL = re.compile(r"^(?:Fatal Python error|Windows fatal exception): (?P<reason>.+)$")
_THREAD = re.compile(r"^(?:(?P<which>Current thread|Thread) 0x[0-9a-fA-F]+.*|Stack) \(most recent call first\):\s*$")
_TERMINATE = re.compile(r"terminate called after throwing an instance of '(?P<type>[^']+)'")
_WHAT = re.compile(r"^\s*what\(\):\s+(?P<message>.*)$")
_WORDS = ("atal ", "(most recent call first)", "terminate called")
_REACH = 4
"""How many lines below "terminate called" its message may stand."""


@dataclass(frozen=True, slots=True)
class Deaths:
    """What was found, and the lines that remain."""

    failures: tuple[Failure, ...]
    call_chains: tuple[tuple[Frame, ...], ...]
    """Dumps of threads that did not die, such as a watchdog's."""
    rest: tuple[Line, ...]


def take_deaths(lines: Sequence[Line], process: Process) -> Deaths:
    """Take the dumps out of a stream."""
    if not any(word in line.text for line in lines for word in _WORDS):
        return Deaths((), (), tuple(lines))
    failures: list[Failure] = []
    chains: list[tuple[Frame, ...]] = []
    rest: list[Line] = []
    reason, at = "", 0
    while at < len(lines):
        line = lines[at]
        fatal, thread, terminate = (pattern.search(line.text) for pattern in (_FATAL, _THREAD, _TERMINATE))
        at += 1
        if fatal is not None:
            if reason:
                failures.append(_death("Fatal Python error", reason, (), process, line.number))
            reason = fatal["reason"].strip()
        elif thread is not None:
            frames, at = _frames_below(lines, at)
            if reason and thread["which"] == "Current thread":
                failures.append(_death("Fatal Python error", reason, frames, process, lines[at - 1].number))
                reason = ""
            elif frames:
                chains.append(frames)
        elif terminate is not None:
            failures.append(_death(terminate["type"], _what(lines, at), (), process, line.number))
        else:
            rest.append(line)
    if reason:
        failures.append(_death("Fatal Python error", reason, (), process, lines[-1].number))
    return Deaths(tuple(failures), tuple(chains), tuple(rest))


def _frames_below(lines: Sequence[Line], at: int) -> tuple[tuple[Frame, ...], int]:
    frames = []
    while at < len(lines):
        found = FRAME.match(lines[at].text)
        if found is None:
            break
        frames.append(Frame(found["file"], int(found["line"]), found["function"] or ""))
        at += 1
    return tuple(reversed(frames)), at


def _what(lines: Sequence[Line], at: int) -> str:
    for line in lines[at : at + _REACH]:
        found = _WHAT.match(line.text)
        if found is not None:
            return found["message"]
    return ""


def _death(name: str, message: str, frames: tuple[Frame, ...], process: Process, line: int) -> Failure:
    known = (process,) if process.label else ()
    return Failure(
        chain=(Raised(type=name, message=message, frames=frames),), kind="signal", processes=known, line=line
    )
