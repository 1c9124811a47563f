"""Code that is captured as it runs: some of its calls break the capture and run between two graphs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from piecegraph.base import torch_compat
from piecegraph.base.plan import Cut
from piecegraph.base.structure import Structure, atoms
from piecegraph.base.user_code import user_line
from piecegraph.engine.eager_interception import ShownCalls, intercepting, wanting
from piecegraph.engine.python_state import PythonState
from piecegraph.errors import CallError
from piecegraph.graph.cut_rules import CutRules
from piecegraph.graph.interception import REASON, Interception, RehearsedOp, is_off
from piecegraph.graph.tracer import EAGER_OP_REASON
from piecegraph.tape.reads import (
    FlatResult,
    PathLeft,
    all_visible,
    hands_out_memory,
    other_than_tensors,
    reads_argument,
    reads_data,
    show_answer,
    why_between,
    without_waiting_later,
    writes_number,
)

MARKED = "marked as an eager op"
"""Why such a call breaks the capture."""

_recording: ContextVar[Breaker | None] = ContextVar("piecegraph_breaker", default=None)


def eager_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that must not be inside a CUDA graph: with ``frontend="breakable"`` it runs eagerly between two
    graphs.

    Its arguments may be anything; its result a tensor, or tuples, lists, dicts and dataclasses of tensors. At replay
    the function itself is called again, with the tensors of the recording and with the other arguments it had then.
    Outside a recording it is just called.

    Example:
        >>> @eager_op
        ... def attention(q, k, v):
        ...     return q * k * v
        >>> attention(2, 3, 4)
        24
    """
    untraceable = torch.compiler.disable(function, reason=EAGER_OP_REASON)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return untraceable(*args, **kwargs)
        breaker = _recording.get()
        return function(*args, **kwargs) if breaker is None else breaker.run_marked(function, args, kwargs)

    return call


def is_recording() -> bool:
    """Whether what runs now is recorded: not inside of a call that breaks the capture."""
    return _recording.get() is not None


