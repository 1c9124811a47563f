"""Folders for temporary files that are gone when their process is, however it ends.

One that ends as it should removes its own. Whoever is killed leaves them behind, and the next process removes them: it
can tell, because a living process holds a lock on each of its folders.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

_NEW_SECONDS = 60.0
"""So long a folder may take to be locked by who made it."""


def scratch_folder(prefix: str) -> Path:
    """A new folder of this process alone, and of those that are forked from it.

    Args:
        prefix: of its name. What dead processes have left under the same is removed meanwhile.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    _lock(folder)  # until the process ends: its files are closed then
    atexit.register(_remove_own, folder, os.getpid())
    _remove_left_behind(folder.parent, prefix)
    return folder


def _remove_own(folder: Path, process: int) -> None:
    if os.getpid() == process:  # and not one that was forked from it
        shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path) -> int | None:
    """The open folder, locked for this process; None if another has it, or if it cannot be had."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(opened)
        else:
            return opened
    return None


@functools.cache  # once for each process
def _remove_left_behind(parent: Path, prefix: str) -> None:
    name = "piecegraph removes what was left behind"
    threading.Thread(target=remove_left_behind, args=(parent, prefix), name=name, daemon=True).start()


def remove_left_behind(parent: Path, prefix: str) -> None:
    """Remove folders of this user that no process holds any more."""
    with contextlib.suppress(OSError):
        for folder in parent.glob(f"{prefix}*"):
            with contextlib.suppress(OSError):  # others remove them, too
                state = folder.lstat()
                if state.st_uid != os.getuid() or time.time() - state.st_mtime < _NEW_SECONDS:
                    continue
                opened = _lock(folder)
                if opened is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                    os.close(opened)
