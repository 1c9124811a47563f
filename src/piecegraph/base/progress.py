"""The slow stages: bars on standard error, where a person is watching, and how long each took."""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Literal, Protocol

from piecegraph.base.collector import collector_paused

STAGES = ("import", "load", "trace", "split", "compile", "kernels", "measure", "record", "check")
"""Of a start, in their order: not all of them are to be found in every start."""

import_seconds: defaultdict[str, float] = defaultdict(float)
"""What importing took, by module: torch and transformers included, where they were not there."""


def timed_import(home: str, *, of: str) -> ModuleType:
    """Import a module; what that takes is counted as part of importing another."""
    if home in sys.modules:  # asked for at every use of a name of ours
        return importlib.import_module(home)
    start = time.perf_counter()
    try:
        with collector_paused():
            return importlib.import_module(home)
    finally:
        import_seconds[of] += time.perf_counter() - start


def is_terminal(stream: Any) -> bool:
    """Whether somebody watches what is written to a stream.

    Programs without a console have none, and others put something of their own in its place: a closed file, an object
    that can be written to and nothing else.
    """
    return _is_open(stream) and hasattr(stream, "isatty") and bool(stream.isatty())


def _is_open(stream: Any) -> bool:
    return stream is not None and not getattr(stream, "closed", False)


class Bar(Protocol):
    """A bar being shown."""

    def advance(self, what: str) -> None:
        """One more is done; ``what`` says what it was."""


class Progress:
    """Shows a bar for each stage, or nothing."""

    def __init__(self, wanted: bool | Literal["auto"]) -> None:
        self._is_shown = is_terminal(sys.stderr) if wanted == "auto" else wanted and _is_open(sys.stderr)

    @contextlib.contextmanager
    def bar(self, stage: str, total: int) -> Iterator[Bar]:
        """A bar for ``total`` steps of a stage; it disappears when the stage is done."""
        if not self._is_shown or total == 0:
            yield _Silent()
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[what]}"),
        )
        with RichProgress(*columns, console=Console(file=sys.stderr, force_terminal=True), transient=True) as shown:
            task = shown.add_task(stage, total=total, what="")
            yield _Rich(shown, task)


class _Silent:
    def advance(self, what: str) -> None:
        pass


class _Rich:
    def __init__(self, shown: object, task: object) -> None:
        self._shown, self._task = shown, task

    def advance(self, what: str) -> None:
        self._shown.update(self._task, advance=1, what=what)  # type: ignore[attr-defined]


class StageClock:
    """Times stages one behind the other: their sum is the time since it was made, or started again.

    >>> clock = StageClock()
    >>> clock.lap("load")
    >>> list(clock.seconds)
    ['load']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        """The next stage begins now; what has passed since the last belongs to none."""
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """A stage is done; one that comes again is added to."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now


def all_stages(seconds: Mapping[str, float], *, of: str) -> dict[str, float]:
    """Seconds of stages in their order, with what importing a module of ours took.

    >>> all_stages({"check": 1.0, "trace": 2.0}, of="nothing")
    {'import': 0.0, 'trace': 2.0, 'check': 1.0}
    """
    every = {**seconds, "import": import_seconds[of] + seconds.get("import", 0.0)}
    return {stage: every[stage] for stage in sorted(every, key=STAGES.index)}
