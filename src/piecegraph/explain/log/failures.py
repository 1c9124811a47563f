"""One stream's lines in, its failures out: crashes first, then the tracebacks.

Tracebacks are read in order where they stand in order. Where they are interleaved they are unwoven, if all processes
printed the same, or else reconstructed.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from piecegraph.explain.evidence import Certainty, Failure, FailureKind, Frame, Process, Raised, TreeLine
from piecegraph.explain.log.dialects import translate
from piecegraph.explain.log.lines import Line
from piecegraph.explain.log.parts import StreamParts, TracebackPart, split_parts
from piecegraph.explain.log.reconstruct import RaisedChain, reconstruct
from piecegraph.explain.log.syntax import frame_of
from piecegraph.explain.log.torn import repair
from piecegraph.explain.log.tracebacks import ExceptionParts, Traceback, key_of, num_processes, read_in_order
from piecegraph.explain.log.unweave import unweave

_FATAL = re.compile(r"^(?P<type>Fatal Python error|Windows fatal exception): (?P<reason>.+)$")
_THREAD = re.compile(r"^(?:(?P<which>Current thread|Thread) 0x[0-9a-fA-F]+.*|Stack) \(most recent call first\):\s*$")
_TERMINATE = re.compile(r"terminate called after throwing an instance of '(?P<type>[^']+)'")
_WHAT = re.compile(r"^\s*what\(\):\s+(?P<message>.*)$")
_PANIC = re.compile(
    r"^thread '(?P<thread>[^']{0,200})'(?: \(\d+\))? panicked at (?:'(?P<message>.*)', )?"
    r"(?P<file>[^\s:']+\.rs):(?P<line>\d+):\d+:?$"
)
"""Of Rust: the message in the line itself, or as of 1.73 in the next."""
_WORDS = ("panicked at", "atal ", "(most recent call first)", "terminate called")
_KINDS: dict[str, FailureKind] = {"thread": "thread", "ignored": "ignored", "logging": "ignored", "logged": "logged"}
_REACH = 4
"""How many lines below "terminate called" its message may stand."""


@dataclass(frozen=True, slots=True)
class StreamFailures:
    """What a stream holds."""

    failures: tuple[Failure, ...] = ()
    call_chains: tuple[tuple[Frame, ...], ...] = ()
    tree: tuple[TreeLine, ...] = ()
    notes: tuple[str, ...] = ()
    num_cut_off: int = 0
    """Tracebacks that end before their exception."""
    rest_from: int | None = None
    """From this line on, nothing was resolved yet."""


def find_failures(
    lines: Sequence[Line], process: Process, *, may_search: bool = True, is_open: bool = False
) -> StreamFailures:
    """Everything that one stream tells; ``process`` is what its prefix proves.

    Args:
        may_search: whether to spend time on the stacks of processes that differ.
        is_open: whether the stream goes on, so that what is unfinished must wait.
    """
    crashes = _take_crashes(repair(translate(lines)), process)
    done = split_parts(crashes.rest, is_open=is_open)
    whole = _complete_part(done) if is_open else done
    read = _read_tracebacks(whole, process, may_search)
    rest_from = done.parts[len(whole.parts)].line if len(whole.parts) < len(done.parts) else None
    died = tuple(crash for crash in crashes.failures if rest_from is None or (crash.line or 0) < rest_from)
    return StreamFailures(
        (*died, *read.failures),
        (*crashes.call_chains, *read.call_chains),
        read.tree,
        read.notes,
        read.num_cut_off,
        rest_from,
    )


def _complete_part(done: StreamParts) -> StreamParts:
    """The parts up to the last header at which no traceback is unfinished; all of them where there is none."""
    num_open = place = 0
    for at, part in enumerate(done.parts):
        if part.kind == "header":
            if num_open == 0 and at and done.parts[at - 1].kind == "text":
                place = at
            num_open += 1
        elif part.kind == "text":
            num_open = max(0, num_open - 1)
    return replace(done, parts=done.parts[:place]) if num_open and place else done


def _read_tracebacks(done: StreamParts, process: Process, may_search: bool) -> StreamFailures:
    if not done.parts:
        return StreamFailures()
    tracebacks = read_in_order(done.parts)
    if tracebacks is None or _may_be_misread(tracebacks, done.parts):
        same = unweave(done.parts)
        if same is not None:
            notes = _other_readings(same.num_other_readings)
            failure = _failure(same.traceback, same.count, _named_processes(done, same.count, process), "unwoven")
            return StreamFailures((failure,), notes=notes)
    if tracebacks is not None:
        return _printed(tracebacks, process)
    found = reconstruct(done.parts, may_search=may_search)
    return StreamFailures(tuple(_reconstructed(chain, process) for chain in found.chains), tree=found.tree)


def _may_be_misread(tracebacks: Sequence[Traceback], parts: Sequence[TracebackPart]) -> bool:
    """Whether tracebacks that differ, read in order, could be equal ones of which a part was moved behind another's."""
    if len({key_of(traceback) for traceback in tracebacks}) < 2:
        return False
    count = num_processes(parts)
    return count > 1 and all(number % count == 0 for number in Counter(part.key for part in parts).values())


