"""Notices that a tree of modules is another than when plans were made: other modules, parameters, buffers or hooks.

All of them are in dictionaries of modules, and CPython numbers the changes of dictionaries
(:mod:`piecegraph.base.dict_versions`): however one is added, replaced or removed, the next call sees it. Dictionaries
of hooks are many, and mostly empty: every hook that torch registers gets the next number, so only those that have any
are looked at. A tensor whose data was replaced (``.data = ...``, ``module.to(...)``) stays the same object, but its old
memory dies, and a weak reference tells of that. Memory that somebody else keeps alive does not die: the addresses that
graphs read are compared at replays, see :class:`~piecegraph.tape.tape.Addresses`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from piecegraph.base import torch_compat
from piecegraph.base.dict_versions import DictVersions


class TreeWatch:
    """Whether modules, parameters, buffers or hooks in a tree of modules are others than they were."""

    def __init__(self, root: torch.nn.Module | None) -> None:
        self._root = root
        self.renew()

    def renew(self) -> None:
        """Take the tree as it is now."""
        self.dead = ""
        """A weight whose memory is gone."""
        self._memory: list[weakref.ref[torch.UntypedStorage]] = []
        self._accept()

    def follow(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Notice that a weight leaves the memory it has now."""

        def notice(name: str) -> Callable[[Any], None]:
            return lambda _: self._lose(name)

        self._memory = [
            weakref.ref(tensor.untyped_storage(), notice(name))
            for name, tensor in weights.items()
            if torch_compat.has_memory(tensor)
        ]

    def what_changed(self) -> str:
        """What is not as it was, in words; empty if all is, whatever was done between."""
        changed = f"{self.dead} was replaced" if self.dead else self._first_change()
        if not changed:
            self._accept()
        return changed

    def _lose(self, name: str) -> None:
        self.dead = self.dead or name

    def _accept(self) -> None:
        self.next_hook = torch_compat.hook_numbers.next_id
        """While no hook has got this number, none was added."""
        self.versions = DictVersions(
            [*(parts for _, parts in self._all_parts()), *(hooks for hooks in self._all_hooks() if hooks)]
        )
        """Of the dictionaries that things may be added to, replaced in or removed from."""
        self._parts = {name: part if part is None else weakref.ref(part) for name, part in self._named_parts()}
        self._hooks = self._hook_numbers()

    def _first_change(self) -> str:
        now = dict(self._named_parts())
        for name, part in self._parts.items():
            if name not in now:
                return f"{name} was removed"
            if now[name] is not (part and part()):
                return f"{name} was replaced"
        if len(now) > len(self._parts):
            return f"{next(name for name in now if name not in self._parts)} was added"
        return "hooks of submodules were added or removed" if self._hook_numbers() != self._hooks else ""

    def _named_parts(self) -> Iterator[tuple[str, Any]]:
        all_parts = ((path, name, part) for path, parts in self._all_parts() for name, part in parts.items())
        return ((f"{path}.{name}".lstrip("."), part) for path, name, part in all_parts)

    def _all_parts(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The dictionaries of modules, parameters and buffers, each with the name of the module that has it."""
        for path, module in self._root.named_modules() if self._root is not None else ():
            is_container = isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict | torch.nn.Sequential)
            for parts in torch_compat.parts_of(module):
                if parts or is_container:
                    yield path, parts

    def _all_hooks(self) -> list[dict[int, Any]]:
        """The dictionaries of hooks; those of the module itself run around its plans."""
        modules = [] if self._root is None else [each for each in self._root.modules() if each is not self._root]
        return [getattr(module, name) for module in modules for name in torch_compat.HOOKS_OF_A_FORWARD]

    def _hook_numbers(self) -> list[tuple[int, list[int]]]:
        """The numbers of all hooks, by the dictionary they are in."""
        return [(place, list(hooks)) for place, hooks in enumerate(self._all_hooks()) if hooks]


def weight_bytes(module: torch.nn.Module) -> int:
    """The memory of all parameters and buffers; what several share counts once."""
    storages = (tensor.untyped_storage() for tensor in itertools.chain(module.parameters(), module.buffers()))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
