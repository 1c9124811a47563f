"""The modules that a call may run beside the one that is compiled: a function names, holds or is given them."""

from __future__ import annotations

import contextlib
import functools
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_MAX_REACHED = 10_000
"""Where walking ends: a global may hold a whole data set."""
_BOOKS = frozenset(vars(torch.nn.Module())) - {"_modules"}
"""What torch keeps in every module."""


def modules_in_reach(value: Any) -> list[torch.nn.Module]:
    """The modules that a function names, or that are in a value: in outer variables, globals and defaults, in
    functions, containers and modules among these, and in the objects that methods belong to.
    """
    found: list[torch.nn.Module] = []
    todo: list[Any] = [value]
    seen: dict[int, Any] = {}
    while todo and len(seen) < _MAX_REACHED:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.nn.Module):
            found.append(value)
        todo += _named_by(value)
    return found


def _named_by(value: Any) -> list[Any]:
    """What can be reached from a value by its code, or in it."""
    if isinstance(value, FunctionType):
        names = [name for code in _codes_in(value.__code__) for name in code.co_names if name in value.__globals__]
        held = [*(value.__closure__ or ()), *(value.__globals__[name] for name in names)]
        return [*held, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, CellType):
        with contextlib.suppress(ValueError):  # it is empty
            return [value.cell_contents]
        return []
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, list | tuple | dict):
        return list(value.values() if isinstance(value, dict) else value)
    if isinstance(value, ModuleType | type) or type(getattr(value, "__dict__", None)) is not dict:
        return []
    is_module = isinstance(value, torch.nn.Module)
    own = [each for name, each in vars(value).items() if not is_module or name not in _BOOKS]
    code = _code_of_forward(type(value)) if is_module else []
    return [*code, *(each for each in own if isinstance(each, torch.nn.Module | list | tuple | dict))]


def _code_of_forward(cls: type) -> list[FunctionType]:
    """A module's forward, and the methods that it names."""
    found: dict[str, FunctionType] = {}
    todo = ["forward"]
    while todo:
        name = todo.pop()
        method = getattr(cls, name, None)
        if name not in found and isinstance(method, FunctionType) and not method.__module__.startswith("torch."):
            found[name] = method
            todo += [named for code in _codes_in(method.__code__) for named in code.co_names]
    return list(found.values())


def _codes_in(code: CodeType) -> list[CodeType]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return [code, *(each for one in inner for each in _codes_in(one))]
