"""All that is recorded of something compiled, as what chooses kernels sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from piecegraph.tape.library import TapeLibrary
from piecegraph.tape.tape import Rerun, Tape


class RecordedTapes:
    """A :class:`~piecegraph.provenance.live.TapeOwner`.

    Args:
        name: of what is compiled.
        lock: held while it runs.
        libraries: its tapes; raises after ``close()``, and is asked each time, to outlive nothing.
    """

    def __init__(
        self,
        name: str,
        lock: contextlib.AbstractContextManager[Any],
        libraries: Callable[[], Sequence[TapeLibrary[Any]]],
    ) -> None:
        self.name = name
        self._lock = lock
        self._libraries = libraries

    def tapes(self) -> list[Tape]:
        """All of them. Raises after ``close()``."""
        with self._lock:
            return [tape for library in self._libraries() for tape in library.tapes.values() if isinstance(tape, Tape)]

    @contextlib.contextmanager
    def rerun(self, tape: Tape) -> Iterator[Rerun]:
        """Make one of them ready to be run again; calls wait meanwhile."""
        with self._lock:
            library = next(each for each in self._libraries() if tape in each.tapes.values())
            with library.rerun(tape) as ready:
                yield ready
