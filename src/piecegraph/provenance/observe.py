"""Watching who launches what, while code runs: op by op, or line by line of a compiled wrapper.

What is seen goes to a :class:`CallSink`: a ledger at capture, marks in a profile otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, Protocol

import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.base.call_stack import current_origin
from piecegraph.base.origin import LaunchCall, Origin
from piecegraph.base.plan import Piece
from piecegraph.graph.program import Step, take, watched_steps
from piecegraph.provenance.origins.fx import all_origins, launch_calls, origins_by_line

_num_profiles = 0


@contextlib.contextmanager
def attributing() -> Iterator[None]:
    """What is compiled or recorded inside is attributed."""
    global _num_profiles
    _num_profiles += 1
    try:
        yield
    finally:
        _num_profiles -= 1


def is_attributing() -> bool:
    """Whether a profile is being taken."""
    return _num_profiles > 0


class CallSink(Protocol):
    """Is told of calls as they happen. Calls do not nest: what runs inside of one belongs to it."""

    @property
    def is_inside(self) -> bool:
        """Whether a call is under way."""

    def begin(self) -> None:
        """A call starts."""

    def end(self, make_call: Callable[[], LaunchCall]) -> None:
        """The call under way is over; what it was is worked out only if it did anything."""

    def settle(self, make_call: Callable[[], LaunchCall]) -> None:
        """A step is over: what it launched outside of any call belongs to the step as a whole."""


@contextlib.contextmanager
def one_call(sink: CallSink, make_call: Callable[[], LaunchCall]) -> Iterator[None]:
    """Everything inside is one call, or part of the one that is under way already."""
    if sink.is_inside:
        yield
        return
    sink.begin()
    try:
        yield
    finally:
        sink.end(make_call)


FindOrigins = Callable[[str], tuple[Origin, ...]]


class OpObserver(torch_compat.WatchingMode):
    """Every op is a call.

    Args:
        sink: is told.
        find_origins: the places in the model, given the op's name.
    """

    def __init__(self, sink: CallSink, find_origins: FindOrigins | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sink = sink
        self._find_origins = find_origins or (lambda op: (current_origin(op),))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_traced = torch.compiler.is_compiling() or (types and torch_compat.are_fake(tuple(types)))
        if is_traced or self._sink.is_inside or _is_mark(func):
            return func(*args, **kwargs)
        self._sink.begin()
        try:
            return func(*args, **kwargs)
        finally:
            self._sink.end(lambda: self._describe(func, args, kwargs))

    def _describe(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> LaunchCall:
        op = _op_of(func)
        return LaunchCall(op, self._find_origins(op), shapes_of((*args, *kwargs.values())))


def _origins_of_running(module: torch.fx.GraphModule) -> FindOrigins:
    """The origins of the node whose line of a traced module's code is running."""
    code, origins = torch_compat.forward_of(module).__code__, origins_by_line(module)

    def find(op: str) -> tuple[Origin, ...]:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        return origins.get(frame.f_lineno, ()) if frame is not None else ()

    return find


CallFunction = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def run_observed(
    step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], sink: CallSink, call_function: CallFunction
) -> Any:
    """Run a piece or a cut, and tell who launches what in it.

    Args:
        step: what to run.
        args: its arguments, slots filled in.
        kwargs: the same.
        sink: is told.
        call_function: calls what is compiled, or runs as a whole.
    """
    source = step.source
    if isinstance(step.label, Piece) and step.label.backend == "eager":
        # Layers that share a function have modules of their own, whose lines know the layer.
        with OpObserver(sink, _origins_of_running(source.module)):
            returned = source.module.forward(*args, **kwargs)
    elif source.compiled is not None:
        with _watched_lines(sink, source.compiled.file, launch_calls(source)):
            returned = call_function(step.function, args, kwargs)
    else:
        with one_call(sink, lambda: whole_step(step)):
            returned = call_function(step.function, args, kwargs)
    sink.settle(lambda: whole_step(step))
    return returned


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


@contextlib.contextmanager
def observing(sink: CallSink, call_function: CallFunction = _call) -> Iterator[None]:
    """Tell a sink of all that runs inside: steps of programs, and ops and Triton kernels outside of them.

    Args:
        sink: is told.
        call_function: calls what is compiled, or runs as a whole.
    """

    def run_step(step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Any]) -> list[Any]:
        returned = run_observed(step, take(args, values), take(kwargs, values), sink, call_function)
        return [returned if position is None else returned[position] for _, position in step.results]

    def around_launch(kernel: str) -> contextlib.AbstractContextManager[None]:
        return one_call(sink, lambda: LaunchCall(kernel, (current_origin(kernel),)))

    with watched_steps(run_step), torch_compat.triton_launches(around_launch), OpObserver(sink):
        yield


def whole_step(step: Step) -> LaunchCall:
    """A step as one call: with the origins of all that it computes."""
    name = str(step.label) if isinstance(step.label, Piece) else step.label.op
    calls = step.source.calls
    return LaunchCall(name, all_origins(calls), is_several=len(calls) > 1)


@contextlib.contextmanager
def _watched_lines(sink: CallSink, file: str, calls: Mapping[int, LaunchCall]) -> Iterator[None]:
    """Every line of a compiled piece's wrapper that launches something is a call."""
    line: int | None = None

    def finish() -> None:
        nonlocal line
        if line is not None:
            here, line = line, None
            sink.end(lambda: calls[here])

    def on_line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal line
        finish()
        if event == "line" and frame.f_lineno in calls:
            line = frame.f_lineno
            sink.begin()
        return on_line

    def on_call(frame: FrameType, event: str, arg: Any) -> Any:
        return on_line if frame.f_code.co_filename == file and line is None else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)
        finish()


def shapes_of(args: Iterable[Any]) -> tuple[str, ...]:
    """The layouts of the tensors among some arguments, and in lists of them: ``bfloat16[16, 4096]``."""
    shapes: list[str] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            shapes.append(_layout(arg.dtype, arg.shape))
        elif isinstance(arg, (list, tuple)):
            shapes += shapes_of(arg)
    return tuple(shapes)


@functools.lru_cache(maxsize=4096)
def _layout(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


@functools.lru_cache(maxsize=4096)
def _is_mark(func: Any) -> bool:
    """Whether an op only tells a profiler where the program is."""
    return bool(func.namespace == "profiler")


@functools.lru_cache(maxsize=4096)
def _op_of(func: Any) -> str:
    """The name of an op, whichever its overload."""
    return torch_compat.qualified_name(func).partition(".")[0]
