"""What a run of the user's code changes in Python: a replay runs no Python, so such a change would happen only once.

The objects that a function can reach are walked before the run and compared after it, one level of each at a time. A
function is made of what it names outside of itself, so the walk goes on through those that it calls, and through hooks.
Classes of the user's own are objects, too. What is not found that way (files, clocks, objects that only C knows) is not
noticed.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import functools
import io
import logging
import os
import pickle
import random
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch

from piecegraph.base import torch_compat
from piecegraph.base.structure import TABLES, builtin_kind
from piecegraph.engine.reach import FIXED, is_installed, methods_that_run, outer_variables, package_of
from piecegraph.errors import TraceError
from piecegraph.graph.results import changes_state
from piecegraph.graph.signature import is_constant, is_same_constant

_MAX_OBJECTS = 500_000
"""Where walking ends: a module may hold a whole data set."""
_BOUND = (types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)
_CODE = (types.FunctionType, *_BOUND, functools.partial)
"""What leads to other objects."""
_OPAQUE = (torch.Generator, type, types.ModuleType, *_BOUND, functools.partial, logging.Logger)
_OWN = ("piecegraph.", "torch._")
"""Whose objects keep books about calls."""
_ITERATORS = ("builtins", "itertools", "_collections")
"""Whose iterators tell how far they are, and nothing else of themselves."""
_MANY = (list, tuple, set, frozenset, deque)
_OF_C: Any = ctypes.c_int.__mro__[-2]
"""The class of all of C's values, which has no public name."""
_MEMORY: tuple[Any, ...] = (bytearray, array.array, _OF_C)
_MAX_BYTES = 1 << 20


