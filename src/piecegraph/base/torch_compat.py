"""Every use of a torch name that torch does not promise to keep.

One function for each need, with the versions it was checked on. All of it holds for torch 2.11 and 2.13 unless a
function says otherwise; a torch upgrade is then a diff of this file, which is why it is one file and long. Nothing
here knows what a piece or a tape is.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import difflib
import functools
import hashlib
import importlib
import inspect
import json
import operator
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import sympy
import torch
import torch.fx
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# --- tracing
# ---------------------------------------------------------------------------------------------------------------


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


def dynamo_capture(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> DynamoCapture:
    """Trace a function or bound method into one graph, without installing anything on its code object.

    ``torch.compile`` would keep guards and a cache entry on the code object that all instances of a class share.
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
        captured = convert_frame.fullgraph_capture(function, args, kwargs)
    objects = {i: ref() for i, ref in graph_bytecode_inputs.index_to_external_object_weakref.items()}
    backend_input = captured.backend_input
    plain_function = getattr(function, "__func__", function)
    receiver = (function.__self__,) if hasattr(function, "__self__") else ()
    bound = inspect.signature(plain_function, follow_wrapped=False).bind(*receiver, *args, **kwargs)
    bound.apply_defaults()
    outer = inspect.getclosurevars(plain_function).nonlocals
    call_scopes = {"L": {**outer, **bound.arguments}, "G": plain_function.__globals__}
    touched = _touched_objects(told, call_scopes)

    run_bytecode = functools.partial(_around_graph, captured, plain_function, receiver, gone_on.copies)
    output = captured.graph_capture_output
    names, imports = _outside_values(output, plain_function, receiver)
    scopes, code, left_out = outside_scopes(function, imports), tuple(output.traced_code), tuple(gone_on.left_out)
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


def _outside_values(
    output: Any, function: Callable[..., Any], receiver: tuple[Any, ...]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """What Dynamo would guard of the values outside the call: their expressions, and the modules that these name.

    Hooks are left out, which would be looked up by the hundred at every call, and torch's own state.
    """
    code = function.__code__
    held = dict(zip(code.co_varnames, receiver, strict=False))
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    imports = {name: module for name, module in output.import_sources.items() if not module.startswith("torch")}
    roots = [f"L[{name!r}]" for name in (*held, *cells)]
    roots += [f"G[{name!r}]" for name in (*function.__globals__, *imports) if not name.startswith("__builtins")]
    kinds = {"CONSTANT_MATCH": "{}", "EQUALS_MATCH": "{}", "SEQUENCE_LENGTH": "len({})"}
    found: dict[str, None] = {}
    for guard in output.output_graph.guards:
        # What is found on the class may come to be on the instance.
        name, kind = _CLASS_ATTRIBUTE.sub(r"\1.\2", guard.name), guard.create_fn_name()
        root = name.partition("]")[0] + "]"
        if kind in kinds and root in roots:
            found[kinds[kind].format(name)] = None
    return tuple(_IMPORTED.sub(r"\1", name) for name in sorted(found)), imports


_IMPORTED = re.compile(r"G\['(__import_\w+)'\]")
_CLASS_ATTRIBUTE = re.compile(r"(?:dict\()?type\((.*)\)(?:\.__mro__\[\d+\])?\.__dict__\)?\['(\w+)'\]")


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
    tolerance = _Tolerance()
    with _patching_dynamo, contextlib.ExitStack() as undo:
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
    is data as any other: Dynamo would take it for the one of the trace, with a guard.
    """

    def __init__(self) -> None:
        from torch._dynamo.variables import builtin, misc, tensor
        from torch._subclasses.fake_tensor import FakeTensorConverter

        self._builtin, self._misc, self._tensor = builtin, misc, tensor
        self._logger_call = misc.LoggingLoggerVariable.call_method
        self._ignored_call = misc.IgnoredFunctionVariable.call_function
        self._requires_grad = tensor.TensorVariable.method_requires_grad_
        self._copied = builtin.BuiltinVariable.call_deepcopy
        self._converter, self._converted = FakeTensorConverter, FakeTensorConverter.from_real_tensor
        self.left_out: dict[str, None] = {}
        """The calls that are in no graph, with their lines."""
        self.copies: list[Any] = []
        """Objects that were copied while tracing."""

    def patches(self) -> list[tuple[Any, str, Any]]:
        """(owner, name, what takes its place)."""
        from torch._dynamo import utils

        return [
            (self._misc.LoggingLoggerVariable, "call_method", _as_method(self._call_logger)),
            (self._misc.IgnoredFunctionVariable, "call_function", _as_method(self._call_ignored)),
            (self._tensor.TensorVariable, "method_requires_grad_", _as_method(self._require_grad)),
            (self._tensor.TensorVariable, "method_new_full", _as_method(self._new_full)),
            (self._builtin.BuiltinVariable, "call_deepcopy", _as_method(self._deepcopy)),
            (self._converter, "from_real_tensor", _as_method(self._convert)),
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
    try:
        return eval(name, dict(scopes))
    except (SyntaxError, NameError, KeyError, AttributeError, TypeError):
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


# --- symbolic sizes
# --------------------------------------------------------------------------------------------------------


def meta_value(node: torch.fx.Node) -> Any:
    """What Dynamo saw a node produce: a fake tensor, a SymInt, a tuple of them, or None."""
    return node.meta.get("example_value", node.meta.get("val"))


def size_expr(value: Any) -> sympy.Expr:
    """The expression behind an int or SymInt, known equalities applied."""
    return value.node.expr if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else sympy.sympify(value)


def size_hint(value: Any) -> int | None:
    """What a size was in the call that was traced; None if it is read from data."""
    if not isinstance(value, torch.SymInt):
        return int(value)
    hint = value.node.hint
    return None if hint is None or not isinstance(hint, int) else hint


def size_text(value: Any, names: Mapping[sympy.Symbol, str]) -> str:
    """A size as Python, with names for its symbols."""
    from torch.utils._sympy.printers import PythonPrinter

    renamed = {symbol: sympy.Symbol(name, integer=True, positive=True) for symbol, name in names.items()}
    return str(PythonPrinter().doprint(size_expr(value).xreplace(renamed)))


def original_symbol(value: Any) -> sympy.Symbol | None:
    """The symbol Dynamo first gave a size, before it learned equalities; None for a plain int."""
    expr = value.node._expr if isinstance(value, torch.SymInt) else None
    return expr if isinstance(expr, sympy.Symbol) else None


def unbacked_symbols(value: Any) -> frozenset[sympy.Symbol]:
    """The symbols in a value that stand for data (``item()``, ``nonzero()``), not for an input's size."""
    if isinstance(value, (tuple, list)):
        return frozenset().union(*map(unbacked_symbols, value)) if value else frozenset()
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested:
        # Asked of every node of a graph: torch's own function would walk through each size's expression again.
        return unbacked_symbols((*value.shape, *value.stride(), value.storage_offset()))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _unbacked_in(value.node.expr) if value.node.is_symbolic() else frozenset()
    if not isinstance(value, torch.Tensor):
        return frozenset()
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return frozenset(free_unbacked_symbols(value))


@functools.lru_cache(maxsize=4096)
def _unbacked_in(expr: sympy.Basic) -> frozenset[sympy.Symbol]:
    return frozenset(symbol for symbol in expr.free_symbols if is_unbacked(symbol))


def is_unbacked(symbol: sympy.Symbol) -> bool:
    """Whether a symbol stands for data."""
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    return symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT))


