"""Judges things one by one, each in a process of its own: a crash or a hang is a verdict too.

The processes are forked after the slow imports, with limits on time and memory, and leave their verdict in a file.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Verdict = dict[str, Any]


@dataclass
class _Job:
    name: str
    process: Any
    result: Path
    started: float


def judge_all(
    names: Sequence[str],
    judge: Callable[[str], Verdict],
    crashed: Callable[[str, str], Verdict],
    *,
    jobs: int,
    timeout: float,
    memory_bytes: int | None,
) -> Iterator[Verdict]:
    """The verdict on each name, as they come, with the seconds it took.

    Args:
        names: what is judged.
        judge: runs in the process.
        crashed: the verdict on a process that left none: takes the name and the reason.
        jobs: how many processes run together.
        timeout: seconds for one.
        memory_bytes: of address space for one; None where a GPU maps more than there is.
    """
    waiting, running = list(names), []
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(waiting.pop(0), judge, Path(folder), memory_bytes))
            time.sleep(0.05)
            for job in list(running):
                late = time.monotonic() - job.started > timeout
                if late:
                    job.process.kill()
                if late or not job.process.is_alive():
                    job.process.join()
                    running.remove(job)
                    yield _collect(job, f"no end after {timeout:.0f} s" if late else "", crashed)


def _start(name: str, judge: Callable[[str], Verdict], folder: Path, memory_bytes: int | None) -> _Job:
    result = folder / f"{name.replace('/', '-')}.json"
    arguments = (name, judge, result, memory_bytes)
    process = multiprocessing.get_context("fork").Process(target=_run, args=arguments)
    process.start()
    return _Job(name, process, result, time.monotonic())


def _run(name: str, judge: Callable[[str], Verdict], result: Path, memory_bytes: int | None) -> None:
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    logging.disable(logging.CRITICAL)
    said = os.open(result.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    result.write_text(json.dumps(judge(name)))


def _collect(job: _Job, why: str, crashed: Callable[[str, str], Verdict]) -> Verdict:
    seconds = round(time.monotonic() - job.started, 1)
    if not why and job.result.exists():
        found: Verdict = json.loads(job.result.read_text())
        return found | {"seconds": seconds}
    said = job.result.with_suffix(".log").read_text(errors="replace").strip().splitlines() or [""]
    reason = why or f"the process ended with exit code {job.process.exitcode}: {said[-1]}"
    return crashed(job.name, reason) | {"seconds": seconds}