class PythonState:
    """The Python objects in reach of some roots, as they are now.

    Args:
        roots: where walking begins, by name.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._roots = roots
        self._before: list[tuple[str, Any, dict[Any, Any]]] = []
        self._global: list[tuple[str, Any]] = []
        self._noted: str | None = None
        self._take()

    def _take(self) -> None:
        with torch_compat.unseen():
            self._before = list(_walk(self._roots))
        self._global = _global_states()

    @contextlib.contextmanager
    def not_inside(self) -> Iterator[None]:
        """What changes inside is nobody's loss: it runs at every replay."""
        self._noted = self.change()
        yield
        self._take()

    def change(self, known: Container[tuple[int, Any]] = ()) -> str | None:
        """The name of something that has changed, or None.

        Args:
            known: the ids of objects, with keys that may change.
        """
        if self._noted is not None:
            return self._noted
        for (name, before), (_, now) in zip(self._global, _global_states(), strict=False):
            if before != now:
                return name
        with torch_compat.unseen():
            for name, value, before in self._before:
                for key in _differing(before, _parts(value)):
                    if (id(value), key) not in known:
                        return _name_of_part(name, value, key)
        return None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those among the objects."""
        return [value for _, value, _ in self._before if isinstance(value, torch.Tensor)]

    @property
    def generators(self) -> set[int]:
        """Those of torch among the objects, and those of devices."""
        defaults = (torch.default_generator, *torch.cuda.default_generators)
        found = [value for _, value, _ in self._before if isinstance(value, torch.Generator)]
        return {torch_compat.generator_id(generator) for generator in (*defaults, *found)}

    @property
    def objects(self) -> dict[int, Any]:
        """All of them, by their ids."""
        return {id(value): value for _, value, _ in self._before}

    def restore(self) -> None:
        """Put containers and attributes back to what they were."""
        random.setstate(self._global[0][1])
        if os.environ != (before := self._global[1][1]):
            os.environ.clear()
            os.environ.update(before)
        for _, value, before in self._before:
            if _differing(before, _parts(value)):
                _refill(value, before)


def changes_python(what: str) -> TraceError:
    """The refusal of a function that changes something in Python at every call."""
    return changes_state(what, ", or mark what changes it with @piecegraph.eager_op")


def outer_objects(function: Callable[..., Any]) -> dict[str, Any]:
    """Where walking begins for a function: at itself, or at the object that is called."""
    return {"the function" if isinstance(function, _CODE) else "self": function}


def _walk(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any, dict[Any, Any]]]:
    """Each object that can be changed, with its name and what it is made of."""
    seen: set[int] = set()
    ahead: deque[tuple[str, Any]] = deque(roots.items())
    while ahead and len(seen) < _MAX_OBJECTS:
        name, value = ahead.popleft()
        if id(value) in seen or (is_constant(value) and not isinstance(value, (torch.nn.Module, *_CODE, type))):
            continue
        seen.add(id(value))
        parts = _parts(value)
        yield name, value, parts
        ahead.extend((_name_of_part(name, value, key), part) for key, part in parts.items())
        ahead.extend(_led_to(name, value))


def _name_of_part(name: str, value: Any, key: Any) -> str:
    if isinstance(value, types.FunctionType):  # a variable has a name of its own
        return str(key)
    return f"{name}.{key}" if isinstance(key, str) else f"{name}[{key!r}]"


def _led_to(name: str, value: Any) -> list[tuple[str, Any]]:
    """What an object leads to that is no part of it and cannot be replaced: code, and what code is bound to."""
    if isinstance(value, functools.partial):
        return [(name, value.func), (f"{name}.args", value.args), (f"{name}.keywords", value.keywords)]
    if isinstance(value, _BOUND):
        function = getattr(value, "__func__", None)
        return [("self" if function else f"{name}.__self__", value.__self__), (name, function)]
    if isinstance(value, types.FunctionType):
        is_theirs = package_of(value.__globals__) not in FIXED
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()] if is_theirs else []
        decorated = (value.__qualname__, getattr(value, "__wrapped__", None))
        return [*((f"a default of {value.__qualname__}", each) for each in defaults), decorated]
    kind = [] if isinstance(value, type) else [(type(value).__name__, type(value))]
    return [*kind, *((method.__qualname__, method) for method in methods_that_run(value) if callable(value))]


def _parts(value: Any) -> dict[Any, Any]:
    """What an object is made of, one level deep."""
    if isinstance(value, type):
        return {name: part for name, part in vars(value).items() if _is_value(name, part)} if _is_users(value) else {}
    if isinstance(value, _OPAQUE) or type(value).__module__.startswith(_OWN):
        return {}
    if isinstance(value, types.FunctionType):
        return _outer_values(value)
    if isinstance(value, torch.Tensor):
        own = vars(value) if type(value) in (torch.Tensor, torch.nn.Parameter) else {}
        known = {name: part for name, part in own.items() if not name.startswith("_dynamo_")}  # its marks
        return {"layout": _layout(value), "requires_grad": value.requires_grad, **known}
    if _draws_numbers(value):
        return {"state": pickle.dumps(_number_state(value))}
    if isinstance(value, Iterator) and type(value).__module__ in _ITERATORS:
        return _iterator_state(value)
    if isinstance(value, dict):
        return {**dict(builtin_kind(value, TABLES).items(value)), **getattr(value, "__dict__", {})}
    if isinstance(value, _MANY):
        return dict(enumerate(builtin_kind(value, _MANY).__iter__(value)))
    if isinstance(value, io.StringIO | io.BytesIO):
        return {} if value.closed else {"text": value.getvalue(), "place": value.tell()}
    if isinstance(value, _MEMORY):
        return {"data": bytes(value)} if memoryview(value).nbytes <= _MAX_BYTES else {}
    if _is_array(value):
        return {"data": value.tobytes()} if value.nbytes <= _MAX_BYTES else {}
    slots = [name for cls in type(value).__mro__ for name in _slots_of(cls) if hasattr(value, name)]
    return {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}


def _is_array(value: Any) -> bool:
    """Its class is asked: some objects have whatever attribute they are asked for."""
    return hasattr(type(value), "tobytes") and hasattr(type(value), "nbytes")


def _is_users(cls: type) -> bool:
    """Whether a class is of the user's own code: packages keep books in theirs."""
    home = sys.modules.get(cls.__module__)
    return home is not None and package_of(vars(home)) not in FIXED and not is_installed(vars(home))


def _is_value(name: str, part: Any) -> bool:
    """Whether an attribute of a class is one of its values, and not what Python makes of its code."""
    is_code = isinstance(part, (*_CODE, staticmethod, classmethod, property)) or hasattr(type(part), "__get__")
    return not is_code and not (name.startswith("__") and name.endswith("__")) and not name.startswith("_abc_")


def _outer_values(function: types.FunctionType) -> dict[str, Any]:
    """What a function finds outside, and its own attributes. In code that nobody replaces, only other code: a decorator
    keeps its own books.
    """
    found = {f"{function.__name__}.{name}": part for name, part in vars(function).items() if name != "__wrapped__"}
    for name, variable in outer_variables(function).items():
        with contextlib.suppress(LookupError):  # it is empty
            found[name] = variable.get()
    if package_of(function.__globals__) in FIXED:
        return {name: value for name, value in found.items() if isinstance(value, _CODE)}
    return found


