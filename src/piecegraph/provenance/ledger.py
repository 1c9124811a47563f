"""Which call put which nodes into the graph that is being captured.

Note [Counting nodes]
~~~~~~~~~~~~~~~~~~~~~
Capture appends nodes to the graph in the order in which work is launched, and CUDA tells at any time how many there
are. So it is enough to look at the count when a call starts and when it ends: the nodes in between are the call's.
Nothing is patched, nothing is hooked, and every launch counts, whoever made it: cuBLAS, Triton, a custom extension.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from piecegraph.base import torch_compat
from piecegraph.base.call_stack import current_origin
from piecegraph.base.origin import GraphNode, GraphRecord, LaunchCall
from piecegraph.graph.program import Step
from piecegraph.provenance.observe import is_attributing, observing, run_observed, whole_step
from piecegraph.tape.device import GraphDevice


def ledgers(provenance: bool) -> Callable[[GraphDevice], Ledger | None]:
    """What makes the ledger of a recording: one where it is asked for, or while a profile is taken."""
    return lambda device: Ledger(device) if provenance or is_attributing() else None


class Ledger:
    """A :class:`~piecegraph.provenance.observe.CallSink` for one recording; see Note [Counting nodes].

    Args:
        device: tells how many nodes the capture under way has; None between two captures, and if one was spoilt.
    """

    def __init__(self, device: GraphDevice) -> None:
        torch_compat.triton_launchers()  # found now, before anything is captured
        self._device = device
        self.is_inside = False
        self._calls: list[LaunchCall] = []
        self._owners: list[int | None] = []
        self._num_settled = 0

    def start_graph(self) -> None:
        """A new graph begins."""
        self._calls, self._owners, self._num_settled = [], [], 0

    def begin(self) -> None:
        self.is_inside = True
        self._leave_loose()

    def end(self, make_call: Callable[[], LaunchCall]) -> None:
        self.is_inside = False
        launched = self._num_new()
        if launched:
            self._owners += [len(self._calls)] * launched
            self._calls.append(make_call())

    def settle(self, make_call: Callable[[], LaunchCall]) -> None:
        self._leave_loose()
        loose = [i for i in range(self._num_settled, len(self._owners)) if self._owners[i] is None]
        self._num_settled = len(self._owners)
        for i in loose:
            self._owners[i] = len(self._calls)
        if loose:
            self._calls.append(make_call())

    def _leave_loose(self) -> None:
        """What was launched up to now outside of any call has no owner yet."""
        self._owners += [None] * self._num_new()

    def _num_new(self) -> int:
        count = self._device.num_nodes()
        return 0 if count is None else count - len(self._owners)

    def finish_graph(self, title: str, phase: str) -> Callable[[Sequence[GraphNode]], GraphRecord]:
        """What makes a record of the graph that was captured, given its nodes."""
        calls, owners = tuple(self._calls), list(self._owners)

        def read(nodes: Sequence[GraphNode]) -> GraphRecord:
            loose = [None] * (len(nodes) - len(owners))  # launched behind the last call
            named = [
                dataclasses.replace(node, call=owner) for node, owner in zip(nodes, [*owners, *loose], strict=True)
            ]
            return GraphRecord(title, phase, calls, tuple(named))

        return read

    def run_step(self, step: Step, args: tuple[Any, ...]) -> Any:
        return run_observed(step, args, {}, self, self._device.call)

    def observing(self) -> contextlib.AbstractContextManager[None]:
        return observing(self, self._device.call)

    def call_of(self, step: Step) -> LaunchCall:
        return whole_step(step)

    def call_here(self, op: str) -> LaunchCall:
        return LaunchCall(op, (current_origin(op),))
