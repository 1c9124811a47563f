"""The stages put together: a subject, a config and an example call in, plans and their runners out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CellType, FunctionType, MappingProxyType, MethodType
from typing import Any

import torch

from piecegraph.base import torch_compat
from piecegraph.base.config import CompileConfig
from piecegraph.base.events import Event, EventLog
from piecegraph.base.plan import Cut, Decision, Piece, Plan, SizeDim
from piecegraph.engine.breakable import BreakableBody
from piecegraph.engine.breaker import BreakRules
from piecegraph.engine.layer_check import Layers
from piecegraph.engine.mode import choose_mode, make_graph_device
from piecegraph.engine.outer_reads import MAX_VALUES
from piecegraph.engine.pipeline import Pipeline
from piecegraph.engine.python_state import PythonState, changes_python, outer_objects
from piecegraph.engine.runner import PlanRunner
from piecegraph.engine.trace_check import check_trace
from piecegraph.engine.watch import Watched, refuse_moved, watch, watch_example
from piecegraph.errors import PiecegraphError, TraceError, describe, located
from piecegraph.graph.cut_rules import CutRules
from piecegraph.graph.dims import EarlierShape
from piecegraph.graph.equal_layers import LayerStack, find_stack
from piecegraph.graph.example import Example, read_example, sizes_of
from piecegraph.graph.fuse import separate
from piecegraph.graph.interception import Interception
from piecegraph.graph.outside import OutsideValues
from piecegraph.graph.results import ResultLeaf as TracedLeaf
from piecegraph.graph.signature import Binder, Call, Signature, with_layout
from piecegraph.graph.sources import AnyUpdate, AttributeUpdate, FromGraph, Update, Weight, with_attributes
from piecegraph.graph.split import find_intercepted
from piecegraph.graph.tracer import Traced
from piecegraph.graph.views import StridedView
from piecegraph.tape.body import Body, TracedBody
from piecegraph.tape.buffers import rows_at
from piecegraph.tape.device import GraphDevice
from piecegraph.tape.library import TapeWatch


@dataclass(frozen=True, slots=True)
class Subject:
    """What is compiled."""

    function: Callable[..., Any]
    """The original: a function, or a module's own forward."""
    name: str
    module: torch.nn.Module | None

    def of_now(self, installed: object) -> Subject:
        """With the forward that the module has now, or had before ``installed`` was put in its place."""
        module = self.module
        if module is None:
            return self
        if vars(module).get("forward") is not installed:
            return replace(self, function=module.forward)
        qualname = getattr(getattr(self.function, "__func__", None), "__qualname__", "")
        if qualname not in (f"{cls.__qualname__}.forward" for cls in type(module).__mro__):  # it was the module's own
            return self
        return replace(self, function=MethodType(type(module).forward, module))

    @property
    def training(self) -> bool | None:
        """Its module's; of TorchScript's modules, those that are frozen have none."""
        return None if self.module is None else getattr(self.module, "training", None)

    def weights(self) -> dict[str, torch.Tensor]:
        """The module's parameters and buffers by name; names that share a tensor are all there."""
        if self.module is None:
            return {}
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        return parameters | dict(self.module.named_buffers(remove_duplicate=False))

    def layers(self) -> LayerStack | None:
        """The layers of which some need be traced. See Note [Equal layers]."""
        module, function = self.module, self.function
        if module is None:
            return _stack_in_closure(function)
        if not isinstance(function, MethodType) or function.__self__ is not module:
            return None
        return find_stack(module, lambda model: MethodType(function.__func__, model))

    def current_weight(self, name: str, recorded: torch.Tensor) -> torch.Tensor:
        """The tensor that bears a weight's name now; the recorded one for globals and tensors that lost their name."""
        owner: Any = self.module
        for part in name.split("."):
            owner = getattr(owner, part, None)
        return owner if isinstance(owner, torch.Tensor) else recorded


