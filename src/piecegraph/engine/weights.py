"""Notices that a module has other parameters or buffers than when its plans were made.

torch tells of every parameter, buffer and module that is registered, and assigning one registers it. A tensor whose
data was replaced (``.data = ...``, ``module.to(...)``) stays the same object, but its old memory dies, and a weak
reference tells of that. Neither costs anything at a call. Memory that somebody else keeps alive does not die: the
addresses that graphs read are compared at replays, see :class:`~piecegraph.tape.tape.Addresses`.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from piecegraph.base import torch_compat

_watches: weakref.WeakKeyDictionary[torch.nn.Module, weakref.WeakSet[WeightWatch]] = weakref.WeakKeyDictionary()


class WeightWatch:
    """Whether a parameter, buffer or module in a tree of modules was replaced, or added."""

    def __init__(self, root: torch.nn.Module | None) -> None:
        self._root = root
        self.changed = ""
        """The name of the first one; empty if none was."""
        self._memory: list[weakref.ref[torch.UntypedStorage]] = []
        self.renew()

    def renew(self) -> None:
        """Begin again, with the tree as it is now."""
        self.changed = ""
        self._memory = []
        if self._root is None:
            return
        _listen()
        for module in self._root.modules():
            _watches.setdefault(module, weakref.WeakSet()).add(self)

    def follow(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Notice that a weight leaves the memory it has now."""

        def notice(name: str) -> Callable[[Any], None]:
            return lambda _: self._set(name)

        self._memory = [
            weakref.ref(tensor.untyped_storage(), notice(name))
            for name, tensor in weights.items()
            if torch_compat.has_memory(tensor)
        ]

    def _set(self, name: str) -> None:
        self.changed = self.changed or name

    def tell(self, module: torch.nn.Module, name: str) -> None:
        assert self._root is not None
        path = next((path for path, each in self._root.named_modules() if each is module), "")
        self._set(f"{path}.{name}".lstrip("."))


@functools.cache
def _listen() -> None:
    torch_module.register_module_parameter_registration_hook(_on_registration)
    torch_module.register_module_buffer_registration_hook(_on_registration)
    torch_module.register_module_module_registration_hook(_on_registration)


def _on_registration(module: torch.nn.Module, name: str, value: Any) -> None:
    if torch.compiler.is_compiling():  # a forward that registers a buffer is traced, and this is no part of it
        return
    watches = _watches.get(module)
    if watches and getattr(module, name, None) is not value:
        for watch in list(watches):
            watch.tell(module, name)


def weight_bytes(module: torch.nn.Module) -> int:
    """The memory of all parameters and buffers; what several share counts once."""
    storages = (tensor.untyped_storage() for tensor in itertools.chain(module.parameters(), module.buffers()))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
