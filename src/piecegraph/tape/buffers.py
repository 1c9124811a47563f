"""The static memory a tape reads its inputs from.

One storage for each tensor argument, large enough for the largest size; every size is a view of its beginning, laid
out densely as the graph was traced. Only one size runs at a time, so all sizes share it. A size that is larger than all
before it gets a new storage, which later ones share; those before it stay where their tapes read them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from piecegraph.base import torch_compat
from piecegraph.base.compare import same_bits
from piecegraph.graph.signature import Call, TensorLeaf, dense_strides


class StaticInputs:
    """Hands out the input views of each size."""

    def __init__(
        self, leaves: Sequence[TensorLeaf], pad_values: Mapping[str, float], example: Sequence[torch.Tensor]
    ) -> None:
        self.leaves = tuple(leaves)
        self.pad_values = tuple(pad_values.get(leaf.name, 0) for leaf in leaves)
        self._static = {i: example[i] for i, leaf in enumerate(leaves) if leaf.address is not None}
        self._storages: list[torch.Tensor | None] = [None] * len(leaves)
        self._views: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self.filled_by: object = None
        """Whose padding the buffers hold. Padding is written again only when somebody else has used the buffers
        since.
        """

    def views(self, sizes: tuple[int, ...]) -> list[torch.Tensor]:
        """Each input's buffer at a size: the same memory whenever it is asked for."""
        if sizes not in self._views:
            self._views[sizes] = [
                self._static[i] if i in self._static else self._view(i, sizes) for i in range(len(self.leaves))
            ]
        return self._views[sizes]

    def _view(self, index: int, sizes: tuple[int, ...]) -> torch.Tensor:
        leaf = self.leaves[index]
        shape = shape_at(leaf, sizes)
        strides = dense_strides(shape, leaf.dim_order)
        numel = torch.Size(shape).numel()
        storage = self._storages[index]
        if storage is None or storage.numel() < numel:
            with torch_compat.outside_inference():
                storage = torch.full((max(numel, 1),), self.pad_values[index], dtype=leaf.dtype, device=leaf.device)
            self._storages[index] = storage
        return storage.as_strided(shape, strides)

    def fill(self, sizes: tuple[int, ...], example: Call) -> None:
        """Fill a size's views with the rows of an example, repeated as often as needed."""
        for view, source, leaf in zip(self.views(sizes), example.tensors, self.leaves, strict=True):
            if leaf.address is None:
                view.copy_(rows_at(source, leaf, example.sizes, sizes))
        self.filled_by = None


def shape_at(leaf: TensorLeaf, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """An input's shape in a call of these sizes."""
    shape = list(leaf.shape)
    for dim, size in leaf.dynamic:
        shape[dim] = sizes[size]
    return tuple(shape)


def rows_at(tensor: torch.Tensor, leaf: TensorLeaf, own: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    """An argument of a call at other sizes than its own: its rows, repeated or cut off.

    An integer may be the index of a row that is cut off. A GPU does not survive such an index, so it becomes the index
    of a row that is there.
    """
    rows = repeat_to(tensor, shape_at(leaf, sizes))
    if rows.is_floating_point() or rows.is_complex() or rows.dtype is torch.bool:
        return rows
    for have, want in zip(own, sizes, strict=True):
        if want < have:
            rows = torch.where((rows >= want) & (rows < have), rows % want, rows)
    return rows


def repeat_to(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor with its rows repeated, or cut off, so that it has the shape."""
    for dim, size in enumerate(shape):
        if tensor.shape[dim] != size:
            tensor = tensor.index_select(dim, torch.arange(size, device=tensor.device) % tensor.shape[dim])
    return tensor


def conform(tensor: torch.Tensor, leaf: TensorLeaf) -> torch.Tensor:
    """The tensor in the memory layout that the pieces were compiled for: itself, or a copy."""
    strides = dense_strides(tensor.shape, leaf.dim_order)
    if all(have == want or size <= 1 for have, want, size in zip(tensor.stride(), strides, tensor.shape, strict=True)):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def real_part(view: torch.Tensor, leaf: TensorLeaf, sizes: tuple[int, ...]) -> torch.Tensor:
    """The part of an input buffer that a call fills."""
    for dim, size in leaf.dynamic:
        view = view.narrow(dim, 0, sizes[size])
    return view


def padded_parts(view: torch.Tensor, leaf: TensorLeaf, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """The parts of an input buffer that a call leaves to padding."""
    return [
        view.narrow(dim, sizes[size], view.shape[dim] - sizes[size])
        for dim, size in leaf.dynamic
        if view.shape[dim] > sizes[size]
    ]


def copy_as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, also of a tensor that leaves memory out or reads it twice (``expand``)."""
    if not tensor.numel():
        return tensor.clone()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((extent,), (1,)).clone()
    return memory.as_strided(tensor.shape, tensor.stride(), 0)


@contextlib.contextmanager
def preserved(written: Sequence[torch.Tensor]) -> Iterator[None]:
    """Put tensors back to what they were, whatever runs inside writes to them."""
    saved = [tensor.clone() for tensor in written]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(written, saved, strict=True):
                tensor.copy_(value)


@contextlib.contextmanager
def unharmed(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """As :func:`preserved`, for tensors that are most likely only read: those that cannot be written to are not."""
    saved = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, saved, strict=True):
                if not same_bits(tensor, value):
                    tensor.copy_(value)