def _stack_in_closure(function: Callable[..., Any]) -> LayerStack | None:
    """The layers of the only module among the outer variables of a function."""
    closure = function.__closure__ or () if isinstance(function, FunctionType) else ()
    places: dict[int, torch.nn.Module] = {}
    for place, cell in enumerate(closure):
        with contextlib.suppress(ValueError):  # it is empty
            if isinstance(cell.cell_contents, torch.nn.Module):
                places[place] = cell.cell_contents
    if len(places) != 1:
        return None
    [(place, module)] = places.items()

    def function_of(model: torch.nn.Module) -> Callable[..., Any]:
        cells = (*closure[:place], CellType(model), *closure[place + 1 :])
        other = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
        other.__kwdefaults__ = function.__kwdefaults__
        return other

    return find_stack(module, function_of)


@dataclass(frozen=True)
class Blueprint:
    """One kind of call, understood but not cut yet. Plans with different cuts are made from it."""

    signature: Signature
    source: Traced | BreakableBody
    outside: OutsideValues | None
    """What else must be as it was; None if nothing."""
    device: torch.device
    decisions: tuple[Decision, ...]
    pipeline: Pipeline

    @property
    def classes(self) -> list[type]:
        """Whose methods may run, beside those of modules."""
        return [*self.source.classes, *self.source.outside.classes]

    def num_places(self, interception: Interception) -> int:
        """How many calls of the function an interception is for."""
        if isinstance(self.source, Traced):
            return len(find_intercepted(self.source.graph, [interception]))
        return self.source.num_places(interception)


class NeitherWayError(TraceError):
    """A function can neither be traced nor run under those who watch it; it may well run without them."""


