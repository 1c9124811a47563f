"""Dynamo: a function becomes one graph, and what it would have guarded."""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import enum
import functools
import inspect
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.fx


@dataclass(frozen=True)
class DynamoCapture:
    """What Dynamo knows after tracing one function once."""

    graph_module: torch.fx.GraphModule | None
    """None when the function does no tensor work at all."""
    example_inputs: tuple[Any, ...]
    """The real object behind each placeholder, in order; symbolic sizes are SymInts."""
    fake_mode: Any
    external_objects: Mapping[int, Any]
    """Streams and events that the graph refers to by index; held here, because Dynamo's own table is weak."""
    run_bytecode: Callable[[Callable[..., Any]], Callable[..., Any]]
    """Given a function for the graph, the function with the user's signature that Dynamo generated around it."""
    touched: Mapping[str, Any]
    """Python objects outside the function that it changes, by name. Running the generated code changes them."""
    sources: tuple[str, ...]
    """The expression that leads to each placeholder's object."""
    constants: tuple[str, ...]
    """Expressions for the numbers and strings that were read from globals, closures and the module."""
    scopes: dict[str, Any]
    """What the expressions are evaluated in."""
    left_out: tuple[str, ...]
    """What the function does that is in no graph and changes no tensor, with the lines."""
    code: tuple[CodeType, ...]
    """All Python that was read for the trace."""
    imports: Mapping[str, str]
    """The modules that expressions name, by the names they have there."""
    sizes: tuple[tuple[torch.Tensor, int, Any], ...] = ()
    """Every symbolic size of an argument, with the tensor and the dimension: also of one that is no input of the graph,
    because nothing but its size is read.
    """


