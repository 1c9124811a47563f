"""Where a value comes from: the nouns that the stages from trace to tape share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.fx


@dataclass(frozen=True, slots=True)
class FromCall:
    """A tensor of the call."""

    index: int
    """Into ``signature.tensors``."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor that is there before the call: a parameter, a buffer, a global."""

    name: str
    tensor: torch.Tensor
    parts: tuple[Weight, ...] = ()
    """The weights that are views of this one, if it was made by joining them."""


@dataclass(frozen=True, slots=True)
class FromSize:
    """An integer computed from the sizes of the call."""

    expr: sympy.Expr


@dataclass(frozen=True, slots=True)
class FromGraph:
    """A value the graph computes."""

    node: torch.fx.Node


@dataclass(frozen=True, slots=True)
class Fixed:
    """A value that is the same in every call."""

    value: Any


GraphInput = FromCall | Weight | FromSize


@dataclass(frozen=True, slots=True)
class Update:
    """A dictionary or list among the arguments that the function adds to. What it adds is part of the result."""

    keys: tuple[Any, ...]
    """The way to it, from the list of all arguments."""
    removed: tuple[Any, ...]
    """Keys of a dictionary that are taken out."""
    is_result: bool
    """Whether it is what the function returns."""

    def find(self, values: Any) -> Any:
        """The container, among the arguments of a call."""
        for key in self.keys:
            values = values[key]
        return values

    def apply(self, container: Any, added: dict[Any, Any]) -> None:
        """Change a container as the function would."""
        for key in self.removed:
            del container[key]
        if isinstance(container, list):
            container.extend(added.values())
        else:
            container.update(added)
