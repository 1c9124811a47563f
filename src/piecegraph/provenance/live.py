"""The kernels of graphs that are in use: choosing some, leaving them out, and seeing what that changes.

A node of a graph that is switched off is skipped by every replay until it is switched on again; nothing is captured
anew. What it would have written keeps the value it had.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from piecegraph.base.origin import GraphNode, GraphRecord, LaunchCall
from piecegraph.errors import ConfigError, KernelError, SelectionError
from piecegraph.provenance.selection.cost import Cost, measure_costs
from piecegraph.provenance.selection.dump import dump_calls
from piecegraph.provenance.selection.where import Where
from piecegraph.tape.tape import EagerStep, GraphStep, Inside, Rerun, Tape

_MAX_LISTED = 8


class TapeOwner(Protocol):
    """Something compiled."""

    @property
    def name(self) -> str:
        """Of what is compiled."""

    def tapes(self) -> Sequence[Tape]:
        """All that is recorded. Raises after ``close()``."""

    def rerun(self, tape: Tape) -> contextlib.AbstractContextManager[Rerun]:
        """Make a recorded size ready; calls wait meanwhile."""


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


class LiveKernels:
    """What ``kernels`` of something compiled is."""

    def __init__(self, owner: TapeOwner) -> None:
        self._owner = owner

    def select(
        self,
        *,
        op: str | None = None,
        module: str | None = None,
        line: str | None = None,
        kernel: str | None = None,
        piece: int | None = None,
        size: int | str | tuple[int, ...] | None = None,
    ) -> Selection:
        """Choose kernels of the recorded graphs. What is left out matches everything.

        Args:
            op: ``aten::mm`` or ``aten.mm``: the call, or what the model calls there; ``*`` stands for anything.
            module: ``layers.*.mlp`` is every such module and all inside it; a path may begin at any of its parts.
            line: ``model.py:12`` or ``model.py``, anywhere on the stack.
            kernel: a kernel's name, whole or as tables show it; ``*`` stands for anything.
            piece: the number of a piece, as ``explain()`` shows it.
            size: a recorded size: ``128``, ``(8, 128)``; of a language model as ``explain()`` shows it.
        """
        wanted = "x".join(map(str, size)) if isinstance(size, tuple) else None if size is None else str(size)
        everything = self._all()
        where = Where(op, module, line, kernel)
        chosen = [
            live
            for live in everything
            if (wanted is None or live.tape.phase == wanted)
            and (piece is None or live.inside.record.title == f"piece {piece}")
            and where.matches(live.call, live.node.name or live.node.kind)
        ]
        if not chosen:
            asked = {"op": op, "module": module, "line": line, "kernel": kernel, "piece": piece, "size": size}
            asked = {name: value for name, value in asked.items() if value is not None}
            raise _runs_between(asked, where, self._owner.tapes()) or _nothing_matches(asked, everything)
        return Selection(self._owner, where, tuple(chosen))

    def _all(self) -> list[LiveKernel]:
        tapes = self._owner.tapes()
        graphs = [(tape, step) for tape in tapes for step in tape.steps if isinstance(step, GraphStep)]
        known = [(tape, step.inside) for tape, step in graphs if step.inside is not None]
        if not known:
            why = "nothing is recorded yet" if not graphs else f"none of its {len(graphs)} graphs knows what it holds"
            hint = "compile with options={'provenance': True}" if graphs else "call it, or capture(), on a GPU first"
            raise KernelError("PG731", f"the kernels of {self._owner.name} are not known", why=why, hint=hint)
        return [LiveKernel(tape, inside, i) for tape, inside in known for i in _switchable(inside.record)]


def _switchable(graph: GraphRecord) -> list[int]:
    """The nodes that may be left out: all but memsets that prepare something for a kernel of the same call.

    What these set are the counters of a kernel whose blocks wait for each other. Left out and let in again, such a
    memset made a GEMM of cuBLAS hang or fail on an H200 (driver 580): a kernel that runs needs it, a kernel that does
    not run is not harmed by it.
    """
    launching = {node.call for node in graph.nodes if node.kind == "kernel"}
    return [i for i, node in enumerate(graph.nodes) if node.kind != "memset" or node.call not in launching]


class Selection:
    """Some kernels of graphs in use."""

    def __init__(self, owner: TapeOwner, where: Where, kernels: tuple[LiveKernel, ...]) -> None:
        self._owner = owner
        self._where = where
        self.kernels = kernels
        self._left_out: list[list[LiveKernel]] = []
        """What each call of ``disable()`` switched off."""

    def __len__(self) -> int:
        return len(self.kernels)

    def __repr__(self) -> str:
        phases = list(dict.fromkeys(live.tape.phase for live in self.kernels))
        num_off = sum(not live.is_on for live in self.kernels)
        return f"{len(self)} kernels of {self._owner.name} at sizes {_listed(phases)}" + (
            f", {num_off} switched off" if num_off else ""
        )

    def disable(self) -> Selection:
        """Leave the kernels out of all replays until they are enabled. Also a context manager, which enables those that
        it disabled.
        """
        self._check_in_use()
        running = [live for live in self.kernels if live.is_on]
        self._left_out.append(running)
        for live in running:
            live.switch(on=False)
        return self

    def enable(self) -> Selection:
        """Let all of the kernels run again, whoever disabled them."""
        self._check_in_use()
        self._left_out.clear()
        for live in self.kernels:
            if not live.is_on:
                live.switch(on=True)
        return self

    def __enter__(self) -> Selection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for live in self._left_out.pop() if self._left_out else ():
            live.switch(on=True)

    def time(self, *, rounds: int = 9) -> tuple[Cost, ...]:
        """What the kernels really cost: the time of a replay with them and without them.

        Kernels are taken together by call and module (layer numbers folded), and all of them once more; for each
        recorded size. Outputs of earlier calls are overwritten, those of later calls are not affected.

        Args:
            rounds: how often each is measured; medians are given, and the spread.
        """
        if rounds < 1:
            raise ConfigError("PG101", f"rounds is {rounds}", why="it must be a positive integer")
        self._check_in_use()
        costs: list[Cost] = []
        for tape, chosen in self._by_tape():
            with self._owner.rerun(tape) as rerun:
                costs += measure_costs(tape.phase, chosen, rerun, rounds)
        return tuple(costs)

    def dump(self, folder: str | Path) -> tuple[Path, ...]:
        """Save the tensors that go into and come out of the ops that the kernels come from.

        What was recorded is run again without graphs on the inputs it had last, and the pieces in question as they were
        traced, op by op. One file is written for each op and size, for ``torch.load``.
        """
        self._check_in_use()
        paths: list[Path] = []
        for tape, chosen in self._by_tape():
            origins = {origin for live in chosen for origin in self._where.origins(live.call)}
            with self._owner.rerun(tape) as rerun:
                paths += dump_calls(Path(folder) / tape.phase.replace(" ", "_"), origins, rerun.compute)
        return tuple(paths)

    def _check_in_use(self) -> None:
        """Graphs are dropped when the model is closed, or its weights move."""
        in_use = self._owner.tapes()
        gone = list(dict.fromkeys(live.tape.phase for live in self.kernels if live.tape not in in_use))
        if gone:
            what = f"graphs of {self._owner.name} that were chosen are gone: those of sizes {_listed(gone)}"
            raise KernelError("PG735", what, why="they were dropped or recorded anew since", hint="select again")

    def _by_tape(self) -> Iterator[tuple[Tape, list[LiveKernel]]]:
        for tape in dict.fromkeys(live.tape for live in self.kernels):
            yield tape, [live for live in self.kernels if live.tape is tape]


def _runs_between(asked: dict[str, Any], where: Where, tapes: Sequence[Tape]) -> SelectionError | None:
    """What to say of an op that is there, but in no graph."""
    steps = [step for tape in tapes for step in tape.steps if isinstance(step, EagerStep)]
    found = [step.call for step in steps if where.matches(step.call, "")]
    if where.op is None or where.kernel is not None or not found:
        return None
    names = _listed(list(dict.fromkeys(call.op for call in found if call is not None)))
    return SelectionError(
        "PG712",
        f"no kernel of a graph has {_in_words(asked)}",
        why=f"{names} runs between the graphs",
        hint="piecegraph.intercept() observes it, replaces it or leaves it out",
    )


def _in_words(asked: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in asked.items())


def _nothing_matches(asked: dict[str, Any], everything: Sequence[LiveKernel]) -> SelectionError:
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
    alone = {name: value for name, value in asked.items() if not _matches_alone(name, value, everything)}
    there = [f"{name}: {_listed(sorted(set(known[name])))}" for name in alone or asked]
    why = f"there is no {' and no '.join(alone)} like that" if alone else "no single kernel has all of it"
    what, hint = f"no kernel of a graph has {_in_words(asked)}", f"there is {'; '.join(there)}"
    return SelectionError("PG712", what, why=why, hint=hint)


def _matches_alone(name: str, value: Any, everything: Sequence[LiveKernel]) -> bool:
    if name == "piece":
        return any(live.inside.record.title == f"piece {value}" for live in everything)
    if name == "size":
        wanted = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
        return any(live.tape.phase == wanted for live in everything)
    where = Where(**{name: value})
    return any(where.matches(live.call, live.node.name or live.node.kind) for live in everything)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
