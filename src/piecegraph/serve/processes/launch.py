"""Where API processes come from: a process that has imported what they need, and is forked for each.

This one imports little: what it starts is the first thing that a server does.
"""

from __future__ import annotations

import multiprocessing
import signal
import socket
from multiprocessing.forkserver import ensure_running
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from piecegraph.serve.settings import ServeSettings

FORKS = multiprocessing.get_context("forkserver")


def start_early() -> None:
    """Have imports begin, while this process does something else."""
    FORKS.set_forkserver_preload(["piecegraph.serve.processes.api_process"])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for this process, which tells others
    try:
        ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run(number: int, listening: socket.socket, connected: socket.socket, settings: ServeSettings, logs: bool) -> None:
    """See :func:`piecegraph.serve.processes.api_process.run`."""
    from piecegraph.serve.processes import api_process

    api_process.run(number, listening, connected, settings, logs)
