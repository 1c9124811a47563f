"""A model among other processes: the ranks that run it together and the replicas beside it are joined, and left."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Protocol

import torch

from piecegraph.base.plan import Decision
from piecegraph.errors import PiecegraphError
from piecegraph.llm.config import LLMConfig
from piecegraph.llm.place import Follower, Leader, Place
from piecegraph.llm.ranks.group import Ranks, Replicas, join, join_replicas
from piecegraph.llm.ranks.orders import Orders
from piecegraph.llm.ranks.watch import Watch
from piecegraph.llm.replicas import Replica
from piecegraph.llm.running import RunningModel


class Closable(Protocol):
    """A model that can be given up."""

    def close(self) -> None:
        """Give it up."""


@dataclass(frozen=True)
class Job:
    """The other processes that a model has to do with."""

    ranks: Ranks | None
    """Those that run it together; None if it is one process."""
    replicas: Replicas | None
    """None if there are no others that share out calls."""

    @property
    def watch(self) -> Watch | None:
        """Of all of them; None if there are none."""
        joined = self.ranks if self.replicas is None else self.replicas
        return None if joined is None else joined.watch

    @property
    def is_first(self) -> bool:
        """Whether this is the process that tells of all."""
        return (self.ranks is None or self.ranks.leads) and (self.replicas is None or self.replicas.number == 0)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What ``explain()`` tells of replicas."""
        if self.replicas is None:
            return ()
        return (Decision("data parallel", self.replicas.title, "the prompts of each call are shared out"),)

    @property
    def request_numbers(self) -> Iterator[int]:
        """Of which no two replicas have the same."""
        if self.replicas is None:
            return itertools.count(1)
        return itertools.count(1 + self.replicas.number, self.replicas.size)

    def together(self, subject: str) -> contextlib.AbstractContextManager[None]:
        """Around what they do together: what fails on one of them stops all."""
        return contextlib.nullcontext() if self.watch is None else self.watch.together(subject)

    def close(self) -> None:
        """The model is gone."""
        if self.ranks is not None:
            self.ranks.close()
        if self.replicas is not None:
            self.replicas.close()


def join_job(path: str, config: LLMConfig) -> Job:
    """Find the processes that share a model, or calls, with this one.

    Raises:
        ConfigError: PG681, this is not a job of so many processes.
        RankError: PG684, they were called with different arguments.
    """
    num_ranks, num_replicas = config.tensor_parallel_size, config.data_parallel_size
    if num_ranks * num_replicas > 1 and config.device.type == "cuda":
        torch.cuda.set_device(config.device)  # NCCL asks for it
    replicas = join_replicas(num_replicas, num_ranks, config.device) if num_replicas > 1 else None
    job = Job(join(num_ranks, config.device, watch=None if replicas is None else replicas.watch), replicas)
    with job.together("joining the ranks"):
        shown = {field.name: getattr(config, field.name) for field in fields(config)}
        shown |= {"device": config.device.type, "backend": str(getattr(config.backend, "__name__", config.backend))}
        for ranks in (None if replicas is None else replicas.firsts, job.ranks):
            if ranks is not None:
                ranks.check_same("the arguments of LLM", f"{path!r} {shown}")
                ranks.share_random_state(config.device)  # dummy weights are drawn whole, and are those of all
    return job


def leave_at_exit(model: Closable) -> None:
    """Give up a model when the program ends, unless it ends by an error: then the others are to miss this rank."""
    found = weakref.ref(model)

    def leave() -> None:
        left = found()
        if left is not None and getattr(sys, "last_value", None) is None:
            with contextlib.suppress(PiecegraphError, RuntimeError):  # the others may be gone
                left.close()

    atexit.register(leave)


def take_place(job: Job, running: RunningModel) -> Place:
    """Who answers the calls that are made in this process."""
    ranks, replicas = job.ranks, job.replicas
    if ranks is not None and not ranks.leads:
        return Follower(running, Orders(ranks))
    place = Place(running) if replicas is None or replicas.firsts is None else Replica(running, replicas.firsts)
    return place if ranks is None else Leader(running, Orders(ranks), place)
