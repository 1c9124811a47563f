"""What a run of the user's code changes in Python: a replay runs no Python, so such a change would happen only once.

The objects that a function can reach are walked before the run and compared after it, one level of each at a time.
What is not found that way (files, clocks, objects that only C knows) is not noticed.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from piecegraph.base import torch_compat
from piecegraph.graph.signature import is_constant, is_same_constant

_MAX_OBJECTS = 500_000
"""Where walking ends: a module may hold a whole data set."""
_OPAQUE = (torch.Generator, type, types.ModuleType, types.FunctionType, types.MethodType, logging.Logger)
_OWN = ("piecegraph.", "torch._")
"""Whose objects keep books about calls."""
_MANY = (list, tuple, set, frozenset, deque)


class PythonState:
    """The Python objects in reach of some roots, as they are now.

    Args:
        roots: where walking begins, by name.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._roots = roots
        self._before: list[tuple[str, Any, dict[Any, Any]]] = []
        self._random: list[tuple[str, Any]] = []
        self._noted: str | None = None
        self._take()

    def _take(self) -> None:
        with torch_compat.unseen():
            self._before = list(_walk(self._roots))
        self._random = _random_states()

    @contextlib.contextmanager
    def not_inside(self) -> Iterator[None]:
        """What changes inside is nobody's loss: it runs at every replay."""
        self._noted = self.change()
        yield
        self._take()

    def change(self) -> str | None:
        """The name of something that has changed, or None."""
        if self._noted is not None:
            return self._noted
        for (name, before), (_, now) in zip(self._random, _random_states(), strict=False):
            if before != now:
                return name
        with torch_compat.unseen():
            for name, value, before in self._before:
                for key in _differing(before, _parts(value)):
                    return f"{name}.{key}" if isinstance(key, str) else f"{name}[{key!r}]"
        return None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those among the objects."""
        return [value for _, value, _ in self._before if isinstance(value, torch.Tensor)]

    @property
    def objects(self) -> dict[int, Any]:
        """All of them, by their ids."""
        return {id(value): value for _, value, _ in self._before}

    def restore(self) -> None:
        """Put containers and attributes back to what they were."""
        random.setstate(self._random[0][1])
        for _, value, before in self._before:
            if not isinstance(value, torch.Tensor) and _differing(before, _parts(value)):
                _refill(value, before)


def outer_objects(function: Callable[..., Any]) -> dict[str, Any]:
    """The outer names that a function uses: globals, and locals of what is around it."""
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(plain, types.FunctionType):
        return {}
    found = inspect.getclosurevars(plain)
    return {**found.globals, **found.nonlocals}


def _walk(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any, dict[Any, Any]]]:
    """Each object that can be changed, with its name and what it is made of."""
    seen: set[int] = set()
    ahead: deque[tuple[str, Any]] = deque(roots.items())
    while ahead and len(seen) < _MAX_OBJECTS:
        name, value = ahead.popleft()
        if id(value) in seen or (is_constant(value) and not isinstance(value, torch.nn.Module)):
            continue
        seen.add(id(value))
        parts = _parts(value)
        yield name, value, parts
        for key, part in parts.items():
            ahead.append((f"{name}.{key}" if isinstance(key, str) else f"{name}[{key!r}]", part))


def _parts(value: Any) -> dict[Any, Any]:
    """What an object is made of, one level deep."""
    if isinstance(value, _OPAQUE) or type(value).__module__.startswith(_OWN):
        return {}
    if isinstance(value, torch.Tensor):
        return {"layout": _layout(value)}
    if isinstance(value, dict):
        return {**value, **getattr(value, "__dict__", {})}
    if isinstance(value, _MANY):
        return dict(enumerate(value))
    if hasattr(value, "tobytes") and hasattr(value, "nbytes"):  # an array
        return {"data": value.tobytes()} if value.nbytes <= 1 << 20 else {}
    slots = [name for cls in type(value).__mro__ for name in _slots_of(cls) if hasattr(value, name)]
    return {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}


def _layout(tensor: torch.Tensor) -> str:
    """Where a tensor lies, and how: its data is another matter."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return ""
    return f"{tuple(tensor.shape)} {tensor.stride()} {tensor.storage_offset()} {torch_compat.storage_id(tensor)}"


def _slots_of(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__") and not name.startswith("__"))


def _differing(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[Any]:
    return [key for key in {**before, **now} if key not in before or key not in now or not _is(before[key], now[key])]


def _is(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, (types.MethodType, bytes)):
        return bool(old == new)
    return is_constant(old) and is_same_constant(old, new)


def _refill(value: Any, before: Mapping[Any, Any]) -> None:
    if isinstance(value, (list, deque)):
        value.clear()
        value.extend(before.values())
    elif isinstance(value, set):
        value.clear()
        value.update(before.values())
    elif isinstance(value, dict):
        own = getattr(value, "__dict__", {})
        value.clear()
        value.update({key: part for key, part in before.items() if key not in own})
    elif hasattr(value, "__dict__"):
        value.__dict__.clear()
        value.__dict__.update(before)
    elif hasattr(type(value), "__slots__"):
        for name, part in before.items():
            setattr(value, name, part)


def _random_states() -> list[tuple[str, Any]]:
    """Of generators that are Python's; those of torch are replayed."""
    states: list[tuple[str, Any]] = [("the state of random", random.getstate())]
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states.append(("the state of numpy.random", (kind, keys.tobytes(), *rest)))
    return states
