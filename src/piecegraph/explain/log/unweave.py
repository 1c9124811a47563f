"""Interleaved tracebacks of processes that all tell the same story.

Note [Same story]: N processes that print the same sequence of chunks, interleaved in any way, print every chunk a
multiple of N times, and a chunk appears for the first time only after the one before it did. So a sequence without
repetition is simply the order of first appearance; only where a chunk occurs more than once in the story must places
be tried out, which is a search over a handful of readings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from piecegraph.explain.log.likelihood import IMPOSSIBLE, STEP, Likelihood
from piecegraph.explain.log.parts import Chunk, representatives
from piecegraph.explain.log.tracebacks import Act, Link, Story, num_tellers

BEAM = 128
_SIMILAR = 1.0
"""Readings whose price differs by less are called equally good."""


@dataclass(frozen=True, slots=True)
class SameStory:
    """What all of ``count`` processes told."""

    story: Story
    count: int
    num_other_readings: int
    """How many other orders of repeated frames explain the log as well."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """A story so far, and how many processes have told how much of it."""

    word: tuple[Hashable, ...]
    told: tuple[int, ...]
    """``told[k]``: how many processes have printed exactly the first k chunks."""
    price: float
    latest: int
    """How much the process that wrote last has told: it is a little likelier to go on."""


def unweave(chunks: Sequence[Chunk]) -> SameStory | None:
    """The one story, or None if these chunks cannot be N copies of one."""
    count = num_tellers(chunks)
    repeats = _repeats(chunks, count)
    if repeats is None:
        return None
    likelihood = Likelihood(chunks)
    first = representatives(chunks)
    readings = [_Reading((), (count,), 0.0, 0)]
    for chunk in chunks:
        further: dict[tuple[tuple[Hashable, ...], tuple[int, ...]], _Reading] = {}
        for reading in readings:
            for nxt in _continuations(reading, chunk, repeats, first, likelihood):
                known = further.get((nxt.word, nxt.told))
                if known is None or nxt.price < known.price:
                    further[nxt.word, nxt.told] = nxt
        readings = sorted(further.values(), key=lambda reading: reading.price)[:BEAM]
        if not readings:
            return None
    whole = [reading for reading in readings if reading.told[-1] == count and first[reading.word[-1]].kind == "text"]
    if not whole:
        return None
    best = whole[0]
    others = {r.word for r in whole if r.price <= best.price + _SIMILAR} - {best.word}
    return SameStory(_tell([first[key] for key in best.word]), count, len(others))


def _repeats(chunks: Sequence[Chunk], count: int) -> dict[Hashable, int] | None:
    """How often each chunk occurs in the story; None if some count refutes that there is one."""
    total = Counter(chunk.key for chunk in chunks)
    if any(number % count for number in total.values()):
        return None
    return {key: number // count for key, number in total.items()}


def _continuations(
    reading: _Reading,
    chunk: Chunk,
    repeats: dict[Hashable, int],
    first: dict[Hashable, Chunk],
    likelihood: Likelihood,
) -> list[_Reading]:
    word, told = reading.word, reading.told
    found = []
    for place, waiting in enumerate(told):
        if not waiting:
            continue
        if place < len(word):
            if word[place] == chunk.key:
                found.append(_advance(reading, place, word, 0.0))
        elif word.count(chunk.key) < repeats[chunk.key]:
            price = likelihood.price(first[word[-1]] if word else None, chunk)
            if price < IMPOSSIBLE:
                found.append(_advance(reading, place, (*word, chunk.key), price - 2 * STEP))
    return found


def _advance(reading: _Reading, place: int, word: tuple[Hashable, ...], price: float) -> _Reading:
    told = [*reading.told, 0] if len(word) > len(reading.word) else list(reading.told)
    told[place] -= 1
    told[place + 1] += 1
    bonus = 0.05 if place == reading.latest else 0.0
    return _Reading(word, tuple(told), reading.price + price - bonus, place + 1)


def _tell(chunks: Sequence[Chunk]) -> Story:
    acts: list[Act] = []
    frames: list[Chunk] = []
    header: Chunk | None = None
    link: Link = ""
    for chunk in chunks:
        if chunk.kind == "frame":
            frames.append(chunk)
        elif chunk.kind == "link":
            link = "cause" if chunk.text == "cause" else "context"
        elif chunk.kind == "header":
            header = chunk
        else:
            acts.append(Act(tuple(frames), chunk, link, header))
            frames, header, link = [], None, ""
    return tuple(acts)
