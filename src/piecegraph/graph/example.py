"""An example call, taken apart: what both front ends start from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch

from piecegraph.base.plan import Decision
from piecegraph.base.structure import Structure
from piecegraph.graph.dims import DimRequest, EarlierShape, find_dynamic_dims
from piecegraph.graph.signature import Binder, Signature, flatten_arguments, make_signature


@dataclass(frozen=True)
class Example:
    """A call with its leaves, its signature and the dimensions that may vary."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    binder: Binder
    leaves: tuple[Any, ...]
    structure: Structure
    """Of the tuple of all argument values."""
    signature: Signature
    requests: tuple[DimRequest, ...]
    decision: Decision
    """How the dynamic dimensions were chosen."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def is_empty(self) -> bool:
        """Whether a size is zero: such a call shows nothing of what others do."""
        return any(leaf.shape[dim] == 0 for leaf in self.signature.tensors for dim, _ in leaf.dynamic)

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the same call with other tensors."""
        others = iter(tensors)
        leaves = (next(others) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves)
        return self.binder.unbind(self.args, self.kwargs, list(self.structure.build(leaves)))


def read_example(
    function: Callable[..., Any],
    binder: Binder,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    dynamic_dims: Literal["auto"] | Mapping[str, Any],
    static_inputs: Sequence[str],
    training: bool | None,
    earlier: Mapping[str, EarlierShape] = MappingProxyType({}),
) -> Example:
    """Take an example call apart and decide which of its dimensions are sizes."""
    names, values = binder.bind(args, kwargs)
    leaves, _, structure = flatten_arguments(tuple(values))
    paths = [path for name, value in zip(names, values, strict=True) for path in flatten_arguments(value, name)[1]]
    requests, decision = find_dynamic_dims(function, leaves, paths, dynamic_dims, earlier)
    signature = make_signature(names, values, requests, static_inputs, training)
    return Example(args, kwargs, binder, tuple(leaves), structure, signature, requests, decision)


def sizes_of(signature: Signature, example: Example) -> tuple[int, ...]:
    """The sizes of an example call, by the signature that a trace has made of its own."""
    found = dict.fromkeys(range(len(signature.size_names)), 2)
    for leaf, tensor in zip(signature.tensors, example.tensors, strict=True):
        found |= {size: tensor.shape[dim] for dim, size in leaf.dynamic}
    return tuple(found.values())
