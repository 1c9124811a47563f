"""Notices that a module has other parameters or buffers than when its plans were made.

torch tells of every parameter, buffer and module that is registered, and assigning one registers it. That costs nothing
at a call. A tensor whose data was replaced (``.data = ...``, ``module.to(...)``) stays the same object; the addresses
that graphs read are compared at every replay.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.nn.modules import module as torch_module

_watches: weakref.WeakKeyDictionary[torch.nn.Module, weakref.WeakSet[WeightWatch]] = weakref.WeakKeyDictionary()


class WeightWatch:
    """Whether a parameter, buffer or module in a tree of modules was replaced, or added."""

    def __init__(self, root: torch.nn.Module | None) -> None:
        self._root = root
        self.changed = ""
        """The name of the first one; empty if none was."""
        self.renew()

    def renew(self) -> None:
        """Begin again, with the tree as it is now."""
        self.changed = ""
        if self._root is None:
            return
        _listen()
        for module in self._root.modules():
            _watches.setdefault(module, weakref.WeakSet()).add(self)

    def tell(self, module: torch.nn.Module, name: str) -> None:
        assert self._root is not None
        path = next((path for path, each in self._root.named_modules() if each is module), "")
        self.changed = self.changed or f"{path}.{name}".lstrip(".")


@functools.cache
def _listen() -> None:
    torch_module.register_module_parameter_registration_hook(_on_registration)
    torch_module.register_module_buffer_registration_hook(_on_registration)
    torch_module.register_module_module_registration_hook(_on_registration)


def _on_registration(module: torch.nn.Module, name: str, value: Any) -> None:
    watches = _watches.get(module)
    if watches and getattr(module, name, None) is not value:
        for watch in list(watches):
            watch.tell(module, name)
