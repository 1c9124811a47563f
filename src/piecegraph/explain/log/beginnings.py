"""Where another run begins in the same log: see Note [Runs] in :mod:`scan`."""

from __future__ import annotations

from collections.abc import Sequence

from piecegraph.explain.evidence import Failure
from piecegraph.explain.log.deaths import tells_death
from piecegraph.explain.log.lines import Line
from piecegraph.explain.log.observations import is_error
from piecegraph.explain.log.syntax import mask

MIN_LETTERS, MAX_LENGTH = 12, 400
"""A line with fewer letters says too little to be the beginning of a run."""


class FirstLine:
    """The first line of a log, as long as it may show where another run begins."""

    def __init__(self) -> None:
        self.text: str | None = None
        """None before it came; empty where it shows nothing, as one that is said a second time before anything failed.
        """
        self._is_met = False

    def note(self, lines: Sequence[str], opening: Sequence[str]) -> None:
        """The next lines of the log; one with any of the words ``opening`` may be a part of a traceback."""
        if self.text is not None:
            return
        known = next((line.strip() for line in lines if sum(map(str.isalpha, line)) >= MIN_LETTERS), None)
        if known is None:
            return
        tells_failure = any(word in known for word in opening) or tells_death(known) or is_error(Line(0, known), known)
        self.text = "" if known != mask(known) or tells_failure or len(known) > MAX_LENGTH else known

    def is_again(self, raw: str, *, has_failed: bool) -> bool:
        """Whether a later line is the first one again, behind a failure."""
        if not self.text or self.text not in raw:
            return False
        if not self._is_met:
            self._is_met = True
            return False
        if not has_failed:
            self.text = ""  # it is said again and again
            return False
        return raw.strip() == self.text


def never_started(failure: Failure) -> bool:
    """Whether Python could not even read the program: nothing that stands above is of the same process."""
    only = failure.chain[0]
    is_main = len(failure.chain) == 1 and not any(frame.function for frame in only.frames)
    return is_main and only.type in ("SyntaxError", "IndentationError", "TabError")
