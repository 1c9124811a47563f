"""Takes calls: finds the plan that fits, or has one made at the first call, or runs the function itself."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch

from piecegraph.base import torch_compat
from piecegraph.base.config import CompileConfig
from piecegraph.base.events import Event, EventLog
from piecegraph.base.plan import Plan
from piecegraph.base.structure import flatten
from piecegraph.engine.eager_interception import ThreadInterceptions, as_eager_code
from piecegraph.engine.planner import Blueprint, Planner, Subject
from piecegraph.engine.runner import PlanRunner, Refusal
from piecegraph.errors import CallError, PiecegraphError
from piecegraph.explain.ranks import report_failure
from piecegraph.graph import interception
from piecegraph.graph.interception import Interception
from piecegraph.graph.signature import Binder, Call
from piecegraph.tape.tape import Rerun, Tape

run_eagerly: ContextVar[bool] = ContextVar("piecegraph_eager", default=False)
"""Set inside ``with piecegraph.eager():``."""


live_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
"""Everything that is compiled and not closed."""


class _Kind:
    """One kind of call: its plan, and while ops in it are intercepted, another one that is cut at them.

    The first is kept all the while, with its tapes, so that afterwards everything is as it was.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        self.blueprint = blueprint
        self._made: dict[tuple[Interception, ...], tuple[Plan, PlanRunner]] = {}
        self._live: tuple[Interception, ...] = ()
        self._concerning: tuple[Interception, ...] = ()
        """Those of the live ones that the function has places for."""
        self._last: tuple[Plan, PlanRunner] | None = None

    def runner(self, planner: Planner, call: Call) -> PlanRunner:
        """What serves such calls now; made if need be."""
        self._follow()
        if self._concerning not in self._made:
            self._made[self._concerning] = planner.make(self.blueprint, call, self._concerning)
        self._last = self._made[self._concerning]
        return self._last[1]

    @property
    def shown(self) -> tuple[Plan, PlanRunner]:
        """The plan for the next call, or the last one if that is not made yet."""
        self._follow()
        shown = self._made.get(self._concerning, self._last)
        assert shown is not None, "a kind of call is kept once it has a plan"
        return shown

    def _follow(self) -> None:
        """Notice that interceptions came or went."""
        live = interception.live()
        if live is not self._live:
            self._live = live
            self._concerning = tuple(each for each in live if self.blueprint.num_places(each))
            self._made = {key: self._made[key] for key in {(), self._concerning} if key in self._made}


