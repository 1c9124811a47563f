"""The tapes of one plan: recorded largest first, kept by their keys, run again.

A library orders, warms up, records, drops and counts. What a key is, what data it is recorded on and what runs is
said by a :class:`Recordable`: the sizes of a call (``calls.py``), or the steps of a language model.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from piecegraph.base import torch_compat
from piecegraph.base.events import Event, EventLog
from piecegraph.base.progress import Bar, Progress
from piecegraph.errors import KernelError, PiecegraphError, located
from piecegraph.graph import interception
from piecegraph.tape.buffers import preserved
from piecegraph.tape.device import GraphDevice
from piecegraph.tape.reads import PathLeft
from piecegraph.tape.record import MakeLedger, Recorder
from piecegraph.tape.tape import DirectTape, GraphStep, Rerun, Tape, WatchedWeight

Key = TypeVar("Key", bound=Hashable)
_AnyKey = TypeVar("_AnyKey", bound=Hashable, contravariant=True)

Way = Callable[[Recorder], list[Any]]
"""Runs under a recorder and returns the outputs as the tape keeps them."""


class Recordable(Protocol[_AnyKey]):
    """What a library records."""

    @property
    def devices(self) -> Iterable[torch.device]:
        """Whose random numbers are not to change."""

    def title(self, key: _AnyKey) -> str:
        """A key in words."""

    def volume(self, key: _AnyKey) -> tuple[int, ...]:
        """How large it is: larger ones are recorded first."""

    def written(self, key: _AnyKey) -> Sequence[torch.Tensor]:
        """Memory that a run writes to and that is to be as it was after recording."""

    def fill_example(self, key: _AnyKey, source: Any) -> None:
        """Write data to the static buffers; ``source`` is what :meth:`TapeLibrary.record` was given."""

    def run(self, key: _AnyKey) -> Sequence[Any]:
        """Run on what the buffers hold, without graphs."""

    def warm_up(self, key: _AnyKey) -> None:
        """Run what has every kernel loaded and tuned, and every workspace made, that a run needs."""

    def direct(self, key: _AnyKey, source: Any) -> Callable[[], Sequence[Any]]:
        """What stands for a tape where nothing can be captured."""

    def ways(self, key: _AnyKey) -> Sequence[Way]:
        """How it may be recorded, the best first."""

    def failed(self, key: _AnyKey, way: int | None, error: Exception, place: dict[str, Any]) -> None:
        """A way failed. Raises, or tells it and returns: then the next way is tried, and the key is dropped behind the
        last. If it was the warm-up (None) there is no other way.
        """

    def weights(self, key: _AnyKey) -> Sequence[WatchedWeight]:
        """The weights that graphs read by address."""

    def current(self, key: _AnyKey | None) -> contextlib.AbstractContextManager[None]:
        """Inside, ops that ask whose they are belong to this, and to the data of a key if there is one."""

    def before_rerun(self, key: _AnyKey) -> None:
        """A tape is about to be replayed for nobody: whatever it may write to must be nobody's."""

    def why_gone(self, key: _AnyKey) -> tuple[str, str]:
        """Why the data of the last run of a key cannot be used again, and what to do; empty if it can."""


class TapeWatch(Protocol):
    """Is told what is recorded."""

    def recorded(self, library: TapeLibrary[Any]) -> None:
        """Some more is recorded, or was dropped."""

    def failed(self, error: Exception) -> None:
        """Recording failed, and the error is about to be raised."""


@dataclass(frozen=True, slots=True)
class Recorded(Generic[Key]):
    """What recording a key cost."""

    key: Key
    num_graphs: int
    num_eager_steps: int
    seconds: float
    num_bytes: int


