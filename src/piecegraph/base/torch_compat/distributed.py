"""Process groups, and memory that ranks share."""

from __future__ import annotations

from typing import Any

import torch


def job_store() -> Any:
    """A connection of our own to the key-value store of the default process group.

    torch 2.11 to 2.13: the store of a group is not public, and using the group's own connection would get in the way of
    a collective that is being set up.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]


def nvlinks() -> list[list[int]]:
    """How many NVLinks lead from each GPU of this machine to each other one.

    torch 2.11 to 2.13. Raises a RuntimeError where torch cannot tell.
    """
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

    matrix: list[list[int]] = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix
    return matrix


def symmetric_bytes(num_bytes: int, device: torch.device, group: Any) -> torch.Tensor:
    """Memory that all ranks of a process group have mapped. All of them call it.

    torch 2.11 to 2.13. Not by ``_symmetric_memory.empty``, which takes parts of a pool: kernels then need to know where
    in it a tensor begins. An allocation by itself begins where its mapping does.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    buffer: torch.Tensor = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
    _SymmetricMemory.rendezvous(buffer, group.group_name)
    return buffer


def one_shot_all_reduce(staged: torch.Tensor, group: str, out: torch.Tensor) -> None:
    """Add up what all ranks have in a tensor of :func:`symmetric_bytes`, in the order of the ranks.

    torch 2.11 to 2.13: ``out`` is contiguous and aligned to 16 bytes, which is not checked there.
    """
    torch.ops.symm_mem.one_shot_all_reduce_out(staged, "sum", group, out)
