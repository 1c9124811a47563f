"""One step of the model: from the static buffers to chosen tokens, recorded once for each bucket and replayed.

The same three parts run in every mode: the decoder, the head on the rows that are asked for, the sampler. In
*full* mode all of it is one graph; in *piecewise* mode the cut ops run eagerly between graphs; without graphs
everything is called directly. Which mode a kind of step has is decided from what its kernels say of themselves.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piecegraph.base import torch_compat
from piecegraph.base.events import Event, EventLog
from piecegraph.base.plan import Decision
from piecegraph.base.progress import Progress
from piecegraph.base.text import size_of
from piecegraph.errors import KernelError, ModelError
from piecegraph.graph.program import RunStep, run_plainly
from piecegraph.llm import ops
from piecegraph.llm.cache.memory import Memory
from piecegraph.llm.model.decoder import Decoder
from piecegraph.llm.model.traced_model import TracedModel
from piecegraph.llm.run.batch import BatchBuffers
from piecegraph.llm.run.sampling import SamplingMode, sample
from piecegraph.llm.run.step import Bucket
from piecegraph.llm.specs import StepKind
from piecegraph.provenance.ledger import ledgers
from piecegraph.tape.device import GraphDevice
from piecegraph.tape.record import Recorder
from piecegraph.tape.tape import Rerun, Tape

_TRIED_TOKENS = 16
"""In steps that compare two ways to run a model: the smallest size that is recorded, so that its kernels are there."""
_ROUNDING, _HALF_ROUNDING = 2e-3, 0.03
"""How much of their norm two right results may differ, in float32 and in half precision."""


@dataclass(frozen=True, slots=True)
class StepKey:
    """What a tape is recorded for."""

    bucket: Bucket
    sampling: SamplingMode
    takes_embeds: bool = False
    """Whether some of its tokens have embeddings of their own."""
    every_row: bool = False
    """Whether hidden states of all tokens are wanted. A step of decoding has no others than those it needs."""

    def __str__(self) -> str:
        size = size_of(self.bucket.num_tokens, "token")
        if self.bucket.kind == "mixed":
            size += f" of {size_of(self.bucket.num_seqs, 'sequence')}"
        size += ", embeddings" if self.takes_embeds else ""
        size += ", every row" if self.every_row else ""
        return f"{self.bucket.kind} {size}" + (f", {self.sampling}" if self.sampling != "greedy" else "")


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """How long a tape took to record, and what it takes."""

    key: StepKey
    seconds: float
    num_bytes: int


class Forward:
    """Runs steps.

    Args:
        model: the compiled model.
        memory: its caches.
        buffers: where steps are written to.
        device: what captures graphs; None to call everything directly.
        modes: ``"full"`` or ``"piecewise"`` for each kind of step, with the reason.
        trace_embeds: makes the decoder that takes embeddings; called when they are first used.
        events: where losses are told.
        provenance: write down which line put which kernels into the graphs.
    """

    def __init__(
        self,
        model: TracedModel,
        memory: Memory,
        buffers: BatchBuffers,
        device: GraphDevice | None,
        modes: Mapping[StepKind, Decision],
        trace_embeds: Callable[[], Decoder],
        events: EventLog,
        *,
        provenance: bool,
    ) -> None:
        self._model = model
        self._provenance = provenance
        self._memory = memory
        self._buffers = buffers
        self._device = device
        self.modes = dict(modes)
        self._trace_embeds = trace_embeds
        self._embeds_decoder: Decoder | None = None
        self._embeds_refusal: ModelError | None = None
        self._events = events
        self._uncapturable: dict[int, str] = {}
        self.tapes: dict[StepKey, Tape] = {}
        self.recorded: list[RecordedStep] = []
        self.num_steps = 0
        self.num_replays = 0
        self._needs_all_rows = False
        """Whether the last piece is run on all rows, whichever are wanted."""
        self._last: StepKey | None = None
        """Whose batch the buffers hold."""

    def run(self, key: StepKey) -> Sequence[torch.Tensor]:
        """Run the step that was written to the buffers: (chosen tokens, logits, hidden states).

        The hidden states are those of the rows with logits, or of every row. The results are valid until the next step.
        """
        self.num_steps += 1
        self._last = key
        tape = self.tapes.get(key)
        with ops.current_sites(self._memory):
            self._use_batch(key.bucket)
            if tape is None:
                return self._compute(key)
            self.num_replays += 1
            assert self._device is not None
            self._device.use_caller_stream()
            return tape.run()

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of rows of hidden states, outside of any graph."""
        return self._model.head(hidden)

    def prepare_embeds(self) -> None:
        """Make the decoder that takes embeddings, and make sure that it is the same model: ids and the embeddings of
        the same ids must give the same.
        """
        if self._embeds_refusal is not None:
            raise self._embeds_refusal
        if self._embeds_decoder is not None:
            return
        with torch_compat.outside_inference():
            self._embeds_decoder = self._trace_embeds()
        for every_row in (True, False):
            of_ids = self._try(takes_embeds=False, every_row=every_row)[2]
            of_embeds = self._try(takes_embeds=True, every_row=every_row)[2]
            if not _are_alike(of_ids, of_embeds):
                self._embeds_decoder = None
                self._embeds_refusal = ModelError(
                    "PG662",
                    "the model cannot take embeddings in the place of tokens",
                    why="it needs the tokens themselves besides their embeddings",
                )
                raise self._embeds_refusal

    def choose_rows(self, num_blocks: int) -> Decision:
        """Decide which rows the last piece is run on. A row must be the same with the others and alone.

        Args:
            num_blocks: of the cache, none of which is anybody's yet.
        """
        why = self._model.decoder.why_whole
        if not why:
            every, some = (self._try(num_blocks, every_row=every_row)[1] for every_row in (True, False))
            why = "" if _are_alike(every, some) else "it makes something else of a row without the others"
        self._needs_all_rows = bool(why)
        if why:
            return Decision("last piece", "on all tokens", why)
        return Decision("last piece", "on rows with logits", "nobody reads what it makes of other tokens")

    def _try(self, num_blocks: int = 1, **how: bool) -> tuple[torch.Tensor, ...]:
        """Run a few tokens, always the same, without graphs."""
        limits = self._buffers.limits
        # One sequence, in as many blocks as it has tokens for: otherwise keys would be overwritten while they are read.
        bucket = Bucket(min(_TRIED_TOKENS, limits.max_tokens, limits.block_size * num_blocks), 1)
        self._fill_dummy(bucket, num_blocks=num_blocks)
        views = self._buffers.views(bucket)
        if views.has_embeds is not None:
            views.has_embeds.zero_()
        with ops.current_sites(self._memory):
            self._use_batch(bucket)
            return self._compute(StepKey(bucket, "greedy", **how))

    def _fill_dummy(self, bucket: Bucket, *, num_blocks: int = 1) -> None:
        """Dummies take the place of the last step's batch."""
        self._last = None
        self._buffers.fill_dummy(bucket, num_blocks=num_blocks)

    def _use_batch(self, bucket: Bucket) -> None:
        """The ops that run from now on belong to what was last written to the buffers."""
        self._memory.use_batch(self._buffers.views(bucket).attention, lambda: self._buffers.state_batch(bucket))

    @contextlib.contextmanager
    def rerun(self, tape: Tape) -> Iterator[Rerun]:
        """Make a recorded step ready to be run again: replayed on a batch of dummies, so that no cache is touched, or
        computed on the batch it had last.
        """
        device, buffers = self._device, self._buffers
        assert device is not None
        key = next(key for key, recorded in self.tapes.items() if recorded is tape)

        is_filled = False

        def replay() -> Any:
            nonlocal is_filled
            if not is_filled:
                is_filled = True
                self._fill_dummy(key.bucket)
                self._use_batch(key.bucket)
            return tape.run()

        def compute() -> Any:
            if self._memory.has_states:
                why = "layers that keep a state have gone on with it, and would go on once more"
                raise KernelError("PG733", f"the inputs of {key} are gone", why=why)
            if self._last != key:
                why = f"the last step was {self._last or 'none'}, and the buffers hold its batch"
                raise KernelError("PG733", f"the inputs of {key} are gone", why=why, hint="generate again, then dump")
            return self._compute(key)

        device.use_caller_stream()
        with torch_compat.without_trace([buffers.device]), ops.current_sites(self._memory):
            self._use_batch(key.bucket)
            yield Rerun(replay, compute, device.seconds_of)

    # -- recording

    def record(self, keys: Iterable[StepKey], progress: Progress, *, tidies: bool = False) -> None:
        """Record steps, largest first, so that smaller ones reuse the memory of larger ones.

        Args:
            keys: of the steps.
            progress: what shows how far it is.
            tidies: see :meth:`GraphDevice.session`.
        """
        device = self._device
        if device is None:
            return
        ordered = sorted(keys, key=lambda key: (key.bucket.num_tokens, key.bucket.num_seqs), reverse=True)
        with (
            torch_compat.without_trace([self._buffers.device]),
            device.session(tidies=tidies),
            ops.current_sites(self._memory),
            progress.bar("record", len(ordered)) as bar,
        ):
            for key in ordered:
                self._record_or_drop(device, key)
                free = device.free_bytes()
                bar.advance(str(key) + (f", {free / 2**30:.1f} GiB free" if free is not None else ""))

    def warm_up(self, keys: Iterable[StepKey]) -> None:
        """Run steps without recording them: what they need is allocated then, and kernels are tuned."""
        for key in keys:
            self._fill_dummy(key.bucket)
            self.run(key)
        self.num_steps = 0

    def forget(self) -> None:
        """Drop every tape: the caches have moved."""
        self.tapes.clear()
        self.recorded.clear()

    def _record_or_drop(self, device: GraphDevice, key: StepKey) -> None:
        start, bytes_before = time.perf_counter(), device.reserved_bytes()
        self._fill_dummy(key.bucket)
        self._use_batch(key.bucket)
        try:
            self._compute(key)  # creates workspaces and tunes kernels, on the capture stream
            tape = self._record_tape(device, key)
        except torch.OutOfMemoryError as error:
            device.abandon()
            reason = str(error).partition(". ")[0]
            self._events.emit(Event("PG402", str(key), reason, "free memory, or leave the size out"))
            return
        finally:
            device.end_size()
        if tape is None:
            return
        self.tapes[key] = tape
        seconds, num_bytes = time.perf_counter() - start, device.reserved_bytes() - bytes_before
        self.recorded.append(RecordedStep(key, seconds, num_bytes))

    def _record_tape(self, device: GraphDevice, key: StepKey) -> Tape | None:
        """None if not even its pieces can be captured."""
        kind = key.bucket.kind
        if self.modes[kind].choice == "full":
            tape, reason = self._try_to_record(self._record_full, device, key)
            if tape is not None:
                return tape
            self._events.emit(Event("PG401", f"a {kind} step as one graph", reason))
            self.modes[kind] = Decision(f"{kind} steps", "piecewise", f"one graph could not be captured: {reason}")
        tape, reason = self._try_to_record(self._record_pieces, device, key)
        if tape is None:
            self._events.emit(Event("PG401", str(key), reason, 'run without graphs: cudagraph_mode="none"'))
        return tape

    def _try_to_record(
        self, record: Callable[[Recorder, StepKey], Tape], device: GraphDevice, key: StepKey
    ) -> tuple[Tape | None, str]:
        """A tape, or why there is none."""
        recorder = self._recorder(device, key)
        try:
            return record(recorder, key), ""
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            recorder.abandon()
            return None, f"{type(error).__name__}: {str(error).splitlines()[0]}"

    def _record_full(self, recorder: Recorder, key: StepKey) -> Tape:
        outputs = recorder.capture("the whole step", self._compute, (key,))
        return self._tape(recorder, key, outputs)

    def _record_pieces(self, recorder: Recorder, key: StepKey) -> Tape:
        hidden = self._decode(key, recorder.run_step, recorder.capture)
        outputs = recorder.capture("head and sampler", self._choose, (key, hidden))
        return self._tape(recorder, key, outputs)

    def _tape(self, recorder: Recorder, key: StepKey, outputs: Sequence[torch.Tensor]) -> Tape:
        held = recorder.outputs(outputs)
        weights = self._decoder(key).weights()
        return Tape(recorder.steps, held, weights, recorder.cells, phase=str(key), check_always=False)

    def _recorder(self, device: GraphDevice, key: StepKey) -> Recorder:
        ledger = ledgers(self._provenance)(device)
        return Recorder(device, self._events, self._uncapturable, phase=str(key), ledger=ledger)

    # -- the step itself

    def _compute(self, key: StepKey) -> tuple[torch.Tensor, ...]:
        return self._choose(key, self._decode(key, run_plainly, _call))

    def _rows_of_last_piece(self, key: StepKey) -> torch.Tensor | None:
        """None for all: of a step of decoding every row has logits."""
        is_whole = key.bucket.kind == "decode" or key.every_row or self._needs_all_rows
        return None if is_whole else self._buffers.views(key.bucket).logit_rows

    def _decoder(self, key: StepKey) -> Decoder:
        if not key.takes_embeds:
            return self._model.decoder
        assert self._embeds_decoder is not None
        return self._embeds_decoder

    def _decode(self, key: StepKey, run_step: RunStep, call: Callable[..., Any]) -> torch.Tensor:
        views = self._buffers.views(key.bucket)
        inputs = [views.input_ids, views.positions]
        if views.mrope_positions is not None:
            inputs.append(views.mrope_positions)
        if key.takes_embeds:
            assert views.input_embeds is not None
            assert views.has_embeds is not None
            inputs += [views.input_embeds, views.has_embeds]
        decoder, num_rows = self._decoder(key), key.bucket.num_tokens
        values, rows = decoder.run(inputs, num_rows, run_step), self._rows_of_last_piece(key)
        if rows is not None:
            values, num_rows = call("rows with logits", decoder.select, (values, rows)), len(rows)
        return decoder.finish(values, num_rows, run_step)

    def _choose(self, key: StepKey, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        views = self._buffers.views(key.bucket)
        has_all = key.bucket.kind == "mixed" and self._rows_of_last_piece(key) is None
        chosen = hidden.index_select(0, views.logit_rows) if has_all else hidden
        logits = self._model.head(chosen)
        tokens = sample(logits, views.temperature, views.top_k, views.top_p, views.uniform, mode=key.sampling)
        return tokens, logits, hidden if key.every_row else chosen


def _call(label: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What :meth:`Recorder.capture` is without a recorder."""
    return function(*args)


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results differ by rounding alone."""
    allowed = _ROUNDING if one.dtype == torch.float32 else _HALF_ROUNDING
    return bool((one.float() - other.float()).norm() <= allowed * one.float().norm())
