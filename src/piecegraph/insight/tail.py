"""The end of a log that holds more tracebacks than are read; what comes before it is counted by exception."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from piecegraph.insight.chunks import exception_of, mask

TAIL_LINES = 5000
MAX_KINDS = 1000


class Tail:
    """Keeps the last lines and counts the exceptions in those that it lets go."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, str]] = deque()
        self._is_under_frame = False
        self._counts: Counter[str] = Counter()

    def add(self, number: int, raw: str) -> None:
        self._kept.append((number, raw))
        if len(self._kept) > TAIL_LINES:
            _, gone = self._kept.popleft()
            self._count(gone)

    def lines(self) -> Iterator[tuple[int, str]]:
        return iter(self._kept)

    def notes(self, num_read: int) -> list[str]:
        """What to say about the lines that were let go."""
        total = self._counts.total()
        if not total:
            return []
        text, number = self._counts.most_common(1)[0]
        return [
            f"after {num_read:,} lines of tracebacks, {total:,} further exceptions were counted and not read, "
            f"most often ({number:,}) {text[:100]}; the last {TAIL_LINES:,} lines were read"
        ]

    def _count(self, raw: str) -> None:
        if raw.startswith("  "):
            self._is_under_frame = True
            return
        if self._is_under_frame and exception_of(raw.rstrip("\r")):
            text = mask(raw)
            if text in self._counts or len(self._counts) < MAX_KINDS:
                self._counts[text] += 1
        self._is_under_frame = False
