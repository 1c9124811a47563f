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
