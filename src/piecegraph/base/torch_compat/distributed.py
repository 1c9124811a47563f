"""Process groups."""

from __future__ import annotations

from typing import Any


def job_store() -> Any:
    """A connection of our own to the key-value store of the default process group.

    torch 2.11 to 2.13: the store of a group is not public, and using the group's own connection would get in the way of
    a collective that is being set up.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
