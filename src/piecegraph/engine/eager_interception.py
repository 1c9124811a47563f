"""Interceptions in code that runs as it is: a pair of torch's modes that show every call.

A mode belongs to one thread. Functions such as ``F.linear`` are seen as they are called; what they are made of, and
ops called from C++, are seen at the dispatcher. FakeTensors are somebody's trace and pass untouched.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from piecegraph.base import torch_compat
from piecegraph.base.call_stack import calling_modules, current_path, path_of, paths_from
from piecegraph.graph import interception
from piecegraph.graph.interception import Interception

_P = ParamSpec("_P")
_R = TypeVar("_R")

"""The module that paths start from; None for the outermost one that is being called."""

RunCall = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Runs a call that a mode was shown: (function, args, kwargs)."""


class _Functions(TorchFunctionMode):
    def __init__(self, run: RunCall) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # Dynamo traces modes, too
            return func(*args, **(kwargs or {}))
        return self._run(func, args, kwargs or {})


class _Ops(torch_compat.WatchingMode):
    def __init__(self, run: RunCall) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {})


class ShownCalls:
    """Hands every call that this thread makes inside a ``with`` block to a function."""

    def __init__(self, run: RunCall, *, innermost: bool = False) -> None:
        self._functions, self._ops = _Functions(run), _Ops(run)
        self._innermost = innermost

    def __enter__(self) -> ShownCalls:
        torch_compat.add_modes(self._functions, self._ops, innermost=self._innermost)
        return self

    def __exit__(self, *_: object) -> None:
        torch_compat.remove_modes(self._functions, self._ops)


def intercepting(interceptions: Sequence[Interception]) -> RunCall:
    """Runs calls with the callbacks of those interceptions that want them."""

    def run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        chain = [] if interception.is_off() else wanting(interceptions, function)
        if not chain or torch_compat.is_faked((args, kwargs)):
            return function(*args, **kwargs)
        return interception.run_unapplied(chain, function, args, kwargs)

    return run


def wanting(interceptions: Sequence[Interception], function: Any) -> list[Interception]:
    """The interceptions that are for a call made here and now."""
    found = [each for each in interceptions if each.wants(function)]
    if any(each.module is not None for each in found):
        path = current_path()
        found = [each for each in found if each.wants_module(path)]
    return found


@contextlib.contextmanager
def as_eager_code(root: torch.nn.Module | None) -> Iterator[None]:
    """Run the original of something compiled: what is intercepted in it is intercepted here, in any thread."""
    interceptions = interception.registry.live
    if not interceptions:
        yield
        return
    with paths_from(root), ShownCalls(intercepting(interceptions)):
        yield


class CallLog:
    """Writes down the calls of a run, and which were made inside which."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, tuple[torch.nn.Module, ...], int | None]] = []
        """(function, the modules that were being called, the call around it)."""
        self._around: int | None = None

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A :data:`RunCall`."""
        around, self._around = self._around, len(self._calls)
        self._calls.append((function, tuple(calling_modules()), around))
        try:
            return function(*args, **kwargs)
        finally:
            self._around = around

    def num_places(self, each: Interception, root: torch.nn.Module | None) -> int:
        """How many of the calls an interception is for. What a wanted call is made of does not count again."""
        wanted: list[bool] = []
        count = 0
        for function, calling, around in self._calls:
            is_inside = around is not None and wanted[around]
            is_wanted = not is_inside and each.wants(function) and each.wants_module(path_of(calling, root))
            count += is_wanted
            wanted.append(is_inside or is_wanted)
        return count


# -- the user's own code, thread by thread

_thread = threading.local()


class ThreadInterceptions:
    """The interceptions that were made in one thread, and the modes that show it the thread's calls.

    These modes come and go in any order with those of others, which are taken off the top of the stack. So they are
    below all others.
    """

    def __init__(self) -> None:
        self._ident = threading.get_ident()
        self._interceptions: list[Interception] = []
        self._shown = ShownCalls(intercepting(self._interceptions), innermost=True)
        self._is_shown = False

    @staticmethod
    def here() -> ThreadInterceptions:
        """Those of the current thread."""
        if not hasattr(_thread, "interceptions"):
            _thread.interceptions = ThreadInterceptions()
        found: ThreadInterceptions = _thread.interceptions
        return found

    def add(self, each: Interception) -> None:
        self._interceptions.append(each)
        if not self._is_shown:
            self._shown.__enter__()
            self._is_shown = True

    def discard(self, each: Interception) -> None:
        """From another thread the modes cannot be taken off the stack: without interceptions they do nothing."""
        self._interceptions.remove(each)
        if not self._interceptions and self._ident == threading.get_ident():
            self._shown.__exit__()
            self._is_shown = False

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, torch does not know of the modes at all: not Dynamo, not a recorder."""
        if not self._is_shown:
            yield
            return
        self._shown.__exit__()
        try:
            yield
        finally:
            if self._is_shown:  # a callback may have removed the last interception
                self._shown.__enter__()


def unintercepted(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function of ours that is no eager code of the user's, though it runs in the user's thread."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with ThreadInterceptions.here().suspended():
            return function(*args, **kwargs)

    return call
