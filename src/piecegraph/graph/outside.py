"""What a plan has read outside the call: globals, closures, attributes of the module and its submodules.

A trace takes such values for constants. So they are looked at again before every call, and a call that finds others is
of another kind. A large model reads hundreds of attributes of its submodules, which would take longer than the replay:
only whether the dictionaries that hold them have changed is looked at (:mod:`piecegraph.base.versions`). The few that
are in no such dictionary, such as elements of lists, are read.
"""

from __future__ import annotations

import abc
import array
import ast
import collections
import contextlib
import contextvars
import ctypes
import functools
import io
import itertools
import operator
import os
import re
import sys
import threading
from collections.abc import Iterable, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from piecegraph.base import torch_compat
from piecegraph.base.source_files import file_of
from piecegraph.base.versions import Versions, class_dict
from piecegraph.errors import TraceError
from piecegraph.graph.signature import is_constant, is_same_constant

_MODULE = re.compile(r".*\._modules\['[^']*'\]|L\['\w+'\](\.__self__)?")
_FROM_MODULE = re.compile(
    rf"(?P<before>\w+\(|)(?P<module>{_MODULE.pattern})\.(?P<attribute>(?!__)[A-Za-z_]\w*)(?P<after>.*)"
)
_ASKED = re.compile(r"(?P<what>len|type|tuple|hasattr)\((?P<path>.*?)(, '\w+')?\)")
_INSIDE = re.compile(r"'\w+' in (?P<dict>.*\.__dict__)")
_SAME = re.compile(r"\((.*)\) is \((.*)\)")
"""Two names for one object, which a trace reads by one of them alone."""
_ROOT = re.compile(r"\w+")
_STEP = re.compile(r"""\.[A-Za-z_]\w*|\['[^']*'\]|\["[^"]*"\]|\[\d+\]""")
_PATH = re.compile(rf"({_STEP.pattern})*")
_HOLDERS = (list, tuple, dict, set, frozenset, torch.Tensor)
"""What is compared by what it holds; a tensor by itself."""
_STATES = (torch.Generator, torch.ScriptObject)
"""What ops are given and Python does not look into."""
_BY_IDENTITY = (torch.Tensor, np.ndarray, *_STATES)
"""What is another if it is another object: what is in it is read where it is."""
_MAX_COMPARED_BYTES = 1 << 20
"""Of an array that Python reads: comparing more at every call would take longer than the call."""
_MAX_DEPTH = 8
"""Of containers in containers: one may hold itself."""
_WRAPPERS = (FunctionType, MethodType, staticmethod, classmethod, property)
_FIXED = ("__closure__", "__func__", "__self__", "__wrapped__", "fget")
"""Of these, as good as never replaced."""


