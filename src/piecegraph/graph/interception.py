"""Callbacks around an op: which calls they are for, and how they run.

An :class:`Interception` is found in graphs by its op and in eager code by the modes of ``eager_interception.py``; both
run its callbacks through :func:`run_chain`. The invariant: a call of the user's runs each callback once for each call
of the op. What piecegraph runs on its own account (tracing, warming up, recording, trying things) runs none.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

import torch

from piecegraph.base import torch_compat
from piecegraph.base.patterns import module_matches
from piecegraph.base.structure import atoms
from piecegraph.errors import CallError, ConfigError
from piecegraph.graph.cut_rules import resolve_op

REASON = "intercepted"
"""What ``explain()`` says of such a cut."""

Layout = tuple[torch.dtype, torch.device, tuple[Any, ...], tuple[Any, ...], bool]
"""(dtype, device, shape, strides, whether it is a view of an argument) of a tensor. A plain tuple, as arguments of a
step are, so that symbolic sizes in it are worked out with theirs.
"""
Layouts = Layout | list[Layout | None] | None
"""Of a result: a tensor, several values, or something that is not looked at."""

_is_off: ContextVar[bool] = ContextVar("piecegraph_interceptions_off", default=False)
_applied: ContextVar[frozenset[Interception]] = ContextVar("piecegraph_interceptions_applied", default=frozenset())


class Interception:
    """An op and what to run around it."""

    def __init__(
        self,
        op: Any,
        before: Callable[..., Any] | None,
        replace: Callable[..., Any] | None,
        after: Callable[..., Any] | None,
        module: str | None,
    ) -> None:
        callbacks = {"before": before, "replace": replace, "after": after}
        given = {name: callback for name, callback in callbacks.items() if callback is not None}
        if not given:
            raise ConfigError("PG721", "intercept() was given no callback", hint="give before=, replace= or after=")
        for name, callback in given.items():
            if not callable(callback):
                raise ConfigError("PG721", f"{name}={callback!r} of intercept() cannot be called")
        resolved = resolve_op(op)
        self._packet, self._overload = torch_compat.op_of(resolved)
        self.op = torch_compat.qualified_name(resolved) or getattr(resolved, "__qualname__", str(resolved))
        self.module = module
        self.callbacks = given
        self.num_calls = 0

    def __str__(self) -> str:
        where = f", module={self.module!r}" if self.module is not None else ""
        return f"intercept({self.op!r}{where})"

    def wants(self, target: Any) -> bool:
        """Whether a target, as a graph or a mode shows it, is the op."""
        packet, overload = torch_compat.op_of(target)
        return packet is self._packet and (overload is None or self._overload in (None, overload))

    def wants_module(self, path: str) -> bool:
        """Whether a call made in a module is meant: the pattern fits its path, or that of a module around it."""
        return self.module is None or module_matches(path, self.module)

    def call_back(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one callback, if there is one, with every interception off."""
        callback = self.callbacks.get(name)
        if callback is None:
            return None
        try:
            with off():
                return callback(*args, **kwargs)
        except Exception as error:
            error.add_note(f"raised by the {name} callback of piecegraph.{self}")
            raise


# -- which are live


class Interceptable(Protocol):
    """Something compiled that interceptions reach."""

    @property
    def name(self) -> str:
        """Of what is compiled."""

    def num_places(self, each: Interception) -> int:
        """How many calls in it an interception is for."""


class _Registry:
    """The interceptions in force, and what they reach."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.live: tuple[Interception, ...] = ()
        """In the order they were added. The tuple is a new one whenever that changes."""
        self.compiled: weakref.WeakSet[Interceptable] = weakref.WeakSet()
        """Everything that is compiled and not closed."""

    def add(self, each: Interception) -> None:
        """Put an interception in force."""
        with self._lock:
            self.live = (*self.live, each)

    def discard(self, each: Interception) -> None:
        """End an interception; nothing happens if it has ended."""
        with self._lock:
            self.live = tuple(other for other in self.live if other is not each)


registry = _Registry()


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Inside, ops run as if nothing was intercepted."""
    token = _is_off.set(True)
    try:
        yield
    finally:
        _is_off.reset(token)


def is_off() -> bool:
    """Whether no callback may run here."""
    return _is_off.get()


# -- running callbacks


def run_chain(
    chain: Sequence[Interception], original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, bool]:
    """Call an op with the callbacks of several interceptions around it, the last one outermost.

    Returns:
        The result, and whether a callback had a part in it.
    """
    if not chain:
        return original(*args, **kwargs), False
    *inner, outer = chain
    outer.num_calls += 1
    changed = outer.call_back("before", args, kwargs)
    if changed is not None:
        args, kwargs = _as_arguments(changed, outer)
    if "replace" in outer.callbacks:
        result, is_changed = outer.call_back("replace", args, kwargs), True
    else:
        result, is_changed = run_chain(inner, original, args, kwargs)
    better = outer.call_back("after", (result, *args), kwargs)
    if better is not None:
        return better, True
    return result, is_changed or changed is not None


