"""Interleaved tracebacks of processes that print different ones.

Which frame belongs to which process is then not proven by the log. What is certain is which exceptions were raised
and how often. The rest is reconstructed: the smallest tree of parts of which the log can be a shuffle of root-to-
leaf paths, where every new branch must be paid for (see :mod:`likelihood`). From it come the frame each exception was
most likely raised at, and the stacks laid on top of each other.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from piecegraph.explain.evidence import TreeLine
from piecegraph.explain.log.likelihood import IMPOSSIBLE, Likelihood
from piecegraph.explain.log.parts import TracebackPart, representatives
from piecegraph.explain.log.tracebacks import Link, num_processes

BEAM = 64
MAX_WORK = 15_000
"""Parts times processes. Larger streams are paired by neighbourhood alone: the search would take minutes."""
_MAX_OPTIONS = 6
_BRANCH_COST = 3.0
_SIBLING_COST = 1.5
_ROOT = 0
_State = tuple[int, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, slots=True)
class RaisedAt:
    """An exception with the frame it was raised at."""

    text: TracebackPart
    frame: TracebackPart | None
    link: Link


@dataclass(frozen=True, slots=True)
class RaisedChain:
    """What some of the processes raised, in order."""

    exceptions: tuple[RaisedAt, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Reconstruction:
    """What can be said about processes that differ."""

    chains: tuple[RaisedChain, ...]
    """In the order in which the first of each was complete."""
    tree: tuple[TreeLine, ...]


def reconstruct(parts: Sequence[TracebackPart], *, may_search: bool = True) -> Reconstruction:
    """Always an answer: where no tree explains the log, exceptions are paired with the frames they stand under."""
    count = num_processes(parts)
    can_search = may_search and len(parts) * count <= MAX_WORK
    tree = _Search(parts, count).run() if can_search else None
    if tree is None:
        return Reconstruction(_pair_neighbours(parts), ())
    return Reconstruction(tuple(sorted(tree.chains(), key=lambda chain: chain.exceptions[-1].text.end)), tree.lines())


def _pair_neighbours(parts: Sequence[TracebackPart]) -> tuple[RaisedChain, ...]:
    """Each exception with the likeliest innermost frame: one that calls none of the others."""
    shown = representatives(parts)
    likelihood = Likelihood(parts)
    counts = Counter(part.key for part in parts)
    frames = [part for part in shown.values() if part.kind == "frame"]
    names = {part.frame.function for part in frames if part.frame is not None}
    leaves = [part for part in frames if not _calls_any(part, names)] or frames
    chains = []
    for text in (part for part in shown.values() if part.kind == "text"):
        fitting = [frame for frame in leaves if counts[frame.key] >= counts[text.key]] or leaves
        best = min(fitting, key=lambda frame, text=text: likelihood.cost(frame, text), default=None)  # type: ignore[misc]
        chains.append(RaisedChain((RaisedAt(text, best, ""),), counts[text.key]))
    return tuple(chains)


def _calls_any(part: TracebackPart, names: set[str]) -> bool:
    frame = part.frame
    if frame is None or frame.source.startswith("raise"):
        return False
    return bool(names & set(re.findall(r"\w+", part.anchor or frame.source)) - {frame.function})


class _Hypothesis(NamedTuple):
    cost: float
    nodes: int
    """The nodes of the tree so far, as bits."""
    waiting: tuple[tuple[int, int], ...]
    """``(node, number of processes that came to it last)``, sorted."""
    latest: int
    path: tuple[int, object] | None
    """The node of every part so far, the last one first, as a linked list."""


@dataclass(frozen=True, slots=True)
class _Tree:
    path: list[int]
    """The node of every part of the log."""
    waiting: tuple[tuple[int, int], ...]
    """At which node the processes were at the end."""
    parent_of: dict[int, int]
    part_of: dict[int, TracebackPart]

    def chains(self) -> Iterator[RaisedChain]:
        for node, count in self.waiting:
            exceptions: list[RaisedAt] = []
            while node != _ROOT:
                part, parent = self.part_of[node], self.parent_of[node]
                if part.kind == "text":
                    frame = self.part_of.get(parent)
                    exceptions.append(
                        RaisedAt(part, frame if frame is not None and frame.kind == "frame" else None, "")
                    )
                elif part.kind == "link" and exceptions:
                    exceptions[-1] = replace(exceptions[-1], link="cause" if part.text == "cause" else "context")
                node = parent
            if exceptions:
                yield RaisedChain(tuple(reversed(exceptions)), count)

    def lines(self) -> tuple[TreeLine, ...]:
        """The frames and exceptions with counts, depth first; depth grows only where the stacks part."""
        counts = Counter(self.path)
        children: defaultdict[int, list[int]] = defaultdict(list)
        for node in dict.fromkeys(self.path):
            children[self.parent_of[node]].append(node)
        found: list[TreeLine] = []
        stack = [(node, 0) for node in reversed(children[_ROOT])]
        while stack:
            node, depth = stack.pop()
            part = self.part_of[node]
            if part.kind == "frame":
                found.append(TreeLine(depth, counts[node], part.frame))
            elif part.kind == "text":
                found.append(TreeLine(depth, counts[node], None, part.text.partition("\n")[0]))
            parts = children[node]
            stack.extend((child, depth + (len(parts) > 1)) for child in reversed(parts))
        return tuple(found)


class _Search:
    """A beam search over trees of parts."""

    def __init__(self, parts: Sequence[TracebackPart], count: int) -> None:
        self._parts, self._count = parts, count
        self._shown = representatives(parts)
        self._likelihood = Likelihood(parts)
        self._steps: dict[tuple[int, Hashable], tuple[float, int]] = {}
        self._parent_of: dict[int, int] = {}
        self._part_of: dict[int, TracebackPart] = {}
        self._children: defaultdict[int, int] = defaultdict(int)

    def run(self) -> _Tree | None:
        beam = [_Hypothesis(0.0, 0, ((_ROOT, self._count),), _ROOT, None)]
        for part in self._parts:
            further: dict[_State, _Hypothesis] = {}
            for hypothesis in beam:
                self._extend(hypothesis, part, further)
            beam = sorted(further.values(), key=lambda h: h.cost)[:BEAM]
            if not beam:
                return None
        best = min(beam, key=lambda h: (self._num_unfinished(h), h.cost))
        path: list[int] = []
        step = best.path
        while step is not None:
            path.append(step[0])
            step = step[1]  # type: ignore[assignment]
        return _Tree(path[::-1], best.waiting, self._parent_of, self._part_of)

    def _extend(self, hypothesis: _Hypothesis, part: TracebackPart, further: dict[_State, _Hypothesis]) -> None:
        options = []
        for node, _ in hypothesis.waiting:
            cost, child = self._steps.get((node, part.key)) or self._step(node, part)
            if cost >= IMPOSSIBLE:
                continue
            if hypothesis.nodes >> child & 1:
                cost = 0.0
            else:
                siblings = (self._children[node] & hypothesis.nodes).bit_count()
                cost += _BRANCH_COST + _SIBLING_COST * siblings if siblings else 0.0
            options.append((cost - 0.05 * (node == hypothesis.latest), node, child))
        for cost, node, child in sorted(options)[:_MAX_OPTIONS]:
            waiting = dict(hypothesis.waiting)
            waiting[node] -= 1
            if not waiting[node]:
                del waiting[node]
            waiting[child] = waiting.get(child, 0) + 1
            places = tuple(sorted(waiting.items()))
            nodes, total = hypothesis.nodes | 1 << child, hypothesis.cost + cost
            known = further.get((nodes, places))
            if known is None or total < known.cost:
                further[nodes, places] = _Hypothesis(total, nodes, places, child, (child, hypothesis.path))

    def _step(self, node: int, part: TracebackPart) -> tuple[float, int]:
        """The cost of a part as a new child of a node, and the child."""
        cost, child = self._likelihood.cost(self._part_of.get(node), part), _ROOT
        if cost < IMPOSSIBLE:
            child = len(self._part_of) + 1
            self._parent_of[child], self._part_of[child] = node, self._shown[part.key]
            self._children[node] |= 1 << child
        self._steps[node, part.key] = (cost, child)
        return cost, child

    def _num_unfinished(self, hypothesis: _Hypothesis) -> int:
        return sum(number for node, number in hypothesis.waiting if node == _ROOT or self._part_of[node].kind != "text")
