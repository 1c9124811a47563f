"""Whether a run was asked to end, and nothing had failed before.

A launcher asks the other ranks to end when one has failed, so what one process says it was asked proves nothing about
another: the lines of two logs have no common order, and those of two ranks reach one log late.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from piecegraph.explain.evidence import Evidence, Failure, Process, Raised, Stop

_SRUN_TASK = re.compile(r"^task \d")
_SHELL_SIGNALS = 128
"""Exit codes from here on are those of shells, for signals."""
_ELASTIC_STOP = re.compile(r"elastic\S*\.SignalException: .* got signal: (?:2|15)$")
"""Raised by torchelastic's launcher when it is asked to end itself; a terminal that goes away asks nobody."""
_NUMBER = re.compile(r"\d+$")


def is_interrupt(failure: Failure) -> bool:
    """Whether a person stopped it: every exception of the chain says so."""
    return bool(failure.chain) and all(map(_interrupts, failure.chain))


def _interrupts(raised: Raised) -> bool:
    return raised.type.endswith("KeyboardInterrupt") or bool(_ELASTIC_STOP.search(f"{raised.type}: {raised.message}"))


def is_by_scheduler(failure: Failure) -> bool:
    """Whether a scheduler, the kernel or a limit of time ended it, which is no request."""
    death = failure.death
    return death is not None and (death.teller in ("scheduler", "kernel") or death.name == "TIMEOUT")


def was_asked_to_end(evidence: Evidence, interrupts: Sequence[Failure], candidates: Sequence[Failure]) -> bool:
    """Whether a request explains every candidate for the root cause."""
    stops = [
        *evidence.stops,
        *(Stop(text="", line=one.line, process=who) for one in interrupts for who in one.processes or (Process(),)),
    ]
    stops = [stop for stop in stops if stop.line is not None]
    if not stops or _failed_by_itself(evidence, min(stop.line or 0 for stop in stops)):
        return False
    num_logs = len(evidence.sources)
    return not any(
        _is_unasked(failure, [s for s in stops if says_of(s.process, failure, num_logs)]) for failure in candidates
    )


def _failed_by_itself(evidence: Evidence, asked: int) -> bool:
    """Whether a launcher saw a process end with a code of its own; a scheduler that ends all of them sees such, too."""
    return any(
        0 < ended.code < _SHELL_SIGNALS
        and (not _SRUN_TASK.match(ended.process.label) or (ended.line is not None and ended.line < asked))
        for ended in evidence.exits
    )


def _is_unasked(failure: Failure, stops: Sequence[Stop]) -> bool:
    """Whether it failed before it was asked to end, or never was."""
    if failure.line is None or is_by_scheduler(failure):
        return True
    if not stops:
        return not _interrupts(failure.chain[0])
    return failure.line < min(stop.line or 0 for stop in stops)


def says_of(process: Process, failure: Failure, num_logs: int) -> bool:
    """Whether the lines of a process say something about this failure: not where a peer of it failed."""
    return not failure.processes or any(_is_one_run(process, who, num_logs) for who in failure.processes)


def _is_one_run(process: Process, other: Process, num_logs: int) -> bool:
    first, second = process.label, other.label
    if num_logs > 1:  # labels begin with the log
        (log, _, first), (other_log, _, second) = first.partition(" "), second.partition(" ")
        if log != other_log:
            return False
    are_peers = bool(_NUMBER.search(first)) and _NUMBER.sub("", first) == _NUMBER.sub("", second)
    return first == second or not are_peers
