"""The failures of several ranks: each rank writes down its own, and one of them puts them together."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from piecegraph.explain.evidence import Evidence, Failure, Process
from piecegraph.explain.run import hook
from piecegraph.explain.run.endings import likeness, milestones_of
from piecegraph.explain.run.records import NotedException, read_noted


def write_failure(error: BaseException) -> str:
    """An exception and the process it was raised in, as one line of JSON for a peer to read."""
    chain = hook.chain_of(error)
    noted = {"kind": "exception", "thread": "", "time": hook.now(), "phase": hook.phases_in(chain), "chain": chain}
    return hook.to_json({"pid": os.getpid(), "host": os.uname().nodename, "noted": noted})


def evidence_of(written: Mapping[int, str], num_ranks: int) -> Evidence:
    """What the failing ranks wrote, put together.

    Args:
        written: what :func:`write_failure` gave, by rank.
        num_ranks: of the whole job.
    """
    processes = {rank: Process(f"rank{rank}", rank) for rank in range(num_ranks)}
    told: list[tuple[NotedException, Process]] = []
    for rank, text in written.items():
        data = json.loads(text)
        processes[rank] = Process(f"rank{rank}", rank, data["pid"], data["host"])
        told.append((read_noted(data["noted"]), processes[rank]))
    told.sort(key=lambda pair: pair[0].wall_ns)  # as exact as the clocks of the machines agree
    alike: dict[object, list[tuple[NotedException, Process]]] = {}
    for noted, process in told:
        alike.setdefault(likeness(noted.chain), []).append((noted, process))
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
        milestones=milestones_of(told[0][0]),
    )
