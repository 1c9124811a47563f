"""Memory that a call writes to and that something else reads, too.

A plan works on copies of the arguments, which share nothing with each other or with the module. As long as nothing is
written, nobody can tell. A call that writes to memory it also reads by another name has to run as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from piecegraph.base import torch_compat
from piecegraph.graph.signature import Signature
from piecegraph.tape.body import Body


class Sharing:
    """Looks for shared memory in the calls of a plan that writes."""

    def __init__(self, signature: Signature, body: Body) -> None:
        self._names = tuple(leaf.name for leaf in signature.tensors)
        self._written = frozenset(body.written_calls)
        self._copied = tuple(i for i, leaf in enumerate(signature.tensors) if leaf.address is None)
        self._state = {torch_compat.storage_id(tensor) for tensor in body.written_state}
        self._weights = {torch_compat.storage_id(weight.tensor): weight.name for weight in body.weights()}

    def found_in(self, tensors: Sequence[torch.Tensor]) -> str:
        """What shares memory with what in a call; empty if nothing does that is written to."""
        for i in self._copied:
            storage = torch_compat.storage_id(tensors[i])
            if storage in self._state:
                return f"{self._names[i]} shares memory with a tensor of the module that is written to"
            if i in self._written:
                if storage in self._weights:
                    return f"{self._names[i]} is written to and shares memory with {self._weights[storage]}"
                if torch_compat.overlaps_itself(tensors[i]):
                    return f"{self._names[i]} is written to and overlaps itself"
                for j, other in enumerate(tensors):
                    if j != i and torch_compat.storage_id(other) == storage and _meet(tensors[i], other):
                        return f"{self._names[i]} is written to and shares memory with {self._names[j]}"
        return ""


def _meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the stretches of one storage that two tensors lie in have bytes in common."""
    (first, end), (other_first, other_end) = _stretch(a), _stretch(b)
    return first < other_end and other_first < end


def _stretch(tensor: torch.Tensor) -> tuple[int, int]:
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1) * tensor.element_size() if tensor.numel() else first
