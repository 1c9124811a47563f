"""The stages put together: a subject, a config and an example call in, plans and their runners out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from piecegraph.base import torch_compat
from piecegraph.base.config import CompileConfig
from piecegraph.base.events import Event, EventLog
from piecegraph.base.plan import Cut, Decision, Piece, Plan, SizeDim
from piecegraph.base.progress import Progress
from piecegraph.engine.breakable import BreakableBody
from piecegraph.engine.runner import PlanRunner
from piecegraph.errors import located
from piecegraph.graph.cut_rules import CutRules
from piecegraph.graph.example import Example, read_example
from piecegraph.graph.fuse import fuse_linears, separate
from piecegraph.graph.interception import Interception
from piecegraph.graph.lower import CompiledPieces, Lowering, lower
from piecegraph.graph.signature import Binder, Call, Signature
from piecegraph.graph.sources import Weight
from piecegraph.graph.split import find_intercepted, split
from piecegraph.graph.tracer import Traced, trace
from piecegraph.provenance.observe import is_attributing
from piecegraph.tape.body import Body, TracedBody
from piecegraph.tape.device import CudaGraphs, GraphDevice
from piecegraph.tape.simulated import SimulatedGraphs


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


@dataclass(frozen=True)
class Blueprint:
    """One kind of call, understood but not cut yet. Plans with different cuts are made from it."""

    signature: Signature
    source: Traced | BreakableBody
    device: torch.device
    decisions: tuple[Decision, ...]
    seconds: tuple[tuple[str, float], ...]
    compiled: CompiledPieces = field(default_factory=dict)
    """The pieces of all its plans."""

    def num_places(self, interception: Interception) -> int:
        """How many calls of the function an interception is for."""
        if isinstance(self.source, Traced):
            return len(find_intercepted(self.source.graph, [interception]))
        return self.source.num_places(interception)


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

    def read(self, binder: Binder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Blueprint, Call]:
        """Understand calls like this one."""
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
        source, decisions = self._trace(example, clock) if config.frontend == "trace" else self._watch(example, clock)
        signature = source.signature if isinstance(source, Traced) else example.signature
        call = signature.match(*binder.bind(args, kwargs), subject.training, args, kwargs)
        assert isinstance(call, Call), call
        device = _device_of(signature, subject)
        return Blueprint(signature, source, device, (example.decision, *decisions), clock.seconds), call

    def make(
        self, blueprint: Blueprint, call: Call, interceptions: Sequence[Interception] = ()
    ) -> tuple[Plan, PlanRunner]:
        """Make a plan. Nothing is recorded yet.

        Args:
            call: one of the kind; taken as an example when buffers are made.
            interceptions: ops that are cut so that callbacks run around them. Such a plan pads nothing, because what
                callbacks do to padded rows, and padded rows to callbacks, is nobody's wish.
        """
        subject, clock = self._subject, _Clock()
        body, steps, decisions = self._cut(blueprint, interceptions, clock)
        signature = blueprint.signature
        mode = self._choose_mode(signature, blueprint.device, is_cut=bool(interceptions))
        runner = PlanRunner(
            signature,
            body,
            self._graph_device(mode.choice, blueprint.device),
            mode=mode.choice,
            config=_without_padding(self._config) if interceptions else self._config,
            events=self._events,
            example=call,
            function=subject.function,
        )
        plan = Plan(
            name=subject.name,
            frontend=self._config.frontend,
            device=str(blueprint.device),
            mode=mode.choice,
            inputs=tuple(leaf.show(signature.size_names) for leaf in signature.tensors),
            size_dims=_size_dims(signature),
            steps=steps,
            decisions=(blueprint.decisions[0], mode, *blueprint.decisions[1:], *decisions),
            seconds=(*blueprint.seconds, *clock.seconds),
        )
        return plan, runner

    def close(self) -> None:
        """Give back the memory pool, and the parameters their own memory."""
        self.device = None
        for weight in self._joined:
            separate([part.tensor for part in weight.parts])
        self._joined.clear()

    def _trace(self, example: Example, clock: _Clock) -> tuple[Traced, tuple[Decision, ...]]:
        subject, config = self._subject, self._config
        if config.backend == "inductor" and any(tensor.is_cuda for tensor in example.tensors):
            torch_compat.start_compile_workers()
        with located(phase="trace"):
            traced = trace(subject.function, example, subject.weights())
        clock.lap("trace")
        if not config.options.fuse_linears:
            return traced, ()
        traced, decision = fuse_linears(traced)
        self._joined += [w for w in traced.inputs.values() if isinstance(w, Weight) and w.parts]
        clock.lap("fuse")
        return traced, (decision,)

    def _watch(self, example: Example, clock: _Clock) -> tuple[BreakableBody, tuple[Decision, ...]]:
        subject, config = self._subject, self._config
        with located(phase="trace"):
            body = BreakableBody(
                subject.function,
                example,
                subject.weights(),
                subject.current_weight,
                config.splitting_ops,
                subject.module,
            )
        clock.lap("watch")
        return body, ()

    def _cut(
        self, blueprint: Blueprint, interceptions: Sequence[Interception], clock: _Clock
    ) -> tuple[Body, tuple[Piece | Cut, ...], tuple[Decision, ...]]:
        """What the plan runs, its steps as far as they are known, and what was decided."""
        config, source = self._config, blueprint.source
        decisions = tuple(
            Decision("interception", _count_places(blueprint.num_places(each)), str(each)) for each in interceptions
        )
        if isinstance(source, BreakableBody):
            return source.with_interceptions(interceptions) if interceptions else source, (), decisions
        is_full = config.cudagraph_mode == "full"
        if interceptions and is_full:
            reason = "callbacks are no part of a graph: it is cut at them while they are there"
            self._events.emit(Event("PG724", self._subject.name, reason))
        with located(phase="compile"):
            segments = split(source, self._rules, full=is_full, interceptions=interceptions)
            clock.lap("split")
            provenance = config.options.provenance or is_attributing()
            lowering = Lowering(config.backend, config.passes, config.options.inductor, provenance)
            progress = Progress(config.options.progress)
            program, num_compiles = lower(source, segments, lowering, self._events, progress, blueprint.compiled)
        self.num_compiles += num_compiles
        clock.lap("lower")
        body = TracedBody(source, program, self._subject.current_weight)
        return body, tuple(step.label for step in program.steps), decisions

    def _choose_mode(self, signature: Signature, device: torch.device, *, is_cut: bool) -> Decision:
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
        if wish == "full" and is_cut:
            return Decision("mode", "piecewise", "full asked for, but ops are intercepted")
        return Decision("mode", wish, "asked for")

    def _graph_device(self, mode: str, device: torch.device) -> GraphDevice | None:
        if mode in ("none", "direct"):
            return None
        if self.device is None:
            self.device = SimulatedGraphs() if device.type != "cuda" else CudaGraphs(device)
        return self.device


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


def _without_padding(config: CompileConfig) -> CompileConfig:
    """The same for exact sizes, recorded as they occur. What callbacks return is checked at every replay."""
    options = replace(config.options, lazy=True, check_addresses="always")
    return replace(config, padding="never", capture_sizes="auto", options=options)


def _count_places(number: int) -> str:
    return "1 call" if number == 1 else f"{number} calls"


def _device_of(signature: Signature, subject: Subject) -> torch.device:
    devices = [leaf.device for leaf in signature.tensors] + [tensor.device for tensor in subject.weights().values()]
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


def _size_dims(signature: Signature) -> tuple[SizeDim, ...]:
    carriers: list[list[tuple[str, int]]] = [[] for _ in signature.size_names]
    for leaf in signature.tensors:
        for dim, size in leaf.dynamic:
            carriers[size].append((leaf.name, dim))
    return tuple(SizeDim(name, tuple(pairs)) for name, pairs in zip(signature.size_names, carriers, strict=True))
