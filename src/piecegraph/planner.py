"""The stages put together: a subject, a config and an example call in, a plan and its runner out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from piecegraph import torch_compat
from piecegraph.body import Body, TracedBody
from piecegraph.breakable import BreakableBody
from piecegraph.config import CompileConfig
from piecegraph.cut_rules import CutRules
from piecegraph.errors import located
from piecegraph.events import EventLog
from piecegraph.example import Example, read_example
from piecegraph.fuse import fuse_linears, separate
from piecegraph.graph_device import CudaGraphs, GraphDevice
from piecegraph.lower import Lowering, lower
from piecegraph.observe import is_tracing
from piecegraph.plan import Cut, Decision, Piece, Plan, SizeDim
from piecegraph.progress import Progress
from piecegraph.runner import PlanRunner
from piecegraph.signature import Binder, Call, Signature
from piecegraph.simulated import SimulatedGraphs
from piecegraph.sources import Weight
from piecegraph.split import split
from piecegraph.tracer import trace


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


class Planner:
    """Makes the plans of one subject. All of them share one memory pool, which no other subject has."""

    def __init__(self, subject: Subject, config: CompileConfig, events: EventLog) -> None:
        self._subject = subject
        self._config = config
        self._events = events
        self._rules = CutRules(config.splitting_ops)  # wrong op names are told now, not at the first call
        self.device: GraphDevice | None = None
        self.num_compiles = 0
        self._joined: list[Weight] = []

    def make(self, binder: Binder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Plan, PlanRunner, Call]:
        """Plan for calls like this one. Nothing is recorded yet."""
        subject, config = self._subject, self._config
        example = read_example(
            subject.function,
            binder,
            args,
            kwargs,
            dynamic_dims=config.dynamic_dims,
            static_inputs=config.options.static_inputs,
            training=subject.training,
        )
        clock = _Clock()
        made = self._trace(example, clock) if config.frontend == "trace" else self._watch(example, clock)
        call = made.signature.match(*binder.bind(args, kwargs), subject.training, args, kwargs)
        assert isinstance(call, Call), call
        device = _device_of(made.signature, subject)
        mode = self._choose_mode(made.signature, device)
        runner = PlanRunner(
            made.signature,
            made.body,
            self._graph_device(mode.choice, device),
            mode=mode.choice,
            config=config,
            events=self._events,
            example=call,
            function=subject.function,
        )
        plan = Plan(
            name=subject.name,
            frontend=config.frontend,
            device=str(device),
            mode=mode.choice,
            inputs=tuple(leaf.show(made.signature.size_names) for leaf in made.signature.tensors),
            size_dims=_size_dims(made.signature),
            steps=made.steps,
            decisions=(example.decision, mode, *made.decisions),
            seconds=clock.seconds,
        )
        return plan, runner, call

    def close(self) -> None:
        """Give back the memory pool, and the parameters their own memory."""
        self.device = None
        for weight in self._joined:
            separate([part.tensor for part in weight.parts])
        self._joined.clear()

    def _trace(self, example: Example, clock: _Clock) -> _Made:
        subject, config = self._subject, self._config
        if config.backend == "inductor" and any(tensor.is_cuda for tensor in example.tensors):
            torch_compat.start_compile_workers()
        with located(phase="trace"):
            traced = trace(subject.function, example, subject.weights())
        clock.lap("trace")
        decisions: tuple[Decision, ...] = ()
        if config.options.fuse_linears:
            traced, decision = fuse_linears(traced)
            self._joined += [w for w in traced.inputs.values() if isinstance(w, Weight) and w.parts]
            decisions = (decision,)
            clock.lap("fuse")
        with located(phase="compile"):
            segments = split(traced, self._rules, full=config.cudagraph_mode == "full")
            clock.lap("split")
            provenance = config.options.provenance or is_tracing()
            lowering = Lowering(config.backend, config.passes, config.options.inductor, provenance)
            program, num_compiles = lower(traced, segments, lowering, self._events, Progress(config.options.progress))
        self.num_compiles += num_compiles
        clock.lap("lower")
        body = TracedBody(traced, program, subject.current_weight)
        return _Made(traced.signature, body, tuple(step.label for step in program.steps), decisions)

    def _watch(self, example: Example, clock: _Clock) -> _Made:
        subject, config = self._subject, self._config
        with located(phase="trace"):
            weights, current = subject.weights(), subject.current_weight
            body = BreakableBody(subject.function, example, weights, current, config.splitting_ops)
        clock.lap("watch")
        return _Made(example.signature, body, (), ())

    def _choose_mode(self, signature: Signature, device: torch.device) -> Decision:
        wish = self._config.cudagraph_mode
        if wish == "none":
            return Decision("mode", "none", "asked for")
        if self._config.options.graph_device == "simulated":
            return Decision("mode", "piecewise", "simulated graphs asked for")
        if device.type != "cuda":
            reason = f"{device.type} has no graphs: pieces are called directly, on the same buffers and sizes"
            return Decision("mode", "direct", reason)
        devices = {leaf.device for leaf in signature.tensors} | {t.device for t in self._subject.weights().values()}
        if len({d for d in devices if d.type == "cuda"}) > 1:
            return Decision("mode", "none", "the model is spread over several GPUs, and a graph belongs to one")
        if wish == "auto":
            return Decision("mode", "piecewise", "the model is on a GPU")
        return Decision("mode", wish, "asked for")

    def _graph_device(self, mode: str, device: torch.device) -> GraphDevice | None:
        if mode in ("none", "direct"):
            return None
        if self.device is None:
            self.device = SimulatedGraphs() if device.type != "cuda" else CudaGraphs(device)
        return self.device


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
    carriers: list[list[tuple[str, int]]] = [[] for _ in signature.size_names]
    for leaf in signature.tensors:
        for dim, size in leaf.dynamic:
            carriers[size].append((leaf.name, dim))
    return tuple(SizeDim(name, tuple(pairs)) for name, pairs in zip(signature.size_names, carriers, strict=True))