def free_symbols(value: Any) -> tuple[sympy.Symbol, ...]:
    """All symbols in a tensor's sizes and strides, or in a SymInt, in a stable order."""
    from torch.fx.experimental.symbolic_shapes import free_symbols as torch_free_symbols

    if not isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return ()
    return tuple(sorted(torch_free_symbols(value), key=str))


def emit_expr(
    graph: torch.fx.Graph, expr: sympy.Expr, symbols: Mapping[sympy.Symbol, torch.fx.Node]
) -> torch.fx.Node | int:
    """Add nodes to a graph that compute a size expression from the nodes of its symbols."""
    from torch.fx.proxy import GraphAppendingTracer, Proxy
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    if expr in symbols:
        return symbols[expr]
    tracer = GraphAppendingTracer(graph)
    result = sympy_interp(PythonReferenceAnalysis, {s: Proxy(n, tracer) for s, n in symbols.items()}, expr)
    return result.node if isinstance(result, Proxy) else int(result)


def fake_like(tensor: torch.Tensor, neighbour: Any) -> torch.Tensor:
    """A fake tensor of the same layout, with fixed sizes, in the world of another fake.

    The fakes in a Dynamo graph are not of the mode that Dynamo hands to backends, though both share their symbols.
    """
    fake: torch.Tensor = neighbour.fake_mode.from_tensor(tensor, static_shapes=True)
    return fake


@functools.lru_cache(maxsize=256)
def are_fake(types: tuple[type, ...]) -> bool:
    """Whether an op is called on stand-ins for tensors, by something that traces."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return any(issubclass(cls, (FakeTensor, FunctionalTensor)) for cls in types)


def run_fake(function: Callable[..., Any], *fakes: Any) -> Any:
    """What a function would make of fake tensors.

    Without the Python dispatcher, torch 2.11 runs composite ops in C++, which knows no symbolic sizes.
    """
    from torch._dispatch.python import enable_python_dispatcher

    with enable_python_dispatcher(), fakes[0].fake_mode, torch.no_grad():
        return function(*fakes)


def size_guards(fake_mode: Any) -> tuple[tuple[sympy.Basic, str], ...]:
    """The conditions on symbolic sizes that tracing and compiling relied on, each with the user's line."""
    env = fake_mode.shape_env if fake_mode is not None else None
    if env is None:
        return ()
    guards = [(guard.expr, str(getattr(guard.sloc, "maybe_user_loc", None) or "")) for guard in env.guards]
    for symbol, bounds in env.var_to_range.items():
        # A lower bound of 2 is Dynamo's default, not something the model asked for: sizes below are checked against the
        # model.
        if bounds.lower > 2:
            guards.append((sympy.Ge(symbol, bounds.lower), "torch._check"))
        if bounds.upper.is_finite and bounds.upper < torch.iinfo(torch.int32).max:
            guards.append((sympy.Le(symbol, bounds.upper), "torch._check"))
    return tuple(guards)


@contextlib.contextmanager
def keeping_guards(fake_mode: Any) -> Iterator[None]:
    """What is compiled inside is thrown away, and with it what it relied on."""
    env = fake_mode.shape_env if fake_mode is not None else None
    before = list(env.guards) if env is not None else []
    try:
        yield
    finally:
        if env is not None:
            env.guards[:] = before


# --- ops
# -------------------------------------------------------------------------------------------------------------------

_BUILTIN_OPS = {
    operator.matmul: "matmul",
    operator.add: "add",
    operator.mul: "mul",
    operator.sub: "sub",
    operator.truediv: "div",
}


def op_of(target: Any) -> tuple[Any, Any]:
    """An op as (packet, overload): overload is None where the target leaves it open, packet is the target if it is no
    op.

    Dynamo records ``torch.ops.ns.op`` as a packet, ``custom_op`` functions as an overload and ``F.linear`` as a
    builtin: all three must match what the user names, so all are mapped to the op object they call.
    """
    if isinstance(target, OpOverload):
        return target.overloadpacket, target
    if isinstance(target, OpOverloadPacket):
        return target, None
    if isinstance(target, CustomOpDef):
        return target._opoverload.overloadpacket, None
    name = target if isinstance(target, str) else _BUILTIN_OPS.get(target) or _torch_function_name(target)
    packet = getattr(torch.ops.aten, name, None) if name else None
    return (packet, None) if packet is not None else (target, None)