class Planner:
    """Makes the plans of one subject. All of them share one memory pool, which no other subject has."""

    def __init__(self, subject: Subject, config: CompileConfig, events: EventLog) -> None:
        self.subject = subject
        self._config = config
        self._events = events
        self._rules = CutRules(config.splitting_ops)  # wrong op names are told now, not at the first call
        self.device: GraphDevice | None = None
        self.num_compiles = 0
        self._joined: list[Weight] = []

    def example(
        self,
        binder: Binder,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        earlier: Mapping[str, EarlierShape] = MappingProxyType({}),
    ) -> Example:
        """Take a call apart.

        Args:
            earlier: the shapes of a call that differs from this one in nothing else.
        """
        return read_example(
            self.subject.function,
            binder,
            args,
            kwargs,
            dynamic_dims=self._config.dynamic_dims,
            static_inputs=self._config.options.static_inputs,
            training=self.subject.training,
            earlier=earlier,
        )

    def read(self, example: Example) -> tuple[Blueprint, Call | str]:
        """Understand calls like this one; also returns the call, or why not even this one can be served."""
        subject, config = self.subject, self._config
        is_full = config.cudagraph_mode == "full"
        pipeline = Pipeline(
            subject.name, config.backend, config.passes, self._rules, config.options, self._events, is_full
        )
        source, decisions = self._understand(example, pipeline)
        signature = source.signature if isinstance(source, Traced) else example.signature
        if source.layout_reader is not None:
            signature = with_layout(signature, source.layout_reader)
        args, kwargs = example.args, example.kwargs
        call = signature.match(*example.binder.bind(args, kwargs), subject.training, args, kwargs)
        device = _device_of(signature, subject)
        outside = None if isinstance(source, Traced) and not source.outside.names else source.outside
        told = (example.decision, *decisions, *(pipeline.decisions if isinstance(source, Traced) else ()))
        return Blueprint(signature, source, outside, device, told, pipeline), call

    def make(self, blueprint: Blueprint, interceptions: Sequence[Interception], call: Call) -> PlanRunner:
        """Make a plan. Nothing is recorded yet.

        Args:
            interceptions: ops that are cut so that callbacks run around them. Such a plan pads nothing, because what
                callbacks do to padded rows, and padded rows to callbacks, is nobody's wish.
            call: one of the kind; taken as an example when buffers are made.
        """
        subject, signature = self.subject, blueprint.signature
        clock = blueprint.pipeline.clock
        before = dict(clock.seconds)
        body, steps, dump = self._cut(blueprint, interceptions)
        mode = self._choose_mode(signature, blueprint.device, is_cut=bool(interceptions))
        intercepted = [
            Decision("interception", _count_places(blueprint.num_places(each)), str(each)) for each in interceptions
        ]
        plan = Plan(
            name=subject.name,
            frontend="trace" if isinstance(blueprint.source, Traced) else "breakable",
            device=str(blueprint.device),
            mode=mode.choice,
            inputs=tuple(leaf.show(signature.size_names) for leaf in signature.tensors),
            size_dims=_size_dims(signature),
            steps=steps,
            decisions=(blueprint.decisions[0], mode, *blueprint.decisions[1:], *intercepted),
            seconds=_seconds_since(before if interceptions else {}, clock.seconds),
        )
        return PlanRunner(
            plan,
            signature,
            body,
            self._graph_device(mode.choice, blueprint.device),
            config=_without_padding(self._config) if interceptions else self._config,
            events=self._events,
            example=call,
            function=subject.function,
            pipeline=None if interceptions else blueprint.pipeline,
            watch=dump,
        )

    def release(self) -> None:
        """Give the parameters that were joined memory of their own."""
        for weight in self._joined:
            separate([part.tensor for part in weight.parts])
        self._joined.clear()

    def _understand(self, example: Example, pipeline: Pipeline) -> tuple[Traced | BreakableBody, tuple[Decision, ...]]:
        """By the front end that was asked for; else by a trace if there can be one."""
        wish = self._config.frontend
        if wish == "breakable":
            return self._watch(example, pipeline)
        try:
            return self._trace(example, pipeline)
        except TraceError as error:
            if wish == "trace" or error.code in _NO_MATTER_OF_TRACING:
                raise
            untraced = self._watch_instead(example, pipeline, error)
            if error.code == _IS_FIXED and not self._takes_other_sizes(example):
                raise
            if error.code == _CHANGES_STATE:  # not any more: what the first run keeps for later runs is there now
                with contextlib.suppress(TraceError):
                    return self._trace(example, pipeline)
            return untraced

    def _takes_other_sizes(self, example: Example) -> bool:
        """Whether the function itself works with other sizes than those of a call, each by itself: some ops are traced
        for one size only (``max_pool1d``, ``gru``).
        """
        leaves, own = example.signature.tensors, sizes_of(example.signature, example)

        def call(tensors: Sequence[torch.Tensor]) -> Any:
            args, kwargs = example.with_tensors(tensors)
            return self.subject.function(*args, **kwargs)

        def takes(sizes: tuple[int, ...]) -> bool:
            pairs = zip(example.tensors, leaves, strict=True)
            tensors = [rows_at(tensor, leaf, own, sizes) for tensor, leaf in pairs]
            try:
                watch(call, tensors)
            except Exception:  # noqa: BLE001 - whatever the function says of such a call
                return False
            return True

        others = [[(*own[:i], other, *own[i + 1 :]) for other in (2 * size, size + 1)] for i, size in enumerate(own)]
        return all(any(map(takes, choices)) for choices in others)

    def _watch_instead(
        self, example: Example, pipeline: Pipeline, error: TraceError
    ) -> tuple[BreakableBody, tuple[Decision, ...]]:
        """Take a function as it is, because it cannot be traced."""
        pipeline.clock.lap("trace")
        try:
            body, decisions = self._watch(example, pipeline)
        except Exception as second:  # the user's code ran: whatever it raised is why
            if isinstance(second, TraceError) and second.code == error.code == _CHANGES_STATE:
                raise error from None
            told, hint = repr(second), ""
            if isinstance(second, PiecegraphError):
                told, hint = describe(second.code, second.what, second.where, second.why), second.hint
            why = f"{error.why.rstrip('.')}; nor can it run as it is: {told}"
            kind = TraceError if isinstance(second, PiecegraphError) else NeitherWayError
            raise kind(
                error.code, error.what, where=error.where, why=why, hint=hint, phase="trace", line=error.line
            ) from second
        body.untraced = describe(error.code, error.what, error.where, error.why)
        lost = "with a trace, its pieces would be compiled" + (" and FX passes run" if self._config.passes else "")
        return body, (Decision("front end", "breakable", f"{body.untraced}; {lost}"), *decisions)

    def _trace(self, example: Example, pipeline: Pipeline) -> tuple[Traced, tuple[Decision, ...]]:
        subject = self.subject

        def find_layers() -> Layers | None:
            stack = subject.layers()
            return None if stack is None else Layers(stack, lambda function: watch_example(function, example))

        traced, decisions = pipeline.fuse(pipeline.trace(subject.function, example, subject.weights(), find_layers))
        decisions = (*traced.decisions, *decisions)
        self._joined += [w for w in traced.inputs.values() if isinstance(w, Weight) and w.parts]
        function = with_attributes(subject.function, traced.updates)
        watched = self._settled_run(function, traced.updates, example)
        refuse_moved(watched, example)
        try:
            check_trace(traced, watched, function, example)
        except TraceError as error:
            if pipeline.refuse_kept(error.why):
                return self._trace(example, pipeline)
            raise
        finally:
            pipeline.clock.lap("check")
        seen = replace(
            traced,
            results=_with_seen_aliases(traced, watched, subject.weights()),
            written_calls=tuple(sorted({*traced.written_calls, *watched.written_calls})),
            hidden_state=watched.written_state,
            layout_reader=watched.layout_reader,
            devices=() if any(isinstance(update, Update) for update in traced.updates) else watched.devices,
        )
        if names := ", ".join(name for update in traced.updates for name in update.names):
            decisions = (*decisions, Decision("set at every call", names, "what they are set to is part of the result"))
        if traced.left_out:
            reason = "they change no tensor, and a replay runs no Python"
            decisions = (*decisions, Decision("left out of replays", ", ".join(traced.left_out), reason))
        return seen, decisions

    def _settled_run(self, function: Callable[..., Any], updates: Sequence[AnyUpdate], example: Example) -> Watched:
        """Run a function that was traced. What it changes in Python is refused, also what no tracer tells of (a set, an
        iterator), unless it is known, or happens once: then something was kept for later calls.
        """
        known = {(id(each.owner), key) for each in updates if isinstance(each, AttributeUpdate) for key in each.keys}
        own, module = self.subject.function, self.subject.module
        roots = {**outer_objects(own), **({} if module is None else {"self": module})}
        first = PythonState(roots)
        watched = watch_example(function, example)
        if (change := first.change(known)) is None:
            return watched
        second = PythonState(roots)
        watched = watch_example(function, example)
        if second.change(known) is None:
            return watched
        first.restore()
        raise changes_python(change)

    def _watch(self, example: Example, pipeline: Pipeline) -> tuple[BreakableBody, tuple[Decision, ...]]:
        subject = self.subject
        with located(phase="trace"):
            body = BreakableBody(
                subject.function,
                example,
                subject.weights(),
                subject.current_weight,
                BreakRules(self._rules, _device_of(example.signature, subject)),
                subject.module,
            )
        pipeline.clock.lap("check")
        if not body.leaves_out:
            return body, ()
        reason = "the code names more outside of the call: a change of one of the others is not noticed"
        return body, (Decision("values outside", f"{MAX_VALUES:,} are looked at", reason),)

    def _cut(
        self, blueprint: Blueprint, interceptions: Sequence[Interception]
    ) -> tuple[Body, tuple[Piece | Cut, ...], TapeWatch | None]:
        """What the plan runs, its steps as far as they are known, and what is told when it is recorded."""
        source = blueprint.source
        if isinstance(source, BreakableBody):
            dump = blueprint.pipeline.open_dump()
            if dump is not None:
                dump.finish_untraced(source.untraced)
            return source.with_interceptions(interceptions) if interceptions else source, (), dump
        if interceptions and blueprint.pipeline.is_full:
            self._events.emit(cut_while_intercepted(self.subject.name))
        lowered = blueprint.pipeline.cut(source, interceptions)
        self.num_compiles += lowered.num_compiles
        return TracedBody(source, lowered.program, self.subject.current_weight), lowered.steps, lowered.dump

    def _choose_mode(self, signature: Signature, device: torch.device, *, is_cut: bool) -> Decision:
        options, wish = self._config.options, self._config.cudagraph_mode
        if wish == "full" and is_cut:
            wish = "piecewise"
        if wish == "none":
            return Decision("mode", "none", "asked for")
        devices = {leaf.device for leaf in signature.tensors} | {t.device for t in self.subject.weights().values()}
        if len({d for d in devices if d.type == "cuda"}) > 1:
            return Decision("mode", "none", "the model is spread over several GPUs, and a graph belongs to one")
        is_simulated = options.graph_device == "simulated"
        reason = "simulated graphs asked for" if is_simulated else "the model is on a GPU"
        without = "pieces are called directly, on the same buffers and sizes"
        return choose_mode("mode", wish, device, options.graph_device, best="piecewise", reason=reason, without=without)

    def _graph_device(self, mode: str, device: torch.device) -> GraphDevice | None:
        if mode not in ("none", "direct") and self.device is None:
            self.device = make_graph_device(mode, device)
        return None if mode in ("none", "direct") else self.device


