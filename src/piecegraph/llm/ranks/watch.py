"""Ranks that end together: whoever fails tells the others, and whoever is gone is missed.

Note [Nobody waits for the dead]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A collective waits for every rank, on a GPU without end. So each rank has a thread that looks, a few times a second, for
two things that need no collective: the first failure, which a rank writes to the job's store before it raises, and the
processes of the other ranks, where they run on the same machine; the kernel tells when one of them ends, whatever ended
it. (Of ranks on another machine ``torchrun`` knows: it ends a job when one of its processes does.) What is found is
raised by the main thread as soon as it is asked, or as a collective fails; if that takes longer than a grace period,
the thread writes it to standard error and ends the process, as there is no other way out of a kernel that waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Never

from piecegraph.base import torch_compat
from piecegraph.errors import PiecegraphError, RankError
from piecegraph.explain.ranks import report_failure

_LOOK_SECONDS = 0.2
_GRACE_SECONDS = 5.0
"""How long a process may take to notice by itself that others have failed."""
_CAUSE_SECONDS = 1.0
"""How long a failure may take to be known behind the collective that failed because of it."""


class Watch:
    """The watch over the other ranks of a model, from :meth:`start` to :meth:`close`.

    Args:
        prefix: of its keys in the job's store: the same on all ranks, and of no other model.
        rank: of this process among the model's.
        size: how many there are.
    """

    def __init__(self, prefix: str, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._prefix = prefix
        self._store = torch_compat.job_store()
        self._has_store = True
        """Whether it still answers."""
        self._failure: RankError | None = None
        self._is_known = threading.Event()
        """Whether there is a failure."""
        self._is_noticed = threading.Event()
        """Whether it was raised, or nothing is left that it could stop."""
        self._processes: dict[int, int] = {}
        """File descriptors of the ranks' processes, by rank."""
        self._thread = threading.Thread(target=self._look, name="piecegraph-ranks", daemon=True)

    def start(self) -> None:
        """Tell the others who we are, and look after them from now on."""
        self._store.set(f"{self._prefix}/process/{self.rank}", json.dumps([os.getpid(), machine()]))
        for rank in range(self.size):
            pid, where = json.loads(self._store.get(f"{self._prefix}/process/{rank}"))
            if rank != self.rank and where == machine():
                with contextlib.suppress(ProcessLookupError):  # gone already: torchrun, or a collective, will tell
                    self._processes[rank] = os.pidfd_open(pid)
        self._thread.start()

    def close(self) -> None:
        """This rank is done, and may be missed no more."""
        if not self._is_noticed.is_set():
            with contextlib.suppress(RuntimeError):  # the store is gone with a rank that was done before
                self._store.set(f"{self._prefix}/done/{self.rank}", "")
        self._is_noticed.set()
        self._thread.join(2 * _LOOK_SECONDS)

    @property
    def is_over(self) -> bool:
        """Whether this rank has failed, or is done: the others hear nothing of it any more."""
        return self._is_noticed.is_set()

    @contextlib.contextmanager
    def together(self, subject: str) -> Iterator[None]:
        """Around what all ranks do: an error in it is told to the others, or is theirs.

        Args:
            subject: what is done, the same on every rank.
        """
        try:
            self.check()
            yield
        except RankError as error:
            if error.rank is None:  # found here
                self._tell(subject, error)
            self._is_noticed.set()
            raise
        except BaseException as error:
            if self.is_over:  # it was told where it was raised, inside of another such block
                raise
            if _may_be_theirs(error) and self._is_known.wait(_CAUSE_SECONDS):
                self._is_noticed.set()
                raise self._known() from error
            self._tell(subject, error)
            raise

    def check(self) -> None:
        """Raise if another rank has failed."""
        if self._is_known.is_set():
            raise self._known()

    def end_process(self, error: BaseException) -> Never:
        """End this process at once, where nobody is left to raise anything to."""
        if self.rank == self._reporter():
            os.write(2, f"error: {error}\n".encode())
        with contextlib.suppress(Exception):  # nobody may be there to read it, and the process must end all the same
            sys.stdout.flush()
        os._exit(1)

    def _known(self) -> RankError:
        assert self._failure is not None
        return self._failure

    def _reporter(self) -> int:
        """Who tells of a failure: the first rank, unless it is the one that is gone."""
        return 1 if self._failure is not None and self._failure.rank == 0 else 0

    def _tell(self, subject: str, error: BaseException) -> None:
        """Write down why this rank ends, and have it reported once: see Note [One report]."""
        self._is_noticed.set()
        text = json.dumps([self.rank, subject, f"{type(error).__name__}: {error}"[:2000]])
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(f"{self._prefix}/failed", "", text)
        report_failure(subject, error)

    # -- the thread

    def _look(self) -> None:
        """See Note [Nobody waits for the dead]."""
        poll = select.poll()
        ranks = {descriptor: rank for rank, descriptor in self._processes.items()}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        store = torch_compat.job_store()
        while not self._is_noticed.is_set() and self._failure is None:
            ended = [descriptor for descriptor, _ in poll.poll(_LOOK_SECONDS * 1e3)]
            if not ranks:
                time.sleep(_LOOK_SECONDS)
            self._failure = self._find(store, [ranks[descriptor] for descriptor in ended])
            for descriptor in ended:
                poll.unregister(descriptor)
        for descriptor in ranks:
            os.close(descriptor)
        if self._failure is not None:
            self._is_known.set()
            if not self._is_noticed.wait(_GRACE_SECONDS):
                self.end_process(self._failure)

    def _find(self, store: Any, ended: list[int]) -> RankError | None:
        """The first failure that is known: of a rank that told it, or of one that ended without a word."""
        gone = ended
        try:
            if self._has_store and store.check([f"{self._prefix}/failed"]):
                rank, subject, text = json.loads(store.get(f"{self._prefix}/failed"))
                return self._of(rank, "failed", f"{subject}: {text}") if rank != self.rank else None
            if self._has_store:
                gone = [rank for rank in ended if not store.check([f"{self._prefix}/done/{rank}"])]
        except RuntimeError:  # every error of a store: it ended with its process, which need not be one of ours
            self._has_store = False
        return self._of(gone[0], "is gone", "its process has ended") if gone else None

    def _of(self, rank: int, what: str, why: str) -> RankError:
        error = RankError("PG683", f"rank {rank} of {self.size} {what}", why=why)
        error.rank = rank
        return error


def _may_be_theirs(error: BaseException) -> bool:
    """Whether an error may be what is seen here of a rank that is gone: torch's own are RuntimeErrors, and may be the
    cause of one of ours. All others are ours, also where every rank has the same.
    """
    cause: BaseException | None = error
    while isinstance(cause, PiecegraphError):
        cause = cause.__cause__
    return isinstance(cause, RuntimeError)


def machine() -> str:
    """What numbers of processes mean the same in."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
