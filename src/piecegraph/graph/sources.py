"""Where a value comes from: the nouns that the stages from trace to tape share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

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
class AttributeUpdate:
    """A module of which the function sets attributes at every call. What it sets them to is part of the result."""

    owner: torch.nn.Module
    name: str
    """Of the module, for people."""
    keys: tuple[str, ...]
    is_result: ClassVar[bool] = False

    @property
    def names(self) -> list[str]:
        """Of the attributes, for people."""
        return [f"{self.name}.{key}" for key in self.keys]

    def find(self, values: Any) -> torch.nn.Module:
        """The module, which is the same at every call."""
        return self.owner

    def apply(self, owner: torch.nn.Module, added: dict[str, Any]) -> None:
        """Set the attributes to what the function would. Its own ``__setattr__`` has seen the values by then."""
        vars(owner).update(added)


@dataclass(frozen=True, slots=True)
class Update:
    """A dictionary or list among the arguments that the function adds to. What it adds is part of the result."""

    keys: tuple[Any, ...]
    """The way to it, from the list of all arguments."""
    removed: tuple[Any, ...]
    """Keys of a dictionary that are taken out."""
    is_result: bool
    """Whether it is what the function returns."""
    names: ClassVar[list[str]] = []

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


AnyUpdate = Update | AttributeUpdate


def with_attributes(function: Callable[..., Any], updates: Sequence[AnyUpdate]) -> Callable[..., Any]:
    """A function that returns what attributes it has set, too, as its trace does."""
    setting = [update for update in updates if isinstance(update, AttributeUpdate)]
    if not setting or len(setting) < len(updates):  # what is added to arguments nobody looks for
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        returned = function(*args, **kwargs)
        return returned, *({key: getattr(update.owner, key) for key in update.keys} for update in setting)

    return run
