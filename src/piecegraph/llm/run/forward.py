"""One step of the model: from the static buffers to sampled tokens, recorded once for each bucket and replayed.

The same three parts run in every mode: the decoder, the head on the rows that are asked for, the sampler. In *full*
mode all of it is one graph; in *piecewise* mode the cut ops run eagerly between graphs; without graphs everything is
called directly. Which mode a kind of step has is decided from what its kernels say of themselves.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from piecegraph.base import torch_compat
from piecegraph.base.call_stack import paths_from, stacks_from_here
from piecegraph.base.events import Event, EventLog
from piecegraph.base.plan import Decision
from piecegraph.base.progress import Progress
from piecegraph.base.text import count_of, size_of
from piecegraph.engine.breakable import Breaker, callbacks
from piecegraph.engine.planner import cut_while_intercepted
from piecegraph.errors import ModelError
from piecegraph.graph import interception
from piecegraph.graph.interception import Interception
from piecegraph.graph.program import RunStep, run_plainly
from piecegraph.llm import ops
from piecegraph.llm.cache.memory import Memory
from piecegraph.llm.model.decoder import Decoder
from piecegraph.llm.model.traced_model import TracedModel
from piecegraph.llm.run.batch import BatchBuffers
from piecegraph.llm.run.results import StepResult
from piecegraph.llm.run.sampling import SamplingMode, sample
from piecegraph.llm.run.sizing import StepSizes
from piecegraph.llm.run.step import Bucket, StepPlan
from piecegraph.llm.specs import StepKind
from piecegraph.provenance.ledger import ledgers
from piecegraph.tape.device import GraphDevice
from piecegraph.tape.library import TapeLibrary, Way
from piecegraph.tape.record import Recorder
from piecegraph.tape.tape import WatchedWeight

_TRIED_TOKENS = 16
"""In steps that compare two ways to run a model: the smallest size that is recorded, so that its kernels are there."""
_ROUNDING, _HALF_ROUNDING = 2e-3, 0.03
"""How much of their norm two right results may differ, in float32 and in half precision."""
_MAX_INTERCEPTED = 64
"""Sizes of steps that are recorded while ops are intercepted: every step has its own then."""


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


class Forward:
    """Runs steps: a :class:`~piecegraph.tape.library.Recordable` whose keys are those of steps, and its library.

    Args:
        model: the compiled model.
        memory: its caches.
        buffers: where steps are written to.
        device: what captures graphs; None to call everything directly.
        modes: ``"full"`` or ``"piecewise"`` for each kind of step, with the reason.
        sizes: which sizes of steps are recorded.
        trace_embeds: makes the model whose decoder takes embeddings; called when they are first used.
        events: where losses are told.
        provenance: write down which line put which kernels into the graphs.
        progress: shows how far recording is.
    """

    def __init__(
        self,
        model: TracedModel,
        memory: Memory,
        buffers: BatchBuffers,
        device: GraphDevice | None,
        modes: Mapping[StepKind, Decision],
        sizes: StepSizes,
        trace_embeds: Callable[[], TracedModel],
        events: EventLog,
        *,
        provenance: bool,
        progress: Progress,
    ) -> None:
        self.modes = dict(modes)
        self.sizes = sizes
        self.decisions: tuple[Decision, ...] = ()
        """What was decided because ops are intercepted."""
        self.devices = (buffers.device,)
        self.head = model.head
        """Logits of rows of hidden states, outside of any graph."""
        self._model = model
        self._memory = memory
        self._buffers = buffers
        self._device = device
        self._events = events
        self._provenance = provenance
        self._progress = progress
        self._embeds = _EmbedsModel(trace_embeds)
        self._decoder = model.decoder
        self._decoder_of_embeds: Decoder | None = None
        self._interceptions: tuple[Interception, ...] = ()
        self._needs_all_rows = False
        """Whether the last piece is run on all rows, whichever are wanted."""
        self.last: StepKey | None = None
        """Whose batch the buffers hold."""
        self._recordable = frozenset(sizes.all())
        self.library = self._new_library()

    def _new_library(self) -> TapeLibrary[StepKey]:
        make_ledger = ledgers(self._provenance)
        return TapeLibrary(self, self._device, self._events, make_ledger=make_ledger, progress=self._progress)

    # -- a step

    def fill(self, plan: StepPlan, *, sampled: torch.Tensor | None = None, every_row: bool = False) -> StepKey:
        """Write a step to the buffers; it is recorded first if it is one of those that are when they are first used.

        Args:
            plan: the step.
            sampled: its tokens, if only the device knows them yet.
            every_row: whether hidden states of all tokens are wanted.
        """
        buffers, bucket = self._buffers, self.sizes.bucket_for(plan)
        buffers.fill(plan, bucket, sampled=sampled)
        key = StepKey(bucket, buffers.sampling_mode, buffers.has_embeds, every_row and bucket.kind == "mixed")
        if sampled is None and self.must_record(key):
            self.library.record([key], tidies=False, is_quiet=True)
            buffers.fill(plan, bucket)  # recording wrote a batch of its own
        self.last = key
        return key

    def run_step(self, key: StepKey) -> StepResult:
        """Run the step that was written to the buffers.

        The hidden states are those of the rows with logits, or of every row. The results are valid until the next step.
        """
        tape = self.library.tapes.get(key)
        if tape is None:
            with self.current(key):
                return StepResult(*self.run(key))
        assert self._device is not None
        self._device.use_caller_stream()
        if tape.is_one_graph:  # nothing of it asks the host
            return StepResult(*tape.run())
        with self.current(key):
            return StepResult(*tape.run())

    def must_record(self, key: StepKey) -> bool:
        """Whether a step has been left to be recorded at its first use."""
        library = self.library
        if self._device is None or key in library.tapes or key in library.dropped:
            return False
        return len(library.tapes) < _MAX_INTERCEPTED if self._interceptions else key.bucket in self._recordable

    def why_not_recorded(self, key: StepKey) -> Event | None:
        """What is lost by a step that is not replayed, where others are."""
        if self._device is None or key in self.library.tapes:
            return None
        reason = f"{key} runs the compiled pieces without graphs"
        return Event("PG503", f"a {key.bucket.kind} step", reason, "add a larger capture size")

    # -- interceptions

    def num_places(self, each: Interception) -> int:
        """How many calls of the model an interception is for."""
        return self._model.num_places(each)

    def intercepted(self, interceptions: tuple[Interception, ...]) -> Forward:
        """The same with callbacks: cut at them, so that no step is one graph, and at the steps' own sizes, since what
        callbacks do to padded rows is nobody's wish. Every row goes through every piece.
        """
        if not interceptions:
            return self
        other = copy.copy(self)
        other.modes = {
            kind: Decision(mode.subject, "piecewise", "ops are intercepted") if mode.choice == "full" else mode
            for kind, mode in self.modes.items()
        }
        if other.modes != self.modes:
            self._events.emit(cut_while_intercepted("steps"))
        other.decisions = tuple(
            Decision("interception", count_of(self.num_places(each), "call"), str(each)) for each in interceptions
        )
        other.sizes, other._needs_all_rows = StepSizes((), (), ()), True
        with torch_compat.outside_inference():
            other._decoder = self._model.intercepted(interceptions)
        other._decoder_of_embeds = None
        other._interceptions = interceptions
        other.last = None
        other.library = other._new_library()
        return other

    # -- embeddings in the place of tokens

    def prepare_embeds(self) -> None:
        """Make the decoder that takes embeddings, and make sure that it is the same model: ids and the embeddings of
        the same ids must give the same.
        """
        model = self._embeds.model()
        if self._decoder_of_embeds is not None:
            return
        with torch_compat.outside_inference():
            interceptions = self._interceptions
            self._decoder_of_embeds = model.intercepted(interceptions) if interceptions else model.decoder
        for every_row in (True, False):
            of_ids = self._try(takes_embeds=False, every_row=every_row)[2]
            of_embeds = self._try(takes_embeds=True, every_row=every_row)[2]
            if not _are_alike(of_ids, of_embeds):
                self._decoder_of_embeds = None
                raise self._embeds.refuse()

    # -- rows of the last piece

    def choose_rows(self, num_blocks: int) -> Decision:
        """Decide which rows the last piece is run on. A row must be the same with the others and alone.

        Args:
            num_blocks: of the cache, none of which is anybody's yet.
        """
        why = self._decoder.why_whole
        if not why:
            every, some = (self._try(num_blocks, every_row=every_row)[1] for every_row in (True, False))
            why = "" if _are_alike(every, some) else "it makes something else of a row without the others"
        self._needs_all_rows = bool(why)
        if why:
            return Decision("last piece", "on all tokens", why)
        return Decision("last piece", "on rows with logits", "nobody reads what it makes of other tokens")

    def _try(self, num_blocks: int = 1, **how: bool) -> Sequence[torch.Tensor]:
        """Run a few tokens, always the same, without graphs."""
        limits = self._buffers.limits
        # One sequence, in as many blocks as it has tokens for: otherwise keys would be overwritten while they are read.
        bucket = Bucket(min(_TRIED_TOKENS, limits.max_tokens, limits.block_size * num_blocks), 1)
        self.last = None
        self._buffers.fill_dummy(bucket, num_blocks=num_blocks)
        views = self._buffers.views(bucket)
        if views.has_embeds is not None:
            views.has_embeds.zero_()
        key = StepKey(bucket, "greedy", **how)
        with interception.off(), self.current(key):
            return self.run(key)

    def warm_up(self, keys: Iterable[StepKey]) -> None:
        """Run steps without recording them: what they need is allocated then, and kernels are tuned."""
        for key in keys:
            self.fill_example(key, None)
            self.run_step(key)

    # -- what the library records

    def title(self, key: StepKey) -> str:
        return str(key)

    def volume(self, key: StepKey) -> tuple[int, ...]:
        return key.bucket.num_tokens, key.bucket.num_seqs

    def written(self, key: StepKey) -> Sequence[torch.Tensor]:
        """Nothing that is anybody's: dummies write to block 0 and slot 0."""
        return ()

    def fill_example(self, key: StepKey, source: None) -> None:
        """Dummies take the place of the last step's batch."""
        self.last = None
        self._buffers.fill_dummy(key.bucket)

    def direct(self, key: StepKey, source: None) -> Callable[[], Sequence[Any]]:
        return partial(self.run, key)

    def ways(self, key: StepKey) -> Sequence[Way]:
        pieces = partial(self._record_pieces, key)
        return (partial(self._record_full, key), pieces) if self.modes[key.bucket.kind].choice == "full" else (pieces,)

    def failed(self, key: StepKey, way: int | None, error: RuntimeError, place: dict[str, Any]) -> None:
        """What cannot be one graph is recorded in pieces from now on; what cannot even that runs without graphs."""
        kind, reason = key.bucket.kind, f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if way is None:
            raise error
        if way == 0 and self.modes[kind].choice == "full":
            self._events.emit(Event("PG401", f"a {kind} step as one graph", reason))
            self.modes[kind] = Decision(f"{kind} steps", "piecewise", f"one graph could not be captured: {reason}")
        else:
            self._events.emit(Event("PG401", str(key), reason, 'run without graphs: cudagraph_mode="none"'))

    def weights(self, key: StepKey) -> Sequence[WatchedWeight]:
        return self._decoder_for(key).weights()

    @contextlib.contextmanager
    def current(self, key: StepKey | None) -> Iterator[None]:
        with ops.current_sites(self._memory):
            if key is not None:
                self._use_batch(key.bucket)
            yield

    def before_rerun(self, key: StepKey) -> None:
        """On dummies, so that nobody's cache is touched."""
        self.fill_example(key, None)
        self._use_batch(key.bucket)

    def why_gone(self, key: StepKey) -> tuple[str, str]:
        if self._memory.has_states:
            return "layers that keep a state have gone on with it, and would go on once more", ""
        if self.last != key:
            why = f"the last step was {self.last or 'none'}, and the buffers hold its batch"
            return why, "generate again, then dump"
        return "", ""

    def _use_batch(self, bucket: Bucket) -> None:
        """The ops that run from now on belong to what was last written to the buffers."""
        self._memory.use_batch(self._buffers.views(bucket).attention, lambda: self._buffers.state_batch(bucket))

    # -- the step itself

    def run(self, key: StepKey) -> Sequence[torch.Tensor]:
        """(sampled tokens, logits, hidden states), without graphs."""
        hidden = self._decode(key, run_plainly, _call)
        if not self._interceptions:
            return self._sample(key, hidden)
        rows = self._rows_with_logits(key, hidden)
        with paths_from(self.head.root), callbacks(self._interceptions):
            logits = self.head(rows)
        return self._sample_from(key, logits, hidden, rows)

    def _record_full(self, key: StepKey, recorder: Recorder) -> list[Any]:
        return recorder.outputs(recorder.capture("the whole step", self.run, (key,)))

    def _record_pieces(self, key: StepKey, recorder: Recorder) -> list[Any]:
        hidden = self._decode(key, recorder.run_step, recorder.capture)
        if not self._interceptions:
            return recorder.outputs(recorder.capture("head and sampler", self._sample, (key, hidden)))
        rows = recorder.capture("rows with logits", self._rows_with_logits, (key, hidden))
        with paths_from(self.head.root), Breaker(recorder, self._interceptions).recording(), stacks_from_here():
            logits = self.head(rows)
        return recorder.outputs(recorder.capture("sampler", self._sample_from, (key, logits, hidden, rows)))

    def _decode(self, key: StepKey, run_step: RunStep, call: Callable[..., Any]) -> torch.Tensor:
        views = self._buffers.views(key.bucket)
        inputs = [views.input_ids, views.positions]
        if views.mrope_positions is not None:
            inputs.append(views.mrope_positions)
        if key.takes_embeds:
            assert views.input_embeds is not None
            assert views.has_embeds is not None
            inputs += [views.input_embeds, views.has_embeds]
        decoder, num_rows = self._decoder_for(key), key.bucket.num_tokens
        values, rows = decoder.run(inputs, num_rows, run_step), self._rows_of_last_piece(key)
        if rows is not None:
            values, num_rows = call("rows with logits", decoder.select, (values, rows)), len(rows)
        return decoder.finish(values, num_rows, run_step)

    def _sample(self, key: StepKey, hidden: torch.Tensor) -> Sequence[torch.Tensor]:
        rows = self._rows_with_logits(key, hidden)
        return self._sample_from(key, self.head(rows), hidden, rows)

    def _sample_from(
        self, key: StepKey, logits: torch.Tensor, hidden: torch.Tensor, rows: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        views = self._buffers.views(key.bucket)
        tokens = sample(logits, views.temperature, views.top_k, views.top_p, views.uniform, mode=key.sampling)
        return tokens, logits, hidden if key.every_row else rows

    def _rows_with_logits(self, key: StepKey, hidden: torch.Tensor) -> torch.Tensor:
        has_all = key.bucket.kind == "mixed" and self._rows_of_last_piece(key) is None
        return hidden.index_select(0, self._buffers.views(key.bucket).logit_rows) if has_all else hidden

    def _rows_of_last_piece(self, key: StepKey) -> torch.Tensor | None:
        """None for all: of a step of decoding every row has logits."""
        is_whole = key.bucket.kind == "decode" or key.every_row or self._needs_all_rows
        return None if is_whole else self._buffers.views(key.bucket).logit_rows

    def _decoder_for(self, key: StepKey) -> Decoder:
        if not key.takes_embeds:
            return self._decoder
        assert self._decoder_of_embeds is not None
        return self._decoder_of_embeds


class _EmbedsModel:
    """The model whose decoder takes embeddings: traced when they are first used, and refused for good if it differs."""

    def __init__(self, trace: Callable[[], TracedModel]) -> None:
        self._trace = trace
        self._model: TracedModel | None = None
        self._refusal: ModelError | None = None

    def model(self) -> TracedModel:
        if self._refusal is not None:
            raise self._refusal
        if self._model is None:
            with torch_compat.outside_inference():
                self._model = self._trace()
        return self._model

    def refuse(self) -> ModelError:
        self._refusal = ModelError(
            "PG662",
            "the model cannot take embeddings in the place of tokens",
            why="it needs the tokens themselves besides their embeddings",
        )
        return self._refusal


def _call(label: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What :meth:`Recorder.capture` is without a recorder."""
    return function(*args)


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results differ by rounding alone."""
    allowed = _ROUNDING if one.dtype == torch.float32 else _HALF_ROUNDING
    return bool((one.float() - other.float()).norm() <= allowed * one.float().norm())