class BreakRecorder(Protocol):
    """What a breaker asks of a :class:`~piecegraph.tape.record.Recorder`."""

    def begin(self) -> None:
        """Start a graph."""

    def end(self, label: str) -> None:
        """End the graph under way."""

    def observing(self) -> contextlib.AbstractContextManager[None]:
        """Around all that is recorded."""

    def run_break(
        self, label: Cut, function: Callable[..., Sequence[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Run a call between two graphs."""


class NoGraphs:
    """A :class:`BreakRecorder` that captures nothing, for a run that is only looked at."""

    def begin(self) -> None:
        pass

    def end(self, label: str) -> None:
        pass

    def observing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def run_break(
        self, label: Cut, function: Callable[..., Sequence[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        return list(function(*args, **kwargs))


@dataclass(frozen=True, slots=True)
class BreakRules:
    """What breaks a capture besides calls that are marked or intercepted."""

    ops: CutRules
    device: torch.device
    """The one that has graphs."""


class Breaker:
    """Hands the calls that break the capture to the recorder.

    Args:
        recorder: what captures.
        interceptions: calls with callbacks, which run between graphs.
        rules: what else breaks the capture; None for code that is known to need no more.
        state: memory outside of the call that the code writes to.
        python: what the code must leave as it is, but for what marked calls do.
    """

    def __init__(
        self,
        recorder: BreakRecorder,
        interceptions: Sequence[Interception],
        rules: BreakRules | None = None,
        state: Iterable[torch.Tensor] = (),
        python: PythonState | None = None,
    ) -> None:
        self._recorder = recorder
        self._interceptions = interceptions
        self._rules = rules
        self._python = python
        self._state = {torch_compat.storage_id(tensor): tensor for tensor in state}
        self._used: dict[int, torch.Tensor] = {}
        self._generators: dict[int, torch.Generator] = {}
        self.drawn_from: list[torch.Generator] = []
        """The generators that recorded calls were given."""
        self._undo: tuple[tuple[torch.Tensor, ...], tuple[torch.Generator, ...]] = ((), ())
        self._writes_number = False
        self.cuts: list[Cut] = []
        self._answers: list[Any] = []
        self._whole_ops = torch_compat.WholeOps()

    @property
    def reads(self) -> Reads:
        """What was read so far."""
        return Reads(tuple(self._answers), *self._undo)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Python that runs inside is captured, but for the calls that break the capture."""
        token = _recording.set(self)
        watching = self._rules is not None or bool(self._interceptions)
        try:
            self._recorder.begin()
            shown = ShownCalls(self._run_or_break) if watching else contextlib.nullcontext()
            # Code that asks whether it is captured would go another way than the call goes: reads are steps here.
            with torch_compat.capture_hidden(), self._recorder.observing(), shown:
                yield
            self._recorder.end("last graph")
        finally:
            _recording.reset(token)

    def _run_or_break(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._whole_ops.has(function, args, kwargs) and not reads_argument(function, args, kwargs):
            # What breaks a capture must be the same in every mode.
            return torch_compat.run_parts(self._run_or_break, function, args, kwargs)
        if self._rules is not None:
            self._notice(function, args, kwargs)
        if _recording.get() is not self:  # inside of a call that broke the capture
            return function(*args, **kwargs)
        if self._rules is not None and hands_out_memory(function, args):
            raise RuntimeError(f"{function.__qualname__} hands out memory of the host, and a replay would not")
        rules, chain = self._rules, wanting(self._interceptions, function)
        if rules is not None and not chain and reads_data(function, args, kwargs):
            return self._read(function, args, kwargs)
        wish = rules.ops.reason(function) if rules is not None else None
        if wish is not None or chain:
            reasons = ([wish[0]] if wish is not None else []) + ([REASON] if chain else [])
            run = RehearsedOp(function, chain, str(user_line() or "")) if chain else function
            return self._run(run, args, kwargs, "; ".join(reasons))
        if writes_number(function, args):
            return self._write_number(function, args)
        numbers = self._writes_number
        reason = why_between(function, args, kwargs, rules.device, numbers=numbers) if rules is not None else None
        if reason is None:
            return function(*args, **kwargs)
        args, kwargs = without_waiting_later(function, args, kwargs)
        return self._run(function, args, kwargs, reason, look=all_visible)

    def _write_number(self, function: Any, args: tuple[Any, ...]) -> Any:
        before, self._writes_number = self._writes_number, True
        try:
            return function(*args)
        finally:
            self._writes_number = before

    def _notice(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write down what a call may change that has to be put back if a later read leaves the tape."""
        tags = torch_compat.tags_of(function)
        if tags is None or torch_compat.is_view(function):
            return
        for atom in atoms((args, kwargs)):
            if isinstance(atom, torch.Tensor) and (storage := torch_compat.storage_id(atom)) in self._state:
                self._used[storage] = self._state[storage]
            elif isinstance(atom, torch.Generator):
                self._generators[torch_compat.generator_id(atom)] = atom
                if _recording.get() is self:
                    self.drawn_from.append(atom)
        if torch.Tag.nondeterministic_seeded in tags and self._rules is not None:
            for generator in _default_generators(self._rules.device):
                self._generators[torch_compat.generator_id(generator)] = generator

    def run_marked(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that is marked as an eager op. What it calls may be intercepted."""
        interceptions = self._interceptions

        @functools.wraps(function)
        def intercepted(*args: Any, **kwargs: Any) -> Any:
            with ShownCalls(intercepting(interceptions)):
                return function(*args, **kwargs)

        with self._python.not_inside() if self._python is not None else contextlib.nullcontext():
            return self._run(intercepted if interceptions else function, args, kwargs, MARKED)

    def _run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reason: str,
        look: Callable[[Sequence[Any]], list[Any]] = other_than_tensors,
    ) -> Any:
        """Run a function between two graphs."""
        cut = self._new_cut(function, reason)
        self.cuts.append(cut)
        return self._run_between(cut, FlatResult(function, look, partial(_returned_else, cut)), args, kwargs)

    def _read(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run between two graphs what tells Python about data. See Note [Paths]."""
        self._undo = tuple(self._used.values()), tuple(self._generators.values())
        flat = FlatResult(function, all_visible, partial(PathLeft, len(self._answers)))
        cut = self._new_cut(function, "the host reads its result")
        result = self._run_between(cut, flat, args, kwargs)
        self.cuts.append(self._new_cut(function, f"the host reads its result: {show_answer(flat.answer)}"))
        self._answers.append(flat.answer)
        if hasattr(result, "setflags"):  # an array: writing to the memory it shares would be seen by nobody
            result.setflags(write=False)
        return result

    def _new_cut(self, function: Callable[..., Any], reason: str) -> Cut:
        op = torch_compat.qualified_name(function) or getattr(function, "__qualname__", None) or str(function)
        return Cut(len(self.cuts), op, reason, user_line())

    def _run_between(self, cut: Cut, flat: FlatResult, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What breaks the capture inside of a call that does belongs to that call."""
        token = _recording.set(None)
        try:
            leaves = self._recorder.run_break(cut, flat, args, kwargs)
        finally:
            _recording.reset(token)
        return flat.structure.build(iter(leaves))


@dataclass(frozen=True, slots=True)
class Reads:
    """What Python was told about data in a run, and what the run had changed by then."""

    answers: tuple[Any, ...]
    used: tuple[torch.Tensor, ...]
    """Written state that was used before the last read, and may have been written to."""
    generators: tuple[torch.Generator, ...]
    """Of random numbers that were drawn before the last read."""


def _default_generators(device: torch.device) -> list[torch.Generator]:
    """Those that ops draw from unless they are given one: of the device, and of the host."""
    index = device.index if device.index is not None or device.type == "cpu" else torch.cuda.current_device()
    of_device = [torch.cuda.default_generators[index]] if index is not None and device.type == "cuda" else []
    return [torch.default_generator, *of_device]


def _returned_else(cut: Cut, _: tuple[Structure, list[Any]]) -> CallError:
    return CallError(
        "PG521",
        f"{cut} returned something else",
        where=str(cut.source or ""),
        why="numbers and structures it returns steered the code that was recorded, and cannot change at replay",
        hint="return tensors, or capture again",
    )


@contextlib.contextmanager
def callbacks(interceptions: Sequence[Interception]) -> Iterator[None]:
    """Run callbacks around the calls inside, in a run that is not recorded."""
    if not interceptions or is_off():
        yield
        return
    with ShownCalls(intercepting(interceptions)):
        yield
