"""The kernels of graphs that are in use: choosing some, leaving them out, and seeing what that changes.

A node of a graph that is switched off is skipped by every replay until it is switched on again; nothing is captured
anew. What it would have written keeps the value it had.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from piecegraph.errors import ConfigError, KernelError
from piecegraph.provenance.selection.cost import Cost, measure_costs
from piecegraph.provenance.selection.dump import dump_calls
from piecegraph.provenance.selection.kernels import LiveKernel, Where, choose, listed
from piecegraph.tape.tape import Rerun, Tape


class TapeOwner(Protocol):
    """Something compiled."""

    @property
    def name(self) -> str:
        """Of what is compiled."""

    def tapes(self) -> Sequence[Tape]:
        """All that is recorded. Raises after ``close()``."""

    def rerun(self, tape: Tape) -> contextlib.AbstractContextManager[Rerun]:
        """Make a recorded size ready; calls wait meanwhile."""


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
        where = Where(op, module, line, kernel, piece, size)
        return Selection(self._owner, where, choose(where, self._owner.tapes(), self._owner.name))


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
        return f"{len(self)} kernels of {self._owner.name} at sizes {listed(phases)}" + (
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
            what = f"graphs of {self._owner.name} that were chosen are gone: those of sizes {listed(gone)}"
            raise KernelError("PG735", what, why="they were dropped or recorded anew since", hint="select again")

    def _by_tape(self) -> Iterator[tuple[Tape, list[LiveKernel]]]:
        for tape in dict.fromkeys(live.tape for live in self.kernels):
            yield tape, [live for live in self.kernels if live.tape is tape]
