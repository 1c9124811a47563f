"""Interleaved tracebacks of processes that tell different stories.

Which frame belongs to which process is then not proven by the log. What is certain is which exceptions were raised
and how often. The rest is reconstructed: the smallest tree of chunks of which the log can be a shuffle of root-to-
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
from piecegraph.explain.log.parts import Chunk, representatives
from piecegraph.explain.log.tracebacks import Link, num_tellers

BEAM = 64
MAX_WORK = 15_000
"""Chunks times processes. Larger streams are paired by neighbourhood alone: the search would take minutes."""
_MAX_OPTIONS = 6
_BRANCH = 3.0
_SIBLING = 1.5
_ROOT = 0
_State = tuple[int, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, slots=True)
class Told:
    """An exception with the frame it was raised at."""

    text: Chunk
    frame: Chunk | None
    link: Link


@dataclass(frozen=True, slots=True)
class Ending:
    """What some of the processes told."""

    chain: tuple[Told, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Reconstruction:
    """What can be said about processes that differ."""

    endings: tuple[Ending, ...]
    """In the order in which the first of each was complete."""
    tree: tuple[TreeLine, ...]


def reconstruct(chunks: Sequence[Chunk], *, may_search: bool = True) -> Reconstruction:
    """Always an answer: where no tree explains the log, exceptions are paired with the frames they stand under."""
    count = num_tellers(chunks)
    can_search = may_search and len(chunks) * count <= MAX_WORK
    tree = _Search(chunks, count).run() if can_search else None
    if tree is None:
        return Reconstruction(_pair_neighbours(chunks), ())
    return Reconstruction(tuple(sorted(tree.endings(), key=lambda ending: ending.chain[-1].text.end)), tree.lines())


def _pair_neighbours(chunks: Sequence[Chunk]) -> tuple[Ending, ...]:
    """Each exception with the likeliest innermost frame: one that calls none of the others."""
    shown = representatives(chunks)
    likelihood = Likelihood(chunks)
    counts = Counter(chunk.key for chunk in chunks)
    frames = [chunk for chunk in shown.values() if chunk.kind == "frame"]
    names = {chunk.frame.function for chunk in frames if chunk.frame is not None}
    leaves = [chunk for chunk in frames if not _calls_any(chunk, names)] or frames
    endings = []
    for text in (chunk for chunk in shown.values() if chunk.kind == "text"):
        fitting = [frame for frame in leaves if counts[frame.key] >= counts[text.key]] or leaves
        best = min(fitting, key=lambda frame, text=text: likelihood.price(frame, text), default=None)  # type: ignore[misc]
        endings.append(Ending((Told(text, best, ""),), counts[text.key]))
    return tuple(endings)


def _calls_any(chunk: Chunk, names: set[str]) -> bool:
    frame = chunk.frame
    if frame is None or frame.source.startswith("raise"):
        return False
    return bool(names & set(re.findall(r"\w+", chunk.anchor or frame.source)) - {frame.function})


class _Hypothesis(NamedTuple):
    price: float
    nodes: int
    """The nodes of the tree so far, as bits."""
    waiting: tuple[tuple[int, int], ...]
    """``(node, number of processes that came to it last)``, sorted."""
    latest: int
    path: tuple[int, object] | None
    """The node of every chunk so far, the last one first, as a linked list."""


@dataclass(frozen=True, slots=True)
class _Tree:
    path: list[int]
    """The node of every chunk of the log."""
    waiting: tuple[tuple[int, int], ...]
    """At which node the processes were at the end."""
    parent_of: dict[int, int]
    chunk_of: dict[int, Chunk]

    def endings(self) -> Iterator[Ending]:
        for node, count in self.waiting:
            chain: list[Told] = []
            while node != _ROOT:
                chunk, parent = self.chunk_of[node], self.parent_of[node]
                if chunk.kind == "text":
                    frame = self.chunk_of.get(parent)
                    chain.append(Told(chunk, frame if frame is not None and frame.kind == "frame" else None, ""))
                elif chunk.kind == "link" and chain:
                    chain[-1] = replace(chain[-1], link="cause" if chunk.text == "cause" else "context")
                node = parent
            if chain:
                yield Ending(tuple(reversed(chain)), count)

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
            chunk = self.chunk_of[node]
            if chunk.kind == "frame":
                found.append(TreeLine(depth, counts[node], chunk.frame))
            elif chunk.kind == "text":
                found.append(TreeLine(depth, counts[node], None, chunk.text.partition("\n")[0]))
            parts = children[node]
            stack.extend((child, depth + (len(parts) > 1)) for child in reversed(parts))
        return tuple(found)


class _Search:
    """A beam search over trees of chunks."""

    def __init__(self, chunks: Sequence[Chunk], count: int) -> None:
        self._chunks, self._count = chunks, count
        self._shown = representatives(chunks)
        self._likelihood = Likelihood(chunks)
        self._steps: dict[tuple[int, Hashable], tuple[float, int]] = {}
        self._parent_of: dict[int, int] = {}
        self._chunk_of: dict[int, Chunk] = {}
        self._children: defaultdict[int, int] = defaultdict(int)

    def run(self) -> _Tree | None:
        beam = [_Hypothesis(0.0, 0, ((_ROOT, self._count),), _ROOT, None)]
        for chunk in self._chunks:
            further: dict[_State, _Hypothesis] = {}
            for hypothesis in beam:
                self._extend(hypothesis, chunk, further)
            beam = sorted(further.values(), key=lambda h: h.price)[:BEAM]
            if not beam:
                return None
        best = min(beam, key=lambda h: (self._num_unfinished(h), h.price))
        path: list[int] = []
        step = best.path
        while step is not None:
            path.append(step[0])
            step = step[1]  # type: ignore[assignment]
        return _Tree(path[::-1], best.waiting, self._parent_of, self._chunk_of)

    def _extend(self, hypothesis: _Hypothesis, chunk: Chunk, further: dict[_State, _Hypothesis]) -> None:
        options = []
        for node, _ in hypothesis.waiting:
            price, child = self._steps.get((node, chunk.key)) or self._step(node, chunk)
            if price >= IMPOSSIBLE:
                continue
            if hypothesis.nodes >> child & 1:
                price = 0.0
            else:
                siblings = (self._children[node] & hypothesis.nodes).bit_count()
                price += _BRANCH + _SIBLING * siblings if siblings else 0.0
            options.append((price - 0.05 * (node == hypothesis.latest), node, child))
        for price, node, child in sorted(options)[:_MAX_OPTIONS]:
            waiting = dict(hypothesis.waiting)
            waiting[node] -= 1
            if not waiting[node]:
                del waiting[node]
            waiting[child] = waiting.get(child, 0) + 1
            places = tuple(sorted(waiting.items()))
            nodes, total = hypothesis.nodes | 1 << child, hypothesis.price + price
            known = further.get((nodes, places))
            if known is None or total < known.price:
                further[nodes, places] = _Hypothesis(total, nodes, places, child, (child, hypothesis.path))

    def _step(self, node: int, chunk: Chunk) -> tuple[float, int]:
        """The price of a chunk as a new child of a node, and the child."""
        price, child = self._likelihood.price(self._chunk_of.get(node), chunk), _ROOT
        if price < IMPOSSIBLE:
            child = len(self._chunk_of) + 1
            self._parent_of[child], self._chunk_of[child] = node, self._shown[chunk.key]
            self._children[node] |= 1 << child
        self._steps[node, chunk.key] = (price, child)
        return price, child

    def _num_unfinished(self, hypothesis: _Hypothesis) -> int:
        return sum(
            number for node, number in hypothesis.waiting if node == _ROOT or self._chunk_of[node].kind != "text"
        )
