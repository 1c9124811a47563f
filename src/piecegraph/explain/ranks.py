"""The ranks of a job: one report of a failure that several of them had.

Note [One report]
~~~~~~~~~~~~~~~~~
A rank that cannot compile or capture writes its failure into the job's key-value store and looks for those of its
peers for a short while. Rank 0 prints the page of all of them if it failed too, else the lowest rank that failed; a
counter in the store makes sure that only one does. No collective is used: ranks that do not fail take no part and are
not waited for beyond the deadline. Should the store itself hang, the rank gives up and raises its own error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import Any

from piecegraph.base.job import is_in_job

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
    if not is_in_job():
        return
    _incidents[subject] += 1
    prefix = f"piecegraph/{subject}/{_incidents[subject]}"
    # See Note [One report]: the store may hang with its server, and this rank must not.
    worker = threading.Thread(target=_agree, args=(prefix, subject, error), daemon=True)
    worker.start()
    worker.join(_DEADLINE_SECONDS + 3)


def _agree(prefix: str, subject: str, error: BaseException) -> None:
    from torch import distributed

    # Pages of failures take a while to import, and most processes never need them.
    from piecegraph.base.torch_compat import job_store
    from piecegraph.explain.page import compose
    from piecegraph.explain.rank_evidence import evidence_of_ranks, write_failure
    from piecegraph.explain.render import to_text

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
