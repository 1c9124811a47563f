"""Eight real processes that fail at once and write to one pipe, as the ranks of a job do.

python crash_together.py STORY WAY PREFIX

STORY   compile: all fail alike, in a chain; oom: one runs out of memory, the others lose their peer;
        mixed: four fail in the compiler and four in a matmul
WAY     uncaught: own interpreters, their exceptions printed by CPython; caught: printed by multiprocessing
PREFIX  none, rank or worker
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time

NUM_PROCESSES = 8


class BackendCompilerFailed(RuntimeError):  # noqa: N818 - torch's name
    pass


class OutOfMemoryError(RuntimeError):
    pass


def create_arg(value: object, depth: int) -> object:
    if depth == 0:
        raise NotImplementedError(f"argument of type: {type(value)}")
    return tuple(create_arg(part, depth - 1) for part in (value,))


def trace(value: object) -> object:
    return create_arg(value, 2)


def inductor(value: object) -> object:
    return trace(value)


def call_backend(value: object) -> object:
    try:
        return inductor(value)
    except Exception as error:
        raise BackendCompilerFailed(f"backend={hex(id(value))} raised:\nNotImplementedError: {error}").with_traceback(
            error.__traceback__
        ) from None


def capture_one_batch_size(rank: int) -> object:
    return call_backend(rank)


def fail_compile(rank: int) -> None:
    try:
        capture_one_batch_size(rank)
    except RuntimeError as error:
        raise Exception(
            f"Capture cuda graph failed: {error}\n\nPossible solutions:\n1. set --mem-fraction-static to a lower value"
        ) from error


def allocate(num_bytes: int) -> bytes:
    raise OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes / 2**30:.2f} GiB.")


def forward(rank: int) -> bytes:
    return allocate(20 << 30)


def matmul(left: int, right: int) -> None:
    raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({left}x128 and {right}x64)")


def all_reduce(rank: int) -> None:
    raise RuntimeError(f"[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:{40000 + rank}")


def fail(kind: str, rank: int) -> None:
    if kind == "compile" or (kind == "mixed" and rank % 2):
        fail_compile(rank)
    elif kind == "mixed":
        matmul(rank, 96)
    elif rank == 3:
        forward(rank)
    else:
        time.sleep(0.05)
        all_reduce(rank)


class Prefixed:
    """A stream that puts a prefix in front of every line, as engines' workers have it."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._stream, self._pending = prefix, sys.stderr, ""

    def write(self, text: str) -> int:
        *lines, self._pending = (self._pending + text).split("\n")
        if lines:
            self._stream.write("".join(f"{self._prefix}{line}\n" for line in lines))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def work(kind: str, rank: int, prefix: str, ready: int, go: int) -> None:
    """Fail, at the same moment as the others: when nobody holds the other end of ``go`` any more."""
    if prefix == "worker":
        sys.stderr = Prefixed(f"(Worker_TP{rank} pid={os.getpid()}) ")
    elif prefix == "rank":
        sys.stderr = Prefixed(f"[rank{rank}]: ")
    os.write(ready, b".")
    os.read(go, 1)
    fail(kind, rank)


def work_forked(kind: str, rank: int, prefix: str, ready: int, go: int, other_end: int) -> None:
    os.close(other_end)
    work(kind, rank, prefix, ready, go)


def main() -> None:
    kind, way, prefix = sys.argv[1:4]
    if len(sys.argv) > 4:
        rank, ready, go = map(int, sys.argv[4:])
        work(kind, rank, prefix, ready, go)
        return
    (ready_out, ready), (go, go_in) = os.pipe(), os.pipe()
    if way == "caught":
        fork = multiprocessing.get_context("fork")
        arguments = [(kind, rank, prefix, ready, go, go_in) for rank in range(NUM_PROCESSES)]
        jobs = [fork.Process(target=work_forked, args=each) for each in arguments]
        for job in jobs:
            job.start()
        wait = [job.join for job in jobs]
    else:
        command = [sys.executable, __file__, kind, way, prefix]
        wait = [
            subprocess.Popen([*command, str(rank), str(ready), str(go)], pass_fds=(ready, go)).wait
            for rank in range(NUM_PROCESSES)
        ]
    for _ in range(NUM_PROCESSES):
        os.read(ready_out, 1)
    os.close(go_in)
    for job_ends in wait:
        job_ends()


if __name__ == "__main__":
    main()
