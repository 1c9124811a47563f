"""Python values as text that is the same in every process: what keys of the cache are made of.

A value goes in; text comes out that is equal for values that code cannot tell apart, and different where it may. Code
is described by what was compiled of it, so that a function needs no file. What cannot be described so raises.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import decimal
import enum
import functools
import hashlib
import inspect
import logging
import pathlib
import re
import sys
import types
import typing
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from piecegraph.base import torch_compat
from piecegraph.base.source_files import portable_name

_BY_REPR = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type(...), torch.dtype, torch.device, torch.layout,
    torch.memory_format, decimal.Decimal, datetime.date, datetime.timedelta, pathlib.PurePath, re.Pattern,
    inspect.Signature, types.GenericAlias, types.UnionType, type(typing.List[int]), type(typing.Any),  # noqa: UP006
)  # fmt: skip

_PLAIN = (torch.nn.Module, types.SimpleNamespace, argparse.Namespace)
"""Classes of others whose objects are nothing but their attributes."""

_VERSIONED = frozenset({"torch", "triton", "numpy", "sympy", "piecegraph", *sys.stdlib_module_names} - {"__main__"})
"""Packages whose code is known by their version, or by a hash of all their files."""

_NO_CODE = frozenset(
    {"__doc__", "__dict__", "__weakref__", "__module__", "__annotations__", "__abstractmethods__", "_abc_impl"}
)
_NO_MATTER = frozenset({"name_or_path", "_name_or_path", "_commit_hash", "transformers_version"})
"""Attributes that say where something comes from."""

_MOST_VALUES = 200_000
_LONG = 100


class IndescribableError(Exception):
    """A value has no text of which another process could say whether it is the same."""


class Describer:
    """Describes the values of one key. What was met before is named by its number, so that cycles end."""

    def __init__(self) -> None:
        self.classes: dict[str, str] = {}
        """A hash of the code of every class that was met, by its name."""
        self._met: dict[int, tuple[str, Any]] = {}
        self._codes: dict[int, tuple[types.CodeType, str]] = {}

    def text(self, value: Any, path: str = "") -> str:
        """Describe a value; ``path`` says what it is if it cannot be described."""
        if isinstance(value, enum.Enum):
            return f"{self._class(type(value))}.{value.name}"
        if isinstance(value, _BY_REPR) and not isinstance(value, type):
            return _short(repr(value))
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, torch.Tensor):
            return describe_tensor(value)
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, logging.Logger):
            return f"logger {value.name}"
        if id(value) in self._met:
            return self._met[id(value)][0]
        if len(self._met) > _MOST_VALUES:
            raise IndescribableError(f"{path} holds more than {_MOST_VALUES} values")
        self.know(value, f"value {len(self._met)}")
        try:
            return _short(self._compound(value, path))
        except IndescribableError:
            raise
        except Exception as error:  # an object of the user's may raise anything when it is looked at
            raise IndescribableError(f"{path or 'a value'} raises {type(error).__name__}: {error}") from error

    def know(self, value: Any, name: str) -> None:
        """From now on a value is described by a name."""
        self._met[id(value)] = (f"<{name}>", value)

    def code(self, code: types.CodeType) -> str:
        """A hash of compiled Python, its line numbers included: they are told of every op that was traced."""
        if id(code) not in self._codes:
            parts = [
                code.co_qualname,
                portable_name(code.co_filename),
                str((code.co_firstlineno, code.co_flags, code.co_argcount, code.co_kwonlyargcount)),
                repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)),
                repr((code.co_code, code.co_linetable, code.co_exceptiontable)),
                *(self._constant(constant) for constant in code.co_consts),
            ]
            self._codes[id(code)] = (code, digest("\n".join(parts)))
        return self._codes[id(code)][1]

    def _constant(self, constant: Any) -> str:
        if isinstance(constant, types.CodeType):
            return self.code(constant)
        if isinstance(constant, tuple):
            return f"({', '.join(map(self._constant, constant))})"
        return repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)

    def _compound(self, value: Any, path: str) -> str:
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            return self._callable(value, path)
        if isinstance(value, Mapping):
            items = (f"{self.text(k, path)}: {self.text(v, f'{path}[{k!r}]')}" for k, v in value.items())
            return f"{self._class(type(value))} {{{', '.join(items)}}}"
        if isinstance(value, (list, tuple)):
            return f"{self._class(type(value))} [{', '.join(self.text(part, path) for part in value)}]"
        if isinstance(value, (set, frozenset)):
            return f"{type(value).__name__} {sorted(self.text(part, path) for part in value)}"
        if isinstance(value, weakref.ref):  # an nn.GRU has some to its weights
            return f"weak {self.text(value(), path)}"
        if type(value).__module__ == "numpy":
            return f"numpy {value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()[:16]}"
        if callable(value) and is_versioned(type(value).__module__) and (name := torch_compat.qualified_name(value)):
            return f"op {name}"
        if isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)):
            return f"builtin {value.__module__ or ''}.{value.__qualname__}"
        return self._object(value, path)

    def _callable(self, value: Any, path: str) -> str:
        if isinstance(value, functools.partial):
            return f"partial {self.text((value.func, value.args, value.keywords), path)}"
        if isinstance(value, types.MethodType):
            return f"{self.text(value.__func__, path)} of {self.text(value.__self__, f'{path}.__self__')}"
        name = f"{value.__module__}.{value.__qualname__}"
        # What functools.wraps made says that it is from where the wrapped function is; its globals tell the truth.
        if is_versioned(str(value.__globals__.get("__name__", "?"))):
            own = ""
        else:
            own = self.text((value.__defaults__, value.__kwdefaults__), f"the defaults of {name}")
            own += self.code(value.__code__)
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        outer = [self.text(_content(cell), f"{cell_name} in {name}") for cell_name, cell in cells]
        return f"function {name} {own} {outer}"

    def _object(self, value: Any, path: str) -> str:
        """An object that is what its attributes are. One of C, or of torch, may be anything."""
        cls = type(value)
        names = [name for base in cls.__mro__ for name in _slots(base) if hasattr(value, name)]
        state = {**{name: getattr(value, name) for name in names}, **getattr(value, "__dict__", {})}
        is_plain = not is_versioned(cls.__module__) or dataclasses.is_dataclass(cls) or isinstance(value, _PLAIN)
        if not is_plain or not (hasattr(value, "__dict__") or names):
            raise IndescribableError(f"{path or 'a value'} is a {cls.__module__}.{cls.__qualname__}")
        if isinstance(value, torch.nn.Module):
            parts = (state.pop(name) for name in ("_parameters", "_buffers", "_modules"))
            state = {**dict(module_state(value)), **{key: part for held in parts for key, part in held.items()}}
        shown = (f"{k}: {self.text(v, f'{path}.{k}')}" for k, v in state.items() if k not in _NO_MATTER)
        return f"{self._class(cls)} {{{', '.join(shown)}}}"

    def _class(self, cls: type) -> str:
        name = f"{cls.__module__}.{cls.__qualname__}"
        if name not in self.classes and not is_versioned(cls.__module__):
            self.classes[name] = ""  # its own methods may name it
            parts = [self._own_code(base) for base in cls.__mro__]
            self.classes[name] = digest("\n".join(parts))
        return name

    def _own_code(self, cls: type) -> str:
        """What a class defines. Of a class of torch, what somebody else has put there.

        Lists and the like that instances share are changed by some libraries while a model is loaded. What a trace has
        read of them is looked at when it is loaded.
        """
        is_known = is_versioned(cls.__module__)
        lines = [f"{cls.__module__}.{cls.__qualname__}"]
        for name, value in sorted(vars(cls).items()):
            function = _function_behind(value)
            if function is not None and not (is_known and is_versioned(function.__module__)):
                lines.append(f"{name} {self._callable_code(function)}")
            elif function is None and not is_known and name not in _NO_CODE:
                lines.append(f"{name} {repr(value) if isinstance(value, _BY_REPR) else type(value).__qualname__}")
        return "\n".join(lines)

    def _callable_code(self, function: types.FunctionType) -> str:
        """Of a method and of what its decorators have put around it."""
        codes = []
        wrapped: Any = function
        while wrapped is not None:
            codes.append(
                self.code(wrapped.__code__) if isinstance(wrapped, types.FunctionType) else repr(type(wrapped))
            )
            wrapped = getattr(wrapped, "__wrapped__", None)
        return " ".join(codes)


def module_state(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """What a module has beside weights and submodules, by name. Of hooks, the functions: their numbers are chance."""
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules") or name in _NO_MATTER:
            continue
        if name in ("_forward_hooks", "_forward_pre_hooks") and value:
            yield name, list(value.values())
        elif name not in _EVERY_MODULE or name == "training":
            yield name, value


_EVERY_MODULE = frozenset(vars(torch.nn.Module()))


def describe_tensor(tensor: torch.Tensor) -> str:
    """Dtype, shape, device, and how it lies if that is not the usual way."""
    text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} {tensor.device}"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        text += f" {type(tensor).__name__}"
    if tensor.layout is not torch.strided:
        return f"{text} {tensor.layout}"
    if not tensor.is_contiguous():
        text += f" strides {tuple(tensor.stride())}"
    return text


def is_versioned(module: str | None) -> bool:
    """Whether the code of a Python module is known by a version."""
    return (module or "builtins").partition(".")[0] in _VERSIONED


def digest(text: str) -> str:
    """A hash, short enough to be shown."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _short(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[:24]}... ({digest(text)})"


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _slots(cls: type) -> tuple[str, ...]:
    names = vars(cls).get("__slots__", ())
    found = (names,) if isinstance(names, str) else tuple(names)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _function_behind(value: Any) -> Any:
    """The function of a method, a property or the like; None for anything else."""
    for name in ("__func__", "fget", "func"):
        value = getattr(value, name, value) if not isinstance(value, types.FunctionType) else value
    return value if isinstance(value, types.FunctionType) else None
