"""The ranks of a job: one report of a failure that several of them had, and a clean way out.

Note [One report]
~~~~~~~~~~~~~~~~~
A rank that cannot compile or capture writes its failure into the job's key-value store and looks for those of its
peers for a short while. Rank 0 prints the page of all of them if it failed too, else the lowest rank that failed; a
counter in the store makes sure that only one does. No collective is used: ranks that do not fail take no part and are
not waited for beyond the deadline. Should the store itself hang, the rank gives up and raises its own error.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from piecegraph.explain.evidence import Evidence, Failure, Process
from piecegraph.explain.page import compose
from piecegraph.explain.render import to_text
from piecegraph.explain.run.hook.data import chain_of, now, phases_in, to_json
from piecegraph.explain.run.records import RecordedException, read_exception
from piecegraph.explain.run.run_evidence import likeness, milestones_of

logger = logging.getLogger(__name__)

_DEADLINE_SECONDS = 2.0
_POLL_SECONDS = 0.05
_incidents: Counter[str] = Counter()


def report_failure(subject: str, error: BaseException) -> None:
    """Tell the other ranks of a failure, and print one page of all of them; nothing outside of a distributed job.

    Args:
        subject: what could not be compiled or captured: the same on every rank.
        error: what is about to be raised.
    """
    if not _is_in_job():
        return
    _incidents[subject] += 1
    prefix = f"piecegraph/{subject}/{_incidents[subject]}"
    # See Note [One report]: the store may hang with its server, and this rank must not.
    worker = threading.Thread(target=_agree, args=(prefix, subject, error), daemon=True)
    worker.start()
    worker.join(_DEADLINE_SECONDS + 3)


def _agree(prefix: str, subject: str, error: BaseException) -> None:
    from torch import distributed

    from piecegraph.base.torch_compat import job_store

    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    try:
        store = job_store()
        store.set(f"{prefix}/{rank}", write_failure(error))
        failed = _wait_for_peers(store, prefix, num_ranks)
        if min(failed) == rank and store.add(f"{prefix}/reported", 1) == 1:
            written = {peer: store.get(f"{prefix}/{peer}").decode() for peer in failed}
            page = to_text(compose(evidence_of_ranks(written, num_ranks)))
            logger.error("%s\n%s", _summary(subject, failed, num_ranks, error), page)
        elif min(failed) != rank:
            error.add_note(f"rank {min(failed)} prints the report of all {len(failed)} ranks that failed")
    except RuntimeError as lost:  # every error of a store
        logger.warning("rank %d could not tell its peers that %s failed: %s", rank, subject, lost)


def _wait_for_peers(store: Any, prefix: str, num_ranks: int) -> list[int]:
    """The ranks that failed: all of them as soon as all have, or those that did within the deadline."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while True:
        failed = [peer for peer in range(num_ranks) if store.check([f"{prefix}/{peer}"])]
        if len(failed) == num_ranks or time.monotonic() > deadline:
            return failed
        time.sleep(_POLL_SECONDS)


def _summary(subject: str, failed: list[int], num_ranks: int, error: BaseException) -> str:
    who = f"rank {failed[0]}" if len(failed) == 1 else f"ranks {', '.join(map(str, failed))}"
    others = num_ranks - len(failed)
    rest = f"; {others} did not fail within {_DEADLINE_SECONDS:.0f} s" if others else ""
    return f"{subject} failed on {who} of {num_ranks}{rest}: {error}"


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


def leave_job() -> None:
    """Shut down the process groups of this process, if it has any: the end of every command of ours."""
    if _is_in_job():
        sys.modules["torch.distributed"].destroy_process_group()


def rank_in_job() -> int | None:
    """The number of this process among several of a job; None if it is the only one."""
    if not _is_in_job() or (distributed := sys.modules["torch.distributed"]).get_world_size() == 1:
        return None
    return int(distributed.get_rank())


def _is_in_job() -> bool:
    distributed = sys.modules.get("torch.distributed")  # not imported for this: a command may do without torch
    return distributed is not None and distributed.is_available() and distributed.is_initialized()