class TapeLibrary(Generic[Key]):
    """Records tapes and keeps them.

    Args:
        recordable: what is recorded.
        device: what captures; None where nothing can be.
        events: where losses are told.
        make_ledger: writes down who puts what into the graphs, if that is asked for.
        progress: shows how far it is.
        check_always: check addresses at every replay, and not only at the first.
        watch: is told what is recorded.
    """

    def __init__(
        self,
        recordable: Recordable[Key],
        device: GraphDevice | None,
        events: EventLog,
        *,
        make_ledger: MakeLedger,
        progress: Progress,
        check_always: bool = False,
        watch: TapeWatch | None = None,
    ) -> None:
        self._recordable = recordable
        self._device = device
        self._events = events
        self._make_ledger = make_ledger
        self._progress = progress
        self._check_always = check_always
        self._watch = watch
        self.uncapturable: dict[int, str] = {}
        """Pieces that run between graphs because they cannot be in one, by number, and why."""
        self.tapes: dict[Key, Tape | DirectTape] = {}
        self.dropped: dict[Key, str] = {}
        """What ran out of memory, or could not be run or captured, and why: not tried again with the like data."""
        self.recorded: list[Recorded[Key]] = []
        self.tune_seconds = 0.0
        """What the very first run took: kernels are tuned and loaded then."""

    def record(
        self,
        keys: Iterable[Key],
        source: Any = None,
        *,
        tidies: bool = True,
        is_quiet: bool = False,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> None:
        """Record keys, largest first, so that smaller ones reuse the memory of larger ones.

        Args:
            keys: what to record.
            source: what the data is made from that the recorded runs work on.
            tidies: see :meth:`GraphDevice.session`.
            is_quiet: show no progress.
            goes_on: asked before each key whether there is time for it.
        """
        progress = Progress(False) if is_quiet else self._progress
        ordered = sorted(keys, key=self._recordable.volume, reverse=True)
        try:
            with self.session(tidies=tidies), progress.bar("record", len(ordered)) as bar:
                self._record(ordered, source, bar, goes_on)
        except Exception as error:
            if self._watch is not None:
                self._watch.failed(error)
            raise
        if self._watch is not None:
            self._watch.recorded(self)

    def _record(self, ordered: list[Key], source: Any, bar: Bar, goes_on: Callable[[], bool]) -> None:
        if ordered and not self.tune_seconds and not self._tune(ordered[0], source):
            self._drop(ordered.pop(0))
        for key in ordered:
            if not goes_on():
                break
            self._record_or_drop(key, source)
            free = self._device.free_bytes() if self._device is not None else None
            bar.advance(self._recordable.title(key) + (f", {free / 2**30:.1f} GiB free" if free is not None else ""))

    @property
    def leaves_out(self) -> bool:
        """Whether kernels of a tape are switched off."""
        return any(inside.nodes.off for tape in self.tapes.values() for inside in tape.insides)

    def forget(self) -> None:
        """Drop every tape: memory that they read has moved."""
        self.tapes.clear()
        self.recorded.clear()

    @contextlib.contextmanager
    def session(self, *, tidies: bool = True) -> Iterator[None]:
        """What is run for recording leaves no trace: not in the caller's modes, not in random numbers, not in
        callbacks.
        """
        graphs: Any = self._device.session(tidies=tidies) if self._device is not None else contextlib.nullcontext()
        with interception.off(), torch_compat.without_trace(self._recordable.devices), graphs:
            with self._recordable.current(None):
                yield

    @contextlib.contextmanager
    def rerun(self, tape: Tape) -> Iterator[Rerun]:
        """Make a tape ready to be run again. What it writes to, its inputs included, is put back."""
        recordable, device = self._recordable, self._device
        assert device is not None, "only what is recorded can be run again"
        key = next(key for key, recorded in self.tapes.items() if recorded is tape)
        is_ready = False

        def replay() -> Any:
            nonlocal is_ready
            if not is_ready:
                is_ready = True
                recordable.before_rerun(key)
            # The first replay of a tape goes another way than those after it, so its way is looked up every time.
            try:
                return tape.run()
            except PathLeft as left:
                why = "what the host reads in them leads along another tape by now"
                raise KernelError("PG733", f"the inputs of {recordable.title(key)} are gone", why=why) from left

        def compute() -> Any:
            why, hint = recordable.why_gone(key)
            if why:
                raise KernelError("PG733", f"the inputs of {recordable.title(key)} are gone", why=why, hint=hint)
            return recordable.run(key)

        device.use_caller_stream()
        with torch_compat.without_trace(recordable.devices), recordable.current(key):
            with preserved(recordable.written(key)):
                yield Rerun(replay, compute, device.seconds_of)

    def can_capture(self, function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Whether a function that runs can be captured, too. The graph is thrown away."""
        device = self._device
        assert device is not None, "there is nothing that captures"
        with self.session():
            function(*args)  # makes workspaces for it, on the capture stream
            try:
                device.begin(keep_nodes=False)
                device.call(function, args, {})
                device.end()
            except RuntimeError:
                device.abandon()
                return False
            finally:
                device.end_size()
        return True

    def _tune(self, key: Key, source: Any) -> bool:
        """Run once at the largest size, so that recording it does not count what happens only once. Whether it can."""
        start = time.perf_counter()
        is_done = True
        with located(phase="capture", size=str(key)), contextlib.suppress(torch.OutOfMemoryError):
            is_done = self._warm_up(key, source)  # that memory runs out is told when it is recorded
        self.tune_seconds = time.perf_counter() - start
        return is_done

    def _warm_up(self, key: Key, source: Any) -> bool:
        """Whether the key can be run."""
        recordable = self._recordable
        try:
            with preserved(recordable.written(key)):
                recordable.fill_example(key, source)
                with recordable.current(key):
                    recordable.warm_up(key)
        except (torch.OutOfMemoryError, PiecegraphError):
            raise
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            recordable.failed(key, None, error, {})
            return False
        return True

    def _record_or_drop(self, key: Key, source: Any) -> None:
        device, recordable = self._device, self._recordable
        start, bytes_before = time.perf_counter(), self._reserved_bytes()
        try:
            with located(phase="capture", size=str(key)):
                tape = self._direct_tape(key, source) if device is None else self._record_tape(device, key, source)
        except torch.OutOfMemoryError as error:
            reason, hint = str(error).partition(". ")[0], "free memory, or leave the size out"
            self._events.emit(Event("PG402", recordable.title(key), reason, hint))
            self.dropped[key] = "recording it ran out of memory"
            return
        if tape is None:
            self._drop(key)
            return
        self.dropped.pop(key, None)
        self.tapes[key] = tape
        num_graphs = sum(isinstance(step, GraphStep) for step in tape.steps)
        seconds, num_bytes = time.perf_counter() - start, self._reserved_bytes() - bytes_before
        self.recorded.append(Recorded(key, num_graphs, len(tape.steps) - num_graphs, seconds, num_bytes))

    def _drop(self, key: Key) -> None:
        self.dropped[key] = "it could not be recorded"

    def _direct_tape(self, key: Key, source: Any) -> DirectTape | None:
        """None if the key cannot be run."""
        try:
            return DirectTape(self._recordable.direct(key, source))
        except (torch.OutOfMemoryError, PiecegraphError):
            raise
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            self._recordable.failed(key, None, error, {})
            return None

    def _record_tape(self, device: GraphDevice, key: Key, source: Any) -> Tape | None:
        """None if there is no way."""
        recordable = self._recordable
        try:
            if not self._warm_up(key, source):  # creates workspaces for this size, on the capture stream
                return None
            for number, way in enumerate(recordable.ways(key)):
                tape = self._try_way(device, key, number, way, source)
                if tape is not None:
                    return tape
        except BaseException:
            device.abandon()
            raise
        finally:
            device.end_size()
        return None

    def _try_way(self, device: GraphDevice, key: Key, number: int, way: Way, source: Any) -> Tape | None:
        recordable, phase = self._recordable, str(key)
        recorder = Recorder(device, self._events, self.uncapturable, phase=phase, ledger=self._make_ledger(device))
        try:
            with preserved(recordable.written(key)):
                recordable.fill_example(key, source)
                with recordable.current(key):
                    outputs = way(recorder)
        except (torch.OutOfMemoryError, PiecegraphError):
            raise
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            device.abandon()
            recordable.failed(key, number, error, recorder.place)
            return None
        weights, check_always = recordable.weights(key), self._check_always
        return Tape(recorder.steps, outputs, weights, recorder.cells, phase=phase, check_always=check_always)

    def _reserved_bytes(self) -> int:
        return self._device.reserved_bytes() if self._device is not None else 0
