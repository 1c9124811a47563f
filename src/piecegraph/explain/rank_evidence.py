"""What failing ranks tell each other: how one writes it down, and what all of them prove."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from piecegraph.explain.evidence import Evidence, Failure, Process
from piecegraph.explain.run.hook.data import chain_of, now, phases_in, to_json
from piecegraph.explain.run.records import RecordedException, read_exception
from piecegraph.explain.run.run_evidence import likeness, milestones_of


def write_failure(error: BaseException) -> str:
    """An exception and the process it was raised in, as one line of JSON for a peer to read."""
    chain = chain_of(error)
    exception = {"kind": "exception", "thread": "", "time": now(), "phase": phases_in(chain), "chain": chain}
    return to_json({"pid": os.getpid(), "host": os.uname().nodename, "exception": exception})


def evidence_of_ranks(written: Mapping[int, str], num_ranks: int) -> Evidence:
    """What the failing ranks wrote, put together.

    Args:
        written: what :func:`write_failure` gave, by rank.
        num_ranks: of the whole job.
    """
    processes = {rank: Process(f"rank{rank}", rank) for rank in range(num_ranks)}
    failed: list[tuple[RecordedException, Process]] = []
    for rank, text in written.items():
        data = json.loads(text)
        processes[rank] = Process(f"rank{rank}", rank, data["pid"], data["host"])
        failed.append((read_exception(data["exception"]), processes[rank]))
    failed.sort(key=lambda pair: pair[0].wall_ns)  # as exact as the clocks of the machines agree
    alike: dict[object, list[tuple[RecordedException, Process]]] = {}
    for exception, process in failed:
        alike.setdefault(likeness(exception.chain), []).append((exception, process))
    failures = [
        Failure(
            chain=group[0][0].chain,
            count=len(group),
            processes=tuple(process for _, process in group),
            certainty="recorded",
            time_ns=group[0][0].wall_ns,
        )
        for group in alike.values()
    ]
    return Evidence(
        sources=("what the failing ranks told each other",),
        processes=tuple(processes.values()),
        failures=tuple(failures),
        milestones=milestones_of(failed[0][0]),
    )
