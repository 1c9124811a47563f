"""What the records of a run prove, as a value: how its processes ended in, one :class:`Evidence` out."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from piecegraph.base.text import count_of
from piecegraph.explain.evidence import Death, Evidence, Exit, Failure, Milestone, Phase, Process, Raised, signal_name
from piecegraph.explain.run.endings import NO_SENDER, Ending, endings_of_all, status_of
from piecegraph.explain.run.launch import Ended
from piecegraph.explain.run.memory import OomKills
from piecegraph.explain.run.records import ProcessRecord, RecordedException, identify

MAX_LAST_LINES = 5
_PHASES: dict[str, Phase] = {"trace": "compile", "compile": "compile", "capture": "capture"}
_PHASES |= {"init": "init", "load": "load", "kv cache": "kv cache"}


def evidence_of_records(records: Sequence[ProcessRecord], ended: Ended, kills: OomKills = OomKills()) -> Evidence:  # noqa: B008
    """What the records prove about a run that failed.

    Args:
        records: of every process that wrote one.
        ended: how the command itself ended.
        kills: what the kernel killed for want of memory meanwhile.
    """
    endings = _with_killers(endings_of_all(records, ended), kills)
    first = next((ending.exception for ending in endings if ending.exception is not None), None)
    who = identify(records)
    return Evidence(
        sources=(f"the records of {count_of(len(records), 'process', 'processes')}",),
        processes=tuple(who.values()),
        failures=_merge(endings, who),
        milestones=milestones_of(first) if first is not None else (),
        memory_signs=tuple(_memory_signs(endings, kills)),
        exits=_exits(endings, records, who, ended),
        known_issue_lines=tuple((line, None) for ending in endings for line in _last_lines(ending)),
    )


def _with_killers(endings: Sequence[Ending], kills: OomKills) -> list[Ending]:
    """The same, with what the kernel says of processes that somebody unknown has killed."""
    killed = [ending for ending in endings if ending.chain[0].type == signal_name(signal.SIGKILL)]
    num_unexplained = sum(ending.chain[0].message == NO_SENDER for ending in killed)
    if kills.in_group >= num_unexplained > 0:
        why = f", but by the kernel, for want of memory: it counts {kills.in_group} such in the run's control group"
    elif kills.in_group or kills.on_machine:
        why = f": likely by the kernel, which killed {kills.in_group or kills.on_machine} for memory meanwhile"
    else:
        why = ": by a scheduler or another supervisor, by hand, or by a kernel that does not count its kills"
    return [_explained(ending, why) if ending in killed else ending for ending in endings]


def _explained(ending: Ending, why: str) -> Ending:
    first, *rest = ending.chain
    if first.message != NO_SENDER:
        return ending
    return replace(ending, chain=(replace(first, message=NO_SENDER + why), *rest))


def _exits(
    endings: Sequence[Ending], records: Sequence[ProcessRecord], who: dict[Path, Process], ended: Ended
) -> tuple[Exit, ...]:
    """How each process ended that did not end well. Of a single one the failure itself says it."""
    first = endings[0].record if endings else None
    found = []
    for record in records:
        status = status_of(record, records, ended)
        code = os.waitstatus_to_exitcode(status) if status is not None else record.code
        if code and record.state != "replaced":
            found.append(Exit(process=who[record.file], code=code, is_first=record is first))
    return tuple(found) if len(found) > 1 else ()


def _merge(endings: Sequence[Ending], who: dict[Path, Process]) -> tuple[Failure, ...]:
    """Equal failures of several processes become one, in the place of the first."""
    merged: dict[object, list[Ending]] = {}
    for ending in endings:
        merged.setdefault((ending.kind, ending.is_after_effect, likeness(ending.chain)), []).append(ending)
    failures = []
    for alike in merged.values():
        first = alike[0]
        failures.append(
            Failure(
                chain=first.chain,
                kind=first.kind,
                count=len(alike),
                processes=tuple(_process_of(ending, who) for ending in alike),
                certainty="recorded",
                time_ns=first.wall_ns,
                last_lines=_last_lines(first)[-MAX_LAST_LINES:],
                death=_death_of(first, _process_of(first, who)),
            )
        )
    return tuple(failures)


def _process_of(ending: Ending, who: dict[Path, Process]) -> Process:
    if ending.record is not None:
        return who[ending.record.file]
    if ending.child_of is not None:
        return Process(f"a child of {who[ending.child_of.file].label}, without a record", pid=ending.pid)
    return Process("the command", pid=ending.pid)


def _death_of(ending: Ending, process: Process) -> Death | None:
    """The end of a process as its parent saw it, where it could raise nothing itself."""
    if ending.signal is None:
        return None
    raised = ending.chain[0]
    return Death(
        name=raised.type,
        teller="parent",
        text=raised.message,
        signal=ending.signal,
        code=-ending.signal,
        process=process,
    )


def _last_lines(ending: Ending) -> tuple[str, ...]:
    """What a process without an exception printed last."""
    return ending.record.last_lines if ending.record is not None and ending.exception is None else ()


def likeness(chain: Sequence[Raised]) -> object:
    """Equal for the same failure of two ranks: their messages differ in numbers and addresses."""
    frames = tuple((frame.file, frame.line, frame.function) for raised in chain for frame in raised.frames)
    return frames, tuple((raised.type, re.sub(r"0x[0-9a-f]+|\d+", "#", raised.message)) for raised in chain)


def milestones_of(exception: RecordedException) -> tuple[Milestone, ...]:
    """The phases a failure happened in; of what was done before it, records say nothing."""
    phases = dict.fromkeys(_PHASES[phase] for phase in exception.phases if phase in _PHASES)
    text = f"{exception.chain[0].type}: {exception.chain[0].message}".splitlines()[0]
    return tuple(Milestone(phase, "failed", text, size=exception.size) for phase in phases)


def _memory_signs(endings: Sequence[Ending], kills: OomKills) -> Iterable[tuple[str, int | None]]:
    if kills.in_group or kills.on_machine:
        place = "in the run's control group" if kills.in_group else "on this machine"
        number = count_of(kills.in_group or kills.on_machine, "process", "processes")
        yield f"the kernel killed {number} {place} for memory during the run", None
    for raised in (raised for ending in endings for raised in ending.chain):
        if "OutOfMemory" in raised.type or raised.type == "MemoryError" or "out of memory" in raised.message:
            yield f"{raised.type}: {raised.message}".splitlines()[0], None
