"""Functions of torch that a program has replaced: by a faster attention, by one that keeps a log.

They are more than a thousand, in few dictionaries. Within a process they are compared with those that were there when
piecegraph was imported; what is kept on a disk depends on what they are.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType
from typing import Any

import torch

from piecegraph.base.describe import Describer, digest
from piecegraph.base.versions import Versions, class_dict

_MODULES = ("torch", "torch.nn.functional", "torch.fft", "torch.linalg", "torch.special")
_HOMES = {**{name: vars(sys.modules[name]) for name in _MODULES}, "torch.Tensor": class_dict(torch.Tensor)}
HOLDERS = tuple(_HOMES.values())
"""The dictionaries that they are in."""
_IN_NO_GRAPH = frozenset({"torch.load", "torch.save", "torch.manual_seed"})
"""What programs, and Dynamo, replace on their way, and no graph has a call of."""
_OF_TORCH = frozenset({"torch", "typing_extensions", *sys.stdlib_module_names})
_BUILTIN = (BuiltinFunctionType, MethodDescriptorType)
_CACHED = type(functools.cache(lambda: None))


def _functions() -> Iterator[tuple[str, Any]]:
    for home, theirs in _HOMES.items():
        for name, value in list(theirs.items()):
            if callable(value) and not isinstance(value, type) and f"{home}.{name}" not in _IN_NO_GRAPH:
                yield f"{home}.{name}", value


_ORIGINALS = dict(_functions())
_KNOWN = frozenset({*_ORIGINALS, *(f"torch.Tensor.{name}" for name in dir(torch.Tensor))})
"""A method that tensors inherit is replaced by one of their own."""


class _Replaced:
    """They are asked for whenever a module changes, and looked at when their dictionaries do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions = Versions(HOLDERS)
        self._found: tuple[tuple[str, Any], ...] = ()

    def __call__(self) -> tuple[tuple[str, Any], ...]:
        """What is not what it was when piecegraph was imported, with what is there now."""
        with self._lock:
            if not self._versions.are_known():
                self._versions.accept()
                self._found = tuple(
                    (name, now) for name, now in _functions() if name in _KNOWN and now is not _ORIGINALS.get(name)
                )
            return self._found


replaced_functions = _Replaced()


def describe_functions() -> str:
    """A hash of what they are. Raises IndescribableError where one was replaced by something that cannot be told."""
    return _describe_originals() if not replaced_functions() else _describe_all()


@functools.cache
def _describe_originals() -> str:
    return _describe_all()


def _describe_all() -> str:
    describer = Describer()
    return digest("\n".join(f"{name} {_describe(describer, name, value)}" for name, value in sorted(_functions())))


def _describe(describer: Describer, name: str, value: Any) -> str:
    """Torch's own, be they in another's place, by their names: the version of torch tells what they do."""
    if isinstance(value, _CACHED):
        value = value.__wrapped__
    home = value.__globals__.get("__name__", "") if isinstance(value, FunctionType) else type(value).__module__
    is_own = isinstance(value, _BUILTIN) or str(home).partition(".")[0] in _OF_TORCH
    if is_own and not isinstance(value, functools.partial | MethodType):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
    return describer.text(value, name)
