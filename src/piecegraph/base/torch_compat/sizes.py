"""Symbolic sizes: expressions, symbols, and the conditions that tracing relied on."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import sympy
import torch
import torch.fx


def meta_value(node: torch.fx.Node) -> Any:
    """What Dynamo saw a node produce: a fake tensor, a SymInt, a tuple of them, or None."""
    return node.meta.get("example_value", node.meta.get("val"))


def input_values(module: torch.fx.GraphModule) -> list[Any]:
    """The same of each of its inputs."""
    return [meta_value(node) for node in module.graph.find_nodes(op="placeholder")]


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
        return frozenset().union(*(unbacked_symbols(part) for part in value if type(part) is not int))  # most are
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


def is_any_rounded(values: Iterable[Any]) -> bool:
    """Whether a tensor has a size that follows others by steps, as that of ``x[::2]`` does."""
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    exprs = {size_expr(size) for each in tensors for size in each.shape if isinstance(size, torch.SymInt)}
    return not all(expr.is_polynomial() for expr in exprs)


def emit_expr(
    graph: torch.fx.Graph, expr: sympy.Expr, symbols: Mapping[sympy.Symbol, torch.fx.Node]
) -> torch.fx.Node | int:
    """Add nodes to a graph that compute a size expression from the nodes of its symbols."""
    from torch.fx.proxy import GraphAppendingTracer, Proxy
    from torch.utils._sympy.interp import sympy_interp

    if expr in symbols:
        return symbols[expr]
    tracer = GraphAppendingTracer(graph)
    result = sympy_interp(_arithmetic_of_nodes(), {s: Proxy(n, tracer) for s, n in symbols.items()}, expr)
    return result.node if isinstance(result, Proxy) else int(result)


@functools.cache
def _arithmetic_of_nodes() -> Any:
    """Torch's arithmetic of Python's numbers, without what it leaves to sympy or to ``math``: they take no nodes."""
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    def node_of(function: Callable[[Any], Any]) -> Callable[..., Any]:
        return lambda x, *dtype: x.tracer.create_proxy("call_function", function, (x,), {})

    functions: dict[str, Callable[..., Any]] = {
        "int_truediv": operator.truediv,
        "floor_to_int": node_of(math.floor),
        "ceil_to_int": node_of(math.ceil),
        "trunc_to_int": node_of(math.trunc),
        "round_to_int": node_of(round),
        "floor": lambda x: torch.sym_float(node_of(math.floor)(x)),
        "ceil": lambda x: torch.sym_float(node_of(math.ceil)(x)),
    }
    for name in ("cos", "sin", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan"):
        functions[name] = getattr(torch, f"_sym_{name}")
    return type("ArithmeticOfNodes", (PythonReferenceAnalysis,), {k: staticmethod(f) for k, f in functions.items()})


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


def add_size_guards(fake_mode: Any, guards: Iterable[tuple[sympy.Basic, str]]) -> None:
    """Have a trace rely on conditions that somebody else found, who compiled a part of it."""
    from torch._guards import ShapeGuard, SLoc

    env = fake_mode.shape_env if fake_mode is not None else None
    known = {condition for condition, _ in size_guards(fake_mode)}
    for condition, line in guards:
        if condition not in known:
            assert env is not None, condition
            env.guards.append(ShapeGuard(condition, SLoc("", line or None), False))  # type: ignore[arg-type]


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