def _torch_function_name(target: Any) -> str:
    name = getattr(target, "__name__", "")
    is_method = getattr(target, "__objclass__", None) is torch._C.TensorBase
    is_torch = (getattr(target, "__module__", None) or "").startswith("torch") or getattr(torch, name, None) is target
    return name if is_method or is_torch else ""


def qualified_name(target: Any) -> str:
    """An op's ``ns::op`` or ``ns::op.overload``, empty for what is no op. The default overload is not spelled out."""
    packet, overload = op_of(target)
    if not isinstance(packet, OpOverloadPacket):
        return ""
    name = str(packet._qualified_op_name)
    return name if overload is None or overload._overloadname == "default" else f"{name}.{overload._overloadname}"


def find_op(name: str) -> Any:
    """The op called ``"ns::op"`` or ``"ns::op.overload"``, or None."""
    namespace, _, rest = name.partition("::")
    op_name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), op_name, None) if op_name else None
    if packet is None or not overload:
        return packet
    return getattr(packet, overload, None)


def similar_op(name: str) -> str:
    """The registered op whose name is closest, or an empty string."""
    names = {full.partition(".")[0] for full in torch._C._dispatch_get_all_op_names()}
    close = difflib.get_close_matches(name.partition(".")[0], names, n=1)
    return close[0] if close else ""


def import_inductor() -> None:
    """Import what compiles, and what loads compiled code: it takes seconds, of whoever comes first."""
    importlib.import_module("torch._inductor.compile_fx")


def start_compile_workers() -> None:
    """Start Inductor's worker processes, which import torch, so that they come up while the model is traced.

    Until they are up, kernels are compiled in this process, one after the other. Torch 2.11 to 2.13 start them when the
    first graph is compiled; earlier versions did when the module was imported.
    """
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.warm_pool()
    AsyncCompile.wakeup()


def is_cudagraph_unsafe(target: Any) -> bool:
    """Whether the op's author tagged it as not capturable."""
    packet, overload = op_of(target)
    if overload is None and isinstance(packet, OpOverloadPacket):
        overload = getattr(packet, packet.overloads()[0], None)
    return isinstance(overload, OpOverload) and torch.Tag.cudagraph_unsafe in overload.tags


def draws_random_numbers(target: Any) -> bool:
    """Whether an op moves a random number generator on."""
    packet, overload = op_of(target)
    if overload is None and isinstance(packet, OpOverloadPacket):
        overload = getattr(packet, packet.overloads()[0], None)
    return isinstance(overload, OpOverload) and torch.Tag.nondeterministic_seeded in overload.tags


def is_op(target: Any) -> bool:
    """Whether something is an op as the dispatcher calls it."""
    return isinstance(target, OpOverload)


def tags_of(target: Any) -> Collection[torch.Tag] | None:
    """The tags of an overload; None for anything else."""
    return target.tags if isinstance(target, OpOverload) else None


def is_view(overload: OpOverload) -> bool:
    """Whether an op's schema says that it returns memory of its arguments and writes to none."""
    schema = overload._schema
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    return not writes and any(returned.alias_info is not None for returned in schema.returns)


def takes_device(overload: OpOverload) -> bool:
    """Whether an op can be told where its result is to be."""
    return any(argument.name == "device" for argument in overload._schema.arguments)


