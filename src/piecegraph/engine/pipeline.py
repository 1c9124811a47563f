"""The stages from a function to a program in their order: the same for any module and for a language model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from piecegraph.base import torch_compat
from piecegraph.base.config import Options
from piecegraph.base.events import EventLog
from piecegraph.base.plan import Cut, Decision, Piece
from piecegraph.base.progress import Progress, StageClock
from piecegraph.dumps.plan_dump import PlanDump
from piecegraph.dumps.structured import trace_plan
from piecegraph.dumps.target import target_of
from piecegraph.errors import located
from piecegraph.graph.cut_rules import CutRules
from piecegraph.graph.example import Example
from piecegraph.graph.fuse import fuse_linears
from piecegraph.graph.interception import Interception
from piecegraph.graph.lower import CompiledPieces, Lowering, lower
from piecegraph.graph.program import Program
from piecegraph.graph.split import Segment, split
from piecegraph.graph.tracer import Traced, trace
from piecegraph.provenance.observe import is_attributing


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
    clock: StageClock = field(default_factory=StageClock)
    compiled: CompiledPieces = field(default_factory=dict)
    """The pieces of all plans."""

    def trace(self, function: Callable[..., Any], example: Example, weights: Mapping[str, torch.Tensor]) -> Traced:
        """One graph of a function."""
        if self.backend == "inductor" and any(tensor.is_cuda for tensor in example.tensors):
            torch_compat.start_compile_workers()  # they come up meanwhile
        with located(phase="trace"):
            traced = trace(function, example, weights)
        self.clock.lap("trace")
        return traced

    def fuse(self, traced: Traced) -> tuple[Traced, tuple[Decision, ...]]:
        """The same graph with linears joined, if that is asked for."""
        if not self.options.fuse_linears:
            return traced, ()
        fused, decision = fuse_linears(traced)
        self.clock.lap("fuse")
        return fused, (decision,)

    def cut(self, traced: Traced, interceptions: Sequence[Interception] = ()) -> Lowered:
        """Cut a graph, at intercepted ops too, and compile the pieces that are not compiled yet."""
        self.clock.start()  # it may have been traced long ago
        provenance = self.options.provenance or is_attributing()
        dump = self.open_dump()
        lowering = Lowering(self.backend, self.passes, self.options.inductor, provenance, dump)
        with located(phase="compile"), contextlib.ExitStack() as telling:
            if dump is not None:
                telling.enter_context(dump.telling())
                dump.traced(traced)
            segments = split(traced, self.rules, full=self.is_full, interceptions=interceptions)
            self.clock.lap("split")
            if dump is not None:
                dump.cut(traced, segments)
            progress = Progress(self.options.progress)
            program, num_compiles = lower(traced, segments, lowering, self.events, progress, self.compiled)
        self.clock.lap("lower")
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