_NO_MATTER_OF_TRACING = ("PG203", "PG207")
"""Arguments are what they are."""
_IS_FIXED = "PG205"
"""A size was fixed, by the function or by its trace alone."""
_CHANGES_STATE = "PG202"
"""Python state would not change in a replay of any kind, but may be made once and stay."""


def _with_seen_aliases(traced: Traced, watched: Watched, weights: Mapping[str, torch.Tensor]) -> tuple[TracedLeaf, ...]:
    """The results, with those taken from the caller that were an argument itself when the function ran.

    A trace does not always know: dropout that drops nothing returns what it was given. What it was given may also be a
    part of an argument, or of the module's own memory, which nothing makes of a trace.
    """
    leaves = watched.leaves(len(traced.results)) or [None] * len(traced.results)
    older = {torch_compat.storage_id(tensor) for tensor in (*watched.inputs, *weights.values())}
    older -= {torch_compat.storage_id(tensor) for tensor in watched.written_state}
    results = []
    for leaf, found in zip(traced.results, leaves, strict=True):
        if isinstance(leaf, FromGraph) and torch_compat.has_memory(found):
            argument = watched.same_place(found)
            if argument is not None:
                leaf = StridedView(leaf.node, argument, is_whole=True)  # it stays an output: its op may write
            elif torch_compat.storage_id(found) in older:
                raise TraceError(
                    "PG208",
                    "the trace returns a copy where the function returns a view",
                    why="an op gave back what it was given, a part of an argument or of the module's memory",
                    hint='use frontend="breakable", which runs the code as it is',
                )
        results.append(leaf)
    return tuple(results)


def cut_while_intercepted(name: str) -> Event:
    """What is told of a full graph that is none for a while."""
    return Event("PG724", name, "callbacks are no part of a graph: it is cut at them while they are there")


def _seconds_since(before: Mapping[str, float], now: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """The stages of one plan, of those of all plans of a trace."""
    return tuple((stage, seconds - before.get(stage, 0.0)) for stage, seconds in now.items())


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
