"""The ranks of one model: joined by torch's own process groups, and agreed on all that a step depends on.

What is found out on one rank alone (free memory, how long something takes, whether a step could be recorded) is asked
of all of them, and one answer holds. Everything else is the same because it follows from the same arguments.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from piecegraph.errors import ConfigError, RankError
from piecegraph.llm.ranks.collectives import name_group
from piecegraph.llm.ranks.watch import Watch

Value = TypeVar("Value")

_NO_LIMIT = timedelta(days=365)
"""Ranks wait for the next order without end: that others are gone is seen by the watch."""
_models = itertools.count()
"""Numbers of the models that were shared out: the same on every rank, as all of them load all of them."""


@dataclass(frozen=True)
class Ranks:
    """The processes that run one model, as one of them sees them."""

    rank: int
    size: int
    label: str
    """By which ops find the group: the same at every start."""
    data: Any
    """The process group of what models send: NCCL's on a GPU."""
    control: Any
    """The process group of what hosts send."""
    watch: Watch

    @property
    def leads(self) -> bool:
        """Whether this is the rank that schedules, serves and prints."""
        return self.rank == 0

    @property
    def title(self) -> str:
        """Who this is among the ranks, for keys and folders."""
        return f"rank {self.rank} of {self.size}"

    def least(self, value: int) -> int:
        """The smallest of what the ranks have."""
        found = torch.tensor([value])
        distributed.all_reduce(found, distributed.ReduceOp.MIN, group=self.control)
        return int(found)

    def are_all(self, flag: bool) -> bool:
        """Whether something holds on every rank."""
        return bool(self.least(int(flag)))

    def of_first(self, value: Value) -> Value:
        """What the first rank has."""
        box = [value]
        distributed.broadcast_object_list(box, group_src=0, group=self.control)
        return box[0]

    def gather(self, value: Value) -> list[Value]:
        """What each rank has, in their order."""
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value, group=self.control)
        return found

    def check_same(self, what: str, value: str) -> None:
        """Raise if something is not the same on all ranks.

        Raises:
            RankError: PG684.
        """
        found = self.gather(value)
        other = next((rank for rank in range(self.size) if found[rank] != found[0]), None)
        if other is not None:
            why = f"rank 0 has {found[0]}, and rank {other} has {found[other]}"
            raise RankError("PG684", f"{what} differ from rank to rank", why=why)

    def share_random_state(self, device: torch.device) -> None:
        """Draw the random numbers that the first rank would from now on."""
        torch.set_rng_state(self.of_first(torch.get_rng_state()))
        if device.type == "cuda":
            torch.cuda.set_rng_state(self.of_first(torch.cuda.get_rng_state(device)), device)

    def take_first(self, tensor: torch.Tensor) -> None:
        """Write what the first rank has into the tensors of the others, in the order of the device."""
        distributed.broadcast(tensor, group_src=0, group=self.data)

    def close(self) -> None:
        """The model is gone, on all ranks before any of them goes on; the process groups stay for others."""
        self.watch.close()
        with contextlib.suppress(RuntimeError):  # of a rank that is gone
            self.are_all(True)


@dataclass(frozen=True)
class Replicas:
    """The models of a job that share out calls, as one process of one of them sees them."""

    number: int
    """Of its own model."""
    size: int
    firsts: Ranks | None
    """The first rank of each model; None if this is none of them."""
    watch: Watch
    """Over all processes of the job."""

    @property
    def title(self) -> str:
        """Which of them this is."""
        return f"replica {self.number} of {self.size}"

    def close(self) -> None:
        """The model is gone, on all replicas before any of them goes on."""
        self.watch.close()
        if self.firsts is not None:
            self.firsts.close()


def join_replicas(num_replicas: int, size: int, device: torch.device) -> Replicas:
    """The replicas that this process shares out calls with.

    Args:
        num_replicas: how many there are.
        size: how many ranks each of them has.
        device: what the model runs on.

    Raises:
        ConfigError: PG681, this is not a job of so many processes.
    """
    start_job(device.type)
    world, me = distributed.get_world_size(), distributed.get_rank()
    if world != num_replicas * size:
        what = f"data_parallel_size is {num_replicas}, of {size} {'rank' if size == 1 else 'ranks'} each"
        hint = f"start {num_replicas * size}"
        raise ConfigError("PG681", what, why=f"the job has {world} processes", hint=hint)
    watch = Watch(f"piecegraph/replicas {next(_models)}", me, world)
    watch.start()
    group = _first_ranks(distributed.group.WORLD, size)
    firsts = Ranks(me // size, num_replicas, "first ranks", group, group, watch) if me % size == 0 else None
    return Replicas(me // size, num_replicas, firsts, watch)


def join(size: int, device: torch.device, *, watch: Watch | None = None) -> Ranks | None:
    """The ranks that this process shares a model with; None if it has one of its own.

    Args:
        size: how many share a model. A job of several times as many processes has several models.
        device: what the model runs on.
        watch: that over all models of the job, if they end together; otherwise each model has one.

    Raises:
        ConfigError: PG681, this is not a job of so many processes.
    """
    if size == 1 and not (distributed.is_initialized() and distributed.get_world_size() == 1):
        return None
    start_job(device.type)
    world, me = distributed.get_world_size(), distributed.get_rank()
    if world % size:
        why = f"the job has {world} processes"
        raise ConfigError("PG681", f"tensor_parallel_size is {size}", why=why, hint="start a multiple of it")
    label = f"ranks of {size}"
    if watch is None:
        watch = Watch(f"piecegraph/model {next(_models)}/{me // size}", me % size, size)
        watch.start()
    data, control = _groups(distributed.group.WORLD, size, device.type)
    name_group(label, data)
    return Ranks(me % size, size, label, data, control, watch)


def local_device() -> torch.device:
    """The GPU of this process among those of its machine."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def start_job(device_type: str) -> None:
    """Make the process group of a job that ``torchrun`` started, unless somebody did.

    Raises:
        ConfigError: PG681, this process was started by itself.
    """
    if device_type == "cuda":
        # Graphs and other launches are never under way together here, so they need not be kept apart.
        os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    if distributed.is_initialized():
        return
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        hint = "start it by torchrun --nproc-per-node N"
        raise ConfigError("PG681", "there are no other ranks", why="this process was started by itself", hint=hint)
    distributed.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")


@functools.cache
def _groups(world: Any, size: int, device_type: str) -> tuple[Any, Any]:
    """Groups of neighbours for data and for control. All processes of the job make all of them, once."""
    mine: tuple[Any, Any] | None = None
    for first in range(0, distributed.get_world_size(), size):
        ranks = list(range(first, first + size))
        data = distributed.new_group(ranks, backend="nccl" if device_type == "cuda" else "gloo")
        control = distributed.new_group(ranks, backend="gloo", timeout=_NO_LIMIT)
        if distributed.get_rank() in ranks:
            mine = data, control
    assert mine is not None
    return mine


@functools.cache
def _first_ranks(world: Any, size: int) -> Any:
    """The group of the first of every ``size`` neighbours. All processes of the job make it, once."""
    return distributed.new_group(list(range(0, distributed.get_world_size(), size)), backend="gloo", timeout=_NO_LIMIT)
