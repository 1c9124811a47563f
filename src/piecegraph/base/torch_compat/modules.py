"""Modules and containers: what a module's call looks at, and what torch's pytree knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import torch
import torch.utils.hooks


def module_call_code() -> CodeType:
    """The code that runs every module's ``forward`` in eager mode; its frames have the module as ``self``."""
    return torch.nn.Module._call_impl.__code__


HOOKS_OF_A_FORWARD = ("_forward_hooks", "_forward_pre_hooks")
HOOKS_OF_A_CALL = ("_backward_hooks", "_backward_pre_hooks", *HOOKS_OF_A_FORWARD)
"""The attributes of a module that its call looks at before it calls ``forward``."""

global_hooks_of_a_call: tuple[Mapping[int, Any], ...] = tuple(
    getattr(torch.nn.modules.module, f"_global{name}") for name in HOOKS_OF_A_CALL
)
"""The same for all modules. torch fills these and never replaces them."""


PARTS = ("_modules", "_parameters", "_buffers")
"""The attributes of a module that hold what it is made of."""


def parts_of(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """The dictionaries in which a module has its modules, parameters and buffers. One of TorchScript has none: it keeps
    them outside of Python.
    """
    return tuple(vars(module)[name] for name in PARTS if name in vars(module))


hook_numbers = torch.utils.hooks.RemovableHandle
"""Its ``next_id`` is the number that the next hook of any module or tensor gets."""


def pytree_node(cls: type) -> tuple[Callable[[Any], tuple[Any, Any]], Callable[[Any, Any], Any]] | None:
    """(flatten, unflatten) of a type registered with torch's pytree, or None."""
    from torch.utils._pytree import SUPPORTED_NODES

    node = SUPPORTED_NODES.get(cls)
    return None if node is None else (node.flatten_fn, node.unflatten_fn)
