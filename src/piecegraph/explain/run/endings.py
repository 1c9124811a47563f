"""How the processes of a run ended: records and the command's own end in, one :class:`Ending` for each failure out.

Note [Order of failures]
~~~~~~~~~~~~~~~~~~~~~~~~
Failures are in order of time, which is exact for what a process recorded itself. A violent death is recorded by the
parent, often after others have already failed because of it, so such a death counts as earlier than it was noticed.
What was done *to* a process afterwards comes last whatever its time: a signal that a recorded process (or we) sent, an
exit code without an exception, and a plain subprocess whose failure its parent lived on with.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from piecegraph.explain.evidence import Raised, signal_name
from piecegraph.explain.run.hook.recorder import PRINTED
from piecegraph.explain.run.launch import Ended
from piecegraph.explain.run.records import (
    ProcessRecord,
    RecordedException,
    RecordedSignal,
    is_running,
    program_of,
)

_SOON_NS = 5_000_000_000
"""What happens within this time belongs together: an exception and the exit after it, a death and its news."""
NO_SENDER = "sent by no recorded process"
_STOPS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}

EndingKind = Literal["exception", "thread", "signal", "killed", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """One failure of one process, with what decides on its place."""

    record: ProcessRecord | None
    """None for a process that wrote none."""
    pid: int = 0
    """Of a process that wrote no record."""
    child_of: ProcessRecord | None = None
    """Who saw it end, where it wrote no record."""
    kind: EndingKind
    chain: tuple[Raised, ...]
    time_ns: int
    wall_ns: int | None = None
    exception: RecordedException | None = None
    signal: int | None = None
    """What it died of."""
    is_after_effect: bool = False


def endings_of_all(records: Sequence[ProcessRecord], ended: Ended) -> list[Ending]:
    """Everything that failed, in order: see Note [Order of failures]."""
    endings = [ending for record in records for ending in endings_of(record, records, ended)]
    endings += [ending for record in records for ending in _unrecorded_children(record, records, ended)]
    if not any(record.pid == ended.pid for record in records):
        endings.append(_unrecorded(ended, len(records)))
    return sorted(endings, key=lambda ending: (ending.is_after_effect, ending.time_ns))


def endings_of(record: ProcessRecord, records: Sequence[ProcessRecord], ended: Ended) -> list[Ending]:
    """The failures of one process: its threads', then what it ended of."""
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
        return [*found, Ending(record=record, kind="signal", chain=(raised,), time_ns=_end_of(record, records))]
    status, noticed_ns = _status(record, records, ended)
    is_bad = status != 0 if status is not None else record.code not in (None, 0)
    printed = next((exception for exception in reversed(record.exceptions) if exception.kind == PRINTED), None)
    if printed is not None and (is_bad or _ended_soon_after(record, printed, noticed_ns)):
        return [*found, _demote(_from_exception(record, printed, "exception"), records)]
    if status is not None and os.WIFSIGNALED(status):
        return [*found, _from_signal(record, os.WTERMSIG(status), noticed_ns, _senders(record, status, records), ended)]
    if is_bad:
        return [*found, _from_exit(record, status, noticed_ns)]
    if record.state == "started" and status is None and not is_running(record):
        why = "the process ended without a word: killed (out of memory?), or it left through code that is not Python"
        return [*found, Ending(record=record, kind="killed", chain=(_said("no ending", why),), time_ns=noticed_ns)]
    return found


def _from_exception(record: ProcessRecord, exception: RecordedException, kind: EndingKind) -> Ending:
    time_ns, wall_ns = exception.time_ns, exception.wall_ns
    return Ending(
        record=record, kind=kind, chain=exception.chain, time_ns=time_ns, wall_ns=wall_ns, exception=exception
    )


