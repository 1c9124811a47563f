"""Takes calls: finds the plan that fits, makes one at the first call, and falls back to the function itself where none does.

The stages are put together here and nowhere else: trace, split, lower (or the breakable front end), then a
:class:`~piecegraph.runner.PlanRunner` that records and replays.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from piecegraph import torch_compat
from piecegraph.body import Body, TracedBody
from piecegraph.breakable import BreakableBody
from piecegraph.config import CompileConfig
from piecegraph.cut_rules import CutRules
from piecegraph.dims import find_dynamic_dims
from piecegraph.errors import CallError
from piecegraph.events import Event, EventLog
from piecegraph.graph_device import CudaGraphs, GraphDevice
from piecegraph.lower import Lowering, lower
from piecegraph.plan import Cut, Decision, Piece, Plan, SizeDim
from piecegraph.progress import Progress
from piecegraph.runner import PlanRunner, Refusal
from piecegraph.signature import Binder, Call, Signature, make_signature
from piecegraph.simulated import SimulatedGraphs
from piecegraph.split import split
from piecegraph.structure import flatten
from piecegraph.trace import trace

run_eagerly: ContextVar[bool] = ContextVar("piecegraph_eager", default=False)
"""Set inside ``with piecegraph.eager():``."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is compiled."""

    function: Callable[..., Any]
    """The original: a function, or a module's own forward."""
    name: str
    module: torch.nn.Module | None

    @property
    def training(self) -> bool | None:
        return None if self.module is None else self.module.training

    def weights(self) -> dict[str, torch.Tensor]:
        """The module's parameters and buffers by name; names that share a tensor are all there."""
        if self.module is None:
            return {}
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        return parameters | dict(self.module.named_buffers(remove_duplicate=False))

    def current_weight(self, name: str, recorded: torch.Tensor) -> torch.Tensor:
        """The tensor that bears a weight's name now; the recorded one for globals and tensors that lost their name."""
        owner: Any = self.module
        for part in name.split("."):
            owner = getattr(owner, part, None)
        return owner if isinstance(owner, torch.Tensor) else recorded


