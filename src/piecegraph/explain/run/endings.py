"""How the processes of a run ended: records and the command's own end in, one :class:`Evidence` out.

Note [Order of failures]
~~~~~~~~~~~~~~~~~~~~~~~~
Failures are in order of time, which is exact for what a process recorded itself. A violent death is recorded by the
parent, often after others have already failed because of it, so such a death counts as earlier than it was noticed.
What was done *to* a process afterwards comes last whatever its time: a signal that a recorded process (or we) sent, an
exit code without an exception, and a plain subprocess whose failure its parent lived on with.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from piecegraph.explain.evidence import Evidence, Failure, Milestone, Phase, Process, Raised, signal_name
from piecegraph.explain.run.hook import PRINTED
from piecegraph.explain.run.launch import Ended
from piecegraph.explain.run.records import (
    ProcessRecord,
    RecordedException,
    RecordedSignal,
    identify,
    is_running,
    program_of,
)

_SOON_NS = 5_000_000_000
"""What happens within this time belongs together: an exception and the exit after it, a death and its news."""
_STOPS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
_PHASES: dict[str, Phase] = {"trace": "compile", "compile": "compile", "capture": "capture"}
_PHASES |= {"init": "init", "load": "load", "kv cache": "kv cache"}

EndingKind = Literal["exception", "thread", "signal", "killed", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    """One failure of one process, with what decides on its place."""

    record: ProcessRecord | None
    kind: EndingKind
    chain: tuple[Raised, ...]
    time_ns: int
    wall_ns: int | None = None
    exception: RecordedException | None = None
    is_after_effect: bool = False


def evidence_of_records(records: Sequence[ProcessRecord], ended: Ended, num_oom_kills: int = 0) -> Evidence:
    """What the records prove about a run that failed.

    Args:
        records: of every process that wrote one.
        ended: how the command itself ended.
        num_oom_kills: how many processes the kernel killed for memory on this machine meanwhile.
    """
    endings = [ending for record in records for ending in _endings_of(record, records, ended)]
    if not any(record.pid == ended.pid for record in records):
        endings.append(_unrecorded(ended, len(records)))
    endings.sort(key=lambda ending: (ending.is_after_effect, ending.time_ns))
    first = next((ending.exception for ending in endings if ending.exception is not None), None)
    who = identify(records)
    return Evidence(
        sources=(f"the records of {len(records)} processes",),
        processes=tuple(who.values()),
        failures=_merge(endings, who, ended),
        milestones=milestones_of(first) if first is not None else (),
        memory_signs=tuple(_memory_signs(endings, num_oom_kills)),
    )


# -- one process


def _endings_of(record: ProcessRecord, records: Sequence[ProcessRecord], ended: Ended) -> list[_Ending]:
    found = [
        _from_exception(record, exception, "thread") for exception in record.exceptions if exception.kind == "thread"
    ]
    if record.state == "replaced" or _was_replaced(record, records):
        return found  # what happened to the process afterwards is the other program's story
    last = next(
        (exception for exception in reversed(record.exceptions) if exception.kind in ("exception", "interrupted")), None
    )
    if last is not None:
        kind: EndingKind = "interrupted" if last.kind == "interrupted" else "exception"
        return [*found, _demote(_from_exception(record, last, kind), records)]
    if record.dump is not None and record.dump.fatal:
        raised = Raised(type="Fatal Python error", message=record.dump.fatal, frames=record.dump.frames)
        return [*found, _Ending(record=record, kind="signal", chain=(raised,), time_ns=_end_of(record, records))]
    status, noticed_ns = _status(record, records, ended)
    is_bad = status != 0 if status is not None else record.code not in (None, 0)
    printed = next((exception for exception in reversed(record.exceptions) if exception.kind == PRINTED), None)
    if printed is not None and (is_bad or _ended_soon_after(record, printed, noticed_ns)):
        return [*found, _demote(_from_exception(record, printed, "exception"), records)]
    if status is not None and os.WIFSIGNALED(status):
        return [*found, _from_signal(record, os.WTERMSIG(status), noticed_ns, records, ended)]
    if is_bad:
        return [*found, _from_exit(record, status, noticed_ns)]
    if record.state == "started" and status is None and not is_running(record):
        why = "the process ended without a word: killed (out of memory?), or it left through code that is not Python"
        return [*found, _Ending(record=record, kind="killed", chain=(_said("no ending", why),), time_ns=noticed_ns)]
    return found


def _from_exception(record: ProcessRecord, exception: RecordedException, kind: EndingKind) -> _Ending:
    time_ns, wall_ns = exception.time_ns, exception.wall_ns
    return _Ending(
        record=record, kind=kind, chain=exception.chain, time_ns=time_ns, wall_ns=wall_ns, exception=exception
    )


def _from_signal(
    record: ProcessRecord, number: int, noticed_ns: int, records: Sequence[ProcessRecord], ended: Ended
) -> _Ending:
    senders = [other for other in records for sent in other.sent if _hits(sent, record, number)]
    frames = record.dump.frames if record.dump is not None else ()
    name = signal_name(number)
    if number == ended.interrupted_by:
        message, is_ours = f"{name} was sent to the run", True
    elif senders:
        message, is_ours = f"sent by {_command_of(senders[-1])}", True
    else:
        message, is_ours = "sent by no recorded process", False
        if number == signal.SIGKILL:
            message += ": by the kernel when memory ran out, by a supervisor, or by hand"
    kind: EndingKind = "interrupted" if number in _STOPS else "killed" if number == signal.SIGKILL else "signal"
    raised = Raised(type=name, message=message, frames=frames)
    time_ns = noticed_ns if is_ours else noticed_ns - _SOON_NS
    return _Ending(record=record, kind=kind, chain=(raised,), time_ns=time_ns, is_after_effect=is_ours)


def _from_exit(record: ProcessRecord, status: int | None, noticed_ns: int) -> _Ending:
    code = os.waitstatus_to_exitcode(status) if status is not None else record.code
    said, frames = f"exit code {code}, no exception", ()
    if record.exit_call is not None:
        said, frames = f"sys.exit({record.exit_call[0]})", (record.exit_call[1],)  # type: ignore[assignment]
    raised = Raised(type="SystemExit", message=said, frames=frames)
    return _Ending(record=record, kind="exception", chain=(raised,), time_ns=noticed_ns, is_after_effect=True)


def _unrecorded(ended: Ended, num_records: int) -> _Ending:
    signaled = os.WIFSIGNALED(ended.status)
    name = signal_name(os.WTERMSIG(ended.status)) if signaled else f"exit code {ended.exit_code}"
    who = "the command's own process wrote no record" if num_records else "no process of the command wrote a record"
    why = f"{who}: it is no Python program, or Python was started with -I, -E or -S"
    kind: EndingKind = "exception"
    if signaled:
        kind = "interrupted" if os.WTERMSIG(ended.status) in _STOPS else "killed"
    return _Ending(record=None, kind=kind, chain=(_said(name, why),), time_ns=0, is_after_effect=True)


def _said(name: str, message: str) -> Raised:
    return Raised(type=name, message=message, frames=())


def _status(record: ProcessRecord, records: Sequence[ProcessRecord], ended: Ended) -> tuple[int | None, int]:
    """The status with which a process ended, as its parent saw it, and when that was noticed."""
    end = _end_of(record, records)
    if record.pid == ended.pid:
        return ended.status, end
    seen = _seen_dead(record, records)
    return (seen.number, seen.time_ns) if seen is not None else (None, end)


def _end_of(record: ProcessRecord, records: Sequence[ProcessRecord]) -> int:
    if record.ended_ns is not None:
        return record.ended_ns
    seen = _seen_dead(record, records)
    return seen.time_ns if seen is not None else max(_signs_of_life(records))


def _seen_dead(record: ProcessRecord, records: Sequence[ProcessRecord]) -> RecordedSignal | None:
    """How the parent saw a process end. A number may be used again: the first death after the start counts."""
    seen = (child for other in records for child in other.children if child.pid == record.pid)
    return min((child for child in seen if child.time_ns > record.started_ns), key=lambda c: c.time_ns, default=None)


def _signs_of_life(records: Iterable[ProcessRecord]) -> Iterable[int]:
    for record in records:
        yield record.started_ns
        yield from (exception.time_ns for exception in record.exceptions)
        if record.ended_ns is not None:
            yield record.ended_ns


def _ended_soon_after(record: ProcessRecord, printed: RecordedException, noticed_ns: int) -> bool:
    return record.state == "ended" and noticed_ns - printed.time_ns < _SOON_NS


def _was_replaced(record: ProcessRecord, records: Sequence[ProcessRecord]) -> bool:
    """Whether the process went on as another program, which wrote its own record."""
    return any(
        other.pid == record.pid and other.start_ticks == record.start_ticks and other.started_ns > record.started_ns
        for other in records
    )


def _demote(ending: _Ending, records: Sequence[ProcessRecord]) -> _Ending:
    """Put a plain subprocess last if its parent lived on with its failure: it was tried out, and is not the cause."""
    record = ending.record
    assert record is not None
    if record.name or record.ranks or record.rank is not None:
        return ending
    parent = next((other for other in reversed(records) if other.pid == record.ppid), None)
    if parent is None:
        return ending
    later = [exception for exception in parent.exceptions if exception.kind in ("exception", PRINTED)]
    lived_on = bool(later) and later[-1].time_ns - ending.time_ns > _SOON_NS
    return replace(ending, is_after_effect=True) if lived_on else ending


def _hits(sent: RecordedSignal, record: ProcessRecord, number: int) -> bool:
    return sent.number == number and (sent.pid == record.pid or sent.group in (record.group, record.pid))


def _command_of(record: ProcessRecord) -> str:
    return f"pid {record.pid} ({program_of(record.arguments)})"


# -- all processes


def _merge(endings: Sequence[_Ending], who: dict[Path, Process], ended: Ended) -> tuple[Failure, ...]:
    """Equal failures of several processes become one, in the place of the first."""
    merged: dict[object, list[_Ending]] = {}
    for ending in endings:
        merged.setdefault((ending.kind, ending.is_after_effect, likeness(ending.chain)), []).append(ending)
    failures = []
    for alike in merged.values():
        processes = [
            who[ending.record.file] if ending.record else Process("the command", pid=ended.pid) for ending in alike
        ]
        first = alike[0]
        failures.append(
            Failure(
                chain=first.chain,
                kind=first.kind,
                count=len(alike),
                processes=tuple(processes),
                certainty="recorded",
                time_ns=first.wall_ns,
            )
        )
    return tuple(failures)


def likeness(chain: Sequence[Raised]) -> object:
    """Equal for the same failure of two ranks: their messages differ in numbers and addresses."""
    frames = tuple((frame.file, frame.line, frame.function) for raised in chain for frame in raised.frames)
    return frames, tuple((raised.type, re.sub(r"0x[0-9a-f]+|\d+", "#", raised.message)) for raised in chain)


def milestones_of(exception: RecordedException) -> tuple[Milestone, ...]:
    """The phases a failure happened in; of what was done before it, records say nothing."""
    phases = dict.fromkeys(_PHASES[phase] for phase in exception.phases if phase in _PHASES)
    text = f"{exception.chain[0].type}: {exception.chain[0].message}".splitlines()[0]
    return tuple(Milestone(phase, "failed", text, size=exception.size) for phase in phases)


def _memory_signs(endings: Sequence[_Ending], num_oom_kills: int) -> Iterable[tuple[str, int | None]]:
    if num_oom_kills:
        yield f"the kernel killed {num_oom_kills} process(es) on this machine for memory during the run", None
    for raised in (raised for ending in endings for raised in ending.chain):
        if "OutOfMemory" in raised.type or raised.type == "MemoryError" or "out of memory" in raised.message:
            yield f"{raised.type}: {raised.message}".splitlines()[0], None
