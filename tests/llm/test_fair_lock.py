"""Threads get the lock in the order in which they ask, unless they need it no longer."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from piecegraph.llm.run.fair_lock import FairLock


def start(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def wait_for(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(5000):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("it never came true")


def test_first_come_first_served() -> None:
    lock, order, threads = FairLock(), list[int](), list[threading.Thread]()

    def come(number: int) -> None:
        with lock, lock:
            order.append(number)

    with lock:
        for number in range(20):
            threads.append(start(lambda number=number: come(number)))  # type: ignore[misc]
            wait_for(lambda: len(lock._line) == number + 1)  # noqa: B023
    for thread in threads:
        thread.join(5)
    assert order == list(range(20))


def test_who_takes_the_lock_again_at_once_waits_behind_those_in_line() -> None:
    lock, order = FairLock(), list[str]()

    def come() -> None:
        with lock:
            order.append("other")

    with lock:
        thread = start(come)
        wait_for(lambda: len(lock._line) == 1)
    for _ in range(3):
        with lock:
            order.append("same")
    thread.join(5)
    assert order == ["other", "same", "same", "same"]


def test_who_needs_it_no_longer_leaves_the_line() -> None:
    lock, left, is_done, goes_on = FairLock(), list[bool](), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            goes_on.wait(5)

    def come() -> None:
        with lock.turn(is_done.is_set) as is_mine:
            left.append(is_mine)

    with lock:
        holder = start(hold)
        wait_for(lambda: len(lock._line) == 1)
        thread = start(come)
        wait_for(lambda: len(lock._line) == 2)
        is_done.set()
    thread.join(5)
    wait_for(lambda: lock._owner is not None)
    assert left == [False], "before the lock was given back"
    with lock.turn_at_once() as is_mine:
        assert not is_mine
    goes_on.set()
    holder.join(5)
    with lock.turn_at_once() as is_mine, lock:
        assert is_mine
    assert (lock._owner, lock._depth, len(lock._line)) == (None, 0, 0)


def test_an_interrupted_wait_holds_nobody_up() -> None:
    lock, order, goes_on = FairLock(), list[str](), threading.Event()

    def hold() -> None:
        with lock:
            goes_on.wait(5)

    holder = start(hold)
    wait_for(lambda: lock._owner is not None)

    def interrupt() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), lock.turn(interrupt):
        order.append("never")
    goes_on.set()
    holder.join(5)
    with lock:
        order.append("now")
    assert (order, len(lock._line)) == (["now"], 0)
