"""The kernels of graphs that are in use, and which of them a user means.

Each is a node of a captured graph, with the call that put it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from piecegraph.base.origin import GraphNode, GraphRecord, LaunchCall, Origin
from piecegraph.base.patterns import line_matches, module_matches, name_matches, op_matches, parse_line
from piecegraph.errors import KernelError, SelectionError
from piecegraph.provenance.names import short
from piecegraph.tape.tape import EagerStep, GraphStep, Inside, Tape

_MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class LiveKernel:
    """A node of a graph that is in use."""

    tape: Tape
    inside: Inside
    index: int

    @property
    def node(self) -> GraphNode:
        return self.inside.record.nodes[self.index]

    @property
    def call(self) -> LaunchCall | None:
        """What put it there."""
        number = self.node.call
        return None if number is None else self.inside.record.calls[number]

    @property
    def is_on(self) -> bool:
        """Whether replays run it."""
        return self.index not in self.inside.nodes.off

    def switch(self, *, on: bool) -> None:
        self.inside.nodes.switch(self.index, on=on)

    def __str__(self) -> str:
        return self.node.name or self.node.kind


def live_kernels(tapes: Sequence[Tape], owner: str) -> list[LiveKernel]:
    """All kernels of recorded graphs that may be left out.

    Args:
        tapes: what is recorded.
        owner: the name of what is compiled, for the error.
    """
    graphs = [(tape, step) for tape in tapes for step in tape.steps if isinstance(step, GraphStep)]
    known = [(tape, step.inside) for tape, step in graphs if step.inside is not None]
    if not known:
        why = "nothing is recorded yet" if not graphs else f"none of its {len(graphs)} graphs knows what it holds"
        hint = "compile with options={'provenance': True}" if graphs else "call it, or capture(), on a GPU first"
        raise KernelError("PG731", f"the kernels of {owner} are not known", why=why, hint=hint)
    return [LiveKernel(tape, inside, i) for tape, inside in known for i in _switchable(inside.record)]


def _switchable(graph: GraphRecord) -> list[int]:
    """The nodes that may be left out: all but memsets that prepare something for a kernel of the same call.

    What these set are the counters of a kernel whose blocks wait for each other. Left out and let in again, such a
    memset made a GEMM of cuBLAS hang or fail on an H200 (driver 580): a kernel that runs needs it, a kernel that does
    not run is not harmed by it.
    """
    launching = {node.call for node in graph.nodes if node.kind == "kernel"}
    return [i for i, node in enumerate(graph.nodes) if node.kind != "memset" or node.call not in launching]


@dataclass(frozen=True, slots=True)
class Where:
    """What is asked for; what is left out matches everything. Of a fused kernel, one origin that matches is enough."""

    op: str | None = None
    module: str | None = None
    line: str | None = None
    kernel: str | None = None
    piece: int | None = None
    size: int | str | tuple[int, ...] | None = None

    @property
    def asked(self) -> dict[str, Any]:
        """What is not left out."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.asked.items())

    def matches(self, live: LiveKernel) -> bool:
        """Whether this kernel is meant."""
        size = "x".join(map(str, self.size)) if isinstance(self.size, tuple) else str(self.size)
        if self.size is not None and live.tape.phase != size:
            return False
        if self.piece is not None and live.inside.record.title != f"piece {self.piece}":
            return False
        return self.matches_call(live.call, str(live))

    def matches_call(self, call: LaunchCall | None, kernel: str) -> bool:
        """Whether a kernel that a call launched is meant, whatever graph it is in."""
        if self.kernel is not None and not any(name_matches(name, self.kernel) for name in (kernel, short(kernel))):
            return False
        return (self.op is None and self.module is None and self.line is None) or bool(self.origins(call))

    def origins(self, call: LaunchCall | None) -> list[Origin]:
        """Those of a call's origins that are meant."""
        if call is None:
            return []
        return [origin for origin in call.origins or (Origin(call.op, ""),) if self._matches_origin(origin, call.op)]

    def _matches_origin(self, origin: Origin, called: str) -> bool:
        if self.op is not None and not any(op_matches(op, self.op) for op in (origin.op, called)):
            return False
        if self.module is not None and not module_matches(origin.module, self.module):
            return False
        if self.line is None:
            return True
        wanted = parse_line(self.line)
        return any(line_matches(frame, wanted) for frame in origin.stack)


def choose(where: Where, tapes: Sequence[Tape], owner: str) -> tuple[LiveKernel, ...]:
    """The kernels that are meant.

    Raises:
        SelectionError: if there are none; it lists what there is.
    """
    everything = live_kernels(tapes, owner)
    chosen = tuple(filter(where.matches, everything))
    if not chosen:
        raise _runs_between(where, tapes) or _nothing_matches(where, everything)
    return chosen


def _runs_between(where: Where, tapes: Sequence[Tape]) -> SelectionError | None:
    """What to say of an op that is there, but in no graph."""
    steps = [step for tape in tapes for step in tape.steps if isinstance(step, EagerStep)]
    found = [step.call for step in steps if where.matches_call(step.call, "")]
    if where.op is None or where.kernel is not None or not found:
        return None
    names = listed(list(dict.fromkeys(call.op for call in found if call is not None)))
    return SelectionError(
        "PG712",
        f"no kernel of a graph has {where}",
        why=f"{names} runs between the graphs",
        hint="piecegraph.intercept() observes it, replaces it or leaves it out",
    )


def _nothing_matches(where: Where, everything: Sequence[LiveKernel]) -> SelectionError:
    calls = [live.call for live in everything if live.call is not None]
    origins = list(dict.fromkeys(origin for call in calls for origin in call.origins))
    known: dict[str, list[str]] = {
        "op": [call.op for call in calls] + [origin.op for origin in origins],
        "module": [origin.module for origin in origins if origin.module],
        "line": [str(origin.line) for origin in origins if origin.line is not None],
        "kernel": [str(live) for live in everything],
        "piece": [live.inside.record.title.removeprefix("piece ") for live in everything],
        "size": [live.tape.phase for live in everything],
    }
    asked = where.asked
    alone = [name for name, value in asked.items() if not any(map(Where(**{name: value}).matches, everything))]
    there = [f"{name}: {listed(sorted(set(known[name])))}" for name in alone or asked]
    why = f"there is no {' and no '.join(alone)} like that" if alone else "no single kernel has all of it"
    what, hint = f"no kernel of a graph has {where}", f"there is {'; '.join(there)}"
    return SelectionError("PG712", what, why=why, hint=hint)


def listed(names: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