def dynamo_capture(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    traced_as: Callable[..., Any] | None = None,
) -> DynamoCapture:
    """Trace a function or bound method into one graph, without installing anything on its code object.

    ``torch.compile`` would keep guards and a cache entry on the code object that all instances of a class share.

    ``traced_as`` is traced instead, if it is given: the same code with another model. What the graph reads is looked up
    in ``function`` all the same.
    """
    from torch._dynamo import config, convert_frame, graph_bytecode_inputs
    from torch._dynamo.utils import dynamo_timed, get_metrics_context

    settings = config.patch(
        capture_scalar_outputs=True,
        capture_dynamic_output_shape_ops=True,
        automatic_dynamic_shapes=False,
        side_effect_replay_policy="warn",
        allow_rnn=True,
        ignore_logging_functions={_cudnn_flags, warnings.warn, print},
    )
    with (
        torch.no_grad(),
        settings,
        _going_on() as gone_on,
        get_metrics_context(),
        dynamo_timed("piecegraph.trace"),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        captured = convert_frame.fullgraph_capture(traced_as or function, args, kwargs)
    objects = {i: ref() for i, ref in graph_bytecode_inputs.index_to_external_object_weakref.items()}
    backend_input = captured.backend_input
    plain_function = getattr(function, "__func__", function)
    receiver = (function.__self__,) if hasattr(function, "__self__") else ()
    arguments = _bound(function, args, kwargs)
    outer = inspect.getclosurevars(plain_function).nonlocals
    call_scopes = {"L": {**outer, **arguments}, "G": plain_function.__globals__}
    touched = _touched_objects(told, call_scopes)

    run_bytecode = functools.partial(_around_graph, captured, plain_function, receiver, gone_on.copies)
    output = captured.graph_capture_output
    imports = {name: module for name, module in output.import_sources.items() if not module.startswith("torch")}
    scopes = outside_scopes(function, imports, args, kwargs)
    names = _outside_values(output, plain_function, receiver, arguments, gone_on.dicts, imports, scopes)
    code, left_out = tuple(output.traced_code), tuple(gone_on.left_out)
    names = _with_class_values(_check_merged(names, scopes), scopes, code)
    if backend_input is None:
        return DynamoCapture(None, (), None, objects, run_bytecode, touched, (), names, scopes, left_out, code, imports)
    graph_module, inputs, fake_mode = (
        backend_input.graph_module,
        tuple(backend_input.example_inputs),
        backend_input.fake_mode,
    )
    sizes = _symbolic_sizes(fake_mode, call_scopes)
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    sources = tuple(_source_name(getattr(node, "_dynamo_source", None)) for node in placeholders)
    return DynamoCapture(
        graph_module,
        inputs,
        fake_mode,
        objects,
        run_bytecode,
        touched,
        sources,
        names,
        scopes,
        left_out,
        code,
        imports,
        sizes,
    )


def _around_graph(
    captured: Any,
    plain_function: Callable[..., Any],
    receiver: tuple[Any, ...],
    copies: Sequence[Any],
    graph_function: Callable[..., Any],
) -> Callable[..., Any]:
    """The code that Dynamo generated around a graph, with a function in the graph's place."""
    environment = captured.graph_capture_output.get_runtime_env()
    backend_id = "no_graph" if captured.backend_input is None else captured.backend_input.backend_id
    names = {**vars(builtins), **plain_function.__globals__}  # torch 2.11 does not look for builtins itself
    generated = environment.forward_callable(backend_id, graph_function, extra_globals=names)

    def run(*args: Any, **kwargs: Any) -> Any:
        before = [dict(vars(value)) for value in copies]
        try:
            return generated(*receiver, *args, **kwargs)
        finally:  # a copy of the trace's is changed by every run, and every run is to find it as it was
            for value, state in zip(copies, before, strict=True):
                vars(value).clear()
                vars(value).update(state)

    return run


def _symbolic_sizes(fake_mode: Any, scopes: Mapping[str, Any]) -> tuple[tuple[torch.Tensor, int, Any], ...]:
    """torch 2.11 to 2.13: where each symbol comes from is known to the shape environment alone."""
    from torch._dynamo.source import TensorProperty, TensorPropertySource

    sizes: list[tuple[torch.Tensor, int, Any]] = []
    for symbol, sources in fake_mode.shape_env.var_to_sources.items():
        for source in sources:
            if isinstance(source, TensorPropertySource) and source.prop is TensorProperty.SIZE:
                owner = _evaluate(_source_name(source.base), scopes)
                if isinstance(owner, torch.Tensor) and source.idx is not None:
                    sizes.append((owner, source.idx, fake_mode.shape_env.create_symintnode(symbol, hint=None)))
    return tuple(sizes)


def _source_name(source: Any) -> str:
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


def _bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
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


def _outside_values(
    output: Any,
    function: Callable[..., Any],
    receiver: tuple[Any, ...],
    arguments: Mapping[str, Any],
    dicts: Iterable[str],
    imports: Mapping[str, str],
    scopes: Mapping[str, Any],
) -> tuple[str, ...]:
    """What Dynamo would guard of the values outside the call, as expressions.

    Hooks are left out, which would be looked up by the hundred at every call, and torch's own state. ``dicts`` are
    objects of whose ``__dict__`` any key may have been asked for, which Dynamo does not guard.
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
            pair = (guard.name, _source_name(guard.create_fn.keywords["source_b"]))
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
                found |= _parts_of_function(name, _evaluate(_IMPORTED.sub(r"\1", name), scopes))
    return tuple(_IMPORTED.sub(r"\1", name) for name in sorted(found))


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
            if isinstance(_evaluate("cell.cell_contents", {"cell": cell}), type)
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
        held = _evaluate(_IMPORTED.sub(r"\1", name[: step.end()]), scopes)
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
        if any(isinstance(_evaluate(part, scopes), _CODE) for part in parts):
            continue
        if parts and _evaluate(name, scopes) is not True:
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
        value = _evaluate(name, scopes) if name.startswith(("L[", "G[", "__import_")) else None
        if isinstance(value, type) and value.__module__.partition(".")[0] not in _OTHERS:
            asked = {each for each in dir(value) if not each.startswith("__")} if is_any else read
            found |= {f"{name}.{each}": None for each in sorted(asked) if _is_value_of(value, each)}
    return tuple(found)


def _is_value_of(cls: type, name: str) -> bool:
    """Whether a class holds something by a name that is no code."""
    held = inspect.getattr_static(cls, name, len)  # a function, if there is none
    return not callable(held) and not hasattr(held, "__get__")


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

_IMPORTED = re.compile(r"G\['(__import_\w+)'\]")

_CALLED = re.compile(r"\b(type|dict)\(([^()]*)\)")
_GIVEN = re.compile(r"\bobject\.__getattribute__\(([^()]*), '(\w+)'\)")

_CLASS_ATTRIBUTE = re.compile(r"\.__class__(?:\.__mro__\[\d+\])?\.__dict__\['(\w+)'\]")


class _Scope(dict[str, Any]):
    """Names that are looked up anew whenever they are read."""

    def __init__(self, fixed: Mapping[str, Any], look_up: Callable[[str], Any]) -> None:
        super().__init__(fixed)
        self._look_up = look_up

    def __missing__(self, name: str) -> Any:
        return self._look_up(name)


_patching_dynamo = threading.RLock()
"""Held while Dynamo's classes are patched, so that two threads do not undo each other's patch."""

_LOGGING = ("debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log")


@contextlib.contextmanager
def _going_on() -> Iterator[_Tolerance]:
    """Dynamo goes on, inside, where it would give up at something that changes no tensor."""
    from torch._dynamo import trace_rules

    trace_rules.get_torch_obj_rule_map()  # made once, and not of what is in its place below
    with _patching_dynamo, contextlib.ExitStack() as undo:
        tolerance = _Tolerance()  # finds what Dynamo has, and not another thread's patches
        for owner, name, patch in tolerance.patches():
            if hasattr(owner, name):
                undo.callback(setattr, owner, name, getattr(owner, name))
            else:
                undo.callback(delattr, owner, name)
            setattr(owner, name, patch)
        yield tolerance


class _Tolerance:
    """What Dynamo does in the place of giving up.

    Loggers, warnings, ``print`` and ``torch.backends.cudnn.flags`` are left out; ``requires_grad_()`` on what was
    computed without gradients, too; ``new_full`` with a tensor, which would be read on the host, fills with it instead.
    ``copy.deepcopy``, which torch 2.13 traces by itself, copies Python objects once, while tracing. A number on the CPU
    is data as any other: Dynamo would take it for the one of the trace, with a guard. Names that are taken for one
    another have a guard, whatever names they are, and reads of ``__dict__`` are noted.
    """

    def __init__(self) -> None:
        from torch._dynamo import guards
        from torch._dynamo.variables import builder, builtin, functions, misc, tensor, user_defined
        from torch._subclasses.fake_tensor import FakeTensorConverter

        self._builder, self._builtin, self._misc, self._tensor = builder, builtin, misc, tensor
        self._function = functions.UserFunctionVariable
        self._with_dict = (
            (user_defined.UserDefinedObjectVariable, "var_getattr"),
            (user_defined.MutableMappingVariable, "var_getattr"),
            (user_defined.UserDefinedClassVariable, "var_getattr"),
            (misc.PythonModuleVariable, "var_getattr"),
            (functions.UserFunctionVariable, "var_getattr"),
            (functions.UserFunctionVariable, "call_obj_hasattr"),
        )
        self._make_dupe_guard = guards.make_dupe_guard
        self._logger_call = misc.LoggingLoggerVariable.call_method
        self._ignored_call = misc.IgnoredFunctionVariable.call_function
        self._requires_grad = tensor.TensorVariable.method_requires_grad_
        self._copied = builtin.BuiltinVariable.call_deepcopy
        self._converter, self._converted = FakeTensorConverter, FakeTensorConverter.from_real_tensor
        self.left_out: dict[str, None] = {}
        """The calls that are in no graph, with their lines."""
        self.copies: list[Any] = []
        """Objects that were copied while tracing."""
        self.dicts: dict[str, None] = {}
        """Objects whose ``__dict__`` was read."""

    def patches(self) -> list[tuple[Any, str, Any]]:
        """(owner, name, what takes its place)."""
        from torch._dynamo import symbolic_convert, utils

        # Dynamo finds the name of every line's function by reading whole files, for a log that few ask for.
        is_logged = torch._logging._internal.log_state.is_artifact_enabled("trace_call")
        unlogged = [] if is_logged else [(symbolic_convert, "get_funcname", lambda file, line: None)]
        return [
            *unlogged,
            (self._misc.LoggingLoggerVariable, "call_method", _as_method(self._call_logger)),
            (self._misc.IgnoredFunctionVariable, "call_function", _as_method(self._call_ignored)),
            (self._tensor.TensorVariable, "method_requires_grad_", _as_method(self._require_grad)),
            (self._tensor.TensorVariable, "method_new_full", _as_method(self._new_full)),
            (self._builtin.BuiltinVariable, "call_deepcopy", _as_method(self._deepcopy)),
            (self._converter, "from_real_tensor", _as_method(self._convert)),
            (self._builder, "make_dupe_guard", self._guard_merged),
            *((owner, method, self._noting_dicts(getattr(owner, method))) for owner, method in self._with_dict),
            (torch.backends.cudnn, "flags", _without_cudnn_flags),
            (utils, "_get_dynamo_config_for_logging", lambda: None),  # cannot write functions (torch 2.11)
        ]

    def _leave_out(self, what: str, tx: Any) -> None:
        frame = tx.frame_summary() if tx.f_code.co_filename != __file__ else tx.parent.frame_summary()
        self.left_out[f"{what} at {frame.filename.rpartition('/')[2]}:{frame.lineno}"] = None

    def _call_logger(self, variable: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.variables.constant import ConstantVariable

        if name not in _LOGGING and not name.endswith(("_once", "_advice")):
            return self._logger_call(variable, tx, name, *args, **kwargs)
        self._leave_out(f"logger.{name}", tx)
        return ConstantVariable.create(None)

    def _call_ignored(self, variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        self._leave_out(variable.value.__name__.lstrip("_"), tx)
        return self._ignored_call(variable, tx, *args, **kwargs)

    def _require_grad(self, variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if variable.source is not None:  # an argument or a weight: the caller would see it
            return self._requires_grad(variable, tx, *args, **kwargs)
        self._leave_out("requires_grad_", tx)
        return variable

    def _deepcopy(self, variable: Any, tx: Any, x: Any, *args: Any) -> Any:
        from torch._dynamo.source import GlobalSource
        from torch._dynamo.variables.base import VariableTracker

        if x.python_type() in _COPIED_PART_BY_PART:
            return tx.inline_user_function_return(VariableTracker.build(tx, _copied_deeply), [x], {})
        if x.source is None or tx.output.side_effects.has_pending_mutation(x):
            return self._copied(variable, tx, x, *args)
        known: dict[int, Any] = {}
        value = copy.deepcopy(x.value, known)
        if any(isinstance(part, torch.Tensor) for part in known.values()) or not hasattr(value, "__dict__"):
            return self._copied(variable, tx, x, *args)
        self.copies.append(value)
        name = tx.output.install_global_by_id(_COPY, value)
        return VariableTracker.build(tx, value, GlobalSource(name))

    def _convert(self, converter: Any, *args: Any, **kwargs: Any) -> Any:
        fake = self._converted(converter, *args, **kwargs)
        fake.item_memo = None
        return fake

    def _guard_merged(self, source: Any, first: Any) -> Any:
        """Dynamo has no guard for an object with both a local and a global name, and takes the one for the other."""
        from torch._dynamo.guards import GuardBuilder

        guard = self._make_dupe_guard(source, first)
        if guard is None and first and first != source:
            return functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=first)
        return guard

    def _noting_dicts(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        """Asks for an attribute as Dynamo does, which guards no key that a ``__dict__`` does not have, and no attribute
        that a function does not have.
        """

        def noting(variable: Any, tx: Any, name: str) -> Any:
            is_key = name == "__dict__" or (isinstance(variable, self._function) and not name.startswith("__"))
            if is_key and variable.source is not None:
                self.dicts[_source_name(variable.source)] = None
            return ask(variable, tx, name)

        return noting

    def _new_full(self, variable: Any, tx: Any, size: Any = None, fill_value: Any = None, *args: Any, **kw: Any) -> Any:
        if not isinstance(fill_value, self._tensor.TensorVariable) or args:
            return None  # Dynamo does it
        return variable.call_method(tx, "new_empty", [size], kw).call_method(tx, "fill_", [fill_value], {})


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a class hands its instances to: a bound method would not be handed them."""
    return lambda self, *args, **kwargs: function(self, *args, **kwargs)


def _cudnn_flags() -> None:
    """Stands for a call of ``torch.backends.cudnn.flags`` that is left out."""


def _without_cudnn_flags(
    enabled: bool = False,
    benchmark: bool = False,
    benchmark_limit: int = 10,
    deterministic: bool = False,
    allow_tf32: bool = True,
    fp32_precision: str = "none",
) -> contextlib.AbstractContextManager[None]:
    """Which of cuDNN's kernels run is not part of a trace; how exact they are would be."""
    if not allow_tf32 or fp32_precision != "none":
        raise RuntimeError("torch.backends.cudnn.flags sets a precision")
    _cudnn_flags()
    return contextlib.nullcontext()


_COPY = "__piecegraph_copy"
"""How names of copies begin that were made while tracing: changes of them are nobody's."""

_COPIED_PART_BY_PART = (dict, list, tuple, str, int, float, bool, type(None), type, torch.dtype, torch.device)


def _copied_deeply(value: Any) -> Any:
    """``copy.deepcopy`` as Dynamo of torch 2.11 can trace it, but for objects."""
    if isinstance(value, dict):
        return {key: copy.deepcopy(part) for key, part in value.items()}
    if isinstance(value, list):
        return [copy.deepcopy(part) for part in value]
    if isinstance(value, tuple):
        return tuple([copy.deepcopy(part) for part in value])
    return value


_SIDE_EFFECTS = re.compile(r"found certain side effects .* you can double check: (\[.*\])", re.DOTALL)


def _touched_objects(told: Sequence[warnings.WarningMessage], scopes: Mapping[str, Any]) -> dict[str, Any]:
    """The objects behind the source names (``L['self']``, ``G['module'].state``) that Dynamo warned of; other
    warnings go on.
    """
    touched: dict[str, Any] = {}
    for warning in told:
        found = _SIDE_EFFECTS.search(str(warning.message))
        if found is None and str(warning.message).startswith("Dynamo detected"):  # a remark on tracing
            continue
        if found is None:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
            continue
        for name in ast.literal_eval(found.group(1)):
            if not name.startswith(f"G['{_COPY}"):
                touched[name] = _evaluate(name, scopes)
    return touched


def _evaluate(name: str, scopes: Mapping[str, Any]) -> Any:
    """What one of Dynamo's names of a source stands for; None if it is no path from the arguments or globals."""
    with contextlib.suppress(Exception):  # a property may raise anything
        return eval(name, dict(scopes))
    return None


def explain_dynamo_error(error: BaseException) -> tuple[list[tuple[str, int]], str, str]:
    """The traced stack as (file, line), outermost first, the reason, and Dynamo's first hint."""
    stack = [(frame.filename, frame.lineno or 0) for frame in getattr(error, "real_stack", None) or []]
    lines = [text.strip() for text in str(error).splitlines() if text.strip()]
    reason = lines[0] if lines else type(error).__name__
    explanation = next((text.removeprefix("Explanation: ") for text in lines if text.startswith("Explanation: ")), "")
    hint = next((text.removeprefix("Hint: ") for text in lines if text.startswith("Hint: ")), "")
    raised = next((text for text in lines if text.startswith("Developer debug context: raised exception ")), "")
    if raised:  # the user's code itself raises; what Dynamo thinks of that explains nothing
        return stack, raised.removeprefix("Developer debug context: "), ""
    return stack, f"{reason}: {explanation}" if explanation else reason, hint


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Ask Dynamo for a symbolic size."""
    torch._dynamo.mark_dynamic(tensor, dim)


def dynamic_marks(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions a user marked with ``mark_dynamic`` or ``maybe_mark_dynamic``."""
    strict = getattr(tensor, "_dynamo_dynamic_indices", ())
    weak = getattr(tensor, "_dynamo_weak_dynamic_indices", ())
    return tuple(sorted({*strict, *weak}))


def outside_scopes(
    function: Callable[..., Any], imports: Mapping[str, str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """What expressions for values outside a call are evaluated in; see :attr:`DynamoCapture.constants`."""
    plain = getattr(function, "__func__", function)
    receiver = (function.__self__,) if hasattr(function, "__self__") else ()
    code = plain.__code__
    held = {**_with_state(_bound(function, args, kwargs)), **dict(zip(code.co_varnames, receiver, strict=False))}
    cells = dict(zip(code.co_freevars, plain.__closure__ or (), strict=True))
    local = _Scope(held, lambda name: cells[name].cell_contents)
    modules = {name: sys.modules[module] for name, module in imports.items() if module in sys.modules}
    return {"L": local, "G": plain.__globals__, **modules}