class Engine:
    """The plans of one compiled function or module."""

    def __init__(self, subject: Subject, config: CompileConfig) -> None:
        self.subject = subject
        self.config = config
        self.events = EventLog(config.on_fallback)
        self._kinds: list[_Kind] = []
        self.planner = Planner(subject, config, self.events)
        self.num_calls = 0
        self.num_replays = 0
        self._binder = Binder(subject.function)
        self._lock = threading.RLock()
        self._is_closed = False
        live_engines.add(self)

    @property
    def plans(self) -> list[tuple[Plan, PlanRunner]]:
        """The plan of every kind of call seen."""
        with self._lock:
            return [kind.shown for kind in self._kinds]

    def num_places(self, each: Interception) -> int:
        """How many calls in the plans an interception is for."""
        with self._lock:
            return sum(kind.blueprint.num_places(each) for kind in self._kinds)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.subject.function(*args, **kwargs)
        if run_eagerly.get():
            return self._call_original(args, kwargs)
        if not interception.live():
            served = self._serve(args, kwargs)
        else:
            with ThreadInterceptions.here().suspended():
                served = self._serve(args, kwargs)
        return self._fall_back(served.event, args, kwargs) if isinstance(served, Refusal) else served[0]

    def _serve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool] | Refusal:
        with self._lock:
            self._check_open()
            self.num_calls += 1
            try:
                found = self._find(args, kwargs)
                served = found if isinstance(found, Refusal) else found[0].serve(found[1])
            except PiecegraphError as error:
                if error.phase:  # it was planned or recorded, not replayed
                    report_failure(self.subject.name, error)
                raise
            if not isinstance(served, Refusal):
                self.num_replays += served[1]
            return served

    def _call_original(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with as_eager_code(self.subject.module):
            return self.subject.function(*args, **kwargs)

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the plan for an example call if there is none, and record its sizes."""
        with ThreadInterceptions.here().suspended(), self._lock:
            self._check_open()
            try:
                runner, call = self._match(args, kwargs) or self._make_plan(args, kwargs)
                if runner.mode != "none":
                    runner.record_listed(call)
            except Exception as error:
                report_failure(self.subject.name, error)
                raise

    @property
    def name(self) -> str:
        return self.subject.name

    def tapes(self) -> list[Tape]:
        """All that is recorded. Raises after ``close()``."""
        with self._lock:
            self._check_open()
            return [
                tape for _, runner in self.plans for tape in runner.library.tapes.values() if isinstance(tape, Tape)
            ]

    @contextlib.contextmanager
    def rerun(self, tape: Tape) -> Iterator[Rerun]:
        """Make a recorded size ready to be run again; calls wait meanwhile."""
        with self._lock:
            self._check_open()
            library, key = next(
                (runner.library, key)
                for _, runner in self.plans
                for key, recorded in runner.library.tapes.items()
                if recorded is tape
            )
            with library.rerun(key) as ready:
                yield ready

    def forget(self) -> None:
        """Drop every plan; the next call makes a new one."""
        with self._lock:
            self._kinds.clear()

    def close(self) -> None:
        """Give back graphs and memory. Calls afterwards are an error; the original is untouched."""
        with self._lock:
            self._is_closed = True
            live_engines.discard(self)
            self._kinds.clear()
            self.planner.close()

    def _check_open(self) -> None:
        if self._is_closed:
            hint = "call the original, or compile again"
            raise CallError("PG106", f"{self.subject.name} was called after close()", hint=hint)

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[PlanRunner, Call] | Refusal:
        if torch.is_grad_enabled() and self._needs_grad(args, kwargs):
            reason = "gradients are on and a parameter or input requires them"
            return _refuse("PG501", reason, "call under torch.no_grad() or torch.inference_mode()")
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            return _refuse("PG506", "a plan does not know autocast", "put autocast inside forward")
        found = self._match(args, kwargs)
        if found is not None:
            return _overlap(*found) or found
        if any(kind.blueprint.signature.size_names for kind in self._kinds):
            return _refuse("PG502", self._why_no_match(args, kwargs), "call capture() to plan for such inputs too")
        if len(self._kinds) >= self.config.options.max_signatures:
            reason = f"{len(self._kinds)} input signatures are recorded already"
            return _refuse("PG509", reason, "raise options['max_signatures']")
        return self._make_plan(args, kwargs)

    def _match(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[PlanRunner, Call] | None:
        names, values = self._binder.bind(args, kwargs)
        training = self.subject.training
        for kind in self._kinds:
            call = kind.blueprint.signature.match(names, values, training, args, kwargs)
            if isinstance(call, Call):
                return kind.runner(self.planner, call), call
        return None

    def _why_no_match(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        names, values = self._binder.bind(args, kwargs)
        training = self.subject.training
        signatures = [kind.blueprint.signature for kind in self._kinds]
        reasons = [signature.match(names, values, training, args, kwargs) for signature in signatures]
        return "; ".join(dict.fromkeys(reason for reason in reasons if isinstance(reason, str)))

    def _needs_grad(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self.subject.module is not None and any(p.requires_grad for p in self.subject.module.parameters()):
            return True
        return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in flatten((args, kwargs))[0])

    def _make_plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[PlanRunner, Call]:
        blueprint, call = self.planner.read(self._binder, args, kwargs)
        kind = _Kind(blueprint)
        runner = kind.runner(self.planner, call)
        self._kinds.append(kind)
        return runner, call

    def _fall_back(self, event: Event, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.events.emit(event)
        if event.code != "PG502":
            return self._call_original(args, kwargs)
        try:
            return self._call_original(args, kwargs)
        except RuntimeError as error:
            # What does not fit the plan (another device, another dtype) is most likely why the function fails, too.
            why = f"{event.reason}; run eagerly, it raised: {error}"
            raise CallError(event.code, f"{self.subject.name} failed", why=why) from error


def _refuse(code: str, reason: str, hint: str = "") -> Refusal:
    return Refusal(Event(code, "call", reason, hint))


def _overlap(runner: PlanRunner, call: Call) -> Refusal | None:
    """Whether an argument that is written to shares memory with another: their copies would not."""
    for i in runner.body.written_calls:
        storage = torch_compat.storage_id(call.tensors[i])
        for j, other in enumerate(call.tensors):
            if j != i and torch_compat.storage_id(other) == storage:
                names = [leaf.name for leaf in runner.signature.tensors]
                return _refuse("PG206", f"{names[i]} is written to and shares memory with {names[j]}")
    return None
