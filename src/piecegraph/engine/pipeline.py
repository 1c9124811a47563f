"""The stages from a function to a program in their order: the same for any module and for a language model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from piecegraph.base import torch_compat
from piecegraph.base.cache_root import is_on
from piecegraph.base.config import Options
from piecegraph.base.describe import IndescribableError
from piecegraph.base.events import EventLog
from piecegraph.base.plan import Cut, Decision, Piece
from piecegraph.base.progress import Progress, StageClock
from piecegraph.dumps.plan_dump import PlanDump
from piecegraph.dumps.structured import trace_plan
from piecegraph.dumps.target import target_of
from piecegraph.engine.layer_check import Layers
from piecegraph.engine.plan_cache import KeptPlan, is_any_kept
from piecegraph.engine.plan_key import pipeline_factors
from piecegraph.errors import located
from piecegraph.graph.compile import CompiledPieces, Lowering
from piecegraph.graph.compile_aside import PieceCompilers
from piecegraph.graph.cut_rules import CutRules
from piecegraph.graph.example import Example
from piecegraph.graph.fuse import PlaceWeight, fuse_linears, place_by_copy
from piecegraph.graph.interception import Interception
from piecegraph.graph.lower import lower
from piecegraph.graph.program import Program
from piecegraph.graph.split import Segment, split
from piecegraph.graph.tracer import Traced, trace
from piecegraph.provenance.observe import is_attributing

_ROOM_ASIDE = 4 * 2**30
"""Free bytes of a GPU that others may use some of."""


@dataclass(frozen=True)
class Lowered:
    """A trace that was cut and compiled."""

    segments: tuple[Segment, ...]
    program: Program
    num_compiles: int
    dump: PlanDump | None = None

    @property
    def steps(self) -> tuple[Piece | Cut, ...]:
        return tuple(step.label for step in self.program.steps)


@dataclass(frozen=True)
class Variant:
    """Another way to lower a graph, for some sizes."""

    name: str
    passes: tuple[Callable[..., Any], ...]
    inductor: Mapping[str, Any]
    """Settings on top of the others."""


@dataclass(frozen=True)
class Pipeline:
    """How functions are traced, cut and compiled. One serves all plans that are made of one trace."""

    name: str
    """Of what is compiled."""
    backend: str | Callable[..., Any]
    passes: tuple[Callable[..., Any], ...]
    rules: CutRules
    options: Options
    events: EventLog
    is_full: bool = False
    has_many_pieces: bool = False
    """Distinct ones. Whoever says so closes :attr:`aside` when all are compiled."""
    op_modules: tuple[str, ...] = ()
    """The modules that register ops which passes put into graphs."""
    factors: Mapping[str, str] = field(default_factory=dict)
    """What else a trace depends on, besides the function and the call."""
    clock: StageClock = field(default_factory=StageClock)
    compiled: CompiledPieces = field(default_factory=dict)
    """The pieces of all plans."""
    aside: PieceCompilers = field(default_factory=PieceCompilers)
    """What compiles pieces of a new plan beside this process."""
    kept: list[KeptPlan] = field(default_factory=list)
    """What the cache has of each trace; the last is the one that is cut."""

    def trace(
        self,
        function: Callable[..., Any],
        example: Example,
        weights: Mapping[str, torch.Tensor],
        find_layers: Callable[[], Layers | None] = lambda: None,
    ) -> Traced:
        """One graph of a function, from the cache if it is there.

        Args:
            function: what is traced.
            example: the call.
            weights: tensors that are the function's own, by name.
            find_layers: those of which only some need be traced, if there are any. See Note [Equal layers].
        """
        is_compiled, gpu = self.backend == "inductor", next((t.device for t in example.tensors if t.is_cuda), None)
        if is_compiled and gpu is not None:
            if self.has_many_pieces and not is_any_kept(self.name):
                self._start_aside(gpu)  # it imports as much
            torch_compat.hash_triton()
        if is_compiled:
            torch_compat.import_inductor()
            if gpu is not None:
                torch_compat.hash_torch()
            self.clock.lap("import")
        kept = self.open_kept()
        found = None if kept is None else kept.find(function, example, weights)
        if found is None:
            if is_compiled:
                torch_compat.hash_triton()
                torch_compat.hash_torch()
            if is_compiled and gpu is not None:
                self._start_aside(gpu)
            found = self._trace_anew(function, example, weights, find_layers)
            if kept is not None:
                kept.take(found, function, weights)
        self.clock.lap("trace")
        return found

    def _trace_anew(
        self,
        function: Callable[..., Any],
        example: Example,
        weights: Mapping[str, torch.Tensor],
        find_layers: Callable[[], Layers | None],
    ) -> Traced:
        with located(phase="trace"), contextlib.ExitStack() as on_failure:
            on_failure.callback(self.aside.close)
            layers = find_layers()
            found = trace(function, example, weights, None if layers is None else layers.stack)
            if layers is not None and found.decisions and (found.updates or not layers.are_alike()):
                found = trace(function, example, weights)
            on_failure.pop_all()
        return found

    def fuse(self, traced: Traced, place: PlaceWeight = place_by_copy) -> tuple[Traced, tuple[Decision, ...]]:
        """The same graph with linears joined, if that is asked for."""
        if not self.options.fuse_linears:
            return traced, ()
        fused, decision = fuse_linears(traced, place)
        self.clock.lap("split")
        return fused, (decision,)

    def cut(self, traced: Traced, interceptions: Sequence[Interception] = ()) -> Lowered:
        """Cut a graph, at intercepted ops too, and compile the pieces that are not compiled yet."""
        if interceptions:
            self.clock.start()  # it was traced long ago
        kept = self.kept[-1] if self.kept and not interceptions else None

        return self._lower(traced, partial(self._split, traced, interceptions), kept)

    def cut_again(self, traced: Traced, variant: Variant) -> Lowered:
        """Cut a graph and compile it with other passes and settings; beside what was made of it, or of its like."""
        inductor = {**self.options.inductor, **variant.inductor}
        other = replace(
            self,
            name=f"{self.name} ({variant.name})",
            passes=variant.passes,
            options=replace(self.options, inductor=inductor),
        )
        return other._lower(traced, partial(other._split, traced, ()), self.kept[-1] if self.kept else None)

    def _split(self, traced: Traced, interceptions: Sequence[Interception]) -> Sequence[Segment]:
        segments = split(traced, self.rules, full=self.is_full, interceptions=interceptions)
        self.clock.lap("split")
        return segments

    def _lower(self, traced: Traced, make_segments: Callable[[], Sequence[Segment]], kept: KeptPlan | None) -> Lowered:
        dump = self.open_dump()
        lowering = Lowering(self.backend, self.passes, self.options.inductor, self._is_attributed(), dump)
        with located(phase="compile"), contextlib.ExitStack() as around:
            if dump is not None:
                around.enter_context(dump.telling())
                dump.traced(traced)
            segments = tuple(make_segments())
            if dump is not None:
                dump.cut(traced, segments)
            progress, pieces = Progress(self.options.progress), {} if kept is None else kept.pieces
            if kept is not None:
                around.enter_context(kept.compiling())
            on_gpu = _is_on_gpu(traced)
            around.enter_context(self.compilers(on_gpu=on_gpu, are_kept=kept is not None and kept.is_warm))
            if not self.aside.is_running:  # it may be started for what is left
                around.callback(self.aside.close)
            program, num_compiles = lower(
                traced, segments, lowering, self.events, progress, self.compiled, pieces, self.aside if on_gpu else None
            )
        self.clock.lap("compile")
        trace_plan(self.name, traced, segments, program)
        if dump is not None:
            program = dump.finish(program)
        return Lowered(segments, program, num_compiles, dump)

    def open_dump(self) -> PlanDump | None:
        """What is to be told of the plan that is made next; None if nobody asked for a dump."""
        target = target_of(self.options)
        if target is None:
            return None
        settings = Lowering(self.backend, (), self.options.inductor).settings
        return PlanDump(target, self.name, self.events, self.clock.seconds, settings)

    def keep(self, traced: Traced) -> None:
        """Let the plan outlive the process. To be called once it is complete: what is tuned at the first run, too."""
        for earlier in self.kept[:-1]:
            earlier.keep(None, {})
        if self.kept:
            self.kept[-1].keep(traced, self.compiled)

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        """Around all that compiles for this plan, whoever compiles: what is compiled inside is kept with it."""
        return self.kept[-1].compiling() if self.kept else contextlib.nullcontext()

    @property
    def is_kept(self) -> bool:
        """Whether an earlier process has compiled it all."""
        return bool(self.kept) and self.kept[-1].is_warm

    def compilers(self, *, on_gpu: bool, are_kept: bool) -> contextlib.AbstractContextManager[None]:
        """Around what lowers pieces: what helps to compile them, if there is more to do than to load them."""
        if self.backend != "inductor" or not on_gpu or are_kept:
            return contextlib.nullcontext()
        return torch_compat.inductor_compilers()

    def _start_aside(self, gpu: torch.device) -> None:
        """Start what compiles pieces beside this process, if there will be enough of them, and room on the GPU."""
        if not self.has_many_pieces or target_of(self.options) is not None or self._is_attributed():
            return
        if torch.cuda.mem_get_info(gpu)[0] >= _ROOM_ASIDE:
            self.aside.start(gpu, self.op_modules)

    def recall(self, what: str) -> int | None:
        """What an earlier start with the same plan has measured; None if it has not."""
        return self.kept[-1].recall(what) if self.kept else None

    def note(self, what: str, value: int | None) -> None:
        """Have it kept with the plan; None if it is not to be relied on any more."""
        if self.kept:
            self.kept[-1].note(what, value)

    def refuse_kept(self, reason: str) -> bool:
        """The last trace is wrong. Whether it came from the cache, which has it no more: another is worth a try."""
        if not self.is_kept:
            return False
        self.kept[-1].refuse(reason)
        return True

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What the cache and other processes had to do with it."""
        kept = (self.kept[-1].decision,) if self.kept else ()
        num_aside, num = self.aside.num_compiled, len(self.compiled)
        if not num_aside and not self.aside.refusals:
            return kept
        why = "; ".join(self.aside.refusals) or "while this process compiled the others"
        return (*kept, Decision("pieces", f"{num_aside} of {num} compiled by other processes", why))

    def open_kept(self) -> KeptPlan | None:
        """What the cache has of the next trace, which is to be asked for; None if nothing is kept."""
        if not self.options.cache or not is_on():
            return None
        if target_of(self.options) is not None:
            self._do_without_cache("a dump is asked for, which shows how a plan is made")
            return None
        try:
            how = pipeline_factors(
                self.backend,
                self.passes,
                self.rules,
                self.options,
                is_full=self.is_full,
                provenance=self._is_attributed(),
            )
        except IndescribableError as error:
            self._do_without_cache(f"there is no key: {error}")
            return None
        self.kept.append(KeptPlan(self.name, {**how, **self.factors}, self.events))
        return self.kept[-1]

    def _do_without_cache(self, reason: str) -> None:
        self.kept.append(KeptPlan(self.name, {}, self.events))
        self.kept[-1].decision = Decision("cache", "off", reason)

    def _is_attributed(self) -> bool:
        """Whether compiled code comes with a map to the lines it was made of."""
        return self.options.provenance or is_attributing()


def _is_on_gpu(traced: Traced) -> bool:
    values = map(torch_compat.meta_value, traced.inputs)
    return any(isinstance(value, torch.Tensor) and value.is_cuda for value in values)
