"""The recorded steps of a language model, as what chooses kernels sees them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from piecegraph.llm.run.forward import Forward
from piecegraph.tape.tape import Rerun, Tape


class RecordedSteps:
    """A :class:`~piecegraph.provenance.live.TapeOwner`.

    Args:
        name: of the model.
        forward: what runs its steps; raises after ``close()``, and is asked each time, to outlive nothing.
        lock: held while a step runs.
    """

    def __init__(self, name: str, forward: Callable[[], Forward], lock: threading.RLock) -> None:
        self.name = name
        self._forward = forward
        self._lock = lock

    def tapes(self) -> list[Tape]:
        """All that is recorded. Raises after ``close()``."""
        return list(self._forward().tapes.values())

    @contextlib.contextmanager
    def rerun(self, tape: Tape) -> Iterator[Rerun]:
        """Make a recorded step ready to be run again; requests wait meanwhile."""
        with self._lock, torch.inference_mode(), self._forward().rerun(tape) as ready:
            yield ready
