"""How likely it is that one part follows another in the same process, as a cost: the lower, the likelier."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

from piecegraph.explain.log.parts import TracebackPart

IMPOSSIBLE = 1e9
STEP_COST = 1.5
"""The cost of any new step, for the shortest description to win."""

_GENERIC = re.compile(
    r"^(__\w+__|<\w+>|_?wrapp\w*|inner|_?fn|decorate_\w+|compile_wrapper|_?call_?\w*|_wrapped_call_impl|_call_impl"
    r"|handler|new_func|run|helper|run_node)$"
)
"""Functions that callers do not call by this name."""


class Likelihood:
    """Evidence from one stream of parts."""

    def __init__(self, parts: Sequence[TracebackPart]) -> None:
        self._num_parts = len(parts)
        self._places: defaultdict[Hashable, list[int]] = defaultdict(list)
        for at, part in enumerate(parts):
            self._places[part.key].append(at)
        self._neighbours = Counter((a.key, b.key) for a, b in itertools.pairwise(parts))
        self._costs: dict[tuple[Hashable, Hashable], float] = {}

    def cost(self, before: TracebackPart | None, after: TracebackPart) -> float:
        """The cost of ``after`` coming right after ``before``; None is the beginning."""
        pair = (before.key if before else None, after.key)
        cost = self._costs.get(pair)
        if cost is None:
            cost = self._costs[pair] = self._cost(before, after)
        return cost

    def _cost(self, before: TracebackPart | None, after: TracebackPart) -> float:
        kinds = (before.kind if before else "", after.kind)
        if after.kind == "header" and after.origin == "original":
            return STEP_COST if kinds[0] == "text" else IMPOSSIBLE
        if before is None or kinds in (("link", "header"), ("text", "link")):
            return STEP_COST if kinds in (("", "header"), ("link", "header"), ("text", "link")) else IMPOSSIBLE
        if kinds == ("header", "frame"):
            base = 2.0
        elif kinds == ("header", "text"):
            base = 6.0
        elif kinds == ("frame", "frame"):
            base = _call_cost(before, after)
        elif kinds == ("frame", "text"):
            base = _raise_cost(before, after)
        else:
            return IMPOSSIBLE
        return STEP_COST + base + self._distance_cost(before.key, after.key)

    def _distance_cost(self, a: Hashable, b: Hashable) -> float:
        """Cheaper where the two are neighbours more often than by chance, dearer where they stand far apart."""
        by_chance = len(self._places[a]) * len(self._places[b]) / self._num_parts
        near = min(1.5, max(0.0, self._neighbours[a, b] - by_chance) * 0.5)
        lag = self._lag(a, b)
        return -near + (1.5 if lag is None else min(1.5, 6.0 * lag / self._num_parts))

    def _lag(self, a: Hashable, b: Hashable) -> float | None:
        """The mean distance of each ``b`` to the first unused ``a`` before it; None if some ``b`` has none."""
        free: list[int] = []
        total, at, places = 0, 0, self._places[a]
        for place in self._places[b]:
            while at < len(places) and places[at] < place:
                free.append(places[at])
                at += 1
            if not free:
                return None
            total += place - free.pop(0)
        return total / len(self._places[b])


def _call_cost(caller: TracebackPart, callee: TracebackPart) -> float:
    assert caller.frame is not None
    assert callee.frame is not None
    name, source = callee.frame.function, caller.frame.source
    if caller.key == callee.key:
        return 5.0
    if name and re.search(r"(?<!\w)" + re.escape(name) + r"(?!\w)", caller.anchor or source):
        return 0.5
    if source.startswith("raise "):  # raised again with a borrowed traceback: Dynamo does it
        return 4.0
    return 2.0 if _GENERIC.match(name) else 4.0


def _raise_cost(frame: TracebackPart, text: TracebackPart) -> float:
    assert frame.frame is not None
    source, name = frame.frame.source, text.name.rsplit(".", 1)[-1]
    if not (source.startswith("raise") or "assert" in source):
        return 2.5  # C++ raised it
    return 0.5 if name in source or not re.match(r"raise\s+[A-Z]", source) else 2.0
