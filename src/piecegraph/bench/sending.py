"""Requests sent by several processes at once, so that a server is not measured by what one of them can read."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from piecegraph.base.progress import Bar
from piecegraph.bench.answers import Answer
from piecegraph.bench.client import Target
from piecegraph.bench.client_process import Job, Share
from piecegraph.errors import CommandError

_CODE = "from piecegraph.bench.client_process import main; main()"
_MOST_PROCESSES = 4
_OPEN_OF_A_PROCESS = 64
"""Requests that one process has open before another is worth its start."""
_BUSY = 0.9
"""From here on a process has no time left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What became of requests that were sent."""

    answers: list[Answer]
    """In the order of the requests."""
    seconds: float
    """From the first request to the last answer."""
    busy: tuple[float, ...]
    """The share of a core that each process used in that time."""

    @property
    def is_client_bound(self) -> bool:
        """Whether a process had no time left: what was measured is the client then, not the server."""
        return max(self.busy) > _BUSY


def default_processes(concurrency: int) -> int:
    """One for few requests open at once; for many up to four, of at most a quarter of the cores."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST_PROCESSES, num_cores // 4, math.ceil(concurrency / _OPEN_OF_A_PROCESS)))


def send_all(
    target: Target,
    requests: Sequence[bytes],
    bar: Bar,
    *,
    concurrency: int,
    num_processes: int,
    moments_s: Sequence[float] | None = None,
) -> Sent:
    """Send requests in their order, and read their answers.

    Args:
        target: where to.
        requests: all that is sent.
        bar: told of each answer.
        concurrency: requests that are open at once at most.
        num_processes: that share them; no more than may be open at once are started.
        moments_s: when to send each, counted from the beginning: times of its answer are counted from there, also if it
            had to wait for room. None: as soon as there is room.

    Raises:
        CommandError: PG618, a process ended by itself.
    """
    num_processes = min(num_processes, concurrency)
    with _numbers(len(requests)) as numbers, contextlib.ExitStack() as stack:
        processes = [stack.enter_context(_Process(numbers)) for _ in range(num_processes)]
        for index, process in enumerate(processes):
            share = concurrency // num_processes + (index < concurrency % num_processes)
            job = Job(target=target, requests=requests, numbers=numbers, moments_s=moments_s, concurrency=share)
            process.give(pickle.dumps(job))
        for process in processes:
            process.receive()  # that it is ready
        shares = _run_all(processes, bar)
    answers = {number: answer for share in shares for number, answer in share.answers.items()}
    seconds = max(share.seconds for share in shares)
    busy = tuple(share.busy * share.seconds / seconds for share in shares)
    return Sent(answers=[answers[number] for number in range(len(requests))], seconds=seconds, busy=busy)


@contextlib.contextmanager
def _numbers(count: int) -> Iterator[int]:
    """A file of all numbers below ``count``. Processes that inherit it share one place in it."""
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(array("I", range(count)))
        file.seek(0)
        yield file.fileno()


def _run_all(processes: Sequence[_Process], bar: Bar) -> list[Share]:
    """Have all begin, and wait until they have ended, or one of them failed."""
    with ThreadPoolExecutor(len(processes)) as pool:
        try:
            for process in processes:
                process.give(b"g")
            shares = [pool.submit(process.share, bar) for process in processes]
            done, _ = wait(shares, return_when=FIRST_EXCEPTION)
            for each in done:
                each.result()  # or what it raised, before the others end for that
            return [each.result() for each in shares]
        finally:
            for process in processes:
                process.kill()  # or the pool would wait for it


class _Process:
    """One of the processes, as the one that started it sees it.

    Args:
        numbers: a file that it inherits.
    """

    def __init__(self, numbers: int) -> None:
        # A session of its own: Ctrl-C is for this process, which ends the others.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(numbers,),
            start_new_session=True,
        )

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.wait()

    def kill(self) -> None:
        self._process.kill()

    def give(self, data: bytes) -> None:
        """Write to it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except OSError as error:
            raise self._gone() from error

    def receive(self) -> Any:
        """What it says next."""
        assert self._process.stdout is not None
        try:
            return pickle.load(self._process.stdout)
        except (EOFError, pickle.UnpicklingError) as error:
            raise self._gone() from error

    def share(self, bar: Bar) -> Share:
        """Wait until it has done its share."""
        while isinstance(message := self.receive(), str):
            bar.advance(message)
        assert isinstance(message, Share)
        return message

    def _gone(self) -> CommandError:
        self.kill()  # if it has only closed its pipes, or said what nobody understands
        code = self._process.wait()
        what = f"a process that sends requests (pid {self._process.pid}) ended with {code}"
        return CommandError("PG618", what, hint="its own lines on standard error say more")
