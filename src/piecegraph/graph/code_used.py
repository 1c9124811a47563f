"""The Python that a trace was made of: written down with the trace, and looked at again before it is used.

The key of a trace is made before anything is traced, from what can be seen from outside. Which functions are called is
known only afterwards.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from piecegraph.base import torch_compat
from piecegraph.base.describe import Describer, is_versioned
from piecegraph.base.source_files import file_of


@dataclass(frozen=True, slots=True)
class CodeUsed:
    """A function that was traced into."""

    module: str
    function: str
    """Its qualified name; of a function inside another, that of the outermost."""
    digest: str

    def __str__(self) -> str:
        return f"{self.module}.{self.function}"


class UnknownCodeError(Exception):
    """Code was traced that lies in no module, so that nobody can say whether it is the same later on."""


def code_used(codes: Iterable[types.CodeType], function: Any) -> tuple[CodeUsed, ...]:
    """The functions that were traced into, without those that a version tells all about.

    Args:
        codes: what Dynamo has read.
        function: what was traced.
    """
    describer = Describer()
    plain = getattr(function, "__func__", function)
    codes = list(codes)
    names = _modules_of(code.co_filename for code in codes)
    # A decorator gives what it returns the module of what it wraps.
    names.setdefault(plain.__code__.co_filename, plain.__globals__.get("__name__", ""))
    found: dict[CodeUsed, None] = {}
    for code in codes:
        if code.co_filename.startswith("<frozen "):
            continue
        written = code.co_filename in names and not code.co_qualname.startswith("__create_fn__")
        place = (
            (names[code.co_filename], code.co_qualname.partition(".<locals>")[0]) if written else _made_by_class(code)
        )
        if not is_versioned(place[0]) and code is not plain.__code__:  # the function itself is part of the key
            found[CodeUsed(*place, describer.code(code))] = None
    for used in found:
        if _changed(used, Describer()):
            raise UnknownCodeError(f"{used} is not found by its name")
    return tuple(found)


def places_of(codes: Iterable[types.CodeType]) -> list[tuple[str, str]]:
    """The module and the qualified name of each code that lies in a file of a module."""
    codes = list(codes)
    names = _modules_of(code.co_filename for code in codes)
    return [(names[code.co_filename], code.co_qualname) for code in codes if code.co_filename in names]


_seen_files: list[dict[str, str]] = [{}]
"""The modules by their files, when all of them were last looked at: there are thousands."""


def _modules_of(files: Iterable[str]) -> dict[str, str]:
    """The names of the modules that lie in these files, where there are any."""
    wanted, seen = set(files), _seen_files[0]
    if any(file_of(sys.modules.get(seen.get(file, ""))) != file for file in wanted):
        modules = [(name, file_of(each)) for name, each in list(sys.modules.items())]
        _seen_files[0] = seen = {file: name for name, file in modules if file}
    return {file: seen[file] for file in wanted if file in seen}


def classes_at(places: Iterable[tuple[str, str]]) -> tuple[type, ...]:
    """The classes that functions belong to, by module and qualified name; those inside of functions are not found."""
    found: dict[type, None] = {}
    for module, function in places:
        owner: Any = sys.modules.get(module)
        for part in function.split(".")[:-1]:
            owner = vars(owner).get(part) if hasattr(owner, "__dict__") else None
        if isinstance(owner, type):
            found[owner] = None
    return tuple(found)


def _made_by_class(code: types.CodeType) -> tuple[str, str]:
    """The module and the name of a method that nobody wrote, as those of a dataclass.

    What others keep in their modules is asked for nothing, not even ``__class__``: some import, or raise, when they are
    asked.
    """
    modules = [module for name, module in list(sys.modules.items()) if not is_versioned(name)]
    for module in modules:
        for value in list(vars(module).values()) if issubclass(type(module), types.ModuleType) else ():
            for name, method in list(vars(value).items()) if issubclass(type(value), type) else ():
                # A named tuple's __new__ is a static method.
                method = method.__func__ if type(method) in (staticmethod, classmethod) else method
                if type(method) is types.FunctionType and method.__code__ is code:
                    return value.__module__, f"{value.__qualname__}.{name}"
    raise UnknownCodeError(f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno}) lies in no module")


def first_changed(used: Iterable[CodeUsed]) -> CodeUsed | None:
    """One that is another now, or gone."""
    describer = Describer()
    return next((each for each in used if _changed(each, describer)), None)


def _changed(used: CodeUsed, describer: Describer) -> bool:
    try:
        value: Any = sys.modules.get(used.module) or importlib.import_module(used.module)
        for part in used.function.split("."):
            value = vars(value)[part] if isinstance(value, type) and part in vars(value) else getattr(value, part)
    except (ImportError, AttributeError, ValueError):
        return True
    return used.digest not in map(describer.code, _codes_behind(value))


def _codes_behind(value: Any) -> Iterator[types.CodeType]:
    """The code of a function, of what its decorators have wrapped, and of the functions inside of each."""
    waiting, seen = [value], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.CodeType):
            yield value
            waiting += [constant for constant in value.co_consts if isinstance(constant, types.CodeType)]
            continue
        names = ("__code__", "__wrapped__", "__func__", "fget", "func", torch_compat.ORIGINAL_OF_SCRIPT)
        waiting += [getattr(value, name) for name in names if hasattr(value, name)]
        cells = getattr(value, "__closure__", None) or ()
        waiting += [cell.cell_contents for cell in cells if _holds_function(cell)]


def _holds_function(cell: types.CellType) -> bool:
    try:
        return isinstance(cell.cell_contents, types.FunctionType)
    except ValueError:  # not filled yet
        return False
