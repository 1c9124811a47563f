"""Where to dump, if at all: what a user said in the program, in an option, or around it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path

from piecegraph.base.config import Options, check_folder
from piecegraph.base.job import rank_in_job


@dataclass(frozen=True, slots=True)
class Target:
    """What was asked for."""

    folder: Path
    saves_inputs: bool = False
    """Whether the tensors that go into each piece are saved."""


_around: ContextVar[Target | None] = ContextVar("piecegraph_dump", default=None)


@contextlib.contextmanager
def dump(folder: str | os.PathLike[str], *, inputs: bool = False) -> Iterator[None]:
    """What is compiled inside leaves a dump: graphs, pieces, repros, and an ``index.md`` that says what is what.

    Args:
        folder: made if it is not there; each plan gets a new folder in it.
        inputs: also save the tensors that go into each distinct piece when it first runs.

    Example:
        with piecegraph.dump("look"):
            fast.capture(x)
    """
    token = _around.set(Target(Path(check_folder("folder", folder)).expanduser(), inputs))
    try:
        yield
    finally:
        _around.reset(token)


def target_of(options: Options) -> Target | None:
    """Where to dump what is compiled now: the nearest wish counts. Ranks of a job have a folder each."""
    found = _around.get()
    if found is None and (folder := options.dump or os.environ.get("PIECEGRAPH_DUMP", "")):
        found = Target(Path(folder).expanduser(), options.dump_inputs)
    rank = rank_in_job() if found is not None else None
    return found if found is None or rank is None else replace(found, folder=found.folder / f"rank{rank}")
