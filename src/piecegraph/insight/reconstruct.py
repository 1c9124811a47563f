"""Interleaved tracebacks of processes that tell different stories.

Which frame belongs to which process is then not proven by the log. What is certain is which exceptions were raised
and how often. The rest is reconstructed: the smallest tree of chunks of which the log can be a shuffle of root-to-
leaf paths, where every new branch must be paid for (see :mod:`likelihood`). From it come the frame each exception was
most likely raised at, and the stacks laid on top of each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from piecegraph.insight.chunks import Chunk, representatives
from piecegraph.insight.failure import TreeLine
from piecegraph.insight.likelihood import IMPOSSIBLE, Likelihood
from piecegraph.insight.stories import Link, num_tellers

BEAM = 96
MAX_CHUNKS = 1500
"""Longer streams are paired by neighbourhood alone: the search would take minutes."""
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
    can_search = may_search and len(chunks) <= MAX_CHUNKS
    tree = _Search(chunks, num_tellers(chunks)).run() if can_search else None
    if tree is None:
        return Reconstruction(_pair_neighbours(chunks), ())
    return Reconstruction(tuple(sorted(tree.endings(), key=lambda ending: ending.chain[-1].text.end)), tree.lines())


def _pair_neighbours(chunks: Sequence[Chunk]) -> tuple[Ending, ...]:
    """Each exception with the frame right above it, wherever that is not torn away."""
    first: dict[Hashable, Told] = {}
    for above, chunk in zip([None, *chunks], chunks, strict=False):
        if chunk.kind != "text":
            continue
        told = Told(chunk, above if above is not None and above.kind == "frame" else None, "")
        if chunk.key not in first or (first[chunk.key].frame is None and told.frame is not None):
            first[chunk.key] = told
    counts = Counter(chunk.key for chunk in chunks if chunk.kind == "text")
    return tuple(Ending((told,), counts[key]) for key, told in first.items())


@dataclass(frozen=True, slots=True)
class _Hypothesis:
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
        self._ids: dict[tuple[int, Hashable], int] = {}
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
            price = self._step_price(hypothesis, node, chunk)
            if price < IMPOSSIBLE:
                options.append((price - 0.05 * (node == hypothesis.latest), node))
        for price, node in sorted(options)[:_MAX_OPTIONS]:
            child = self._ids[node, chunk.key]
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

    def _step_price(self, hypothesis: _Hypothesis, node: int, chunk: Chunk) -> float:
        before = self._chunk_of.get(node)
        price = self._likelihood.price(before, chunk)
        if price >= IMPOSSIBLE:
            return price
        child = self._node(node, chunk)
        if hypothesis.nodes >> child & 1:
            return 0.0
        siblings = (self._children[node] & hypothesis.nodes).bit_count()
        return price + (_BRANCH + _SIBLING * siblings if siblings else 0.0)

    def _node(self, parent: int, chunk: Chunk) -> int:
        node = self._ids.get((parent, chunk.key))
        if node is None:
            node = self._ids[parent, chunk.key] = len(self._ids) + 1
            self._parent_of[node], self._chunk_of[node] = parent, self._shown[chunk.key]
            self._children[parent] |= 1 << node
        return node

    def _num_unfinished(self, hypothesis: _Hypothesis) -> int:
        return sum(
            number for node, number in hypothesis.waiting if node == _ROOT or self._chunk_of[node].kind != "text"
        )