def _printed(tracebacks: Sequence[Traceback], process: Process) -> StreamFailures:
    failures, chains, notes = [], [], []
    for traceback in tracebacks:
        whole = tuple(exception for exception in traceback if exception.text is not None)
        if whole:
            failures.append(_failure(whole, 1, _named_process(traceback, process), "printed"))
        for exception in traceback:
            if exception.text is None:
                chains.append(_frames(exception))
                if not exception.is_call_chain:
                    notes.append(f"a traceback that ends at line {exception.end} has no exception text: it was cut off")
    cut_off = len(notes)
    return StreamFailures(
        tuple(failures), tuple(chain for chain in chains if chain), notes=tuple(notes), num_cut_off=cut_off
    )


def _named_process(traceback: Traceback, process: Process) -> tuple[Process, ...]:
    """Who printed a traceback: proven by the prefix, or by a name right above it if nothing stands in between."""
    if process.label:
        return (process,)
    header = traceback[0].header
    parts = [part for one in traceback for part in (one.header, *one.frames, one.text) if part is not None]
    # Between chained exceptions stand a link and blank lines.
    is_unbroken = all(b.line - a.end <= 4 for a, b in itertools.pairwise(parts))
    return (Process(header.name),) if header is not None and header.name and is_unbroken else ()


def _named_processes(done: StreamParts, count: int, process: Process) -> tuple[Process, ...]:
    """Who printed the traceback that all printed: every name that announced itself, if there are as many."""
    if process.label:
        return (process,)
    claims = {part.name for part in done.parts if part.kind == "header" and part.name}
    for names in (set(done.names), claims):
        if len(names) == count:
            return tuple(Process(name) for name in sorted(names, key=lambda name: (len(name), name)))
    return ()


def _failure(traceback: Traceback, count: int, processes: tuple[Process, ...], certainty: Certainty) -> Failure:
    origins = (one.header.origin for one in traceback if one.header is not None)
    return Failure(
        chain=tuple(map(_raised, traceback)),
        kind=next((_KINDS[origin] for origin in origins if origin in _KINDS), "exception"),
        count=count,
        num_writers=count if certainty == "unwoven" else 1,
        num_unnamed=0 if processes else count,
        processes=processes,
        certainty=certainty,
        line=traceback[-1].end,
    )


def _reconstructed(chain: RaisedChain, process: Process) -> Failure:
    raised = tuple(
        Raised(
            type=at.text.name,
            message=_message(at.text),
            frames=(at.frame.frame,) if at.frame is not None and at.frame.frame is not None else (),
            link=at.link,
        )
        for at in chain.exceptions
    )
    return Failure(
        chain=raised,
        count=chain.count,
        num_writers=chain.count,
        num_unnamed=0 if process.label else chain.count,
        processes=(process,) if process.label else (),
        certainty="reconstructed",
        line=chain.exceptions[-1].text.line,
    )


