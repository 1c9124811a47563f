"""Kernels of graph replays in a profile, matched with the nodes that are known to be in the graphs.

Note [Matching replays]
~~~~~~~~~~~~~~~~~~~~~~~
A profiler shows the kernels of a replay with nothing but the number of the launch they share; newer ones add the id of
the node. Our graphs are captured on one stream, so their nodes run in the order of their capture: the n-th kernel of a
replay is the n-th node. That is believed only if there are as many kernels as nodes and *all* their names agree;
otherwise it is only said which step of which tape it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from piecegraph.base.origin import GraphNode, GraphRecord, LaunchCall
from piecegraph.provenance.launch import CapturedCall, How, Member, RawLaunch

_LOW_HALF = 0xFFFFFFFF
"""Of a node's id: the rest is the number of the running graph, which the captured one does not have."""


@dataclass(frozen=True, slots=True)
class RecordedGraph:
    """A graph of a tape."""

    record: GraphRecord
    off: frozenset[int] = frozenset()
    """Nodes that are switched off."""


@dataclass(frozen=True, slots=True)
class RecordedTape:
    """What is known of a tape: for each step the inside of its graph, the call it makes, or only its name."""

    phase: str
    steps: tuple[RecordedGraph | LaunchCall | str, ...]


def match_replay(launches: Sequence[RawLaunch], graph: RecordedGraph) -> tuple[list[int | None], How]:
    """The call (by number in the graph's record) of each launch of one replay, and how it was found.

    Args:
        launches: all that the profiler saw of one replay.
        graph: what was captured. See Note [Matching replays].
    """
    # What is no kernel, memset or memcpy (an event, an empty node that joins others) shows in no profile.
    nodes = [node for i, node in enumerate(graph.record.nodes) if i not in graph.off and node.kind != "op"]
    ids = {node.node_id & _LOW_HALF: node for node in nodes if node.node_id is not None}
    found = [ids.get(launch.node_id & _LOW_HALF) if launch.node_id is not None else None for launch in launches]
    if all(node is not None and _agree(launch, node) for launch, node in zip(launches, found, strict=True)):
        return [node.call if node is not None else None for node in found], "node id"
    in_order = sorted(range(len(launches)), key=lambda i: launches[i].start)
    if len(nodes) != len(launches) or not all(
        _agree(launches[i], node) for i, node in zip(in_order, nodes, strict=True)
    ):
        return [None] * len(launches), "step"
    calls: list[int | None] = [None] * len(launches)
    for i, node in zip(in_order, nodes, strict=True):
        calls[i] = node.call
    return calls, "position"


def _agree(launch: RawLaunch, node: GraphNode) -> bool:
    if node.kind == "memcpy":  # copies within a device run as a kernel of the driver's
        return launch.kind == "memcpy" or launch.name.startswith("memcpy")
    if node.kind == "memset":
        return launch.kind == "memset" or launch.name.startswith("memset")
    return launch.kind == "kernel" and launch.name == node.name


def captured_calls(graph: GraphRecord) -> list[CapturedCall]:
    """The calls of a graph with what each put into it; not what only stands for several calls."""
    members: list[list[Member]] = [[] for _ in graph.calls]
    for node in graph.nodes:
        if node.call is not None:
            members[node.call].append(Member(node.kind, node.name, node.grid, node.block))
    return [
        CapturedCall(call, graph.phase, tuple(found))
        for call, found in zip(graph.calls, members, strict=True)
        if found and not call.is_several
    ]
