"""Processes that compile pieces while this one does, each of them another.

Note [Pieces compiled aside]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Inductor is Python, so pieces are compiled side by side in several processes, or not at all. These cannot be copies of
this one, as those are that compile kernels (Note [Copies that compile]): even of a fake tensor Inductor asks what only
the driver of the GPU knows, and a copy cannot ask a driver that was in use before. So a process is started that imports
what compiles, while this one traces, and is copied then.

What such a copy has compiled is in Inductor's cache, and is loaded from there as in a warm start. This process does not
wait for them: it compiles, too, whatever nobody has begun with, and what they could not compile. Imports take as long
as to compile some pieces. So processes are started for models that are known to have many, and where many are left.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, Pipe
from typing import Any, TypeAlias

import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.graph.piece_worker import END, Done, make_job

Answer: TypeAlias = "Future[Done]"
"""It is cancelled by who compiles the piece instead."""
_Jobs: TypeAlias = "queue.SimpleQueue[tuple[bytes, Answer] | None]"
"""None ends one of those who serve it."""

_WORTH_STARTING = 8
"""Pieces. In the time of the imports one process compiles four or five."""
_PATIENCE = 120.0
"""Seconds that pieces may take."""
_MOST_PROCESSES = 4
"""Models have six distinct pieces, or a few more, and each process takes half a gigabyte of a GPU."""
_GRACE = 5.0
"""Seconds in which copies are ended."""
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from piecegraph.graph.piece_worker import main; main(*map(json.loads, sys.argv[2:]))"
)


class PieceCompilers:
    """See Note [Pieces compiled aside]."""

    def __init__(self) -> None:
        self.num_compiled = 0
        """Pieces that others have compiled."""
        self.refusals: dict[str, None] = {}
        """Why they have not compiled others that they began with."""
        self._processes: _Processes | None = None

    @property
    def is_running(self) -> bool:
        """Whether there are processes, or will be."""
        return self._processes is not None

    def start(self, device: torch.device, modules: Sequence[str] = ()) -> None:
        """Start processes, unless there are some, or this machine has no cores for them; returns at once.

        Args:
            device: of the pieces.
            modules: those that register ops of them.
        """
        count = min(_MOST_PROCESSES, torch_compat.num_compilers())
        if self._processes is not None or count < 2 or not sys.executable or not hasattr(os, "fork"):
            return
        with contextlib.suppress(OSError):  # no room for them: all is compiled here
            self._processes = _Processes(count, str(device), modules)
            weakref.finalize(self, self._processes.close)

    def end(self) -> None:
        """Begin to end them, which takes a second if they have used a GPU."""
        if self._processes is not None:
            self._processes.end()

    def close(self) -> None:
        """End them. When this returns, what they had of a GPU is free."""
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def submit(
        self, pieces: Mapping[str, torch.fx.GraphModule], fake_mode: Any, settings: Mapping[str, Any]
    ) -> dict[str, Answer]:
        """Have pieces compiled, as far as they can be sent. Who does not want to wait for one cancels it.

        Args:
            pieces: by their keys.
            fake_mode: that of their trace.
            settings: of Inductor.
        """
        if len(pieces) >= _WORTH_STARTING:
            self.start(_device_of(pieces.values()))
        if self._processes is None or len(pieces) < 2:
            return {}
        answers: dict[str, Answer] = {}
        for key, module in pieces.items():
            job = make_job(module, fake_mode, settings)
            if job is not None:
                answers[key] = Future()
                self._processes.jobs.put((job, answers[key]))
        return answers

    def result(self, answer: Answer) -> Done | None:
        """What became of a piece that somebody has begun with; None if it is to be compiled here."""
        try:
            done = answer.result(_PATIENCE)
        except Exception as error:  # noqa: BLE001 - a process that died, or takes too long: nothing is lost by that
            done = Done(None, reason=f"{type(error).__name__}: {error}")
        if done.artifact is None:
            self.refusals[done.reason] = None
            return None
        return done


def _device_of(pieces: Iterable[torch.fx.GraphModule]) -> torch.device:
    """The first that is not the host's."""
    values = itertools.chain.from_iterable(map(torch_compat.input_values, pieces))
    devices = (value.device for value in values if isinstance(value, torch.Tensor))
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


class _Processes:
    """A process that imports what compiles, and its copies.

    Args:
        count: how many copies.
        device: what they compile for.
        modules: what else they need.
    """

    def __init__(self, count: int, device: str, modules: Sequence[str]) -> None:
        self.jobs: _Jobs = queue.SimpleQueue()
        self._count = count
        self._are_ready = threading.Event()
        self._is_ending = False
        pipes = [Pipe() for _ in range(count)]
        try:
            self._process = _start_process([there.fileno() for _, there in pipes], modules, device)
        finally:
            for _, there in pipes:
                there.close()
        for here, _ in pipes:
            served = here, self.jobs, self._are_ready
            threading.Thread(target=_serve, args=served, name="piecegraph pieces", daemon=True).start()

    def end(self) -> None:
        """Begin to end them. What is still importing does not listen, and has no copies."""
        if self._is_ending:
            return
        self._is_ending = True
        for _ in range(self._count):
            self.jobs.put(None)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            # Not by closing it: copies of this process have it open, too.
            self._process.stdin.write(END)
            self._process.stdin.close()
        if not self._are_ready.is_set():
            self._kill()

    def close(self) -> None:
        """End them, and wait for it."""
        self.end()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _start_process(handles: list[int], modules: Sequence[str], device: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *map(json.dumps, (sys.path, handles, modules, device))],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=handles,
        start_new_session=True,  # Ctrl-C is for this process, which ends them
        # One kernel after the other: there are as many processes as there may be. And to look whether there is a GPU
        # must not make use of the driver, before copies are made.
        env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
    )


def _serve(connection: Connection, jobs: _Jobs, is_ready: threading.Event) -> None:
    """Give jobs to a process, one after the other, until there are no more or it is gone."""
    with connection, contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()  # it has imported what compiles
        is_ready.set()
        while (job := jobs.get()) is not None:
            data, answer = job
            if answer.set_running_or_notify_cancel() and not _ask(connection, data, answer):
                return


def _ask(connection: Connection, data: bytes, answer: Answer) -> bool:
    """Whether there was an answer."""
    try:
        connection.send_bytes(data)
        answer.set_result(pickle.loads(connection.recv_bytes()))
    except Exception as error:  # noqa: BLE001 - whatever it is, somebody waits for it
        answer.set_exception(error)
        return False
    return True
