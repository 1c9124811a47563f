"""Memory: tensors over storages, and whose they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def non_owning(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that does not keep it alive."""
    storage = tensor.untyped_storage()
    return over(
        torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes()), tensor
    )


def over(storage: Any, like: torch.Tensor) -> torch.Tensor:
    """A tensor that reads a storage as another tensor reads its own: conjugated and negated lazily, too."""
    with torch.inference_mode(False):
        view = torch.empty(0, dtype=like.dtype, device=like.device)
        view.set_(storage, like.storage_offset(), like.size(), like.stride())
        if like.is_conj():
            view = view.conj()
        return torch._neg_view(view) if like.is_neg() else view


def stretched(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of another shape over the memory that begins where this one's does, with its strides.

    No view of it: of what was made in inference mode there are none that calls in both modes can use.
    """
    with torch.inference_mode(False):
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), shape, tensor.stride())


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's whole storage, as bytes."""
    storage = tensor.untyped_storage()
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's whole storage, as numbers of the tensor's type."""
    storage, size = tensor.untyped_storage(), tensor.dtype.itemsize
    if storage.nbytes() % size:
        return bytes_of(tensor)
    with torch.inference_mode(False):
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(storage, 0, (storage.nbytes() // size,), (1,))


def reading(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How a tensor's memory is read, apart from where."""
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Of which it is known that they are nothing else."""


def has_memory(value: Any) -> bool:
    """Whether a value is a tensor with a storage that can be looked at."""
    if type(value) not in _PLAIN_TENSORS:
        from torch._subclasses.fake_tensor import FakeTensor
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass

        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or is_traceable_wrapper_subclass(value):
            return False
    is_dense = value.layout is torch.strided and not value.is_nested
    return is_dense and value.device.type != "meta" and not is_only_zeros(value)


is_only_zeros: Callable[[torch.Tensor], bool] = torch._is_zerotensor
"""Whether a tensor is zeros without memory, as the tangents of ``torch.func.jvp`` are that are not known to be more."""


def parts_with_memory(value: Any) -> list[torch.Tensor]:
    """The tensors that hold a value's data: itself, or those that a wrapper such as a nested tensor is made of."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if type(value) not in _PLAIN_TENSORS and is_traceable_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()
        return [part for name in names for part in parts_with_memory(getattr(value, name))]
    return [value] if has_memory(value) else []


def storage_id(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory. Works on fake tensors, which have no address."""
    return int(tensor.untyped_storage()._cdata)


def is_made_of_data(op: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is how torch shows a tensor that it has just filled with Python numbers: ``torch.tensor([1.0])``.

    What ``torch.from_numpy`` returns is shown likewise, and is somebody else's memory, which torch cannot resize.
    """
    is_shown = op is torch.ops.aten.lift_fresh.default
    return is_shown and bool(args[0].untyped_storage().resizable())  # type: ignore[no-untyped-call]


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor may lie at one place."""
    return bool(torch._debug_has_internal_overlap(tensor) != 0)


def storage_is_alive(tensor: torch.Tensor) -> Callable[[], bool]:
    """A function that tells whether anything still holds the tensor's storage, without holding it itself."""
    from torch.multiprocessing.reductions import StorageWeakRef

    reference = StorageWeakRef(tensor.untyped_storage())
    return lambda: not reference.expired()


alias: Callable[[torch.Tensor], torch.Tensor] = torch.ops.aten.alias.default
"""Another tensor over the same memory."""

copy_all: Callable[[Any, Any], None] = torch._foreach_copy_
"""Copies several tensors with as few kernels as their types allow."""
