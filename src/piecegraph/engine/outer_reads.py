"""What code that is not traced may read in Python, outside of the call.

Such code runs as it is when it is recorded, and a replay goes on with what it read then. Which values those are, nobody
says; but which code ran does: what it can read outside is named in it, as a global, an outer variable or an attribute.
All that bears such a name is looked at before every call, and so is what a function has with it: the owner of a method,
arguments of a partial, defaults. Eager ops read at every replay, so their code does not count.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import gc
import inspect
import logging
import re
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from piecegraph.base import torch_compat
from piecegraph.base.structure import flatten
from piecegraph.base.user_code import user_line
from piecegraph.engine.reach import FIXED, is_installed, package_of
from piecegraph.graph.asked import MEMORY, SEEDING, Question, questions_in, reads_memory_at, seeds_at
from piecegraph.graph.code_used import classes_at
from piecegraph.graph.signature import has_attributes, is_constant

MAX_VALUES = 10_000
_CACHED = type(functools.cache(lambda: None))
_BY_OTHERS = (functools.partialmethod, functools.singledispatchmethod)
"""What of the standard library makes methods of functions that a class does not show."""
_MAX_DEPTH = 8
"""Where walking ends: a global may hold a library's own state. An object is as deep as two containers."""
_CONTAINERS = (list, tuple, dict)
_BY_ANY_NAME = {"getattr", "vars", "__dict__", "attrgetter", "hasattr"}
"""What reads attributes whose names are not in the code."""
_BY_TEXT = {"globals", "eval", "exec"}
"""What reads globals whose names are in a text."""
_NAME = re.compile(r"[^\W\d]\w*")
_OURS = FIXED - {"torch"}
"""Whose code runs because it is looked at; the standard library's, for both."""
_EVERY_MODULE = frozenset(vars(torch.nn.Module()))


class OuterNames(NamedTuple):
    """What to look at, as :class:`~piecegraph.graph.outside.OutsideValues` takes it."""

    tensors: list[str]
    constants: list[str]
    scopes: dict[str, Any]


