"""The distributed job that this process is part of, if torch knows of one."""

from __future__ import annotations

import sys


def is_in_job() -> bool:
    """Whether there is a process group."""
    distributed = sys.modules.get("torch.distributed")  # not imported for this: a command may do without torch
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def rank_in_job() -> int | None:
    """The number of this process among several of a job; None if it is the only one."""
    if not is_in_job() or (distributed := sys.modules["torch.distributed"]).get_world_size() == 1:
        return None
    return int(distributed.get_rank())


def leave_job() -> None:
    """Shut down the process groups of this process, if it has any: the end of every command of ours."""
    if is_in_job():
        sys.modules["torch.distributed"].destroy_process_group()
