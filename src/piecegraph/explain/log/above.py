"""What stands right above the line that tells of an end: who left no exception may have said why in plain text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from piecegraph.explain.log.syntax import kind_of

MAX_ABOVE = 2
MAX_TEXT = 300
_REACH = 24
_OF_LAUNCHERS = re.compile(
    r"[Cc]losing signal SIG|[Kk]illing subprocess|\bdeath signal\b|torch/distributed/(?:elastic|run|launch)"
    r"|^srun: |^slurmstepd: |Setting OMP_NUM_THREADS|^\W*$"
)
"""What they say while they end the others, and rules that are drawn."""


def lines_above(
    block: Sequence[str], end: int, first: int, read: Callable[[int, str], str]
) -> tuple[tuple[str, int | None], ...]:
    """The last lines that say something before a place in a block, with their numbers.

    Args:
        block: lines of the log.
        end: the place of the line that tells of an end.
        first: the number of the first line of the block.
        read: takes the prefixes off a line with this number.
    """
    found: list[tuple[str, int | None]] = []
    for at in range(end - 1, max(-1, end - 1 - _REACH), -1):
        text = read(first + at, block[at])
        if text.startswith("    ") or kind_of(text) or len(found) == MAX_ABOVE:
            break  # a traceback is told elsewhere
        if text.strip() and not _OF_LAUNCHERS.search(block[at]) and not _OF_LAUNCHERS.search(text):
            found.append((text.strip()[:MAX_TEXT], first + at))
    return tuple(reversed(found))
