"""A folder that files are written into: each appears whole or not at all, and no failure to write breaks a run."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from piecegraph.base.events import Event, EventLog
from piecegraph.base.user_code import note_generated

_LOG = logging.getLogger(__name__)

_HINT = "make room there, or give another folder to dump into"


class DumpFolder:
    """The folder of one plan, made for it: nothing that lay there before is touched.

    Args:
        path: where it is; None if it could not be made.
        root: what was asked for.
        events: where it is told that something could not be written.
    """

    def __init__(self, path: Path | None, root: Path, events: EventLog) -> None:
        self.path = path
        self.files: list[str] = []
        """What was written, by name."""
        self._root = root
        self._events = events

    @staticmethod
    def make(root: Path, name: str, events: EventLog) -> DumpFolder:
        """A new folder below ``root``, and below that of the rank if there are several."""
        rank = _rank()
        above = root if rank is None else root / f"rank{rank}"
        plain = re.sub(r"[^\w.-]+", "_", name).strip("._") or "plan"
        try:
            above.mkdir(parents=True, exist_ok=True)
            path = _claim(above.absolute(), plain)
        except OSError as error:
            nowhere = DumpFolder(None, root, events)
            nowhere.tell(error)
            return nowhere
        note_generated(str(path))
        return DumpFolder(path, root, events)

    def write(self, name: str, text: str) -> Path | None:
        """Write a text, or write it anew; None if it cannot be."""
        return self._put(name, lambda path: path.write_text(text, encoding="utf-8"))

    def save(self, name: str, value: Any) -> Path | None:
        """Write tensors for ``torch.load``; None if they cannot be."""
        return self._put(name, lambda path: torch.save(value, path))

    def tell(self, error: Exception) -> None:
        """Something could not be written."""
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        event = Event("PG321", f"the dump in {self._root}", reason, _HINT if isinstance(error, OSError) else "")
        if "PG321" not in self._events.counts:
            _LOG.warning("%s", event)
        self._events.emit(event)

    def _put(self, name: str, put: Callable[[Path], object]) -> Path | None:
        if self.path is None:
            return None
        target, work = self.path / name, self.path / f".{name}.{threading.get_ident()}"
        try:
            put(work)
            work.replace(target)
        except (OSError, RuntimeError) as error:  # torch.save raises the latter when a disk is full
            self.tell(error)
            with contextlib.suppress(OSError):
                work.unlink(missing_ok=True)
            return None
        if name not in self.files:
            self.files.append(name)
        return target


def _rank() -> int | None:
    """The number of this process in its job; None outside of one."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else None


def _claim(above: Path, name: str) -> Path:
    """The first of ``name``, ``name-2``, ... that nobody has made."""
    for number in itertools.count(1):
        path = above / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o755)  # code is run from it: nobody else may write there
            return path
    raise AssertionError("there is always a next number")
