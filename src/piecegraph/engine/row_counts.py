"""What a function that is not traced makes of its arguments' rows. See Note [Padding]."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from piecegraph.base import torch_compat
from piecegraph.base.structure import atoms
from piecegraph.graph.indices import is_integer, keeps_size, ranks, takes_any_integer
from piecegraph.graph.signature import TensorLeaf
from piecegraph.tape.body import is_blind, is_truth


class Count(NamedTuple):
    """Truth values, or numbers that are made of some."""

    op: str
    shape: tuple[int, ...]
    sizes: frozenset[int]
    """The numbers of the sizes that arguments have which it is made of."""


class RowCounts:
    """Follows rows through a run: what is made of all of them together and NaN would not show in, and what becomes an
    index.

    Args:
        inputs: the arguments.
        leaves: which sizes they have.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], leaves: Sequence[TensorLeaf]) -> None:
        self._rows = {
            torch_compat.storage_id(tensor): frozenset(size for _, size in leaf.dynamic)
            for tensor, leaf in zip(inputs, leaves, strict=True)
            if leaf.dynamic and torch_compat.has_memory(tensor)
        }
        """Memory that is made of rows, with the sizes that these have."""
        self._truths: set[int] = set()
        """That of it which is made of truth values."""
        self._pure: set[int] = set()
        """That which is made of nothing else."""
        self.found: list[Count] = []
        self._numbers = {
            torch_compat.storage_id(tensor): frozenset({index})
            for index, tensor in enumerate(inputs)
            if torch_compat.has_memory(tensor)
        }
        """Memory whose numbers are those of arguments, or as large as they are."""
        self.indices = frozenset[int]()
        """The arguments whose numbers become indices."""

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A :data:`~piecegraph.engine.eager_interception.RunCall`."""
        returned = function(*args, **kwargs)
        if torch_compat.is_op(function):
            op, given, made = torch_compat.qualified_name(function), _tensors((args, kwargs)), _tensors(returned)
            self._follow(op, given, made)
            numbers = [self._numbers.get(torch_compat.storage_id(tensor), frozenset[int]()) for tensor in given]
            if not takes_any_integer(op):
                self.indices = self.indices.union(*itertools.compress(numbers, map(is_integer, given)))
            for place, tensor in enumerate(made):
                is_kept = not (place and ranks(op)) and keeps_size(op, args, kwargs, given, tensor)
                self._numbers[torch_compat.storage_id(tensor)] = frozenset[int]().union(*numbers if is_kept else ())
        return returned

    def _follow(self, op: str, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        storages = {torch_compat.storage_id(tensor) for tensor in given}
        for storage in {torch_compat.storage_id(tensor) for tensor in made} - storages:  # it is new
            self._rows.pop(storage, None)
            self._truths.discard(storage)
            self._pure.discard(storage)
        sizes = frozenset[int]().union(*(self._rows.get(storage, ()) for storage in storages))
        if not sizes:
            return
        is_pure = storages.intersection(self._rows) <= self._pure
        is_made_of_truths = not self._truths.isdisjoint(storages)
        for tensor in made:
            storage = torch_compat.storage_id(tensor)
            self._rows[storage] = sizes | self._rows.get(storage, frozenset())
            if is_truth(tensor) or is_made_of_truths:
                self._truths.add(storage)
                (self._pure.add if is_truth(tensor) or is_pure else self._pure.discard)(storage)
                if is_blind(tensor, is_pure=storage in self._pure):
                    self.found.append(Count(op, tuple(tensor.shape), sizes))


def first_without_rows(first: Sequence[Count], second: Sequence[Count], padded: Collection[int]) -> str:
    """The first op that makes as much of the rows of some sizes in one run as in another; empty if there is none."""
    if [each.op for each in first] != [each.op for each in second]:
        return (*first, *second)[0].op
    pairs = zip(first, second, strict=True)
    return next((a.op for a, b in pairs if a.shape == b.shape and not a.sizes.isdisjoint(padded)), "")


def _tensors(value: Any) -> list[torch.Tensor]:
    return [part for atom in atoms(value) for part in torch_compat.parts_with_memory(atom)]
