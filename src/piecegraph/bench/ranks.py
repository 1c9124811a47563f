"""Several processes that measure one model together: who prints, and what they must agree on."""

from __future__ import annotations

import os

import torch


def is_first() -> bool:
    """Whether this is the process that prints: the only one, or rank 0 of torchrun's."""
    return os.environ.get("RANK", "0") == "0"


def all_say(said: bool) -> bool:
    """Whether all ranks say so: else some would go on to a step that the others do not run."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return said
    votes: list[bool] = [False] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(votes, said)
    return all(votes)
