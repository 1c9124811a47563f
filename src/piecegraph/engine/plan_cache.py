"""Plans that outlive a process: found by their key before anything is traced, kept when they have served once.

Note [A warm start]
~~~~~~~~~~~~~~~~~~~
What takes long is kept: the trace, which Dynamo made, and what compilers made of the pieces. The rest is done again, on
the trace that was loaded: linears are joined, the graph is cut, passes run, and compiled pieces are looked up by their
structural keys. So what is loaded is the plan that would be made, or a piece is not found and is compiled. The checks
of a new plan are those of a loaded one, too: the function runs once and is compared with its trace.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from piecegraph.base import torch_compat
from piecegraph.base.cache_root import is_on
from piecegraph.base.describe import IndescribableError
from piecegraph.base.entries import (
    DamagedEntryError,
    Entry,
    Factors,
    changes,
    entries_of,
    find_entry,
    remove_entry,
    write_entry,
)
from piecegraph.base.events import Event, EventLog
from piecegraph.base.plan import Decision
from piecegraph.base.scratch import scratch_folder
from piecegraph.base.text import count_of
from piecegraph.engine.plan_key import key_of, plan_factors
from piecegraph.errors import CacheError
from piecegraph.graph.compile import CompiledPieces, KeptPiece
from piecegraph.graph.example import Example
from piecegraph.graph.kept_graph import StaleTraceError, UnkeepableError
from piecegraph.graph.kept_trace import dump_trace, load_trace
from piecegraph.graph.sizes import SizeGuards
from piecegraph.graph.tracer import Traced

_TRACE, _GUARDS, _PIECES, _COMPILED = "trace.pickle", "guards.pickle", "pieces.json", "compiled"
_MEASURED = "measured.json"
_SHOWN_CHANGES = 3

_refused: dict[str, str] = {}
"""Keys whose entries were wrong, with the reasons, until this process has written others in their place."""


class KeptPlan:
    """One plan, as far as the cache has to do with it. See Note [A warm start].

    Args:
        name: of what is compiled.
        how: what is asked of the stages, described; see :func:`~piecegraph.engine.plan_key.pipeline_factors`.
        events: where losses are told.
    """

    def __init__(self, name: str, how: Mapping[str, str], events: EventLog) -> None:
        self._name = name
        self._how = how
        self._events = events
        self._factors: Factors = {}
        self._key = ""
        self._trace = b""
        self._guards: SizeGuards = ()
        self._replaces = False
        """Whether there is an entry that was of no use."""
        self._folder: Path | None = None
        """Where compilers write, and read what was loaded."""
        self.pieces: Mapping[str, KeptPiece] = {}
        """By structural key."""
        self._measured: dict[str, int] = {}
        self._has_news = False
        """Whether something was measured that the entry does not hold."""
        self.decision = Decision("cache", "off", "nothing was traced")
        self.is_warm = False

    def find(
        self, function: Callable[..., Any], example: Example, weights: Mapping[str, torch.Tensor]
    ) -> Traced | None:
        """The trace of a function, if it is kept and holds for what is there now."""
        try:
            self._factors = plan_factors(function, example, weights, self._how)
        except IndescribableError as error:
            self.decision = Decision("cache", "off", f"there is no key: {error}")
            return None
        self._key = key_of(self._factors)
        if reason := _refused.get(self._key):
            self._cannot_use(reason)
            return None
        try:
            entry = find_entry(self._key)
            self.decision = self._miss() if entry is None else self.decision
            return None if entry is None else self._load(entry, function, example, weights)
        except StaleTraceError as stale:
            self._replaces = True
            self.decision = Decision("cache", "cold", f"{stale} since {self._key} was kept")
        except DamagedEntryError as damage:
            self._tell_damage(str(damage))
        except CacheError as error:
            self._give_up(error)
        return None

    def take(self, traced: Traced, function: Callable[..., Any], weights: Mapping[str, torch.Tensor]) -> None:
        """Write down a trace that was just made, before anything is changed in it."""
        if not self._key:
            return
        try:
            self._trace, self._guards = dump_trace(traced, function, weights), traced.sizes.guards
        except UnkeepableError as error:
            self._key, self.decision = "", Decision("cache", "off", f"the trace cannot be kept: {error}")

    def refuse(self, reason: str) -> None:
        """What was loaded is wrong: it goes, and the plan is to be made anew. It may be found again all the same, where
        it cannot be removed or another process writes it once more, so this process looks for it no more.
        """
        self._tell_damage(reason)
        _refused[self._key] = reason
        with contextlib.suppress(CacheError):
            remove_entry(self._key)

    def recall(self, what: str) -> int | None:
        """What was measured by an earlier start."""
        return self._measured.get(what)

    def note(self, what: str, value: int | None) -> None:
        """Keep what was measured, for later starts; None if it is not to be relied on any more."""
        self._has_news = True
        self._measured.pop(what, None)
        if value is not None:
            self._measured[what] = value

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        """Around everything that compiles or loads compiled code."""
        folder = self._compiler_folder() if self._key else None
        return contextlib.nullcontext() if folder is None else torch_compat.compiler_folder(str(folder))

    def _compiler_folder(self) -> Path | None:
        if self._folder is None:
            try:
                self._folder = _scratch_folder()
            except CacheError as error:
                self._give_up(error)
                return None
            if self._how["backend"] == repr("inductor") and "cpu" in self._factors["device"]:
                torch_compat.choose_vector_units()
        return self._folder / _COMPILED

    def keep(self, traced: Traced | None, pieces: CompiledPieces) -> None:
        """Write an entry, unless all of it was loaded from one. What cannot be written is told, and nothing else.

        Args:
            traced: the trace, if it was cut: compiling adds conditions on sizes.
            pieces: what was compiled of it.
        """
        is_known = (
            self.is_warm
            and not self._has_news
            and all(piece.is_loaded or piece.kept is None for piece in pieces.values())
        )
        if not self._key or not self._trace or is_known:
            return
        records = {key: piece.kept for key, piece in pieces.items() if piece.kept is not None}
        guards = pickle.dumps(self._guards if traced is None else traced.sizes.guards)
        facts = {"pieces": len(pieces), "pieces kept": len(records)}
        try:
            folder = self._folder or _scratch_folder()
            with _told_as_ours():
                (folder / _TRACE).write_bytes(self._trace)
                (folder / _GUARDS).write_bytes(guards)
                (folder / _PIECES).write_text(json.dumps({key: kept._asdict() for key, kept in records.items()}))
                (folder / _MEASURED).write_text(json.dumps(self._measured))
            write_entry(
                self._key,
                self._name,
                self._factors,
                facts,
                folder,
                replaces=self._replaces or self.is_warm,
            )
            _refused.pop(self._key, None)
        except CacheError as error:
            self._give_up(error)

    def _load(
        self, entry: Entry, function: Callable[..., Any], example: Example, weights: Mapping[str, torch.Tensor]
    ) -> Traced:
        folder = _scratch_folder()
        try:
            with ThreadPoolExecutor(1, "piecegraph copy") as aside:  # of what is needed later
                copying = aside.submit(entry.copy_to, folder)
                trace, guards = entry.read(_TRACE), pickle.loads(entry.read(_GUARDS))
                traced = load_trace(trace, function, example, weights, guards)
            with _told_as_ours():
                copying.result()
            torch_compat.settle_kernels(str(folder / _COMPILED))
            pieces = json.loads((folder / _PIECES).read_text())
            self.pieces = {key: KeptPiece(**record) for key, record in pieces.items()}
            self._measured = json.loads((folder / _MEASURED).read_text())
        except (StaleTraceError, DamagedEntryError, CacheError):
            raise
        except Exception as error:  # its files are what was written: whoever wrote them knew another torch, or us
            raise DamagedEntryError(f"it cannot be read: {type(error).__name__}: {error}") from error
        self._trace, self._guards, self._folder, self.is_warm = trace, guards, folder, True
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.made))
        facts = entry.facts
        what = f"the trace and {facts['pieces kept']} of {count_of(facts['pieces'], 'distinct piece')}"
        self.decision = Decision("cache", "warm", f"{self._key}, made {made}: {what}")
        return traced

    def _miss(self) -> Decision:
        """Why there is no entry: what has changed since the nearest one was kept."""
        mine = list(entries_of(self._name))
        if not mine:
            return Decision("cache", "cold", f"nothing is kept of {self._name} yet")
        found = [(changes(entry.factors, self._factors), entry) for entry in mine]
        nearest, entry = min(found, key=lambda pair: (len(pair[0]), -pair[1].made))
        shown = "; ".join(f"{factor} was {old}, is {new}" for factor, old, new in nearest[:_SHOWN_CHANGES])
        more = f"; and {len(nearest) - _SHOWN_CHANGES} more" if len(nearest) > _SHOWN_CHANGES else ""
        return Decision("cache", "cold", f"since {entry.key} was kept: {shown}{more}")

    def _tell_damage(self, reason: str) -> None:
        self._events.emit(Event("PG674", f"cache entry {self._key}", reason))
        self._cannot_use(reason)

    def _cannot_use(self, reason: str) -> None:
        self._replaces = True
        self.decision = Decision("cache", "cold", f"entry {self._key} cannot be used: {reason}")

    def _give_up(self, error: CacheError) -> None:
        self._key, self.decision = "", Decision("cache", "off", str(error))
        self._events.emit(Event(error.code, "cache", f"{error.what}: {error.why}", error.hint))


def is_any_kept(name: str) -> bool:
    """Whether the cache has plans of what is compiled: the next may be one of them."""
    try:
        return is_on() and any(True for _ in entries_of(name))
    except CacheError:
        return False


def _scratch_folder() -> Path:
    """A folder of this process alone.

    It is named as Inductor names its own: what is written there is known to be nobody's code.
    """
    with _told_as_ours():
        folder = scratch_folder("torchinductor_piecegraph_")
        (folder / _COMPILED).mkdir(mode=0o700)
    return folder


@contextlib.contextmanager
def _told_as_ours() -> Iterator[None]:
    """A folder for temporary files that is full is no reason to fail."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise CacheError("PG673", f"{tempfile.gettempdir()} cannot be used", why=why, hint="make room there") from error