class CodeLog:
    """The code that runs, and the globals it sees.

    Args:
        is_recorded: whether what runs now will not run at replays.
    """

    def __init__(self, is_recorded: Callable[[], bool]) -> None:
        self._is_recorded = is_recorded
        self._ran: dict[CodeType, dict[str, Any]] = {}
        self._ours: set[CodeType] = set()
        self._importing: FrameType | None = None
        """The outermost module that is being imported: what that runs will not run again, and may be thousands."""
        self._functions = _Functions()
        self.leaves_out = False
        """Whether the code can read more values than are looked at."""
        self._seeding: tuple[Question, ...] = ()
        """Where random numbers were seeded, if they were."""
        self._reading: tuple[Question, ...] = ()
        """Where memory was read without an op, if it was."""
        self.questions: tuple[Question, ...] = ()
        """What the code was found to ask for, of all runs and on all paths."""

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note what runs inside, on this thread."""
        before: Any = sys.getprofile()
        is_native = before is not None and not callable(before)  # cProfile's: only it can put itself back
        if is_native:
            before.disable()
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None if is_native else before)
            if is_native:
                before.enable()
            self._functions.note_ended()
            self._importing = None
            self._ask()

    def _note(self, frame: FrameType, event: str, called: Any) -> None:
        self._functions.note_ended()
        if self._importing is not None:
            self._importing = None if event == "return" and frame is self._importing else self._importing
        elif event == "c_call":
            self._note_seeding(frame, called)
        elif event == "return":
            self._functions.note_ending(frame)
        elif event == "call" and frame.f_code not in self._ran and frame.f_code not in self._ours:
            self._note_code(frame)

    def _note_code(self, frame: FrameType) -> None:
        package = package_of(frame.f_globals)
        if _is_imported(frame):
            self._importing = frame
        elif package in _OURS:
            self._ours.add(frame.f_code)
        elif self._is_recorded():
            self._ran[frame.f_code] = frame.f_globals
            if package != "torch":
                self._functions.look_for(frame.f_code)
            elif frame.f_code.co_name in MEMORY and frame.f_globals.get("__name__") == "torch.storage":
                self._reading = self._reading or (reads_memory_at(str(user_line() or "the function")),)

    def _note_seeding(self, frame: FrameType, called: Any) -> None:
        """Whoever does it, a library too: it is seen where it is done."""
        if getattr(called, "__name__", None) not in SEEDING or not isinstance(called.__self__, torch.Generator):
            return
        is_theirs = package_of(frame.f_globals) not in _OURS and not _is_in_compiler(frame)
        if not self._seeding and is_theirs and self._is_recorded():
            self._seeding = (seeds_at(str(user_line() or called.__qualname__)),)

    def note_new_generator(self, function: Callable[..., Any]) -> None:
        """A generator that was made by the call begins anew with every call."""
        self._seeding = self._seeding or (seeds_at(getattr(function, "__qualname__", "the function")),)
        self._ask()

    def _ask(self) -> None:
        """What was asked before had the answer of then."""
        known = {question.what: question for question in self.questions}
        found = (*questions_in(self._ran, is_traced=False), *self._seeding, *self._reading)
        self.questions = tuple(known.get(question.what, question) for question in found)

    def classes(self) -> tuple[type, ...]:
        """Those whose methods ran."""
        return classes_at((str(scope.get("__name__")), code.co_qualname) for code, scope in self._ran.items())

    @property
    def num_codes(self) -> int:
        return len(self._ran)

    def names(
        self,
        function: Callable[..., Any],
        module: torch.nn.Module | None,
        others: Iterable[torch.nn.Module],
        arguments: Any,
    ) -> OuterNames:
        """What the code can read outside of the call: in a module and its submodules, in other modules, in what the
        function has with it, in globals and outer variables, and in arguments that are the same objects at every call.
        """
        theirs = {code: scope for code, scope in self._ran.items() if package_of(scope) != "torch"}
        names = {name for code in self._ran for name in (*code.co_names, *code.co_consts) if isinstance(name, str)}
        is_any = any(not _BY_ANY_NAME.isdisjoint(code.co_names) for code in theirs)
        reader = _Reader(names, is_any=is_any)
        reader.walk_modules(module, others)
        for scope in {id(scope): scope for scope in theirs.values()}.values():
            codes = [code for code in theirs if theirs[code] is scope]
            named = [name for code in codes for name in _globals_of(code)]
            by_any_name = _plain_values(scope) if any("globals" in code.co_names for code in codes) else []
            reader.walk_scope(scope, [*named, *by_any_name])
        for code in theirs:
            for imported in _imported_by(code):
                reader.walk_scope(vars(imported), code.co_names)
        reader.walk_held(_held_by(function))
        same = [leaf for leaf in flatten(arguments)[0] if isinstance(leaf, FunctionType | type | enum.Enum)]
        reader.walk_held({f"argument{number}": leaf for number, leaf in enumerate(same)})
        for function in self._functions.found():
            reader.walk_closure(function)
            reader.walk_defaults(function)
        self.leaves_out = reader.is_full
        return OuterNames(reader.tensors, reader.constants, reader.scopes)


class _Functions:
    """The functions whose code runs, for what they have with them: a frame does not say whose it is.

    But a frame that has ended owns its function, and a collector is told. What was made by the call itself is gone
    after it, and need not be looked at.
    """

    def __init__(self) -> None:
        self._wanted: set[CodeType] = set()
        self._missing: set[CodeType] = set()
        """Code of which no function was seen: a generator may still wait."""
        self._found: weakref.WeakKeyDictionary[FunctionType, None] = weakref.WeakKeyDictionary()
        self._ending: FrameType | None = None

    def look_for(self, code: CodeType) -> None:
        is_function = code.co_flags & inspect.CO_OPTIMIZED
        if is_function and (code.co_freevars or code.co_argcount or code.co_kwonlyargcount):
            self._wanted.add(code)
            self._missing.add(code)

    def note_ending(self, frame: FrameType) -> None:
        """It still runs when a profiler hears of it."""
        if frame.f_code in self._wanted:
            self._ending = frame

    def note_ended(self) -> None:
        """Look at the frame that was ending when something was last heard."""
        if self._ending is None:
            return
        frame, self._ending = self._ending, None
        for each in gc.get_referents(frame):
            if type(each) is FunctionType and each.__code__ is frame.f_code:
                self._found[each] = None
                self._missing.discard(frame.f_code)

    def found(self) -> list[FunctionType]:
        """Those that still live."""
        if self._missing:
            for each in _functions_of(self._missing):
                self._found[each] = None
        return list(self._found)


def _functions_of(codes: Iterable[CodeType]) -> list[FunctionType]:
    """The functions with these codes.

    ``isinstance`` would ask each object that lives, and a proxy of something that is gone raises.
    """
    wanted = {id(code) for code in codes}
    return [each for each in gc.get_objects() if type(each) is FunctionType and id(each.__code__) in wanted]


def _is_in_compiler(frame: FrameType | None) -> bool:
    """Whether torch's compilers are at work: they put back what they change."""
    while frame is not None and package_of(frame.f_globals) in FIXED:
        if torch_compat.is_compiler(str(frame.f_globals.get("__name__"))):
            return True
        frame = frame.f_back
    return False