class Engine:
    """The plans of one compiled function or module."""

    def __init__(self, subject: Subject, config: CompileConfig) -> None:
        self.subject = subject
        self.config = config
        self.events = EventLog(config.on_fallback)
        self.plans: list[tuple[Plan, PlanRunner]] = []
        self.num_calls = 0
        self.num_replays = 0
        self.num_compiles = 0
        self._binder = Binder(subject.function)
        self._rules = CutRules(config.splitting_ops)  # wrong op names are told now, not at the first call
        self._lock = threading.RLock()
        self._device: GraphDevice | None = None
        self._is_closed = False

    # -- calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if run_eagerly.get() or torch.compiler.is_compiling():
            return self.subject.function(*args, **kwargs)
        with self._lock:
            self._check_open()
            self.num_calls += 1
            found = self._find(args, kwargs)
            served = found if isinstance(found, Refusal) else found[0].serve(found[1])
            if not isinstance(served, Refusal):
                self.num_replays += served[1]
                return served[0]
        return self._fall_back(served.event, args, kwargs)

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the plan for an example call if there is none, and record its sizes."""
        with self._lock:
            self._check_open()
            runner, call = self._match(args, kwargs) or self._make_plan(args, kwargs)
            if runner.mode != "none":
                runner.record_listed(call)

    def close(self) -> None:
        """Give back graphs and memory. Calls afterwards are an error; the original is untouched."""
        with self._lock:
            self._is_closed = True
            self.plans.clear()
            self._device = None

    def forget(self) -> None:
        """Drop every plan; the next call makes a new one."""
        with self._lock:
            self.plans.clear()

    def _check_open(self) -> None:
        if self._is_closed:
            raise CallError("PG106", f"{self.subject.name} was called after close()", hint="call the original, or compile again")

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[PlanRunner, Call] | Refusal:
        if torch.is_grad_enabled() and self._needs_grad(args, kwargs):
            hint = "call under torch.no_grad() or torch.inference_mode()"
            return Refusal(Event("PG501", "call", "gradients are on and a parameter or input requires them", hint))
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            return Refusal(Event("PG506", "call", "a plan does not know autocast", "put autocast inside forward"))
        found = self._match(args, kwargs)
        if found is not None:
            overlap = _overlap(*found)
            return found if overlap is None else Refusal(overlap)
        if not self.plans:
            return self._make_plan(args, kwargs)
        if any(runner.signature.size_names for _, runner in self.plans):
            return Refusal(Event("PG502", "call", self._why_no_match(args, kwargs), "call capture() with such inputs to plan for them too"))
        if len(self.plans) >= self.config.options.max_signatures:
            return Refusal(
                Event("PG509", "call", f"{len(self.plans)} input signatures are recorded already", "raise options['max_signatures']")
            )
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
        reasons = [runner.signature.match(names, values, self.subject.training, args, kwargs) for _, runner in self.plans]
        return "; ".join(dict.fromkeys(reason for reason in reasons if isinstance(reason, str)))

    def _needs_grad(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self.subject.module is not None and any(p.requires_grad for p in self.subject.module.parameters()):
            return True
        return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in flatten((args, kwargs))[0])

    def _fall_back(self, event: Event, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.events.fallback(event)
        try:
            return self.subject.function(*args, **kwargs)
        except RuntimeError as error:
            # The reason for not using the plan is most likely also why the function fails.
            raise CallError(event.code, f"{self.subject.name} failed", why=f"{event.reason}; run eagerly, it raised: {error}") from error

    # -- plans

    def _make_plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[PlanRunner, Call]:
        clock = _Clock()
        made = (self._trace if self.config.frontend == "trace" else self._watch)(args, kwargs, clock)
        signature = made.signature
        call = signature.match(*self._binder.bind(args, kwargs), self.subject.training, args, kwargs)
        assert isinstance(call, Call), call
        mode, why = self._choose_mode(signature)
        runner = PlanRunner(
            signature,
            made.body,
            self._device_for(signature, mode),
            mode=mode,
            config=self.config,
            events=self.events,
            example=call,
            function=self.subject.function,
        )
        plan = Plan(
            name=self.subject.name,
            frontend=self.config.frontend,
            device=str(_device_of(signature, self.subject)),
            mode=mode,
            inputs=tuple(leaf.show(signature.size_names) for leaf in signature.tensors),
            size_dims=_size_dims(signature),
            steps=made.steps,
            decisions=(*made.decisions, Decision("mode", mode, why)),
            seconds=clock.seconds,
        )
        self.plans.append((plan, runner))
        return runner, call

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], clock: _Clock) -> _Made:
        config = self.config
        if config.backend == "inductor" and any(t.is_cuda for t in flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)):
            torch_compat.start_compile_workers()
        traced = trace(
            self.subject.function,
            self._binder,
            args,
            kwargs,
            weights=self.subject.weights(),
            dynamic_dims=config.dynamic_dims,
            static_inputs=config.options.static_inputs,
            training=self.subject.training,
        )
        clock.lap("trace")
        segments = split(traced, self._rules, full=config.cudagraph_mode == "full")
        clock.lap("split")
        lowering = Lowering(config.backend, config.passes, config.options.inductor)
        program, num_compiles = lower(traced, segments, lowering, self.events, Progress(config.options.progress))
        self.num_compiles += num_compiles
        clock.lap("lower")
        body = TracedBody(traced, program, self.subject.current_weight)
        return _Made(traced.signature, body, tuple(step.label for step in program.steps), traced.decisions)

    def _watch(self, args: tuple[Any, ...], kwargs: dict[str, Any], clock: _Clock) -> _Made:
        config, function, binder = self.config, self.subject.function, self._binder
        names, values = binder.bind(args, kwargs)
        leaves, _, structure = flatten(tuple(values))
        paths = [path for name, value in zip(names, values, strict=True) for path in flatten(value, name)[1]]
        requests, decision = find_dynamic_dims(function, leaves, paths, config.dynamic_dims)
        signature = make_signature(names, values, requests, config.options.static_inputs, self.subject.training)
        call = signature.match(names, values, self.subject.training, args, kwargs)
        assert isinstance(call, Call), call
        constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def run(tensors: Any) -> Any:
            filled = list(constants)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            called_args, called_kwargs = binder.unbind(args, kwargs, list(structure.build(iter(filled))))
            return function(*called_args, **called_kwargs)

        body = BreakableBody(run, self.subject.weights(), self.subject.current_weight, config.splitting_ops, call.tensors, call.sizes)
        clock.lap("watch")
        return _Made(signature, body, (), (decision,))

    def _choose_mode(self, signature: Signature) -> tuple[str, str]:
        wish, device = self.config.cudagraph_mode, _device_of(signature, self.subject)
        if wish == "none":
            return "none", "asked for"
        if self.config.options.graph_device == "simulated":
            return "piecewise", "simulated graphs asked for"
        if device.type != "cuda":
            return "direct", f"{device.type} has no graphs: pieces are called directly, on the same buffers and sizes"
        devices = {leaf.device for leaf in signature.tensors} | {t.device for t in self.subject.weights().values()}
        if len({d for d in devices if d.type == "cuda"}) > 1:
            return "none", "the model is spread over several GPUs, and a graph belongs to one"
        return ("full", "asked for") if wish == "full" else ("piecewise", "asked for" if wish == "piecewise" else "the model is on a GPU")

    def _device_for(self, signature: Signature, mode: str) -> GraphDevice | None:
        """One pool and capture stream for all plans of this engine, and none shared with any other."""
        if mode in ("none", "direct"):
            return None
        if self._device is None:
            simulated = self.config.options.graph_device == "simulated"
            self._device = SimulatedGraphs() if simulated else CudaGraphs(_device_of(signature, self.subject))
        return self._device


@dataclass(frozen=True)
class _Made:
    """What a front end gives."""

    signature: Signature
    body: Body
    steps: tuple[Piece | Cut, ...]
    decisions: tuple[Decision, ...]


class _Clock:
    """Times the stages of making a plan."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._laps: list[tuple[str, float]] = []

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self._laps.append((stage, now - self._last))
        self._last = now

    @property
    def seconds(self) -> tuple[tuple[str, float], ...]:
        return tuple(self._laps)


def _device_of(signature: Signature, subject: Subject) -> torch.device:
    devices = [leaf.device for leaf in signature.tensors] + [tensor.device for tensor in subject.weights().values()]
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


def _size_dims(signature: Signature) -> tuple[SizeDim, ...]:
    return tuple(
        SizeDim(name, tuple((leaf.name, dim) for leaf in signature.tensors for dim, size in leaf.dynamic if size == index))
        for index, name in enumerate(signature.size_names)
    )


def _overlap(runner: PlanRunner, call: Call) -> Event | None:
    """Whether an argument that is written to shares memory with another: their copies would not."""
    for i in runner.body.written_calls:
        storage = torch_compat.storage_id(call.tensors[i])
        for j, other in enumerate(call.tensors):
            if j != i and torch_compat.storage_id(other) == storage:
                names = [leaf.name for leaf in runner.signature.tensors]
                return Event("PG206", "call", f"{names[i]} is written to and shares memory with {names[j]}")
    return None
