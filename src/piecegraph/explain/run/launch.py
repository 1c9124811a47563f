"""Runs a command as if it had been started without us: same files, same signals, same exit code.

A command and its environment come in, how it ended comes out. Nothing stands between the command and its terminal: it
inherits our files, and stays in our process group, so that a terminal stops, continues and interrupts it directly.

Note [Signals]
~~~~~~~~~~~~~~
The signals that end a command are blocked here and read one by one with who sent them. What a terminal sends, it sends
to the command as well. What a process sends to us alone is passed on to the command. Either way the caller is told
first, to ask for stacks while they still show where the command hung.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_TELLING = (signal.SIGUSR1, signal.SIGUSR2)
"""Schedulers announce the end of a job with these; a program that listens goes on, and so must we."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How the command's own process ended."""

    pid: int
    status: int
    """As ``os.waitpid`` gives it."""
    interrupted_by: int | None = None
    """The signal with which somebody ended the run through us."""
    sender: str = ""
    """Who sent it, as far as the kernel says: ``slurmstepd (pid 77)``."""

    @property
    def exit_code(self) -> int:
        """As a shell gives it: 128 and the number of the signal for a command that died of one.

        >>> Ended(1, 3 << 8).exit_code, Ended(1, 9).exit_code
        (3, 137)
        """
        return 128 + os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else os.waitstatus_to_exitcode(self.status)


def launch(command: Sequence[str], environment: Mapping[str, str], before_signal: Callable[[], None]) -> Ended:
    """Run a command to its end. Raises ``OSError`` if it cannot be started.

    Args:
        command: the program, looked up on ``PATH``, and its arguments.
        environment: all of it.
        before_signal: called once, before the first signal that is meant to end the command is passed on.
    """
    watched = {
        number for number in (*_ENDING, *_TELLING) if signal.getsignal(number) != signal.SIG_IGN
    }  # nohup stays nohup
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched | {signal.SIGCHLD})
    child_action = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, it would lose the exit code
    try:
        restored = [signal.SIGPIPE, signal.SIGXFSZ]  # which Python ignores
        pid = os.posix_spawnp(command[0], list(command), environment, setsigmask=mask, setsigdef=restored)
        return _wait(pid, watched, before_signal)
    finally:
        signal.signal(signal.SIGCHLD, child_action)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _wait(pid: int, watched: set[signal.Signals], before_signal: Callable[[], None]) -> Ended:
    interrupted_by: int | None = None
    sender = ""
    while True:
        got = signal.sigwaitinfo(watched | {signal.SIGCHLD})
        if got.si_signo == signal.SIGCHLD:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return Ended(pid, status, interrupted_by, sender)
            continue
        if interrupted_by is None and got.si_signo in _ENDING:
            interrupted_by, sender = got.si_signo, _sender(got)
            before_signal()
        if got.si_code <= 0:  # sent by a process, not by the kernel for a terminal: see Note [Signals]
            os.kill(pid, got.si_signo)  # not reaped yet, so the number is still the command's


def _sender(got: signal.struct_siginfo) -> str:
    if got.si_code > 0:
        return "the terminal"
    try:
        name = Path(f"/proc/{got.si_pid}/comm").read_text().strip()
    except OSError:  # it has gone since, or is outside of this container
        return f"pid {got.si_pid}" if got.si_pid else "a process outside of this container"
    return f"{name} (pid {got.si_pid})"
