"""What a running job prints: passed on byte for byte as it comes, and kept for a reader that may be slower.

Note [The end of a followed job]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The job ends when its pipe does. Ctrl-C reaches the job as well, whose last words are still to come: the first one is
no reason to stop reading, the second is. A scheduler that sends SIGTERM, or a terminal that goes away, leaves little
time: what comes within :data:`GRACE_SECONDS` is read. In each case the reader gets everything up to there.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

CHUNK_BYTES = 1 << 16
MAX_CHUNKS = 64
"""So many wait for the reader; then the job has to."""
GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.1


class FollowedJob(io.RawIOBase):
    """The output of a job as a stream. It is passed on by a thread of its own, so that reading holds nothing up."""

    def __init__(self, source: int, target: int | None) -> None:
        """Make one; nothing is passed on before the first read.

        Args:
            source: the descriptor that the job writes to.
            target: the descriptor to pass everything on to; None for nowhere.
        """
        self._source, self._target = source, target
        self._chunks: queue.Queue[bytes] = queue.Queue(MAX_CHUNKS)
        self._passing = threading.Thread(target=self._pass_on, daemon=True)
        self._stop_at: float | None = None
        self._num_left: int | None = None
        self._num_interrupts = 0
        self._has_ended = False
        self.refusal = ""
        """Why output could no longer be passed on."""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """As many bytes as asked for; fewer, or none, only at the end."""
        parts, missing = [], size if size >= 0 else 1 << 62
        while missing > 0 and (part := self._next()):
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def drain(self) -> None:
        """Pass on what is left without reading it."""
        while self._next():
            pass

    def end_by(self, number: int) -> None:
        """A signal has come: see Note [The end of a followed job]."""
        self._num_interrupts += number == signal.SIGINT
        if number != signal.SIGINT or self._num_interrupts > 1:
            grace = 0.0 if number == signal.SIGINT else GRACE_SECONDS
            self._stop_at = min(time.monotonic() + grace, self._stop_at or float("inf"))

    def _next(self) -> bytes:
        if self._passing.ident is None:
            self._passing.start()
        while not self._has_ended and not self._must_stop():
            with contextlib.suppress(queue.Empty):
                chunk = self._chunks.get(timeout=_POLL_SECONDS)
                self._has_ended = not chunk
                return chunk
        return b""

    def _must_stop(self) -> bool:
        """Whether it is time, and what had come by then is read; a job that prints on and on has no end of its own."""
        if self._stop_at is None or time.monotonic() < self._stop_at:
            return False
        left = self._chunks.qsize() if self._num_left is None else self._num_left
        self._num_left = left - 1
        self._has_ended = left <= 0
        return self._has_ended

    def _pass_on(self) -> None:
        chunk = b"..."
        while chunk:
            chunk = _read(self._source)
            if self._target is not None and not self.refusal:
                try:
                    _write(self._target, chunk)
                except OSError as error:  # the job must not suffer for whoever read its output
                    self.refusal = (error.strerror or str(error)).lower()
            self._chunks.put(chunk)


def _read(source: int) -> bytes:
    while True:
        try:
            return os.read(source, CHUNK_BYTES)
        except BlockingIOError:
            select.select([source], [], [])
        except OSError:  # a terminal that is gone
            return b""


def _write(target: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(target, data) :]
        except BlockingIOError:
            select.select([], [target], [])


@contextlib.contextmanager
def signals_end(job: FollowedJob) -> Iterator[None]:
    """While this lasts, signals end the reading and not this process."""

    def handle(number: int, frame: FrameType | None) -> None:
        job.end_by(number)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, action in previous.items():
            signal.signal(number, action)
