"""A lock that threads get in the order in which they ask for it.

Note [Waiting in line]
~~~~~~~~~~~~~~~~~~~~~~
A thread that runs step after step gives its lock back for a moment between two of them, and takes it again before any
other has woken up. So threads wait in a line, and only the first of it waits for the lock itself. What is held is a
lock of Python's own, so that giving it back is one call that no interrupt can cut in two. All else is made of single
operations on queues, which no other thread can get in between; to be woken once too often does no harm.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, eq=False, slots=True)
class _Waiter:
    is_moot: Callable[[], bool]
    woken: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)

    def wake(self) -> None:
        self.woken.put(None)


class FairLock:
    """As ``threading.RLock``, but first come, first served: see Note [Waiting in line].

    >>> lock = FairLock()
    >>> with lock, lock.turn() as is_mine:
    ...     is_mine
    True
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._line: deque[_Waiter] = deque()
        self._owner: int | None = None
        """Written by the owner alone, so that a thread reads reliably whether it is its own."""
        self._depth = 0

    @property
    def is_wanted(self) -> bool:
        """Whether a thread waits in line."""
        return len(self._line) > 0

    def __enter__(self) -> None:
        self._wait(lambda: False)

    def __exit__(self, *_: object) -> None:
        self._release()

    @contextlib.contextmanager
    def turn(self, is_moot: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Hold the lock inside, and give True; or do not hold it and give False, because there is no need to any more.

        Args:
            is_moot: whether that is so. It is asked here and by threads that give the lock back.
        """
        is_mine = self._wait(is_moot)
        try:
            yield is_mine
        finally:
            if is_mine:
                self._release()

    @contextlib.contextmanager
    def turn_at_once(self) -> Iterator[bool]:
        """The same without waiting: False if another thread has the lock."""
        is_mine = self._lock.acquire(blocking=False)
        if is_mine:
            self._enter()
        try:
            yield is_mine
        finally:
            if is_mine:
                self._release()

    def _wait(self, is_moot: Callable[[], bool]) -> bool:
        if self._owner == threading.get_ident():
            self._lock.acquire()
        elif not self._take(is_moot):
            return False
        self._enter()
        return True

    def _take(self, is_moot: Callable[[], bool]) -> bool:
        """Take the lock: at once where nobody has it or waits for it, else behind those in line."""
        if is_moot():
            return False
        if not self._line and self._lock.acquire(blocking=False):
            return True
        waiter = _Waiter(is_moot)
        self._line.append(waiter)
        try:
            while self._line[0] is not waiter and not is_moot():
                waiter.woken.get()
            return not is_moot() and self._lock.acquire()
        finally:
            self._line.remove(waiter)
            with contextlib.suppress(IndexError):
                self._line[0].wake()

    def _enter(self) -> None:
        self._owner = threading.get_ident()
        self._depth += 1

    def _release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            for waiter in tuple(self._line):
                if waiter.is_moot():
                    waiter.wake()
        self._lock.release()