def _raised(exception: ExceptionParts) -> Raised:
    assert exception.text is not None
    name, message = exception.text.name, _message(exception.text)
    return Raised(type=name, message=message, frames=_frames(exception), link=exception.link)


def _frames(exception: ExceptionParts) -> tuple[Frame, ...]:
    return tuple(part.frame for part in exception.frames if part.frame is not None)


def _message(text: TracebackPart) -> str:
    return text.text[len(text.name) :].removeprefix(":").strip()


def _other_readings(number: int) -> tuple[str, ...]:
    if not number:
        return ()
    return (f"{number} other orders of frames that repeat would explain this log as well",)


# -- crashes


@dataclass(frozen=True, slots=True)
class _Crashes:
    """Deaths that no Python exception tells of, and the lines that remain."""

    failures: tuple[Failure, ...]
    call_chains: tuple[tuple[Frame, ...], ...]
    """Dumps of threads that did not die, such as a watchdog's."""
    rest: tuple[Line, ...]


def _take_crashes(lines: Sequence[Line], process: Process) -> _Crashes:
    """Take faulthandler's dumps (most recent call first) and C++ exceptions out of a stream."""
    if not any(word in line.text for line in lines for word in _WORDS):
        return _Crashes((), (), tuple(lines))
    failures: list[Failure] = []
    chains: list[tuple[Frame, ...]] = []
    rest: list[Line] = []
    name, reason, at = "", "", 0
    while at < len(lines):
        line = lines[at]
        fatal, thread, terminate = (pattern.search(line.text) for pattern in (_FATAL, _THREAD, _TERMINATE))
        at += 1
        if fatal is not None:
            if reason:
                failures.append(_crash(name, reason, (), process, line.number))
            name, reason = fatal["type"], fatal["reason"].strip()
        elif thread is not None:
            frames, at = _frames_below(lines, at)
            if reason and thread["which"] != "Thread":
                failures.append(_crash(name, reason, frames, process, lines[at - 1].number))
                reason = ""
            elif frames:
                chains.append(frames)
        elif terminate is not None:
            failures.append(_crash(terminate["type"], _what(lines, at), (), process, line.number))
        elif (panic := _PANIC.match(line.text)) is not None:
            failures.append(_panic(panic, lines[at].text if at < len(lines) else "", process, line.number))
        else:
            rest.append(line)
    if reason:
        failures.append(_crash(name, reason, (), process, lines[-1].number))
    return _Crashes(tuple(failures), tuple(chains), tuple(rest))


def _frames_below(lines: Sequence[Line], at: int) -> tuple[tuple[Frame, ...], int]:
    frames = []
    while at < len(lines):
        found = frame_of(lines[at].text)
        if found is None:
            break
        frames.append(Frame(*found))
        at += 1
    return tuple(reversed(frames)), at


def _what(lines: Sequence[Line], at: int) -> str:
    for line in lines[at : at + _REACH]:
        found = _WHAT.match(line.text)
        if found is not None:
            return found["message"]
    return ""


def _panic(panic: re.Match[str], below: str, process: Process, line: int) -> Failure:
    """A panic of Rust, which ends the program where it is of the main thread."""
    frame = Frame(panic["file"], int(panic["line"]), "")
    message = panic["message"] if panic["message"] is not None else below.strip()
    crash = _crash("Rust panic", message, (frame,), process, line)
    return replace(crash, kind="exception" if panic["thread"] == "main" else "thread")


def _crash(name: str, message: str, frames: tuple[Frame, ...], process: Process, line: int) -> Failure:
    known = (process,) if process.label else ()
    return Failure(
        chain=(Raised(type=name, message=message, frames=frames),),
        kind="signal",
        processes=known,
        num_unnamed=0 if known else 1,
        line=line,
    )