def run_unapplied(
    candidates: Sequence[Interception], original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """:func:`run_chain` in eager code, where one call passes through several levels of torch: an interception that
    runs at one level does not run again below.
    """
    applied = _applied.get()
    chain = [each for each in candidates if each not in applied]

    def without_these(*args: Any, **kwargs: Any) -> Any:
        token = _applied.set(applied | set(chain))
        try:
            return original(*args, **kwargs)
        finally:
            _applied.reset(token)

    return run_chain(chain, without_these if chain else original, args, kwargs)[0]


def _as_arguments(changed: Any, interception: Interception) -> tuple[tuple[Any, ...], dict[str, Any]]:
    is_pair = isinstance(changed, tuple) and len(changed) == 2
    if is_pair and isinstance(changed[0], (tuple, list)) and isinstance(changed[1], dict):
        return tuple(changed[0]), changed[1]
    raise CallError(
        "PG722",
        f"the before callback of {interception} returned a {type(changed).__name__}",
        why="it must return None, or the new arguments as (args, kwargs)",
    )


# -- between graphs


class InterceptedOp:
    """An op between two graphs, with its callbacks. Called with the layouts its results must have, then its arguments.

    The code behind it was compiled, and maybe captured, for results of that dtype and shape. The strides are put
    right here.
    """

    def __init__(self, original: Callable[..., Any], chain: Sequence[Interception], place: str) -> None:
        self._original = original
        self._chain = tuple(chain)
        self._place = place

    def __call__(self, layouts: Layouts, *args: Any, **kwargs: Any) -> Any:
        if is_off():
            return self._original(*args, **kwargs)
        result, is_changed = run_chain(self._chain, self._original, args, kwargs)
        return self._fit(result, layouts, args, kwargs) if is_changed else result

    def _fit(self, result: Any, layouts: Layouts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        held = {torch_compat.storage_id(atom) for atom in atoms((args, kwargs)) if isinstance(atom, torch.Tensor)}
        if not isinstance(layouts, list):
            return self._fit_one(result, layouts, held)
        if not isinstance(result, (tuple, list)) or len(result) != len(layouts):
            raise self._unfit(f"a {type(result).__name__}", f"the op returns {len(layouts)} values")
        return tuple(self._fit_one(part, layout, held) for part, layout in zip(result, layouts, strict=True))

    def _fit_one(self, value: Any, layout: Layout | None, held: set[int]) -> Any:
        if layout is None:
            return value
        dtype, device, shape, strides, is_view = layout
        if not isinstance(value, torch.Tensor):
            raise self._unfit(f"a {type(value).__name__}", "the op returns a tensor")
        if value.dtype != dtype or tuple(value.shape) != shape or value.device.type != device.type:
            expected = f"{dtype} {shape} on {device.type}"
            found = f"{value.dtype} {tuple(value.shape)} on {value.device.type}"
            raise self._unfit(found, f"the code behind it was compiled for {expected}")
        if is_view and torch_compat.storage_id(value) not in held:
            raise self._unfit("memory of its own", "the op returns a view of an argument, which graphs read in place")
        if is_view or value.stride() == strides:
            return value
        return torch.empty_strided(shape, strides, dtype=dtype, device=value.device).copy_(value)

    def _unfit(self, what: str, why: str) -> CallError:
        names = " and ".join(str(each) for each in self._chain)
        hint = "return what the op would, as to type and shape"
        return CallError("PG722", f"a callback of {names} returned {what}", where=self._place, why=why, hint=hint)


class RehearsedOp:
    """An :class:`InterceptedOp` of code that is not a graph: which results it must give is seen in its first call,
    which is the one that is recorded, with no callback.
    """

    def __init__(self, original: Callable[..., Any], chain: Sequence[Interception], place: str) -> None:
        self.__qualname__ = torch_compat.qualified_name(original) or str(original)
        self._op = InterceptedOp(original, chain, place)
        self._layouts: Layouts = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._op(self._layouts, *args, **kwargs)
        if is_off():
            self._layouts = layouts_of(result, (args, kwargs))
        return result


def layouts_of(result: Any, arguments: Any, number: Callable[[Any], Any] = int) -> Layouts:
    """What results an op must give, after those it gave. ``number`` makes a size of a layout from one of a tensor."""
    held = {torch_compat.storage_id(atom) for atom in atoms(arguments) if isinstance(atom, torch.Tensor)}
    one = partial(_layout, held=held, number=number)
    return [one(part) for part in result] if isinstance(result, (tuple, list)) else one(result)


def _layout(value: Any, held: set[int], number: Callable[[Any], Any]) -> Layout | None:
    if not isinstance(value, torch.Tensor) or torch_compat.unbacked_symbols(value):
        return None
    shape, strides = (tuple(map(number, sizes)) for sizes in (value.shape, value.stride()))
    return value.dtype, value.device, shape, strides, torch_compat.storage_id(value) in held