def _from_signal(
    record: ProcessRecord | None, number: int, noticed_ns: int, senders: Sequence[ProcessRecord], ended: Ended
) -> Ending:
    frames = record.dump.frames if record is not None and record.dump is not None else ()
    name = signal_name(number)
    if number == ended.interrupted_by:
        message, is_ours = f"sent to the run by {ended.sender or 'somebody'}", True
    elif senders and senders[-1] is record:
        message, is_ours = "the process sent it to itself", False
    elif senders:
        message, is_ours = f"sent by {_command_of(senders[-1])}", True
    else:
        message, is_ours = NO_SENDER, False
    kind: EndingKind = "interrupted" if number in _STOPS else "killed" if number == signal.SIGKILL else "signal"
    raised = Raised(type=name, message=message, frames=frames)
    time_ns = noticed_ns if is_ours else noticed_ns - _SOON_NS
    return Ending(record=record, kind=kind, chain=(raised,), time_ns=time_ns, signal=number, is_after_effect=is_ours)


def _senders(record: ProcessRecord, status: int, records: Sequence[ProcessRecord]) -> list[ProcessRecord]:
    number = os.WTERMSIG(status)
    return [other for other in records for sent in other.sent if _hits(sent, record.pid, record.group, number)]


def _unrecorded_children(record: ProcessRecord, records: Sequence[ProcessRecord], ended: Ended) -> Iterator[Ending]:
    """Children that died of a signal before they could write a record, or are no Python programs."""
    recorded = {other.pid for other in records}
    for child in record.children:
        if child.pid in recorded or not os.WIFSIGNALED(child.number):
            continue
        number = os.WTERMSIG(child.number)
        senders = [other for other in records for sent in other.sent if _hits(sent, child.pid, child.pid, number)]
        ending = _from_signal(None, number, child.time_ns, senders, ended)
        is_after_effect = ending.is_after_effect or _lived_on(record, child.time_ns)
        yield replace(ending, pid=child.pid, child_of=record, is_after_effect=is_after_effect)


def _from_exit(record: ProcessRecord, status: int | None, noticed_ns: int) -> Ending:
    code = os.waitstatus_to_exitcode(status) if status is not None else record.code
    said, frames = f"exit code {code}, no exception", ()
    if record.exit_call is not None:
        said, frames = f"sys.exit({record.exit_call[0]})", (record.exit_call[1],)  # type: ignore[assignment]
    raised = Raised(type="SystemExit", message=said, frames=frames)
    return Ending(record=record, kind="exception", chain=(raised,), time_ns=noticed_ns, is_after_effect=True)


def _unrecorded(ended: Ended, num_records: int) -> Ending:
    signaled = os.WIFSIGNALED(ended.status)
    name = signal_name(os.WTERMSIG(ended.status)) if signaled else f"exit code {ended.exit_code}"
    who = "the command's own process wrote no record" if num_records else "no process of the command wrote a record"
    why = f"{who}: it is no Python program, or Python was started with -I, -E or -S"
    kind: EndingKind = "exception"
    if signaled:
        kind = "interrupted" if os.WTERMSIG(ended.status) in _STOPS else "killed"
    return Ending(record=None, pid=ended.pid, kind=kind, chain=(_said(name, why),), time_ns=0, is_after_effect=True)


def _said(name: str, message: str) -> Raised:
    return Raised(type=name, message=message, frames=())


def status_of(record: ProcessRecord, records: Sequence[ProcessRecord], ended: Ended) -> int | None:
    """The status with which a process ended, as its parent saw it."""
    return _status(record, records, ended)[0]


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


def _demote(ending: Ending, records: Sequence[ProcessRecord]) -> Ending:
    """Put a plain subprocess last if its parent lived on with its failure: it was tried out, and is not the cause."""
    record = ending.record
    assert record is not None
    if record.name or record.ranks or record.rank is not None:
        return ending
    parent = next((other for other in reversed(records) if other.pid == record.ppid), None)
    if parent is None or not _lived_on(parent, ending.time_ns):
        return ending
    return replace(ending, is_after_effect=True)


def _lived_on(parent: ProcessRecord, time_ns: int) -> bool:
    """Whether a process failed, if at all, long after one of its children did."""
    later = [exception for exception in parent.exceptions if exception.kind in ("exception", PRINTED)]
    return bool(later) and later[-1].time_ns - time_ns > _SOON_NS


def _hits(sent: RecordedSignal, pid: int, group: int, number: int) -> bool:
    return sent.number == number and (sent.pid == pid or sent.group in (group, pid))


def _command_of(record: ProcessRecord) -> str:
    return f"pid {record.pid} ({program_of(record.arguments)})"
