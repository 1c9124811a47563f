"""What a call may reach by its code: modules beside the one that is compiled, and values that functions name."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

FIXED = frozenset({"torch", "piecegraph", *sys.stdlib_module_names})
"""In whose modules nobody replaces anything."""

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
    code = methods_that_run(value) if is_module else []
    return [*code, *(each for each in own if isinstance(each, torch.nn.Module | list | tuple | dict))]


class OuterVariable(NamedTuple):
    """Where a function finds a value that is none of its own."""

    holder: dict[str, Any] | CellType
    key: str

    def set(self, value: Any) -> None:
        """Have the function find another value there."""
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        else:
            self.holder[self.key] = value

    def get(self) -> Any:
        """What is there now.

        Raises:
            LookupError: nothing is.
        """
        if not isinstance(self.holder, CellType):
            return self.holder[self.key]
        try:
            return self.holder.cell_contents
        except ValueError as error:
            raise LookupError(self.key) from error


def outer_variables(function: FunctionType) -> dict[str, OuterVariable]:
    """The globals and outer variables that a function names, and what it names in modules among them.

    Of code that nobody replaces only the outer variables count: decorators have what they decorate there. Packages of
    others are not gone through: what their functions name is looked at, but neither what they call nor their modules.
    """
    scope, cells = function.__globals__, function.__closure__ or ()
    found = {name: OuterVariable(cell, name) for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}
    if package_of(scope) in FIXED:
        return found
    names = [name for code in _codes_in(function.__code__) for name in code.co_names]
    for owner in (name for name in names if isinstance(scope.get(name), ModuleType)):
        theirs = vars(scope[owner])
        if package_of(theirs) not in FIXED and not is_installed(theirs):
            found |= {f"{owner}.{name}": OuterVariable(theirs, name) for name in names if name in theirs}
    ends_here = is_installed(scope)
    named = [name for name in names if name in scope and not (ends_here and callable(scope[name]))]
    return {name: OuterVariable(scope, name) for name in named} | found


def package_of(scope: dict[str, Any]) -> str:
    """Whose globals these are."""
    return str(scope.get("__name__", "")).split(".")[0]


def is_installed(scope: dict[str, Any]) -> bool:
    """Whether they are those of a package that is none of the user's own: it may keep books, and has no end."""
    return f"{os.sep}site-packages{os.sep}" in str(scope.get("__file__", ""))


def methods_that_run(value: Any) -> list[FunctionType]:
    """What runs when an object is called, of its own class's: a module's forward, and the methods that it names."""
    cls, found = type(value), dict[str, FunctionType]()
    todo = ["forward" if isinstance(value, torch.nn.Module) else "__call__"]
    while todo:
        name = todo.pop()
        method = getattr(cls, name, None)
        if name in found or not isinstance(method, FunctionType):
            continue
        if not str(method.__module__).startswith("torch."):  # of code that was generated it is None
            found[name] = method
            todo += [named for code in _codes_in(method.__code__) for named in code.co_names]
    return list(found.values())


def _codes_in(code: CodeType) -> list[CodeType]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return [code, *(each for one in inner for each in _codes_in(one))]
