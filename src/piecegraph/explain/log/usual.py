"""What a run prints again and again, and whether it went back to that after a traceback.

A program that catches an exception may print its traceback and go on. The traceback then begins where the exception
was caught, and behind it stand the lines that stood before, with other numbers (``step 41 loss 2.3``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from piecegraph.explain.evidence import Failure
from piecegraph.explain.log.syntax import HEADER_TEXT, mask

NUM_LINES = 24
MAX_TEXT = 160
"""Of a line: long ones differ at their beginning, too, and thousands of them are kept."""
_MIN_AGAIN = 2
_PREFIX = re.compile(
    r"\[[A-Za-z]\w{0,40}\]:|\([^()]{0,80}pid=\d+[^()]{0,40}\)|\[[\w,@-]{1,40}\]<std\w+>:| {0,4}\d{1,5}: |"
)
"""Who printed a line, in the unmasked number; empty where nobody is named."""
_TELLING = re.compile(r"[A-Za-z]{3}.*#|#.*[A-Za-z]{3}")
_STARTS = re.compile(r"^(?:<module>|_bootstrap\w*|_run_module_as_main|_run_code|wrapper)$")
"""The outermost function where nothing has caught the exception: of a program, a process or a thread."""


@dataclass(frozen=True, slots=True)
class UsualLines:
    """The lines above a traceback or above the end of the log: how often each stands there, without its numbers."""

    number: int
    """Of the line that they stand above."""
    counts: Counter[tuple[str, str]]
    """By the prefix that names the process, and the rest without its numbers."""
    prefix: str
    """Of that line: those of the same process alone count."""


def usual_lines(block: Sequence[str], end: int, number: int) -> UsualLines:
    """Those above a place in a block of lines, up to the next traceback."""
    counts: Counter[tuple[str, str]] = Counter()
    for raw in reversed(block[max(0, end - NUM_LINES) : end]):
        prefix, text = _split(raw)
        if 'File "' in text or HEADER_TEXT in text:
            break
        counts[prefix, mask(text[:MAX_TEXT])] += 1
    return UsualLines(number, counts, _split(block[end])[0] if end < len(block) else "")


def _split(raw: str) -> tuple[str, str]:
    found = _PREFIX.match(raw)
    prefix = found[0] if found is not None else ""
    return prefix, raw[len(prefix) :]


def went_on(failure: Failure, usual: Iterable[UsualLines]) -> bool:
    """Whether the run went back to its usual output after the last print of a failure that it had caught."""
    last = failure.last_line
    if not failure.is_caught or last is None:
        return False
    usual = list(usual)
    before = next((lines for lines in reversed(usual) if lines.number <= last), None)
    if before is None:
        return False
    telling = [line for line in before.counts if line[0] == before.prefix and _TELLING.search(line[1])]
    later = (lines.counts for lines in usual if lines.number > last)
    return any(counts[line] >= _MIN_AGAIN for counts in later for line in telling)


def is_caught(failure: Failure) -> bool:
    """Whether the traceback that was printed last begins inside of a program, where somebody caught the exception."""
    if failure.kind not in ("exception", "logged") or failure.certainty != "printed":
        return False
    frames = failure.chain[-1].frames
    return bool(frames) and not _STARTS.match(frames[0].function)
