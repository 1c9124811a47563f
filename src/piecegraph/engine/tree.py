"""Notices that a tree of modules is another than when plans were made: other modules, parameters, buffers, hooks, code.

All of them are in dictionaries of modules or their classes, and CPython numbers the changes of dictionaries
(:mod:`piecegraph.base.versions`): however one is added, replaced or removed, the next call sees it. Dictionaries of
hooks are many, and mostly empty: every hook that torch registers gets the next number, so only those that have any are
looked at. A tensor whose data was replaced (``.data = ...``, ``module.to(...)``) stays the same object, but its old
memory dies, and a weak reference tells of that. Memory that somebody else keeps alive does not die: the addresses that
graphs read are compared at replays, see :class:`~piecegraph.tape.tape.Addresses`.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch

from piecegraph.base import torch_compat, torch_functions
from piecegraph.base.versions import Versions, class_dict
from piecegraph.engine.reach import modules_in_reach

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
_CODE = (property, staticmethod, classmethod, functools.cached_property)
"""What code is in beside what can be called."""


class _Watched(NamedTuple):
    """A dictionary, and what of it a plan depends on."""

    owner: str
    holder: dict[Any, Any]
    look: Callable[[dict[Any, Any]], dict[Any, Any]]


class TreeWatch:
    """Whether modules, parameters, buffers, hooks or code in a tree of modules are others than they were."""

    def __init__(self, root: torch.nn.Module | None, function: Callable[..., Any]) -> None:
        self._root = root
        self.renew(function)

    def renew(self, function: Callable[..., Any]) -> None:
        """Take the tree as it is now, and what runs it."""
        self._function = getattr(function, "__func__", function)
        own = [] if self._root is None else [self._root]
        self._roots = dict.fromkeys([*own, *modules_in_reach(function)])
        self._classes: dict[type, None] = {}
        self.dead: list[str] = []
        """Weights whose memory is gone."""
        self._memory: list[weakref.ref[torch.UntypedStorage]] = []
        self._accept()

    def add(self, arguments: tuple[Any, ...], classes: Iterable[type]) -> None:
        """Look at the modules among arguments of a call, too, and at the methods of classes; and notice that a weight
        leaves the memory it has now.
        """
        modules, others = dict.fromkeys(modules_in_reach(arguments)), dict.fromkeys(classes)
        if modules.keys() - self._roots.keys() or others.keys() - self._classes.keys():
            self._roots |= modules
            self._classes |= others
            self._accept()
        self._follow()

    def _follow(self) -> None:
        """Hold the memory of weights weakly, so that its end is told."""
        dead = self.dead  # whoever is told must not hold what holds the reference

        def notice(name: str) -> Callable[[Any], None]:
            return lambda _: dead.append(name)

        self._memory = [
            weakref.ref(part.untyped_storage(), notice(f"{path}.{name}".lstrip(".")))
            for path, module in self._modules
            for parts in torch_compat.parts_of(module)
            for name, part in parts.items()
            if isinstance(part, torch.Tensor) and torch_compat.has_memory(part)
        ]

    def what_changed(self) -> str:
        """What is not as it was, in words; empty if all is, whatever was done between."""
        self.replaced = torch_functions.replaced_functions()
        changed = f"{self.dead[0]} was replaced" if self.dead else self._first_change()
        if not changed and torch_compat.hook_numbers.next_id != self.next_hook:  # they were somebody else's
            self._accept()
        elif not changed:
            self.versions.accept()
        return changed

    def _accept(self) -> None:
        self.next_hook = torch_compat.hook_numbers.next_id
        """While no hook has got this number, none was added."""
        paths = {module: path for root in reversed(self._roots) for path, module in root.named_modules()}
        self._modules = [(path, module) for module, path in paths.items()]
        self._paths = {id(module): path for path, module in self._modules}
        self._watched = list(self._all_watched())
        known = [each.look(each.holder) for each in self._watched]
        self._looks: dict[int, list[tuple[_Watched, dict[Any, Any]]]] = {}
        """What is known of each dictionary, by its id: a model has thousands, and mostly one has changed."""
        for each, parts in zip(self._watched, known, strict=True):
            self._looks.setdefault(id(each.holder), []).append((each, parts))
        self._hooks = self._hook_numbers()
        self.replaced = torch_functions.replaced_functions()
        """Functions of torch that are the program's own now: other plans, not other modules."""
        values = (self._function, *(value for parts in known for value in parts.values()))
        functions = [value for value in values if isinstance(value, FunctionType)]
        self.versions = Versions(
            [*torch_functions.HOLDERS, *(each.holder for each in self._watched)],
            [module for _, module in self._modules],
            functions,
        )
        """Of the dictionaries that things may be added to, replaced in or removed from, of classes and of code."""

    def _first_change(self) -> str:
        for changed in self.versions.changed():
            for (owner, holder, look), known in self._looks.get(id(changed), ()):
                if difference := _difference(known, look(holder)):
                    return f"{owner}.{difference}".lstrip(".")
            if (path := self._paths.get(id(changed))) is not None:
                return f"the class of {path or 'the module'} was replaced"
            if isinstance(changed, FunctionType):
                return f"the code of {changed.__qualname__} was replaced, or its defaults"
        return "hooks of submodules were added or removed" if self._hook_numbers() != self._hooks else ""

    def _all_watched(self) -> Iterator[_Watched]:
        for path, module in self._modules:
            for parts in torch_compat.parts_of(module):
                if parts or isinstance(module, _CONTAINERS):
                    yield _Watched(path, parts, _parts)
            yield _Watched(path, vars(module), functools.partial(_own_code, type(module)))
        called = [] if isinstance(self._function, FunctionType) else [self._function]  # an object with a __call__
        objects = [*(module for _, module in self._modules), *called]
        kinds = [*map(type, objects), *self._classes]
        for cls in dict.fromkeys(cls for kind in kinds for cls in kind.__mro__):
            if cls is not torch.nn.Module and cls.__module__ != "builtins":
                yield _Watched(cls.__qualname__, class_dict(cls), _code)
        for hooks in self._all_hooks():
            if hooks:
                yield _Watched("hooks", hooks, dict)

    def _all_hooks(self) -> list[Any]:
        """The dictionaries of hooks; those of the module itself run around its plans."""
        modules = [module for _, module in self._modules if module is not self._root]
        own = [getattr(module, name) for module in modules for name in torch_compat.HOOKS_OF_A_FORWARD]
        return [*own, *torch_compat.global_hooks_of_a_call] if modules else []

    def _hook_numbers(self) -> list[tuple[int, list[int]]]:
        """The numbers of all hooks, by the dictionary they are in."""
        return [(place, list(hooks)) for place, hooks in enumerate(self._all_hooks()) if hooks]


