"""The last lines that a process printed, kept where they outlive it: of one that is killed there is nothing else."""

from __future__ import annotations

import os

KEPT_BYTES = 4096


def open_high(path: str, flags: int) -> int:
    """A file of ours, out of the way of programs that count on the number of the next one."""
    import fcntl

    low = os.open(path, os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
    try:
        descriptor = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 500)
    except (OSError, ValueError):
        return low
    os.close(low)
    return descriptor


class Tail:
    """A file that always holds the end of what was printed. Not mapped memory: a full disk must not end the program."""

    def __init__(self, path: str) -> None:
        self.descriptor = open_high(path, os.O_WRONLY)
        self.kept = b""

    def add(self, text: str) -> None:
        """Something was printed."""
        self.kept = (self.kept + text.encode("utf-8", "backslashreplace"))[-KEPT_BYTES:]
        if text != "\n":  # which print() writes apart
            os.pwrite(self.descriptor, self.kept, 0)