class OutsideValues:
    """Numbers, strings and tensors outside the call, as they were when it was planned.

    Args:
        tensors: expressions for tensors that are neither parameters nor buffers: another tensor is another value.
        constants: expressions for what is compared by type and value.
        scopes: what the expressions are evaluated in.
    """

    def __init__(self, tensors: Sequence[str], constants: Sequence[str], scopes: dict[str, Any]) -> None:
        self.renew(tensors, constants, scopes)

    def renew(self, tensors: Sequence[str], constants: Sequence[str], scopes: dict[str, Any]) -> None:
        """Look at these from now on, as they are now."""
        self._scopes = dict(scopes)
        named = dict.fromkeys((*(each for name in constants for each in self._expand(name)), *tensors))
        known = [name for name in named if _is_comparable(self._try(name)) and not self._is_torchs(name)]
        held = [name for name in named if self._is_one_object(name)]
        if any(_takes_in_others(self._try(name)) for name in known):
            self._scopes["registrations"] = abc.get_cache_token
            known.append("registrations()")
        self.names = (*known, *held)
        self._shortened = [self._shorten(name) for name in self.names]
        self._all = _tuple_of(self._shortened)
        self._watch([_holders(text, self._scopes) for text in self._shortened])
        self._take(eval(self._all, self._scopes))

    def _expand(self, name: str, depth: int = 0) -> list[str]:
        """What is compared in the place of a value that can change."""
        if name.startswith("type("):
            return self._expand_type(name)
        value = self._try(name)
        if how := _read_as(value):
            return self._expand_read(name, how.format(name), depth)
        is_one = not isinstance(value, _HOLDERS) or isinstance(value, _BY_IDENTITY) or _is_comparable(value)
        if is_one or depth > _MAX_DEPTH:
            return [name]
        if isinstance(value, set | frozenset):
            return [f"frozenset({name})"]
        keys = value if isinstance(value, dict) else range(len(value))
        parts = [f"{name}[{key!r}]" for key in keys if isinstance(key, str | int)]
        return [
            f"{'tuple' if isinstance(value, dict) else 'len'}({name})",
            *(each for part in parts for each in self._expand(part, depth + 1)),
        ]

    def _expand_type(self, name: str) -> list[str]:
        """What a value is, where nothing else tells: modules in modules are watched, containers have parts."""
        path = name[len("type(") : -1]
        value = self._try(path)
        if isinstance(value, torch.nn.Module):
            return [] if _MODULE.fullmatch(path) else [path]
        if isinstance(value, (np.generic, *_STATES)):
            return [path]
        if _read_as(value):
            return [name, path, *self._expand(path)]  # itself, too: a graph may read the memory of an array
        if isinstance(value, dict):  # that a key is missing is not told by whoever met a KeyError
            return [f"tuple({path})"]
        return [] if is_constant(value) or isinstance(value, _HOLDERS) else [name]

    def _expand_read(self, name: str, read: str, depth: int) -> list[str]:
        """What a call gives that reads all of a value. Raises if that cannot be compared: nothing else would tell."""
        parts = self._expand(read, depth + 1)
        values = [self._try(part) for part in parts]
        if not all(_is_comparable(value) or isinstance(value, _BY_IDENTITY) for value in values):
            raise TraceError(
                "PG203",
                f"{_readable(name)} may be read in Python",
                why=f"changes of what is in this {type(self._try(name)).__name__} could not be noticed",
                hint="read it in a function marked with piecegraph.eager_op, or pass what is read as an argument",
            )
        return parts

    def _watch(self, holders: list[list[Any]]) -> None:
        """Have versions tell of what is in these; what is in none is read."""
        self._holders = holders
        watched = {id(each): each for found in holders for each in found}.values()
        dicts = [each for each in watched if isinstance(each, dict)]
        functions = [each for each in watched if isinstance(each, FunctionType)]
        objects = [each for each in watched if not isinstance(each, dict | FunctionType)]
        self._versions = Versions(dicts, objects, functions)
        self._is_read = [not found for found in holders]
        self._read = _tuple_of(itertools.compress(self._shortened, self._is_read))

    def _follow(self) -> None:
        """Where something on the way to a value was replaced, watch what is there now, though the value be equal."""
        changed = {id(each) for each in self._versions.changed()}
        self._versions.accept()
        holders = [
            _holders(text, self._scopes) if any(id(each) in changed for each in found[:-1]) else found
            for text, found in zip(self._shortened, self._holders, strict=True)
        ]
        if [list(map(id, found)) for found in holders] != [list(map(id, found)) for found in self._holders]:
            self._watch(holders)

    def _take(self, values: tuple[Any, ...]) -> None:
        self._values: tuple[Any, ...] = values
        self._read_values = tuple(itertools.compress(values, self._is_read))
        self._is_doubtful = False

    @property
    def constants(self) -> dict[str, Any]:
        """Those that are compared by value, as they were, by their expressions."""
        named = zip(self.names, self._values, strict=True)
        return {name: value for name, value in named if _is_comparable(value)}

    @property
    def classes(self) -> list[type]:
        """Those among them, and those of the objects."""
        return [value for value in self._values if isinstance(value, type)]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that are, by their names."""
        named = zip(map(_readable, self.names), self._values, strict=True)
        return {name: value for name, value in named if isinstance(value, torch.Tensor)}

    @property
    def objects(self) -> dict[str, Any]:
        """Those that are none of these, nor ops, and compared by identity."""
        named = zip(self.names, self._values, strict=True)
        objects = {
            name: each for name, each in named if not _is_comparable(each) and not isinstance(each, _BY_IDENTITY)
        }
        return {name: each for name, each in objects.items() if not torch_compat.qualified_name(each)}

    def find(self, expression: str) -> Any:
        """What an expression leads to now; the object itself if to nothing."""
        return self._try(expression)

    def hold(self) -> bool:
        """Whether they are what they were."""
        try:
            if (
                not self._is_doubtful
                and self._versions.are_known()
                and (not self._read_values or _are_same(eval(self._read, self._scopes), self._read_values))
            ):
                return True
            return self._hold_all()
        except (AttributeError, LookupError, TypeError, NameError):  # one of them is gone
            return self._doubt()

    def _hold_all(self) -> bool:
        self._follow()  # before they are looked at: what changes meanwhile is looked at again
        values = eval(self._all, self._scopes)
        if not all(map(_is_same, values, self._values)):
            return self._doubt()
        self._take(values)  # equal, and next time the same
        return True

    def _doubt(self) -> bool:
        """Something has changed: until it is as it was, all are looked at."""
        self._is_doubtful = True
        return False

    def first_changed(self) -> str:
        """The expression of one that is not what it was; empty if all are."""
        for name, value in zip(self.names, self._values, strict=True):
            if not _is_same(self._try(name), value):
                return _readable(name)
        return ""

    def _try(self, name: str) -> Any:
        with contextlib.suppress(Exception):  # a name that only Dynamo can read
            return eval(_compiled(name), self._scopes)
        return self

    def _is_one_object(self, name: str) -> bool:
        """Whether an expression leads to something that is no constant, and to the same each time: a bound method is
        made where it is asked for. What is read in Python's modules has names of its own, and nobody reads hints.
        """
        value = self._try(name)
        is_left_out = value is self or isinstance(value, ModuleType) or type(value).__module__ == "typing"
        is_compared = is_left_out or _is_comparable(value) or self._is_torchs(name)
        return not is_compared and value is self._try(name)

    def _is_torchs(self, name: str) -> bool:
        """Whether it is a function or class that torch has: nobody replaces those, and every model reads many."""
        name = name.removesuffix(".__code__")
        if not callable(self._try(name)):
            return False
        holder = self._try(name.rpartition(".")[0])
        return isinstance(holder, ModuleType) and holder.__name__.split(".")[0] == "torch"

    def _shorten(self, name: str) -> str:
        """The expression from the nearest module on, and whether that is the same is looked at elsewhere."""
        if pair := _SAME.fullmatch(name):
            return f"({self._shorten(pair[1])}) is ({self._shorten(pair[2])})"
        asked = _ASKED.fullmatch(name)
        if asked and asked["what"] == "hasattr" and isinstance(module := self._try(asked["path"]), torch.nn.Module):
            self._scopes[owner := f"all{id(module)}"] = module
            return name.replace(asked["path"], owner, 1)
        found = _FROM_MODULE.fullmatch(name)
        module = self._try(found["module"]) if found else None
        if not found or not isinstance(module, torch.nn.Module):
            return name
        is_own = found["attribute"] in module.__dict__
        owner = f"{'own' if is_own else 'all'}{id(module)}"
        self._scopes[owner] = module.__dict__ if is_own else module
        attribute = f"[{found['attribute']!r}]" if is_own else f".{found['attribute']}"
        return f"{found['before']}{owner}{attribute}{found['after']}"


def _holders(expression: str, scopes: dict[str, Any]) -> list[Any]:
    """The dictionaries and functions on the way to a value, whose versions tell that it is the same; none if they do
    not.
    """
    if pair := _SAME.fullmatch(expression):
        one, other = (_holders(each, scopes) for each in pair.groups())
        return [*one, *other] if one and other else []
    if inside := _INSIDE.fullmatch(expression):
        expression = f"tuple({inside['dict']})"
    asked = _ASKED.fullmatch(expression)
    path = asked["path"] if asked else expression
    root = _ROOT.match(path)
    if not root or not _PATH.fullmatch(path, root.end()) or root[0] not in scopes:
        return []
    value = scopes[root[0]]
    if type(value) is dict and value.get("__name__") == "__main__":  # a program writes there all the time
        return []
    holders: list[Any] = []
    for step in _STEP.findall(path, root.end()):
        found = _attribute(value, step[1:]) if step[0] == "." else _element(value, ast.literal_eval(step[1:-1]))
        if found is None:
            return []
        more, value = found
        holders += more
    if not asked or type(value) is tuple:
        return holders
    if asked["what"] == "hasattr":
        found_in = _holders_of_names(value)
        return [*holders, *found_in] if found_in else []
    is_known = asked["what"] == "type" or type(value) is dict
    return [*holders, value] if is_known else []


def _holders_of_names(value: Any) -> list[Any]:
    """The dictionaries whose versions tell which attributes a value has; none if they do not."""
    own, is_module = getattr(value, "__dict__", None), isinstance(value, torch.nn.Module)
    if type(own) is not dict or (hasattr(type(value), "__getattr__") and not is_module):
        return []
    parts = torch_compat.parts_of(value) if is_module else ()
    return [own, *parts, *(class_dict(cls) for cls in type(value).__mro__ if cls is not object)]


def _element(value: Any, key: str | int) -> tuple[list[Any], Any] | None:
    """An element of a dictionary or a tuple, and what holds it; None if nothing tells that it is replaced."""
    if isinstance(key, int):
        return ([], value[key]) if type(value) is tuple and key < len(value) else None
    return ([value], value[key]) if isinstance(value, dict) and key in value else None


def _attribute(value: Any, name: str) -> tuple[list[Any], Any] | None:
    """The same for an attribute."""
    if isinstance(value, FunctionType) and name in ("__code__", "__defaults__", "__kwdefaults__"):
        return [value], getattr(value, name)
    if isinstance(value, _WRAPPERS):
        return ([], getattr(value, name)) if name in _FIXED and hasattr(value, name) else None
    if name == "__class__":
        return [value], type(value)
    if isinstance(value, type) and name in ("__dict__", "__mro__"):
        return [], class_dict(value) if name == "__dict__" else value.__mro__
    own = getattr(value, "__dict__", None)
    if name == "__dict__" and type(own) is dict:
        return [], own
    if isinstance(value, ModuleType):
        return ([own], own[name]) if own is not None and name in own else None
    holders: list[Any] = [] if isinstance(value, type) else [own]
    if holders and type(own) is not dict:
        return None
    for cls in (value if isinstance(value, type) else type(value)).__mro__:
        holders.append(class_dict(cls))
        if name in holders[-1]:
            break
    found = holders[-1].get(name)
    if hasattr(found, "__get__"):  # code that gives the value; but for plain functions, which a class gives as they are
        return (holders, found) if isinstance(value, type) and isinstance(found, FunctionType) else None
    if type(own) is dict and name in own:
        return [own], own[name]
    return (holders, found) if name in holders[-1] else None


def _takes_in_others(value: Any) -> bool:
    """Whether it is a class of the user's own that others may be registered with, which nothing but Python's count of
    all registrations tells.
    """
    if not isinstance(value, abc.ABCMeta) or value.__module__.partition(".")[0] in sys.stdlib_module_names:
        return False
    return f"{os.sep}site-packages{os.sep}" not in str(file_of(sys.modules.get(value.__module__)))


def _readable(expression: str) -> str:
    """As a program would write it.

    >>> _readable("L['self']._modules['0'].factor"), _readable("len(C1['scales'].cell_contents[0])")
    ('0.factor', 'len(scales[0])')
    """
    given = re.sub(r"\.__class__(\.__mro__\[\d+\])?\.__dict__\['(\w+)'\]", r".\2", expression)
    own = re.sub(r"_modules\['([^']*)'\]", r"\1", re.sub(r"\bL\['self'\]\.", "", given))
    return re.sub(r"(?<![\w\]])[A-Z]\d*\['(\w+)'\](\.cell_contents)?", r"\1", own)


@functools.lru_cache(maxsize=4096)
def _compiled(expression: str) -> CodeType:
    """To read it takes ten times as long as to look at what it says, and each is looked at several times."""
    return compile(expression, "<outside the call>", "eval")


def _tuple_of(expressions: Iterable[str]) -> CodeType:
    return compile(f"({''.join(f'{text}, ' for text in expressions)})", "<outside the call>", "eval")


def _is_same(now: Any, then: Any) -> bool:
    if type(now) is not type(then) or not _is_comparable(then):
        return now is then
    if isinstance(then, np.generic):
        return bool(now.dtype == then.dtype and now.tobytes() == then.tobytes())
    return is_same_constant(now, then)


def _are_same(now: tuple[Any, ...], then: tuple[Any, ...]) -> bool:
    return all(map(operator.is_, now, then)) or all(map(_is_same, now, then))


def _is_comparable(value: Any) -> bool:
    """Whether a value is compared as a whole, as Dynamo does: a constant, or what holds only such and never changes."""
    is_single = is_constant(value) or isinstance(value, np.generic)
    return is_single or (isinstance(value, tuple | frozenset) and all(map(_is_comparable, value)))


def _read_as(value: Any) -> str:
    """What reads all that is in a value which is neither a container that is walked nor an object with attributes;
    empty for others. What is too large is read as something that cannot be compared.
    """
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return "{0}.tolist()"
        return "(str({0}.dtype), {0}.shape, {0}.tobytes())" if value.nbytes <= _MAX_COMPARED_BYTES else "..."
    if isinstance(value, contextvars.ContextVar):
        return "{0}.get()" if _has_value(value) else "{0}.get(None)"  # its own default is not to be hidden by ours
    return next((how for cls, how in _READ_AS.items() if isinstance(value, cls)), "")


def _has_value(variable: contextvars.ContextVar[Any]) -> bool:
    try:
        variable.get()
    except LookupError:
        return False
    return True


_READ_AS: dict[type, str] = {
    collections.deque: "list({0})",
    bytearray: "bytes({0})",
    memoryview: "bytes({0})",
    array.array: "{0}.tobytes()",
    ctypes.c_int.__mro__[-2]: "bytes({0})",  # the class of all of C's values, which has no public name
    io.StringIO: "({0}.getvalue(), {0}.tell())",
    io.BytesIO: "({0}.getvalue(), {0}.tell())",
    type(threading.Lock()): "{0}.locked()",
}