def written_args(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an op's schema says it writes to. Empty for anything that is not an op with a schema."""
    packet, overload = op_of(target)
    if overload is None:
        if not isinstance(packet, OpOverloadPacket) or not isinstance(target, OpOverloadPacket):
            return []
        overload = getattr(packet, packet.overloads()[0])
    written = []
    for position, argument in enumerate(overload._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if argument.name in kwargs:
                written.append(kwargs[argument.name])
            elif position < len(args):
                written.append(args[position])
    return written


def schema_of(target: Any) -> str:
    """The schema of an op's default overload, as it is defined: ``linear(Tensor x) -> Tensor``."""
    packet, overload = op_of(target)
    return str((overload or packet.default)._schema).partition("::")[2]


def home_of_op(target: Any) -> str:
    """The module that registers a ``torch.library.custom_op``; empty if it cannot be imported, or is not known."""
    packet, overload = op_of(target)
    definition = OPDEFS.get((overload or packet.default)._name)
    home = "" if definition is None else str(definition._init_fn.__module__)
    return "" if home == "__main__" else home


def direct_kernel(target: Any, device_type: str) -> Any:
    """The Python function behind a ``torch.library.custom_op``, or the target itself.

    The dispatcher and the autograd wrapper cost 15 to 40 us a call around such an op; a tape has no gradients and
    fixed devices.
    """
    _, overload = op_of(target)
    if isinstance(target, OpOverloadPacket):
        overload = getattr(target, "default", None)
    definition = OPDEFS.get(overload._name) if isinstance(overload, OpOverload) else None
    if definition is None or definition._disabled_kernel:
        return target
    if device_type in definition._backend_fns or None not in definition._backend_fns:
        return target  # a kernel of its own for this device: torch picks it
    return definition._init_fn


# --- modes
# -----------------------------------------------------------------------------------------------------------------


def add_modes(function_mode: Any, dispatch_mode: Any, *, innermost: bool) -> None:
    """Put a pair of modes on this thread's stacks, innermost or outermost.

    Not by entering them: leaving must be the reverse of entering then, and torch.compile would refuse to compile.
    """
    functions, others = _function_modes(), _dispatch_modes()
    _set_function_modes([function_mode, *functions] if innermost else [*functions, function_mode])
    _set_dispatch_modes([dispatch_mode, *others] if innermost else [*others, dispatch_mode])


def remove_modes(function_mode: Any, dispatch_mode: Any) -> None:
    """Take a pair of modes off this thread's stacks, wherever in them it is."""
    _set_function_modes([mode for mode in _function_modes() if mode is not function_mode])
    _set_dispatch_modes([mode for mode in _dispatch_modes() if mode is not dispatch_mode])


def _function_modes() -> list[Any]:
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def _set_function_modes(modes: Sequence[Any]) -> None:
    for _ in range(torch._C._len_torch_function_stack()):
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


def _dispatch_modes() -> list[Any]:
    """Without those of torch's own machinery (fakes, proxies), which have places of their own."""
    modes = [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]
    return [mode for mode in modes if getattr(mode, "_mode_key", None) is None]


def _set_dispatch_modes(modes: Sequence[Any]) -> None:
    for _ in range(len(_dispatch_modes())):
        torch._C._pop_torch_dispatch_stack(None)
    for mode in modes:
        torch._C._push_on_torch_dispatch_stack(mode)


def unseen() -> contextlib.AbstractContextManager[Any]:
    """Inside, no mode sees which functions of torch are called."""
    return torch._C.DisableTorchFunction()  # type: ignore[no-untyped-call,no-any-return,unused-ignore]


def is_faked(arguments: Any) -> bool:
    """Whether a call is part of somebody's trace: a FakeTensor is among the arguments, or fakes are being made."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode(arguments) is not None


def is_profiling() -> bool:
    """Whether a profiler runs, in any thread: a second one would fail, or end the process."""
    return bool(torch.autograd.profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled())


def module_call_code() -> CodeType:
    """The code that runs every module's ``forward`` in eager mode; its frames have the module as ``self``."""
    return torch.nn.Module._call_impl.__code__


def nodes_by_line(module: torch.fx.GraphModule) -> dict[int, torch.fx.Node]:
    """What each line of a traced module's ``forward`` computes, lines numbered as in its frames."""
    nodes, first = list(module.graph.nodes), module.forward.__code__.co_firstlineno
    return {first + line: nodes[index] for line, index in (module._lineno_map or {}).items() if index is not None}


@dataclass(frozen=True, slots=True)
class GraphCode:
    """A graph as Python that can be read and run."""

    text: str
    """``def forward(self, ...):``, with the user's lines as comments."""
    names: Mapping[str, Any]
    """What it calls by a name of its own."""


def graph_code(graph: torch.fx.Graph) -> GraphCode:
    """The code of a graph with layouts and lines in it, which ``GraphModule.code`` leaves out."""
    code = graph.python_code("self", verbose=True, include_stride=True, include_device=True)
    return GraphCode(code.src.strip() + "\n", code.globals)


def run_from_file(module: torch.fx.GraphModule, file: str, text: str, names: Mapping[str, Any]) -> None:
    """Let a traced module's ``forward`` be that of a file, so that breakpoints in the file are met.

    Args:
        module: whose code the file holds, as :func:`graph_code` writes it.
        file: where the text is.
        text: of the whole file; the first function called ``forward`` is taken.
        names: what it calls.
    """
    tree = ast.parse(text)
    function = next(part for part in ast.walk(tree) if isinstance(part, ast.FunctionDef) and part.name == "forward")
    scope = dict(names)
    exec(compile(ast.Module([function], []), file, "exec"), scope)
    type(module).forward = scope["forward"]  # its class is its own, made for it
    module._lineno_map = _node_of_line(module.graph, function)


def _node_of_line(graph: torch.fx.Graph, function: ast.FunctionDef) -> dict[int, int | None]:
    """Which node each line behind a function's first computes: a node is what gives a value to its name."""
    indices = {node.name: index for index, node in enumerate(graph.nodes)}
    lines: dict[int, int | None] = {}
    for statement in function.body:
        if isinstance(statement, ast.Assign) and not _is_none(statement.value):
            targets = statement.targets
        else:
            targets = [statement.target] if isinstance(statement, ast.AnnAssign) else []
        for target in targets:
            if isinstance(target, ast.Name) and target.id in indices:
                lines[statement.lineno - function.lineno] = indices[target.id]
    return lines


def _is_none(value: ast.expr) -> bool:
    """Whether an assignment only lets go of what names held."""
    return isinstance(value, ast.Constant) and value.value is None


def trace_artifact(owner: torch.nn.Module, name: str, encoding: str, make: Callable[[], str]) -> None:
    """Put something into the log that ``TORCH_TRACE`` asks for and tlparse reads; nothing is made if it is not.

    It stands with what Dynamo told of the graph that it wrote down with ``owner``.
    """
    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact",
        lambda: {"name": name, "encoding": encoding},
        payload_fn=make,
        expect_trace_id=False,
        compile_id=getattr(owner, "meta", {}).get("dynamo_compile_id"),
    )


# --- compiling
# -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CompiledSource:
    """The Python that Inductor generated for a graph: allocations, and one launch after the other."""

    file: str
    """The ``co_filename`` of the frames that run it."""
    code: str
    provenance: str | None
    """Inductor's map of kernels to graph nodes, as JSON; None unless asked for."""


PlaceSource = Callable[[str], str | None]
"""Puts generated source into a file and returns its name; None if it cannot."""


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """What Inductor made of a graph."""

    function: Callable[..., Any]
    source: CompiledSource | None
    """None where Inductor generated no Python."""
    artifact: str | None = None
    """What :func:`load_compiled` finds it by; None if Inductor keeps nothing of it."""


def inductor_compile(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    fake_mode: Any,
    settings: Mapping[str, Any],
    *,
    provenance: bool = False,
    place: PlaceSource | None = None,
) -> CompiledGraph:
    """Compile a graph for the symbolic sizes of its fake inputs. The graph must return a tuple.

    With ``provenance``, the generated source comes with Inductor's map of kernels to graph nodes, and is sure to have
    been generated for a graph whose nodes have the same names. With ``place``, what runs is loaded from the file that
    the source is put into.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import standalone_compile

    patches, salted = dict(settings), contextlib.nullcontext()
    if provenance:
        patches["trace.provenance_tracking_level"] = 1
        patches["cpp.enable_kernel_profile"] = True  # kernels of a CPU are seen by profilers, as those of a GPU are
        salted = _salted_cache(graph_module)
    with torch.no_grad(), tracing(TracingContext(fake_mode)), salted, _generated_sources(place) as sources:
        function = standalone_compile(
            graph_module,
            list(example_inputs),
            dynamic_shapes="from_tracing_context",
            options={"config_patches": patches},
        )
    return CompiledGraph(function, sources[-1] if sources else None, _artifact_of(function))


def _artifact_of(compiled: Any) -> str | None:
    """The name of a compiled graph in Inductor's cache. A graph of several, or none, cannot be loaded again."""
    if compiled._artifacts is None or not compiled.is_saveable():
        return None
    name: str = compiled._artifacts[1].aot_autograd_artifacts[0]
    return name


def _salted_cache(graph_module: torch.fx.GraphModule) -> Any:
    """Entries of Inductor's caches that are for graphs with these node names only, and compiled with provenance.

    The key of a cached graph is taken after node names were replaced: source compiled for ``x.view`` serves
    ``x.reshape``, and its comments name a node that is not there. On torch 2.11 the level of provenance is not part of
    the key either.
    """
    names = " ".join(node.name for node in graph_module.graph.nodes)
    salt = f"piecegraph provenance {hashlib.sha256(names.encode()).hexdigest()[:16]}"
    config = torch.compiler.config
    return config.patch(cache_key_tag=f"{config.cache_key_tag} {salt}".strip())  # type: ignore[attr-defined]


_watching_sources = threading.RLock()
"""Held while Inductor's class is patched, so that two threads do not undo each other's patch."""


@contextlib.contextmanager
def _generated_sources(place: PlaceSource | None) -> Iterator[list[CompiledSource]]:
    """Collects the source of what is compiled, or loaded from a cache, inside.

    ``post_compile`` runs last in both cases. It may put other callables around the generated function, so that is
    looked at first.
    """
    from torch._inductor.output_code import CompiledFxGraph

    found: list[CompiledSource] = []
    original = CompiledFxGraph.post_compile

    def post_compile(graph: Any, example_inputs: Any, constants: Any, *args: Any, **kwargs: Any) -> None:
        text = getattr(graph, "source_code", None)
        file = place(text) if place is not None and text else None
        if file is not None:
            _load_source(graph, file, constants)
        code = getattr(graph.current_callable, "__code__", None)
        if code is not None and text:
            provenance = getattr(graph, "inductor_provenance_mapping_str", None)
            found.append(CompiledSource(code.co_filename, text, provenance))
        original(graph, example_inputs, constants, *args, **kwargs)

    with _watching_sources:
        CompiledFxGraph.post_compile = post_compile  # type: ignore[method-assign,assignment]
        try:
            yield found
        finally:
            CompiledFxGraph.post_compile = original  # type: ignore[method-assign]


def _load_source(graph: Any, file: str, constants: Any) -> None:
    """Let a compiled graph run what a file holds, as torch 2.11 to 2.13 do with a file of their cache."""
    from torch._inductor.codecache import PyCodeCache

    loaded = PyCodeCache.load_by_key_path(graph.cache_key, file, graph.cache_linemap, constants.unwrap(graph))
    graph.current_callable = loaded.call
    graph.recursively_apply_fns = getattr(loaded, "recursively_apply_fns", None)
    graph.compiled_fn_runner = getattr(loaded, "runner", None)


@functools.cache
def triton_launchers() -> tuple[Any, ...]:
    """The classes whose ``run`` launches a Triton kernel. Finding them imports Inductor: not for during a capture."""
    if not torch.cuda.is_available():
        return ()
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    with contextlib.suppress(ImportError):
        return CachingAutotuner, importlib.import_module("triton.runtime.jit").JITFunction
    return (CachingAutotuner,)


AroundLaunch = Callable[[str], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def triton_launches(around: AroundLaunch) -> Iterator[None]:
    """Launches of Triton kernels by this thread, by Inductor's code or directly, happen inside of ``around(name)``.

    They are no ops, so that no dispatch mode sees them. Inductor of torch 2.11 and 2.13 launches by a plain method.
    """
    with contextlib.ExitStack() as undo:
        for launcher in triton_launchers():
            undo.callback(setattr, launcher, "run", launcher.run)
            launcher.run = _watched_launch(launcher.run, around, threading.get_ident())
        yield


def _watched_launch(run: Callable[..., Any], around: AroundLaunch, thread: int) -> Callable[..., Any]:
    @functools.wraps(run)
    def watched(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or kwargs.get("warmup"):
            return run(kernel, *args, **kwargs)
        with around(kernel.fn.__name__):
            return run(kernel, *args, **kwargs)

    return watched


# --- memory
# ----------------------------------------------------------------------------------------------------------------


def non_owning(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that does not keep it alive."""
    storage = tensor.untyped_storage()
    return over(
        torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes()), tensor
    )


def over(storage: Any, like: torch.Tensor) -> torch.Tensor:
    """A tensor that reads a storage as another tensor reads its own: conjugated and negated lazily, too."""
    with torch.inference_mode(False):
        view = torch.empty(0, dtype=like.dtype, device=like.device)
        view.set_(storage, like.storage_offset(), like.size(), like.stride())
        if like.is_conj():
            view = view.conj()
        return torch._neg_view(view) if like.is_neg() else view


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's whole storage, as bytes."""
    storage = tensor.untyped_storage()
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's whole storage, as numbers of the tensor's type."""
    storage, size = tensor.untyped_storage(), tensor.dtype.itemsize
    if storage.nbytes() % size:
        return bytes_of(tensor)
    with torch.inference_mode(False):
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(storage, 0, (storage.nbytes() // size,), (1,))


def reading(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How a tensor's memory is read, apart from where."""
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


def has_memory(value: Any) -> bool:
    """Whether a value is a tensor with a storage that can be looked at."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or is_traceable_wrapper_subclass(value):
        return False
    return value.layout is torch.strided and value.device.type != "meta"


def storage_id(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory. Works on fake tensors, which have no address."""
    return int(tensor.untyped_storage()._cdata)


def is_made_of_data(op: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is how torch shows a tensor that it has just filled with Python numbers: ``torch.tensor([1.0])``.

    What ``torch.from_numpy`` returns is shown likewise, and is somebody else's memory, which torch cannot resize.
    """
    is_shown = op is torch.ops.aten.lift_fresh.default
    return is_shown and bool(args[0].untyped_storage().resizable())  # type: ignore[no-untyped-call]


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor may lie at one place."""
    return bool(torch._debug_has_internal_overlap(tensor) != 0)


def storage_is_alive(tensor: torch.Tensor) -> Callable[[], bool]:
    """A function that tells whether anything still holds the tensor's storage, without holding it itself."""
    from torch.multiprocessing.reductions import StorageWeakRef

    reference = StorageWeakRef(tensor.untyped_storage())
    return lambda: not reference.expired()


is_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any device; asking for each takes four times as long."""

HOOKS_OF_A_CALL = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
"""The attributes of a module that its call looks at before it calls ``forward``."""

global_hooks_of_a_call: tuple[Mapping[int, Any], ...] = tuple(
    getattr(torch.nn.modules.module, f"_global{name}") for name in HOOKS_OF_A_CALL
)
"""The same for all modules. torch fills these and never replaces them."""

alias: Callable[[torch.Tensor], torch.Tensor] = torch.ops.aten.alias.default
"""Another tensor over the same memory."""

copy_all: Callable[[Any, Any], None] = torch._foreach_copy_
"""Copies several tensors with as few kernels as their types allow."""


# --- CUDA
# ------------------------------------------------------------------------------------------------------------------


def driver_cuda_version() -> str:
    """The newest CUDA version the installed driver supports."""
    version = int(torch._C._cuda_getDriverVersion())  # type: ignore[attr-defined] # only in CUDA builds
    return f"{version // 1000}.{version % 1000 // 10}"


raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device_index: 0)
"""The handle of a device's current stream, without building a Stream object. Builds without CUDA have none."""


def graph_replay(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """What replays a graph, without the Python around it, which asks whether a pool is tracked: ours is not."""
    replay: Callable[[], None] = super(torch.cuda.CUDAGraph, graph).replay
    return replay


_abandoned: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed. torch's allocator for pinned memory keeps calling into them, so they may never be
destroyed.
"""


def abandon_capture(graph: torch.cuda.CUDAGraph, pool_id: tuple[int, int], device_index: int) -> None:
    """Leave a capture that failed, on the capture stream. The pool cannot be captured into again.

    ``capture_end`` raises before it has tidied up (torch 2.11): the allocator still serves the capture, and so does
    the allocator for pinned memory, which has no way out; and the random number generator still counts for the
    capture. An empty capture that succeeds puts the generator right.
    """
    _abandoned.append(graph)
    with contextlib.suppress(RuntimeError):
        graph.capture_end()
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device_index, pool_id)
    healthy = torch.cuda.CUDAGraph()
    healthy.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device=f"cuda:{device_index}")
    healthy.capture_end()


# --- streams in graphs
# -----------------------------------------------------------------------------------------------------


def stream_op(target: Any) -> str | None:
    """The name of a stream op in a Dynamo graph (``wait_stream``, ``record_event``, ...), or None.

    torch 2.11 records method calls on stream objects, 2.13 records ``torch.ops.streams``; both fetch objects by index.
    """
    from torch._dynamo.graph_bytecode_inputs import get_external_object_by_index

    if target is get_external_object_by_index:
        return "get_object"
    name = qualified_name(target) if isinstance(target, (OpOverload, OpOverloadPacket)) else ""
    return name.removeprefix("streams::") if name.startswith("streams::") else None


# --- containers
# ------------------------------------------------------------------------------------------------------------


def pytree_node(cls: type) -> tuple[Callable[[Any], tuple[Any, Any]], Callable[[Any, Any], Any]] | None:
    """(flatten, unflatten) of a type registered with torch's pytree, or None."""
    from torch.utils._pytree import SUPPORTED_NODES

    node = SUPPORTED_NODES.get(cls)
    return None if node is None else (node.flatten_fn, node.unflatten_fn)


@contextlib.contextmanager
def outside_inference() -> Iterator[None]:
    """Grad off, inference mode off: what is traced, allocated or recorded inside serves calls in both modes."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextlib.contextmanager
def capture_hidden() -> Iterator[None]:
    """Inside, Python is told that no graph is being captured."""
    asked = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked


@contextlib.contextmanager
def without_trace(devices: Iterable[torch.device]) -> Iterator[None]:
    """As :func:`outside_inference`, and :func:`drawn_again`."""
    with outside_inference(), drawn_again(devices):
        yield


@contextlib.contextmanager
def drawn_again(devices: Iterable[torch.device]) -> Iterator[None]:
    """Random numbers drawn inside are drawn again afterwards: those of the CPU, of these devices and of the current
    one, where a function of no tensors makes some.
    """
    with torch.random.fork_rng(_cuda_indices(devices)):
        yield


def random_states(devices: Iterable[torch.device]) -> list[bytes]:
    """Where the random number generators of the CPU and of these devices are: equal if nothing was drawn between."""
    states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, _cuda_indices(devices))]
    return [bytes(state.tolist()) for state in states]


def _cuda_indices(devices: Iterable[torch.device]) -> list[int]:
    current = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    return sorted({*current, *(device.index for device in devices if device.type == "cuda")})


def job_store() -> Any:
    """A connection of our own to the key-value store of the default process group.

    torch 2.11 to 2.13: the store of a group is not public, and using the group's own connection would get in the way of
    a collective that is being set up.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]


# --- kernels
# ---------------------------------------------------------------------------------------------------------------


def demangle(name: str) -> str:
    """A C++ name as it was written; the name itself if torch cannot read it: it knows no ``std::bfloat16_t``."""
    return str(torch._C._demangle(name))


# --- what outlives a process
# -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeptSymbol:
    """A symbolic size, as far as tracing and compiling know it."""

    symbol: sympy.Symbol
    hint: int | None
    """Its value in the example; None for one that stands for data."""
    lower: Any
    upper: Any


@dataclass(frozen=True, slots=True)
class FakeLayout:
    """All that there is of a fake tensor."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[Any, ...]
    """Numbers and expressions."""
    strides: tuple[Any, ...]
    offset: Any
    storage: int
    """Equal for those that share memory."""


def kept_symbols(fake_mode: Any) -> tuple[KeptSymbol, ...]:
    """The symbols of a trace."""
    env = fake_mode.shape_env if fake_mode is not None else None
    if env is None:
        return ()
    return tuple(
        KeptSymbol(
            symbol, None if (hint := env.backed_var_to_val.get(symbol)) is None else int(hint), span.lower, span.upper
        )
        for symbol, span in env.var_to_range.items()
    )


def kept_layout(fake: torch.Tensor) -> FakeLayout:
    """A fake tensor as a value."""
    plain = (int(n) if not isinstance(n, torch.SymInt) else size_expr(n) for n in (*fake.shape, *fake.stride()))
    numbers = tuple(plain)
    offset = fake.storage_offset()
    return FakeLayout(
        fake.dtype,
        fake.device,
        numbers[: fake.dim()],
        numbers[fake.dim() :],
        size_expr(offset) if isinstance(offset, torch.SymInt) else int(offset),
        storage_id(fake),
    )


def is_keepable_fake(value: Any) -> bool:
    """Whether a fake tensor is nothing but its layout."""
    from torch._subclasses.fake_tensor import FakeTensor

    if type(value) is not FakeTensor or value.layout is not torch.strided:
        return False
    return not (value.is_quantized or value.is_conj() or value.is_neg() or value.is_nested)


class FakeWorld:
    """Symbols and fake tensors made anew, for a graph that was traced in another process."""

    def __init__(self, symbols: Sequence[KeptSymbol]) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv, ValueRangesSLoc
        from torch.utils._sympy.value_ranges import ValueRanges

        self._env = env = ShapeEnv()
        for kept in symbols:
            env.var_to_range[kept.symbol] = ValueRanges(kept.lower, kept.upper)
            env.var_to_range_sloc[kept.symbol] = ValueRangesSLoc(env._get_sloc(), env._get_sloc())
            env.var_to_sources[kept.symbol] = []
            if kept.hint is not None:
                env.backed_var_to_val[kept.symbol] = sympy.Integer(kept.hint)
        self.mode = FakeTensorMode(shape_env=env)
        self._bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        """What reads a storage as a dtype, one for each of both."""
        self._storages: dict[int, Any] = {}
        self._sizes: dict[tuple[sympy.Expr, str], Any] = {}

    def size(self, expr: sympy.Expr, kind: str) -> Any:
        """A number of a trace: ``kind`` is the name of its class, SymInt, SymFloat or SymBool."""
        from torch.fx.experimental.sym_node import SymNode

        if (expr, kind) not in self._sizes:
            python = {"SymInt": int, "SymFloat": float, "SymBool": bool}[kind]
            self._sizes[expr, kind] = getattr(torch, kind)(SymNode(expr, self._env, python, None))
        return self._sizes[expr, kind]

    def tensor(self, layout: FakeLayout) -> torch.Tensor:
        """A fake tensor of that layout; those of one storage share memory.

        A view of a tensor of one element takes a tenth of the time that a tensor of symbolic sizes does, whose bytes
        are computed.
        """
        from torch._subclasses.fake_tensor import FakeTensor
        from torch.utils._mode_utils import no_dispatch

        def number(value: Any) -> Any:
            return value if isinstance(value, int) else self.size(value, "SymInt")

        shape, strides = (tuple(map(number, part)) for part in (layout.shape, layout.strides))
        with no_dispatch(), self._env.suppress_guards(), torch.no_grad():
            base = self._base(layout.storage, layout.dtype).as_strided(shape, strides, number(layout.offset))
            return FakeTensor(self.mode, base, layout.device)

    def _base(self, storage: int, dtype: torch.dtype) -> torch.Tensor:
        if (storage, dtype) not in self._bases:
            base = torch.empty(1, dtype=dtype, device="meta")
            if storage in self._storages:
                base.set_(self._storages[storage], 0, (1,), (1,))
            self._storages.setdefault(storage, base.untyped_storage())
            self._bases[storage, dtype] = base
        return self._bases[storage, dtype]


def kept_op_name(target: Any) -> str | None:
    """What :func:`find_op` finds an op by in another process; None for what is no op."""
    if isinstance(target, OpOverload):
        return f"{target.overloadpacket._qualified_op_name}.{target._overloadname}"
    return str(target._qualified_op_name) if isinstance(target, OpOverloadPacket) else None


def op_definition(target: Any) -> tuple[str, list[Any]]:
    """An op's schema, and the Python functions that are known to stand behind it."""
    _, overload = op_of(target)
    if isinstance(target, OpOverloadPacket):
        overload = getattr(target, target.overloads()[0], None)
    if not isinstance(overload, OpOverload):
        return "", []
    definition = OPDEFS.get(overload._name)
    if definition is None:
        return str(overload._schema), []
    functions = [definition._init_fn, definition._abstract_fn, *definition._backend_fns.values()]
    return str(overload._schema), [function for function in functions if function is not None]


def map_aggregate(value: Any, change: Callable[[Any], Any]) -> Any:
    """Nested arguments of a node, with every atom changed."""
    from torch.fx.node import map_aggregate as torch_map_aggregate

    return torch_map_aggregate(value, change)


def outside_scopes(function: Callable[..., Any], imports: Mapping[str, str]) -> dict[str, Any]:
    """What expressions for values outside a call are evaluated in; see :attr:`DynamoCapture.constants`."""
    plain = getattr(function, "__func__", function)
    receiver = (function.__self__,) if hasattr(function, "__self__") else ()
    code = plain.__code__
    held = dict(zip(code.co_varnames, receiver, strict=False))
    cells = dict(zip(code.co_freevars, plain.__closure__ or (), strict=True))
    local = _Scope(held, lambda name: cells[name].cell_contents)
    modules = {name: sys.modules[module] for name, module in imports.items() if module in sys.modules}
    return {"L": local, "G": plain.__globals__, **modules}


_in_folder = threading.RLock()
"""Held while compilers write to a folder of ours, which is a matter of the whole process."""


@contextlib.contextmanager
def compiler_folder(folder: str) -> Iterator[None]:
    """Inside, Inductor and Triton keep all that they write, and find what they look for, in a folder.

    torch 2.11 to 2.13: both read the environment at every use; Inductor's caches in memory go by paths in the folder.
    """
    places = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": os.path.join(folder, "triton")}
    with _in_folder:
        before = {name: os.environ.get(name) for name in places}
        if before == places:
            yield
            return
        os.environ.update(places)
        _clear_inductor()
        try:
            yield
        finally:
            _clear_inductor()
            for name, place in before.items():
                if place is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = place


def settle_kernels(folder: str) -> None:
    """Make Triton find the kernels in a :func:`compiler_folder` that was copied here from elsewhere.

    Triton 3.6 and 3.7: which files a kernel consists of is written beside them, with whole paths; those that are not
    there are not missed but compiled.
    """
    for listing in Path(folder, "triton").glob("*/__grp__*"):
        children = json.loads(listing.read_text())["child_paths"]
        here = {name: str(listing.parent / Path(path).name) for name, path in children.items()}
        listing.write_text(json.dumps({"child_paths": here}))


def _clear_inductor() -> None:
    """Make Inductor forget in which files things are. Importing it takes seconds, and is for those who need it."""
    utils: Any = sys.modules.get("torch._inductor.utils")
    if utils is not None:
        utils.clear_caches()


def choose_vector_units() -> None:
    """Have Inductor find out, once for all processes, for which vector units of the CPU it can compile.

    It compiles a test for that, which would otherwise be compiled again in every :func:`compiler_folder`.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    bool(pick_vec_isa())  # asking is what compiles


def load_compiled(artifact: str) -> CompiledGraph:
    """What :func:`inductor_compile` made, from the :func:`compiler_folder` that it was made in. Nothing is compiled.

    Not by ``CompiledArtifact.load``, which takes a folder for each graph, and spends a third of a second on a hash of
    torch's own files.
    """
    import torch._inductor.config
    from torch._inductor.standalone_compile import CacheCompiledArtifact

    # That it was compiled shows that it can be. With one thread no worker processes are started, for nothing.
    settings = torch._inductor.config.patch({"cpp.vec_isa_ok": True, "compile_threads": 1})  # type: ignore[attr-defined]
    with torch.no_grad(), settings, _generated_sources(None) as sources, _without_headers():
        function = CacheCompiledArtifact._load_impl(contextlib.nullcontext(), artifact)
    return CompiledGraph(function, sources[-1] if sources else None)


@contextlib.contextmanager
def _without_headers() -> Iterator[None]:
    """Inside, Inductor compiles no headers for kernels before it looks whether there is something to compile."""
    from torch._inductor import codecache

    original = codecache._precompile_header
    codecache._precompile_header = lambda header, *args, **kwargs: ""  # type: ignore[assignment]
    try:
        yield
    finally:
        codecache._precompile_header = original


def compiler_settings() -> dict[str, str]:
    """Every setting of torch that changes what is traced or compiled and is not as torch is delivered, as text."""
    found: dict[str, str] = {}
    for name in ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config"):
        config: Any = sys.modules.get(name)  # nobody has changed one that is not imported
        for setting, value in config._get_dict(skip_default=True).items() if config is not None else ():
            if value != config._config[setting].default:  # it may have been changed, and changed back
                found[f"{name.removeprefix('torch.')}.{setting}"] = _setting_text(value)
    # What the environment says is part of their defaults.
    found |= {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE", "TRITON_")) and name not in _PLACES
    }
    backends = torch.backends
    return found | {
        "default dtype": str(torch.get_default_dtype()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "cudnn": f"{backends.cudnn.enabled} {backends.cudnn.deterministic} {backends.cudnn.allow_tf32}",
    }


def _setting_text(value: Any) -> str:
    parts = sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else value
    return re.sub(r" at 0x[0-9a-f]+", "", repr(parts))


_PLACES = frozenset({"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"})
"""Variables that say where and how fast, not what."""


# --- torch.compile, for comparison
# ---------------------------------------------------------------------------------------------------------------


def no_silent_eager() -> contextlib.AbstractContextManager[None]:
    """Have ``torch.compile`` compile for many sizes, and raise where it would give up and run eagerly."""
    import torch._dynamo

    settings: contextlib.AbstractContextManager[None] = torch._dynamo.config.patch(  # type: ignore[attr-defined]
        recompile_limit=64, fail_on_recompile_limit_hit=True
    )
    return settings


def num_skipped_cudagraphs() -> int:
    """How many graphs ``mode="reduce-overhead"`` has left out until now: such code is launched kernel by kernel."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["cudagraph_skips"])
