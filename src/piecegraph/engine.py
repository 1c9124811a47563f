"""Takes calls: finds the plan that fits, or has one made at the first call, or runs the function itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch

from piecegraph import torch_compat
from piecegraph.config import CompileConfig
from piecegraph.errors import CallError, PiecegraphError
from piecegraph.events import Event, EventLog
from piecegraph.plan import Plan
from piecegraph.planner import Planner, Subject
from piecegraph.ranks import report_failure
from piecegraph.runner import PlanRunner, Refusal
from piecegraph.signature import Binder, Call
from piecegraph.structure import flatten
from piecegraph.tape import Rerun, Tape

run_eagerly: ContextVar[bool] = ContextVar("piecegraph_eager", default=False)
"""Set inside ``with piecegraph.eager():``."""


class Engine:
    """The plans of one compiled function or module."""

    def __init__(self, subject: Subject, config: CompileConfig) -> None:
        self.subject = subject
        self.config = config
        self.events = EventLog(config.on_fallback)
        self.plans: list[tuple[Plan, PlanRunner]] = []
        self.planner = Planner(subject, config, self.events)
        self.num_calls = 0
        self.num_replays = 0
        self._binder = Binder(subject.function)
        self._lock = threading.RLock()
        self._is_closed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if run_eagerly.get() or torch.compiler.is_compiling():
            return self.subject.function(*args, **kwargs)
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
                return served[0]
        return self._fall_back(served.event, args, kwargs)

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the plan for an example call if there is none, and record its sizes."""
        with self._lock:
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
        """All that is recorded."""
        return [tape for _, runner in self.plans for tape in runner.library.tapes.values() if isinstance(tape, Tape)]

    @contextlib.contextmanager
    def rerun(self, tape: Tape) -> Iterator[Rerun]:
        """Make a recorded size ready to be run again; calls wait meanwhile."""
        with self._lock:
            self._check_open()
            found = [
                (runner.library, key)
                for _, runner in self.plans
                for key, recorded in runner.library.tapes.items()
                if recorded is tape
            ]
            if not found:
                hint = "select the kernels again"
                raise CallError("PG106", f"{self.name} has recorded anew since", hint=hint)
            library, key = found[0]
            with library.rerun(key) as ready:
                yield ready

    def forget(self) -> None:
        """Drop every plan; the next call makes a new one."""
        with self._lock:
            self.plans.clear()

    def close(self) -> None:
        """Give back graphs and memory. Calls afterwards are an error; the original is untouched."""
        with self._lock:
            self._is_closed = True
            self.plans.clear()
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
        if any(runner.signature.size_names for _, runner in self.plans):
            return _refuse("PG502", self._why_no_match(args, kwargs), "call capture() to plan for such inputs too")
        if len(self.plans) >= self.config.options.max_signatures:
            reason = f"{len(self.plans)} input signatures are recorded already"
            return _refuse("PG509", reason, "raise options['max_signatures']")
        return self._make_plan(args, kwargs)

    def _match(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[PlanRunner, Call] | None:
        names, values = self._binder.bind(args, kwargs)
        training = self.subject.training
        for _, runner in self.plans:
            call = runner.signature.match(names, values, training, args, kwargs)
            if isinstance(call, Call):
                return runner, call
        return None

    def _why_no_match(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        names, values = self._binder.bind(args, kwargs)
        training = self.subject.training
        reasons = [runner.signature.match(names, values, training, args, kwargs) for _, runner in self.plans]
        return "; ".join(dict.fromkeys(reason for reason in reasons if isinstance(reason, str)))

    def _needs_grad(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self.subject.module is not None and any(p.requires_grad for p in self.subject.module.parameters()):
            return True
        return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in flatten((args, kwargs))[0])

    def _make_plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[PlanRunner, Call]:
        plan, runner, call = self.planner.make(self._binder, args, kwargs)
        self.plans.append((plan, runner))
        return runner, call

    def _fall_back(self, event: Event, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.events.emit(event)
        if event.code != "PG502":
            return self.subject.function(*args, **kwargs)
        try:
            return self.subject.function(*args, **kwargs)
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
