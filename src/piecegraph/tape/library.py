"""The tapes of one plan: recording a size, and finding out whether other sizes may be padded to it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from piecegraph.base import torch_compat
from piecegraph.base.config import Options
from piecegraph.base.events import Event, EventLog
from piecegraph.base.plan import RecordedSize, SizeKey
from piecegraph.base.progress import Progress
from piecegraph.base.user_code import user_line
from piecegraph.errors import PiecegraphError, RecordError, located
from piecegraph.graph import interception
from piecegraph.graph.signature import Call, Signature
from piecegraph.tape.body import Body, Sizes
from piecegraph.tape.buffers import StaticInputs
from piecegraph.tape.device import GraphDevice
from piecegraph.tape.padding import padding_changes, preserved
from piecegraph.tape.record import MakeLedger, Recorder
from piecegraph.tape.tape import DirectTape, GraphStep, Rerun, Tape


class TapeLibrary:
    """Records tapes and keeps them."""

    def __init__(
        self,
        signature: Signature,
        body: Body,
        device: GraphDevice | None,
        options: Options,
        events: EventLog,
        example: Call,
        make_ledger: MakeLedger,
    ) -> None:
        self._signature = signature
        self._body = body
        self._device = device
        self._options = options
        self._events = events
        self._make_ledger = make_ledger
        self._uncapturable: dict[int, str] = {}
        self.buffers = StaticInputs(signature.tensors, options.pad_values, example.tensors)
        static = [example.tensors[i] for i in body.written_calls if signature.tensors[i].address is not None]
        self.state = (*body.written_state, *static)
        """Memory outside the buffers that the body writes to. Recording leaves it as it was."""
        self.tapes: dict[SizeKey, Tape | DirectTape] = {}
        self.dropped: set[SizeKey] = set()
        """Sizes that ran out of memory."""
        self.recorded: list[RecordedSize] = []
        self.tune_seconds = 0.0
        """What the first run of the compiled pieces took: kernels are tuned and loaded then."""

    def record(self, keys: Sequence[SizeKey], call: Call) -> None:
        """Record sizes, largest first, so that smaller ones reuse the memory of larger ones.

        Args:
            keys: the sizes.
            call: its rows, repeated, are what the recorded runs work on.
        """
        ordered = sorted(keys, key=lambda key: (key.volume, key.values), reverse=True)
        with self._session(), Progress(self._options.progress).bar("record", len(ordered)) as bar:
            if ordered and not self.recorded:
                self._tune(ordered[0], call)
            for key in ordered:
                try:
                    with located(phase="capture", size=str(key)):
                        self._record_one(key, call)
                except torch.OutOfMemoryError as error:
                    self.dropped.add(key)
                    reason = str(error).partition(". ")[0]
                    self._events.emit(Event("PG402", f"size {key}", reason, "free memory, or leave the size out"))
                free = self._device.free_bytes() if self._device is not None else None
                bar.advance(f"size {key}" + (f", {free / 2**30:.1f} GiB free" if free is not None else ""))

    @contextlib.contextmanager
    def rerun(self, key: SizeKey) -> Iterator[Rerun]:
        """Make a recorded size ready to be run again. What it writes to, its inputs included, is put back."""
        assert self._device is not None, "only what is recorded can be run again"
        self._device.use_caller_stream()
        views, tape = self.buffers.views(key.values), self.tapes[key]
        written = (*self.state, *(views[i] for i in self._body.written_calls))
        with torch_compat.without_trace(leaf.device for leaf in self._signature.tensors), preserved(written):
            # The first replay of a tape goes another way than those after it, so that its way is looked up every time.
            yield Rerun(lambda: tape.run(), lambda: self._body.run(views, key.values), self._device.seconds_of)

    def why_not_pad(self, key: SizeKey, sizes: Sizes, call: Call) -> str | None:
        """How padding calls of ``sizes`` to a recorded size would change them, or None. See Note [Padding]."""
        with self._session():
            self._prepare(sizes)
            run = self.tapes[key].run
            try:
                return padding_changes(self._body, run, self.buffers, key, sizes, call.tensors, self.state)
            except RuntimeError as error:  # of a cut op that does not expect the size: see options["prepare"]
                return f"trying {SizeKey(sizes)} rows raised {type(error).__name__}: {str(error).splitlines()[0]}"

    def _tune(self, key: SizeKey, call: Call) -> None:
        """Run once at the largest size, so that recording it does not count what happens only once."""
        start = time.perf_counter()
        with contextlib.suppress(torch.OutOfMemoryError):  # told when the size is recorded
            self._warm_up(key, self.buffers.views(key.values), call)
        self.tune_seconds = time.perf_counter() - start

    def _warm_up(self, key: SizeKey, views: list[torch.Tensor], call: Call) -> None:
        self._prepare(key.values)
        with preserved(self.state):
            self.buffers.fill(views, call.tensors)
            self._body.run(views, key.values)

    def _record_one(self, key: SizeKey, call: Call) -> None:
        start, bytes_before = time.perf_counter(), self._reserved_bytes()
        views = self.buffers.views(key.values)
        if self._device is None:
            body = self._body
            self.buffers.fill(views, call.tensors)
            body.learn(views, key.values)  # nothing else runs this size before its results are cut
            self.tapes[key] = DirectTape(lambda: body.run(views, key.values))
        else:
            self.tapes[key] = self._record_tape(self._device, key, views, call)
        steps = self.tapes[key].steps
        num_graphs = sum(isinstance(step, GraphStep) for step in steps)
        seconds, num_bytes = time.perf_counter() - start, self._reserved_bytes() - bytes_before
        self.recorded.append(RecordedSize(key, num_graphs, len(steps) - num_graphs, seconds, num_bytes))

    def _record_tape(self, device: GraphDevice, key: SizeKey, views: list[torch.Tensor], call: Call) -> Tape:
        recorder = Recorder(device, self._events, self._uncapturable, phase=str(key), ledger=self._make_ledger(device))
        try:
            self._warm_up(key, views, call)  # create workspaces for this size, on the capture stream
            with preserved(self.state):
                self.buffers.fill(views, call.tensors)
                outputs = self._body.record(recorder, views, key.values)
        except (torch.OutOfMemoryError, PiecegraphError):
            recorder.abandon()
            raise
        except RuntimeError as error:
            recorder.abandon()
            line = str(user_line(error) or "")
            raise RecordError(
                "PG403",
                f"size {key} could not be recorded",
                where=line,
                why=f"{type(error).__name__}: {str(error).splitlines()[0]}",
                hint="mark what cannot be captured with @piecegraph.eager_op or name it in splitting_ops",
                **(recorder.place | ({"line": line} if line else {})),
            ) from error
        finally:
            device.end_size()
        check_always = self._options.check_addresses == "always"
        weights = self._body.weights()
        return Tape(recorder.steps, outputs, weights, recorder.cells, phase=str(key), check_always=check_always)

    @contextlib.contextmanager
    def _session(self) -> Iterator[None]:
        """Recording leaves no trace: not in the caller's modes, not in random numbers, not in callbacks."""
        graphs: Any = self._device.session() if self._device is not None else contextlib.nullcontext()
        with interception.off(), torch_compat.without_trace(leaf.device for leaf in self._signature.tensors), graphs:
            yield

    def _prepare(self, sizes: Sizes) -> None:
        if self._options.prepare is not None:
            self._options.prepare(dict(zip(self._signature.size_names, sizes, strict=True)))

    def _reserved_bytes(self) -> int:
        return self._device.reserved_bytes() if self._device is not None else 0