class _Reader:
    """Finds expressions for the values that code may read.

    Args:
        names: the attributes that it may read.
        is_any: whether it may read any other, of objects.
    """

    def __init__(self, names: set[str], *, is_any: bool) -> None:
        self._names = names
        self._is_any = is_any
        self.tensors: list[str] = []
        self.constants: list[str] = []
        self.scopes: dict[str, Any] = {}
        """What the expressions begin with."""
        self.is_full = False
        """Whether there are more than are written down."""
        self._cached: set[Any] = set()
        """Functions with a cache that were walked through."""
        self._walked: dict[int, tuple[str, int, Any]] = {}
        """The way to each object that was walked through, how deep in others it was, and itself."""

    def walk_modules(self, module: torch.nn.Module | None, others: Iterable[torch.nn.Module]) -> None:
        """Write down attributes; parameters, buffers and submodules are looked at elsewhere."""
        own = {each: path for path, each in module.named_modules()} if module is not None else {}
        self.scopes["L"] = {"self": module}
        for each, path in own.items():
            steps = "".join(f"._modules[{step!r}]" for step in path.split(".")) if path else ""
            self._walk_attributes(f"L['self']{steps}", each)
        for number, each in enumerate(each for each in others if each not in own):
            self.scopes[name := f"{type(each).__name__}_{number}"] = each
            self._walk_attributes(name, each)

    def walk_scope(self, scope: dict[str, Any], names: Iterable[str]) -> None:
        """Write down globals."""
        self.scopes[root := f"G{len(self.scopes)}"] = scope
        for name in dict.fromkeys(names):
            if name in scope:
                self._walk(f"{root}[{name!r}]", scope[name])

    def walk_closure(self, function: FunctionType) -> None:
        """Write down outer variables."""
        if not function.__closure__:
            return
        cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
        self.scopes[root := f"C{len(self.scopes)}"] = cells
        for name, cell in cells.items():
            with contextlib.suppress(ValueError):  # it is empty
                self._walk(f"{root}[{name!r}].cell_contents", cell.cell_contents)

    def walk_defaults(self, function: FunctionType) -> None:
        """Write down defaults, and what they hold."""
        for name in ("__defaults__", "__kwdefaults__"):
            if defaults := getattr(function, name):
                self.scopes[root := f"D{len(self.scopes)}"] = function
                self._walk(f"{root}.{name}", defaults)

    def walk_held(self, held: dict[str, Any]) -> None:
        """Write down what is in objects that stay the same, by their names."""
        self.scopes |= held
        for name, value in held.items():
            self._walk(name, value)

    def _walk(self, path: str, value: Any, above: tuple[int, ...] = (), depth: int = 0) -> None:
        """Write down a value, or what it holds."""
        if depth > _MAX_DEPTH or id(value) in above:
            return
        if len(self.constants) + len(self.tensors) >= MAX_VALUES:
            self.is_full = True
            return
        if isinstance(value, torch.Tensor):
            self.tensors.append(path)
            for name in vars(value):
                if self._is_any or name in self._names:
                    self._walk(f"{path}.{name}", vars(value)[name], (*above, id(value)), depth + 2)
        elif is_constant(value):
            self.constants.append(path)
            if isinstance(value, FunctionType):
                self.constants.append(f"{path}.__code__")
                if isinstance(getattr(value, "registry", None), MappingProxyType):  # of functools.singledispatch
                    self.constants += [f"tuple({path}.registry)", f"tuple({path}.registry.values())"]
            for name in self._names_in(path, value):
                self._walk(f"{path}.{name}", getattr(value, name), (*above, id(value)), depth + 2)
        else:
            first, first_depth, _ = self._walked.get(id(value), ("", _MAX_DEPTH, None))
            if first and first_depth <= depth:  # all layers of a model have one configuration
                self.constants.append(f"({path}) is ({first})")
                return
            self._walked[id(value)] = path, depth, value
            self.constants += [f"type({path})"] if not isinstance(value, ModuleType) else []
            below = depth + (1 if isinstance(value, _CONTAINERS) else 2)
            for part in self._parts(path, value):
                self._walk(part.path, part.value, (*above, id(value)), below)

    def _names_in(self, path: str, value: Any) -> list[str]:
        """The attributes of a constant that the code may read: a function of the user's, a class, a member of an
        enumeration, or a number or text of such a class.
        """
        is_one = isinstance(value, FunctionType | type | enum.Enum) or has_attributes(value)
        if not is_one or str(value.__module__).split(".")[0] in FIXED:
            return []
        if isinstance(value, type):
            found = (*_data_of(value), *_data_of(type(value)))
            return [name for name in found if self._is_any or name in self._names]
        if self._is_any:
            self.constants.append(f"tuple({path}.__dict__)")
        return [name for name in vars(value) if (self._is_any or name in self._names) and not name.startswith("_")]

    def _walk_attributes(self, path: str, module: torch.nn.Module) -> None:
        for part in self._attributes(path, module):
            self._walk(part.path, part.value, (id(module),), 2)

    def _parts(self, path: str, value: Any) -> Iterator[_Part]:
        if isinstance(value, _CONTAINERS):
            self.constants.append(f"{'tuple' if isinstance(value, dict) else 'len'}({path})")
            items = dict.items(value) if isinstance(value, dict) else enumerate(value)
            for key, part in list(items):
                if isinstance(key, str | int):
                    yield _Part(f"{path}[{key!r}]", part)
        elif isinstance(value, set):
            self.constants.append(f"frozenset({path})")
        elif isinstance(value, MethodType):
            yield _Part(f"{path}.__self__", value.__self__)
        elif isinstance(value, _CACHED) and isinstance(value.__wrapped__, FunctionType):
            self._walk_cached(path, value)
        elif isinstance(value, logging.Logger):  # it leads to all others, which tell a model nothing
            yield _Part(f"{path}.level", value.level)
        elif isinstance(value, weakref.ref):
            if (target := value()) is not None:
                yield _Part(f"{path}()", target)
        elif isinstance(value, functools.partial | functools.partialmethod):
            yield from (_Part(f"{path}.{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
        elif isinstance(value, functools.singledispatchmethod):
            yield _Part(f"{path}.dispatcher", value.dispatcher)
        elif _is_known_by_itself(value):
            self.scopes[held := f"H{len(self.scopes)}"] = value
            self.constants.append(f"({path}) is ({held})")
        elif not isinstance(value, ModuleType) or value.__name__.split(".")[0] not in FIXED:
            yield from self._attributes(path, value)

    def _walk_cached(self, path: str, value: Any) -> None:
        """Write down what a function with a cache would read, which it does when the cache is cleared."""
        function = value.__wrapped__
        self.constants.append(f"{path}.__wrapped__.__code__")
        if value not in self._cached:
            self._cached.add(value)
            self._names.update(function.__code__.co_names)
            self.walk_scope(function.__globals__, _globals_of(function.__code__))
            self.walk_closure(function)

    def _attributes(self, path: str, value: Any) -> Iterator[_Part]:
        own = getattr(value, "__dict__", {})
        if self._is_any and type(own) is dict and not isinstance(value, ModuleType):  # it may ask which there are
            self.constants.append(f"tuple({path}.__dict__)")
        skipped = _EVERY_MODULE - {"training"} if isinstance(value, torch.nn.Module) else frozenset()
        names = dict.fromkeys(name for name in own if isinstance(name, str) and name not in skipped)
        names |= dict.fromkeys(() if isinstance(value, ModuleType) else _data_of(type(value)))
        is_any = (self._is_any and not isinstance(value, ModuleType)) or _is_read_by_methods(value)
        if isinstance(value, ModuleType) and self._is_any and not is_installed(own):
            for name in _plain_values(own):
                yield _Part(f"{path}.{name}", own[name])
        if type(own) is dict and not isinstance(value, ModuleType | torch.nn.Module):  # a method may come to be its own
            methods = self._names.intersection(dir(type(value))) - names.keys()
            self.constants += [f"{name!r} in {path}.__dict__" for name in sorted(methods)]
        for name in names:
            if name.isidentifier() and (is_any or name in self._names):
                with contextlib.suppress(Exception):  # a slot that is empty
                    yield _Part(f"{path}.{name}", getattr(value, name))
        if not isinstance(value, ModuleType):
            yield from self._givers(path, type(value))

    def _givers(self, path: str, cls: type) -> Iterator[_Part]:
        """What gives the attributes of a class's objects, and may hold something itself."""
        for number, each in enumerate(cls.__mro__):
            for name, held in vars(each).items() if each.__module__.split(".")[0] not in FIXED else ():
                is_one = hasattr(held, "__get__") and type(held).__module__.split(".")[0] not in ("builtins", *FIXED)
                if (is_one or isinstance(held, _BY_OTHERS)) and name in self._names:
                    yield _Part(f"{path}.__class__.__mro__[{number}].__dict__[{name!r}]", held)


class _Part(NamedTuple):
    path: str
    value: Any


def _is_known_by_itself(value: Any) -> bool:
    """A date or a fraction; or what runs a plan of its own, which looks after what its code reads."""
    home = type(value).__module__.partition(".")[0]
    is_plan = home == __name__.partition(".")[0] and callable(value) and not isinstance(value, torch.nn.Module)
    return is_plan or (not hasattr(value, "__dict__") and home in sys.stdlib_module_names)


def _is_read_by_methods(value: Any) -> bool:
    """Whether a class of the standard library reads its objects, whose code is not seen to run: a ``UserDict``, an
    ``Event``. What is in others (a logger, an executor) changes all the time and tells a model nothing.
    """
    module = type(value).__module__
    is_theirs = module.partition(".")[0] in sys.stdlib_module_names and not isinstance(value, threading.Thread)
    return is_theirs and (isinstance(value, Collection) or module == "threading")


def _data_of(cls: type) -> list[str]:
    """The names of values that a class has for all its objects, and of their slots."""
    own = [each for each in cls.__mro__ if each.__module__.split(".")[0] not in ("builtins", "torch")]
    return [name for each in own for name, held in vars(each).items() if _is_data(name, held)]


def _is_data(name: str, held: Any) -> bool:
    """Whether a class holds a value by this name, or the slot for one."""
    return not name.startswith("__") and (
        type(held).__name__ == "member_descriptor" or not (callable(held) or hasattr(held, "__get__"))
    )


@functools.lru_cache(maxsize=4096)
def _globals_of(code: CodeType) -> tuple[str, ...]:
    """The globals that code names; attributes may have the names of others."""
    if not _BY_TEXT.isdisjoint(code.co_names):
        texts = [text for text in code.co_consts if isinstance(text, str)]
        return (*code.co_names, *(name for text in texts for name in _NAME.findall(text)))
    return tuple(each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))


def _plain_values(scope: dict[str, Any]) -> list[str]:
    """The globals that are numbers, texts or tensors."""
    code = (FunctionType, BuiltinFunctionType, type, ModuleType)
    return [
        name
        for name, value in scope.items()
        if isinstance(value, torch.Tensor) or (is_constant(value) and not isinstance(value, code))
    ]


def _imported_by(code: CodeType) -> list[ModuleType]:
    """The user's own modules that code imports where it stands."""
    names = [each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME"]
    found = [sys.modules[name] for name in names if name in sys.modules]
    return [each for each in found if package_of(vars(each)) not in FIXED and not is_installed(vars(each))]


def _is_imported(frame: FrameType) -> bool:
    """Whether it is a module that runs for the first time."""
    caller = frame.f_back if frame.f_code.co_name == "<module>" else None
    return caller is not None and caller.f_code.co_filename.startswith("<frozen importlib")


def _held_by(function: Any) -> dict[str, Any]:
    """What comes with a function and not with its calls: the owner of a method, an object that is called itself, what
    a partial hands on. Modules are looked at elsewhere.
    """
    held: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        held |= {f"A{len(held)}": function.args, f"K{len(held)}": function.keywords}
        function = function.func
    owner = function.__self__ if isinstance(function, MethodType) else function
    is_code = isinstance(owner, (FunctionType, BuiltinFunctionType, torch.nn.Module))
    return held if is_code else {**held, "self": owner}