def _parts(holder: dict[str, Any]) -> dict[str, Any]:
    """Modules; and the identities of tensors, which nobody may hold weakly: ``torch.utils.swap_tensors`` refuses then.

    Another tensor with the identity of one that is gone has other memory, or comes while that is held elsewhere.
    """
    return {name: id(part) if isinstance(part, torch.Tensor) else part for name, part in holder.items()}


def _code(holder: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in holder.items() if callable(value) or isinstance(value, _CODE)}


def _own_code(cls: type, holder: dict[str, Any]) -> dict[str, Any]:
    """Code, the dictionaries of its parts, and which names of its class a module has as its own: that it gets or loses
    one is another value.
    """
    own = {name: True for name in holder if hasattr(cls, name)}
    return {**own, **_code(holder), **{name: holder.get(name) for name in torch_compat.PARTS}}


def _difference(then: dict[Any, Any], now: dict[Any, Any]) -> str:
    for name, value in then.items():
        if name not in now:
            return f"{name} was removed"
        if now[name] is not value and (type(value) is not int or now[name] != value):
            return f"{name} was replaced"
    return next((f"{name} was added" for name in now if name not in then), "")


def weight_bytes(module: torch.nn.Module) -> int:
    """The memory of all parameters and buffers; what several share counts once."""
    storages = (tensor.untyped_storage() for tensor in itertools.chain(module.parameters(), module.buffers()))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