def _draws_numbers(value: Any) -> bool:
    """Whether it is a generator of random numbers, Python's or numpy's; those of torch are replayed."""
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    return type(value).__module__.startswith("numpy.random.")


def _number_state(source: Any) -> Any:
    if isinstance(source, random.Random):
        return source.getstate()
    source = getattr(source, "bit_generator", source)
    return source.get_state() if hasattr(source, "get_state") else getattr(source, "state", None)


def _set_number_state(source: Any, state: Any) -> None:
    if isinstance(source, random.Random):
        source.setstate(state)
        return
    source = getattr(source, "bit_generator", source)
    if hasattr(source, "set_state"):
        source.set_state(state)
    elif state is not None:
        source.state = state


def _iterator_state(iterator: Any) -> dict[Any, Any]:
    """How far an iterator is. That it went on is seen; no iterator can be put back."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return {} if frame is None else {**frame.f_locals, "next instruction": frame.f_lasti}
    if hasattr(iterator, "__length_hint__"):
        return {"left": iterator.__length_hint__()}
    with warnings.catch_warnings():  # that newer versions of Python will not tell
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            _, *state = iterator.__reduce__()
        except TypeError:
            return {}
    parts = [part for group in state for part in (group if isinstance(group, tuple) else (group,))]
    return dict(enumerate(part.__length_hint__() if hasattr(part, "__length_hint__") else part for part in parts))


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
    if isinstance(value, torch.Tensor):
        _reset_tensor(value, before)
    elif isinstance(value, types.FunctionType):
        _reset_variables(value, before)
    elif isinstance(value, type):
        _reset_attributes(value, before)
    elif _draws_numbers(value):
        _set_number_state(value, pickle.loads(before["state"]))
    elif isinstance(value, io.StringIO | io.BytesIO):
        value.seek(0)
        value.truncate()
        value.write(before["text"])
        value.seek(before["place"])
    elif isinstance(value, _MEMORY) or _is_array(value):
        _refill_memory(value, before["data"])
    elif isinstance(value, (list, deque)):
        kind = builtin_kind(value, _MANY)
        kind.clear(value)
        kind.extend(value, before.values())
    elif isinstance(value, set):
        set.clear(value)
        set.update(value, before.values())
    elif isinstance(value, dict):
        kind, own = builtin_kind(value, TABLES), getattr(value, "__dict__", {})
        kind.clear(value)
        for key, part in before.items():
            if key not in own:
                kind.__setitem__(value, key, part)
    elif hasattr(value, "__dict__"):
        value.__dict__.clear()
        value.__dict__.update(before)
    elif hasattr(type(value), "__slots__"):
        for name, part in before.items():
            setattr(value, name, part)


def _refill_memory(value: Any, data: bytes) -> None:
    if isinstance(value, bytearray):
        value[:] = data
    elif isinstance(value, array.array):
        del value[:]
        value.frombytes(data)
    elif isinstance(value, _OF_C):
        ctypes.memmove(ctypes.addressof(value), data, len(data))
    else:
        with contextlib.suppress(TypeError, ValueError):  # it may not be written to, or has gaps
            memoryview(value).cast("B")[:] = data


def _reset_tensor(value: torch.Tensor, before: Mapping[str, Any]) -> None:
    """Its data and how it lies are put back elsewhere."""
    if value.is_leaf:
        value.requires_grad_(before["requires_grad"])
    for name in _differing(before, _parts(value)):
        if name in vars(value) and name not in before:
            delattr(value, name)
        elif name not in ("layout", "requires_grad"):
            setattr(value, name, before[name])


def _reset_variables(function: types.FunctionType, before: Mapping[str, Any]) -> None:
    """Put back what was found outside; a global that was not there stays, since others may have found it by now."""
    variables = outer_variables(function)
    for name in _differing(before, _outer_values(function)):
        if name in before and name in variables:
            variables[name].set(before[name])
        elif name in before:
            setattr(function, name.rpartition(".")[2], before[name])


def _reset_attributes(cls: type, before: Mapping[str, Any]) -> None:
    for name in _differing(before, _parts(cls)):
        if name in before:
            setattr(cls, name, before[name])
        else:
            delattr(cls, name)


def _global_states() -> list[tuple[str, Any]]:
    """What no object holds: of generators that are Python's, as those of torch are replayed, and of the environment."""
    states: list[tuple[str, Any]] = [("the state of random", random.getstate()), ("os.environ", dict(os.environ))]
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states.append(("the state of numpy.random", (kind, keys.tobytes(), *rest)))
    return states
