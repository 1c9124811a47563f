"""The end of a log that holds more tracebacks than are read; what comes before it is counted by exception."""

from __future__ import annotations

from collections import Counter, deque

from piecegraph.explain.log.syntax import HEADER_TEXT, exception_of, mask

TAIL_LINES = 5000
MAX_KINDS = 1000
"""Of exceptions that are counted and not read."""


class Tail:
    """Takes the lines, gives the last of them back."""

    def __init__(self) -> None:
        self._blocks: deque[tuple[int, list[str]]] = deque()
        self._num_kept = 0
        self._is_under_frame = False
        self._counts: Counter[str] = Counter()

    def add(self, first: int, lines: list[str]) -> None:
        """The next lines, of which the first has this number. Whole blocks are let go: one by one costs too much."""
        self._blocks.append((first, lines))
        self._num_kept += len(lines)
        while self._num_kept - len(self._blocks[0][1]) >= TAIL_LINES:
            _, gone = self._blocks.popleft()
            self._num_kept -= len(gone)
            self._count(gone)

    def lines(self) -> list[tuple[int, str]]:
        """The last lines with their numbers, from the head of a traceback on; call it once, at the end."""
        kept = [numbered for first, lines in self._blocks for numbered in enumerate(lines, first)]
        start = max(0, len(kept) - TAIL_LINES)
        while start < len(kept) and HEADER_TEXT not in kept[start][1]:
            start += 1  # a traceback of which the head was let go would look like another failure
        self._count([raw for _, raw in kept[:start]])
        return kept[start:]

    def notes(self, num_read: int) -> list[str]:
        """What to say about the lines that were let go."""
        total = self._counts.total()
        if not total:
            return []
        text, number = self._counts.most_common(1)[0]
        return [
            f"after {num_read:,} frames, {total:,} further exceptions were counted and not read, "
            f"most often ({number:,}) {text[:100]}; the last {TAIL_LINES:,} lines were read"
        ]

    def _count(self, lines: list[str]) -> None:
        is_under_frame = self._is_under_frame
        for raw in lines:
            if raw[:2] == "  ":
                is_under_frame = True
            elif is_under_frame:
                is_under_frame = False
                if exception_of(raw.rstrip("\r")):
                    text = mask(raw)
                    if text in self._counts or len(self._counts) < MAX_KINDS:
                        self._counts[text] += 1
        self._is_under_frame = is_under_frame
