"""What Dynamo would guard of the values outside a call, as expressions that can be evaluated again."""

from __future__ import annotations

import contextlib
import enum
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch


def outside_scopes(
    function: Callable[..., Any], imports: Mapping[str, str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """What expressions for values outside a call are evaluated in; see :attr:`DynamoCapture.constants`."""
    plain = getattr(function, "__func__", function)
    receiver = (function.__self__,) if hasattr(function, "__self__") else ()
    code = plain.__code__
    state = _with_state(bound_arguments(function, args, kwargs))
    held = {**state, **dict(zip(code.co_varnames, receiver, strict=False))}
    cells = dict(zip(code.co_freevars, plain.__closure__ or (), strict=True))
    local = _Scope(held, lambda name: cells[name].cell_contents)
    modules = {name: sys.modules[module] for name, module in imports.items() if module in sys.modules}
    return {"L": local, "G": plain.__globals__, **modules}


class _Scope(dict[str, Any]):
    """Names that are looked up anew whenever they are read."""

    def __init__(self, fixed: Mapping[str, Any], look_up: Callable[[str], Any]) -> None:
        super().__init__(fixed)
        self._look_up = look_up

    def __missing__(self, name: str) -> Any:
        return self._look_up(name)


def bound_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names, with the receiver and defaults."""
    receiver = (function.__self__,) if hasattr(function, "__self__") else ()
    plain = getattr(function, "__func__", function)
    bound = inspect.signature(plain, follow_wrapped=False).bind(*receiver, *args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _with_state(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are modules, functions, classes or members of an enumeration, or hold some.

    Of a later call they are the same objects, and what these have is outside of the call.
    """
    leaves = {name: torch.utils._pytree.tree_leaves(value) for name, value in arguments.items()}
    return {name: arguments[name] for name in leaves if any(isinstance(leaf, _HAVE_STATE) for leaf in leaves[name])}


_HAVE_STATE = (torch.nn.Module, FunctionType, type, enum.Enum)


def outside_names(
    output: Any,
    function: Callable[..., Any],
    receiver: tuple[Any, ...],
    arguments: Mapping[str, Any],
    dicts: Iterable[str],
    imports: Mapping[str, str],
    scopes: Mapping[str, Any],
) -> tuple[str, ...]:
    """Expressions for what a trace has read outside the call.

    Hooks are left out, which would be looked up by the hundred at every call, and torch's own state.

    Args:
        output: what Dynamo made.
        function: what was traced.
        receiver: what it is bound to, if it is.
        arguments: of the call, by name.
        dicts: objects of whose ``__dict__`` any key may have been asked for, which Dynamo does not guard.
        imports: the modules that expressions name.
        scopes: what the expressions are evaluated in.
    """
    code = function.__code__
    held = dict(zip(code.co_varnames, receiver, strict=False))
    own = [f"L[{name!r}]" for name in held]  # what is called
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    roots = [f"L[{name!r}]" for name in (*held, *_with_state(arguments), *cells)]
    torchs = ("__builtins", *(output.import_sources.keys() - imports.keys()))
    roots += [f"G[{name!r}]" for name in (*function.__globals__, *imports) if not name.startswith(torchs)]
    found = {f"tuple({name}.__dict__)": None for name in dicts if _root(name) in roots}
    for guard in output.output_graph.guards:
        # Those who trace look at what is called, and at the classes of objects, themselves; not at what classes hold.
        kind = guard.create_fn_name()
        if kind == "DUPLICATE_INPUT":
            pair = (guard.name, source_name(guard.create_fn.keywords["source_b"]))
            found |= _merged([_from_instance(_as_path(each), scopes) for each in pair], roots)
            continue
        is_own = guard.name in (*own, *(f"{name}.__func__" for name in own)) and kind != "HASATTR"
        if is_own or guard.name.endswith(".__class__"):
            continue
        name = _from_instance(_as_path(guard.name), scopes)
        root = _root(name)
        is_watched = name.endswith(_WATCHED_ANYWAY) or (kind == "NOT_PRESENT_IN_GENERIC_DICT" and "_modules[" in name)
        if kind in _LOOKS and root in roots and not is_watched:
            asked, attribute = name, getattr(guard.create_fn, "keywords", {}).get("attr", "")
            if kind == "HASATTR" and not attribute:  # torch 2.11 names the attribute itself
                asked, _, attribute = name.rpartition(".")
            found[_LOOKS[kind].format(asked, attribute)] = None
            if kind == "CLOSURE_MATCH":
                found |= _parts_of_function(name, evaluate(_IMPORTED.sub(r"\1", name), scopes))
    names = [_IMPORTED.sub(r"\1", name) for name in sorted(found)]
    return _with_class_values(_check_merged(names, scopes), scopes, output.traced_code)


def _parts_of_function(name: str, function: Any) -> dict[str, None]:
    """What may be another of the same function: its code, as functions are reloaded, its defaults, and of outer
    variables the classes. For the latter two, Dynamo of torch 2.11 has no guards.
    """
    parts = [f"{name}.__code__"]
    if isinstance(function, FunctionType):
        parts += [f"{name}.{each}" for each in ("__defaults__", "__kwdefaults__") if getattr(function, each)]
        cells = [f"{name}.__closure__[{number}].cell_contents" for number in range(len(function.__closure__ or ()))]
        parts += [
            each
            for each, cell in zip(cells, function.__closure__ or (), strict=True)
            if isinstance(evaluate("cell.cell_contents", {"cell": cell}), type)
        ]
    return dict.fromkeys(parts)


def _root(name: str) -> str:
    """What an expression begins with, be it in a call.

    >>> _root("dict.__getitem__(L['d'], 'key')"), _root("G['a'].b['c']"), _root("torch")
    ("L['d']", "G['a']", '')
    """
    found = _ROOT.search(name)
    return found[0] if found else ""


_ROOT = re.compile(r"\b[LG]\[[^\]]*\]")


def _merged(names: Sequence[str], roots: Sequence[str]) -> dict[str, None]:
    """What tells that a name still leads to the object that Dynamo found by another name before, and has traced by that
    one alone. Where one is an argument, which is looked at elsewhere, only the other is left.
    """
    outside = [each for each in names if _root(each) in roots]
    return dict.fromkeys(["({}) is ({})".format(*outside)] if len(outside) == 2 else outside)


def _as_path(name: str) -> str:
    """A name of Dynamo's as attributes and elements of what it begins with.

    >>> _as_path("dict(type(G['c']).__dict__)['p'].fget"), _as_path("object.__getattribute__(L['c'], 'd')[0]")
    ("G['c'].__class__.__dict__['p'].fget", "L['c'].d[0]")
    """
    path = _CALLED.sub(lambda call: call[2] + (".__class__" if call[1] == "type" else ""), name)
    path = _GIVEN.sub(r"\1.\2", path)
    return _as_path(path) if path != name else name


def _from_instance(name: str, scopes: Mapping[str, Any]) -> str:
    """What is found on the class may come to be on the instance. But for what is not given as it is: a property, a
    static method.
    """
    begin = 0
    while step := _CLASS_ATTRIBUTE.search(name, begin):
        held = evaluate(_IMPORTED.sub(r"\1", name[: step.end()]), scopes)
        begin = step.end()
        if isinstance(held, FunctionType) or not hasattr(held, "__get__"):
            name = f"{name[: step.start()]}.{step[1]}{name[step.end() :]}"
            begin = step.start() + len(step[1]) + 1
    return name


def _check_merged(names: Iterable[str], scopes: Mapping[str, Any]) -> tuple[str, ...]:
    """Nothing but this expression tells that two names have become one: without it, neither may be taken for both.

    Code has many names, some of which Dynamo made up, and is looked at by each of them: no two need be the same.
    """
    found = []
    for name in names:
        parts = name[1:-1].split(") is (") if name.startswith("(") else []
        if any(isinstance(evaluate(part, scopes), _CODE) for part in parts):
            continue
        if parts and evaluate(name, scopes) is not True:
            raise RuntimeError(f"whether {name} cannot be watched")
        found.append(name)
    return tuple(found)


def _with_class_values(names: Sequence[str], scopes: Mapping[str, Any], code: Iterable[CodeType]) -> tuple[str, ...]:
    """These and the values of classes among them, as far as code names them: torch 2.11 guards the class alone."""
    code = tuple(code)
    read = {name for each in code for name in each.co_names}
    # By a name that is computed; packages mean what they say.
    is_any = any("getattr" in each.co_names and "site-packages" not in each.co_filename for each in code)
    found = dict.fromkeys(names)
    for name in names:
        value = evaluate(name, scopes) if name.startswith(("L[", "G[", "__import_")) else None
        if isinstance(value, type) and value.__module__.partition(".")[0] not in _OTHERS:
            asked = {each for each in dir(value) if not each.startswith("__")} if is_any else read
            found |= {f"{name}.{each}": None for each in sorted(asked) if _is_value_of(value, each)}
    return tuple(found)


def _is_value_of(cls: type, name: str) -> bool:
    """Whether a class holds something by a name that is no code."""
    held = inspect.getattr_static(cls, name, len)  # a function, if there is none
    return name != "_abc_impl" and not callable(held) and not hasattr(held, "__get__")


_OTHERS = frozenset({"torch", "piecegraph", "numpy", *sys.stdlib_module_names})

_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType)


_LOOKS = {
    **dict.fromkeys(("CONSTANT_MATCH", "EQUALS_MATCH", "CONSTANT_SUBCLASS_MATCH", "NONE_MATCH", "BOOL_MATCH"), "{0}"),
    **dict.fromkeys(("CLOSURE_MATCH", "BUILTIN_MATCH", "FUNCTION_MATCH", "CLASS_MATCH"), "{0}"),
    **dict.fromkeys(("ID_MATCH", "NN_MODULE", "MODULE_MATCH"), "{0}"),
    **dict.fromkeys(("TYPE_MATCH", "NOT_NONE_MATCH"), "type({0})"),
    **dict.fromkeys(("DICT_CONTAINS", "DICT_NOT_CONTAINS", "DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK"), "tuple({0})"),
    **dict.fromkeys(("SET_CONTAINS", "SET_NOT_CONTAINS"), "frozenset({0})"),
    "SEQUENCE_LENGTH": "len({0})",
    "HASATTR": "hasattr({0}, '{1}')",
    "NOT_PRESENT_IN_GENERIC_DICT": "'{1}' in {0}.__dict__",
}
"""What is to be the same for a guard to hold, by its kind: of a name, and an attribute of it."""
_WATCHED_ANYWAY = (".__dict__", *(f".{name}" for name in vars(torch.nn.Module()) if name != "training"))
"""In modules: their parts, hooks and code."""

UNNAMED_SCOPE = "___unnamed_scope"
"""What Dynamo calls the globals of code whose module has no name, with a number of this process."""
_IMPORTED = re.compile(r"G\['(__import_\w+)'\]")

_CALLED = re.compile(r"\b(type|dict)\(([^()]*)\)")
_GIVEN = re.compile(r"\bobject\.__getattribute__\(([^()]*), '(\w+)'\)")

_CLASS_ATTRIBUTE = re.compile(r"\.__class__(?:\.__mro__\[\d+\])?\.__dict__\['(\w+)'\]")


def source_name(source: Any) -> str:
    """The name that Dynamo has for where a value comes from."""
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)  # a method up to torch 2.11


def array_behind(source: str) -> str:
    """The expression for a NumPy array or number, of the one that Dynamo has for the tensor it makes of that.

    >>> array_behind("___from_numpy(G['table'])"), array_behind("G['table']")
    ("G['table']", "G['table']")
    """
    found = _FROM_ARRAY.fullmatch(source)
    return found[1] if found else source


_FROM_ARRAY = re.compile(r"___from_numpy\((.*)\)")


def evaluate(name: str, scopes: Mapping[str, Any]) -> Any:
    """What one of Dynamo's names of a source stands for; None if it is no path from the arguments or globals."""
    with contextlib.suppress(Exception):  # a property may raise anything
        return eval(name, dict(scopes))
    return None
