"""Interleaved tracebacks of processes that tell different stories.

Which frame belongs to which process is then not proven by the log. What is certain is which exceptions were raised and how
often. The rest is reconstructed: the smallest tree of chunks of which the log can be a shuffle of root-to-leaf paths, where
every new branch must be paid for (see :mod:`likelihood`). From it come the frame each exception was most likely raised at,
and the stacks laid on top of each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from piecegraph.insight.chunks import Chunk, exception_of
from piecegraph.insight.failure import TreeLine
from piecegraph.insight.likelihood import IMPOSSIBLE, Likelihood
from piecegraph.insight.stories import num_tellers

BEAM = 96
MAX_CHUNKS = 4000
"""Longer streams are paired by neighbourhood alone: the search would take minutes."""
_MAX_OPTIONS = 6
_BRANCH = 3.0
_SIBLING = 1.5
_ROOT = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """An exception with the frame it was raised at."""

    text: Chunk
    """The first such text in the log."""
    frame: Chunk | None
    count: int
    """How often the log holds this exception: certain."""
    is_proven: bool
    """Whether the frame is: its source raises this type, and no other frame's does."""
    is_last: bool
    """Whether a process ended with it; otherwise another exception follows."""


@dataclass(frozen=True, slots=True)
class Reconstruction:
    """What can be said about processes that differ."""

    count: int
    pairs: tuple[Pair, ...]
    tree: tuple[TreeLine, ...]


def reconstruct(chunks: Sequence[Chunk]) -> Reconstruction:
    """Always an answer: where no tree explains the log, exceptions are paired with the frames they stand under."""
    count = num_tellers(chunks)
    best = _Search(chunks, count).run() if len(chunks) <= MAX_CHUNKS else None
    if best is None:
        return Reconstruction(count, _pair(chunks, _stands_under(chunks), {}), ())
    parents: defaultdict[Hashable, Counter[Hashable]] = defaultdict(Counter)
    num_continued: Counter[Hashable] = Counter()
    for node in best.path:
        chunk, before = best.chunk_of[node], best.chunk_of.get(best.parent_of[node])
        if chunk.kind == "text" and before is not None and before.kind == "frame":
            parents[chunk.key][before.key] += 1
        if chunk.kind == "link" and before is not None:
            num_continued[before.key] += 1
    return Reconstruction(count, _pair(chunks, parents, num_continued), best.tree())


def _pair(
    chunks: Sequence[Chunk],
    parents: dict[Hashable, Counter[Hashable]],
    num_continued: dict[Hashable, int],
) -> tuple[Pair, ...]:
    first: dict[Hashable, Chunk] = {}
    for chunk in chunks:
        known = first.setdefault(chunk.key, chunk)
        if chunk.frame is not None and known.frame is not None and chunk.frame.source and not known.frame.source:
            first[chunk.key] = replace(known, frame=chunk.frame)
    totals = Counter(chunk.key for chunk in chunks if chunk.kind == "text")
    pairs = []
    for key, total in totals.items():
        text = first[key]
        raisers = [c for c in first.values() if c.kind == "frame" and _raises(c, text)]
        is_last, left = total > num_continued.get(key, 0), total
        place = parents.get(key) or Counter({raisers[0].key: total} if len(raisers) == 1 else {})
        for frame_key, number in place.most_common():
            taken = min(number, left)
            left -= taken
            if taken:
                is_proven = [raiser.key for raiser in raisers] == [frame_key]
                pairs.append(Pair(text, first[frame_key], taken, is_proven, is_last))
        if left:
            pairs.append(Pair(text, None, left, False, is_last))
    return tuple(pairs)


def _raises(frame: Chunk, text: Chunk) -> bool:
    """Whether a frame's source raises this exception, or the one that its text quotes first."""
    source = frame.frame.source if frame.frame else ""
    if not source.startswith("raise "):
        return False
    quoted = next(filter(None, map(exception_of, text.text.split("\n")[1:3])), None)
    name = quoted[0] if quoted else text.name
    return source[6:].lstrip().startswith((name, name.rsplit(".", 1)[-1]))


def _stands_under(chunks: Sequence[Chunk]) -> dict[Hashable, Counter[Hashable]]:
    parents: defaultdict[Hashable, Counter[Hashable]] = defaultdict(Counter)
    for above, chunk in zip(chunks, chunks[1:], strict=False):
        if chunk.kind == "text" and above.kind == "frame":
            parents[chunk.key][above.key] += 1
    return parents


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
class _Best:
    path: list[int]
    parent_of: dict[int, int]
    chunk_of: dict[int, Chunk]

    def tree(self) -> tuple[TreeLine, ...]:
        """The frames and exceptions with counts, depth first; depth grows only where the stacks part."""
        counts = Counter(self.path)
        children: defaultdict[int, list[int]] = defaultdict(list)
        for node in dict.fromkeys(self.path):
            children[self.parent_of[node]].append(node)
        lines: list[TreeLine] = []
        stack = [(node, 0) for node in reversed(children[_ROOT])]
        while stack:
            node, depth = stack.pop()
            chunk = self.chunk_of[node]
            if chunk.kind == "frame":
                lines.append(TreeLine(depth, counts[node], chunk.frame))
            elif chunk.kind == "text":
                lines.append(TreeLine(depth, counts[node], None, chunk.text.partition("\n")[0]))
            parts = children[node]
            stack.extend((child, depth + (len(parts) > 1)) for child in reversed(parts))
        return tuple(lines)


class _Search:
    """A beam search over trees of chunks."""

    def __init__(self, chunks: Sequence[Chunk], count: int) -> None:
        self._chunks, self._count = chunks, count
        self._likelihood = Likelihood(chunks)
        self._ids: dict[tuple[int, Hashable], int] = {}
        self._parent_of: dict[int, int] = {}
        self._chunk_of: dict[int, Chunk] = {}
        self._children: defaultdict[int, int] = defaultdict(int)

    def run(self) -> _Best | None:
        beam = [_Hypothesis(0.0, 0, ((_ROOT, self._count),), _ROOT, None)]
        for chunk in self._chunks:
            further: dict[tuple[int, tuple[tuple[int, int], ...]], _Hypothesis] = {}
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
        return _Best(path[::-1], self._parent_of, self._chunk_of)

    def _extend(self, hypothesis: _Hypothesis, chunk: Chunk, further: dict[object, _Hypothesis]) -> None:  # type: ignore[type-arg]
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
            self._parent_of[node], self._chunk_of[node] = parent, chunk
            self._children[parent] |= 1 << node
        return node

    def _num_unfinished(self, hypothesis: _Hypothesis) -> int:
        return sum(
            number
            for node, number in hypothesis.waiting
            if node == _ROOT or self._chunk_of[node].kind != "text"
        )
