"""How many threads run a step on a CPU: tried, not assumed.

Threads that wait for each other spin, and a step has hundreds of short ops at whose ends they wait. On a machine with
other work, or on two of its cores that are one, fewer threads are quicker.

Note [Threads of a process]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
``torch.set_num_threads`` is for the whole process. So what it was set to, by a call or by ``OMP_NUM_THREADS``, is the
most that is tried, and it is set again at the end of every step. A thread that uses torch for the first time while a
step runs in another one starts with the step's number.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Literal

import torch

from piecegraph.base.plan import Decision

_MOST_ROUNDS, _FEWEST_ROUNDS = 5, 3
_SECONDS = 1.0
"""After which no other round is begun."""
_AS_QUICK = 1.05
"""Fewer threads are taken if they are no slower than this: the others are somebody else's, or spin."""


@contextlib.contextmanager
def at_most_threads(count: int | None) -> Iterator[None]:
    """Run ops with so many threads, or with fewer if torch is set to fewer; None leaves it as it is."""
    before = torch.get_num_threads()
    if count is None or count >= before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choose_threads(wish: int | Literal["auto"], run: Callable[[], object]) -> Decision:
    """Decide how many threads run a step.

    Args:
        wish: a number, or ``"auto"`` to try.
        run: a step that is nobody's.
    """
    most = torch.get_num_threads()
    if wish != "auto":
        return Decision("threads", str(wish), "asked for")
    if most == 1:
        return Decision("threads", "1", "torch is set to one")
    took = _time_each(_counts(most), run)
    quickest = min(took.values())
    best = next(count for count, seconds in took.items() if seconds <= _AS_QUICK * quickest)
    others = [f"{seconds * 1e3:.0f} ms with {count}" for count, seconds in took.items() if count != best]
    times = f"{took[best] * 1e3:.0f} ms, and {', '.join(others)}"
    return Decision("threads", str(best), f"a step of decoding took {times}; torch is set to {most}")


def _counts(most: int) -> list[int]:
    """What is tried: powers of two, and all.

    >>> _counts(2), _counts(6), _counts(16)
    ([1, 2], [1, 2, 4, 6], [1, 2, 4, 8, 16])
    """
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def _time_each(counts: list[int], run: Callable[[], object]) -> dict[int, float]:
    """Median seconds with each number of threads. They take turns, so that what else the machine does meets all."""
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    begun = time.perf_counter()
    for number in range(-1, _MOST_ROUNDS):
        if number >= _FEWEST_ROUNDS and time.perf_counter() - begun > _SECONDS:
            break
        for count in counts:
            with at_most_threads(count):
                start = time.perf_counter()
                run()
                if number >= 0:  # the round before the first starts the threads
                    seconds[count].append(time.perf_counter() - start)
    return {count: statistics.median(times) for count, times in seconds.items()}
