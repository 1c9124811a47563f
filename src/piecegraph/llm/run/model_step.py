"""One step of the model on the static buffers: decoder, head, sampler, and how it is recorded.

The same three parts run in every mode: the decoder, the head on the rows that are asked for, the sampler. In *full*
mode all of it is one graph; in *piecewise* mode the cut ops run eagerly between graphs; without graphs everything is
called directly. Which mode a kind of step has is decided from what its kernels say of themselves.

Note [Samplers behind one recording]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Steps that differ only in how tokens are chosen have the same decoder and head, and to capture these is what a recording
takes its time for. So the greedy step is recorded first, and each other sampler is one small graph behind its graphs,
which reads its logits. Their memory is held until the last sampler is recorded. The greedy choice is made for nothing
then: a look at every logit. Where graphs know who put what into them, nothing is shared: a kernel that is switched off
in one recording is not to be missing in another.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from piecegraph.base.call_stack import paths_from, stacks_from_here
from piecegraph.base.events import Event, EventLog
from piecegraph.base.plan import Cut, Decision
from piecegraph.base.text import size_of
from piecegraph.engine.breaker import Breaker, callbacks
from piecegraph.graph import interception
from piecegraph.graph.interception import Interception
from piecegraph.graph.program import RunStep, equal_pieces_once, run_plainly
from piecegraph.llm import ops
from piecegraph.llm.cache.memory import EachKindOnce, Memory
from piecegraph.llm.model.decoder import Decoder
from piecegraph.llm.model.traced_model import TracedModel
from piecegraph.llm.run.adjustment_buffers import adjust
from piecegraph.llm.run.batch import BatchBuffers
from piecegraph.llm.run.sampling import SamplingMode, sample
from piecegraph.llm.run.step import Bucket
from piecegraph.llm.specs import StepKind
from piecegraph.tape.library import Way
from piecegraph.tape.record import Recorder
from piecegraph.tape.tape import EagerStep, GraphStep, WatchedWeight

_MASKS = Cut(0, "masks", "the host says which tokens may come next", None)


@dataclass(frozen=True, slots=True)
class StepKey:
    """What a tape is recorded for."""

    bucket: Bucket
    sampling: SamplingMode
    takes_embeds: bool = False
    """Whether some of its tokens have embeddings of their own."""
    every_row: bool = False
    """Whether hidden states of all tokens are wanted. A step of decoding has no others than those it needs."""
    num_adjusted: int = 0
    """How many logits may be adjusted before tokens are chosen; 0 for none. See Note [Adjusted logits]."""
    has_masks: bool = False
    """Whether tokens are chosen from those that masks allow. See Note [Masks behind the decoder]."""

    @property
    def greedy(self) -> StepKey:
        """The same decoder and head, with the plainest sampler."""
        return replace(self, sampling="greedy", num_adjusted=0, has_masks=False)

    def __str__(self) -> str:
        size = size_of(self.bucket.num_tokens, "token")
        if self.bucket.kind == "mixed":
            size += f" of {size_of(self.bucket.num_seqs, 'sequence')}"
        size += ", short contexts" if self.bucket.is_short else ""
        size += ", embeddings" if self.takes_embeds else ""
        size += ", every row" if self.every_row else ""
        size += f", {size_of(self.num_adjusted, 'adjusted logit')}" if self.num_adjusted else ""
        size += ", masks" if self.has_masks else ""
        return f"{self.bucket.kind} {size}" + (f", {self.sampling}" if self.sampling != "greedy" else "")


@dataclass(frozen=True, slots=True)
class _Greedy:
    """A greedy step that was just recorded: see Note [Samplers behind one recording]."""

    key: StepKey
    steps: tuple[GraphStep | EagerStep, ...]
    logits: torch.Tensor
    hidden: torch.Tensor
    weights: Sequence[WatchedWeight]


class ModelStep:
    """A :class:`~piecegraph.tape.library.Recordable` whose keys are those of steps.

    Args:
        model: the compiled model.
        memory: its caches.
        buffers: where steps are written to.
        modes: ``"full"`` or ``"piecewise"`` for each kind of step, with the reason.
        events: where losses are told.
    """

    def __init__(
        self,
        model: TracedModel,
        memory: Memory,
        buffers: BatchBuffers,
        modes: Mapping[StepKind, Decision],
        events: EventLog,
    ) -> None:
        self.modes = dict(modes)
        self.devices = (buffers.device,)
        self.head = model.head
        self.decoder = model.decoder
        self.few = model.few
        self.decoder_of_embeds: Decoder | None = None
        """Made when a request first brings embeddings of its own."""
        self.needs_all_rows = False
        """Whether the last piece is run on all rows, whichever are wanted."""
        self.num_threads: int | None = None
        """Of a CPU, at most, where steps run without graphs; None for as many as torch is set to."""
        self.last: StepKey | None = None
        """Whose batch the buffers hold."""
        self._memory = memory
        self._buffers = buffers
        self._events = events
        self._interceptions: tuple[Interception, ...] = ()
        self._greedy: _Greedy | None = None

    def intercepted(self, decoder: Decoder, interceptions: tuple[Interception, ...]) -> ModelStep:
        """The same with callbacks around some calls: no step is one graph, and every row goes through every piece."""
        other = copy.copy(self)
        other.decoder, other.few, other.decoder_of_embeds = decoder, None, None
        other.needs_all_rows, other.last, other._greedy = True, None, None
        other.modes = {
            kind: Decision(mode.subject, "piecewise", "ops are intercepted") if mode.choice == "full" else mode
            for kind, mode in self.modes.items()
        }
        other._interceptions = interceptions
        return other

    def try_tokens(self, num_tokens: int, num_blocks: int = 1, **how: bool) -> Sequence[torch.Tensor]:
        """Run a few tokens of one sequence, always the same, without graphs and callbacks.

        It needs as many blocks as it has tokens for: otherwise keys would be overwritten while they are read.
        """
        limits = self._buffers.limits
        bucket = Bucket(min(num_tokens, limits.max_tokens, limits.block_size * num_blocks), 1)
        self.last = None
        self._buffers.fill_dummy(bucket, num_blocks=num_blocks)
        views = self._buffers.views(bucket)
        if views.has_embeds is not None:
            views.has_embeds.zero_()
        key = StepKey(bucket, "greedy", **how)
        with interception.off(), self.current(key):
            return self.run(key)

    # -- what the library records

    def title(self, key: StepKey) -> str:
        return str(key)

    def volume(self, key: StepKey) -> tuple[int, ...]:
        """Steps with the same decoder and head come one after another, the greedy one first."""
        bucket, is_mixed, is_greedy = key.bucket, key.bucket.kind == "mixed", key == key.greedy
        return bucket.num_tokens, bucket.num_seqs, is_mixed, key.takes_embeds, key.every_row, is_greedy

    def written(self, key: StepKey) -> Sequence[torch.Tensor]:
        """Nothing that is anybody's: dummies write to block 0 and slot 0."""
        return ()

    def fill_example(self, key: StepKey, source: None) -> None:
        """Dummies take the place of the last step's batch."""
        self.last = None
        self._buffers.fill_dummy(key.bucket)
        # Allocated now, and not while something is captured.
        if key.num_adjusted:
            self._buffers.entries.views(key.num_adjusted)
        if key.has_masks:
            self._buffers.masks.prepare()

    def warm_up(self, key: StepKey) -> None:
        greedy = self._before(key)
        if greedy is not None:
            self._run_sampler(key, torch.zeros_like(greedy.logits), greedy.hidden, greedy.hidden)
            return
        self.release()
        with ops.current_sites(EachKindOnce(self._memory)), equal_pieces_once():
            self.run(key)

    def direct(self, key: StepKey, source: None) -> Callable[[], Sequence[Any]]:
        return partial(self.run, key)

    def ways(self, key: StepKey) -> Sequence[Way]:
        ways: list[Way] = [partial(self._record_pieces, key)]
        if self.modes[key.bucket.kind].choice == "full":
            ways.insert(0, partial(self._record_full, key))
        greedy = self._before(key)
        if greedy is not None:
            ways[0] = partial(self._record_behind, key, greedy)
        return ways

    def _before(self, key: StepKey) -> _Greedy | None:
        """What was recorded just now, if only a sampler is missing."""
        return self._greedy if self._greedy is not None and self._greedy.key == key.greedy != key else None

    def release(self) -> None:
        """No other sampler will be recorded behind what was recorded last: its memory may be used again."""
        self._greedy = None

    def failed(self, key: StepKey, way: int | None, error: Exception, place: dict[str, Any]) -> None:
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
        if self._greedy is not None and self._greedy.key == key.greedy:
            return self._greedy.weights
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
        return self._run_sampler(key, *self._run_model(key))

    def _run_sampler(self, key: StepKey, *made: torch.Tensor) -> Sequence[torch.Tensor]:
        if key.has_masks:
            self._send_masks()
        return self._sample_from(key, *made)

    def _run_model(self, key: StepKey) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits, hidden states, and those of the rows with logits."""
        hidden = self._decode(key, run_plainly, _call)
        if not self._interceptions:
            return self._make_logits(key, hidden)
        rows = self._rows_with_logits(key, hidden)
        with paths_from(self.head.root), callbacks(self._interceptions):
            return self.head(rows), hidden, rows

    def _record_full(self, key: StepKey, recorder: Recorder) -> list[Any]:
        if key.has_masks:
            made = recorder.capture("the model", self._run_model, (key,))
            return self._record_sampler(key, recorder, made)
        return self._keep(key, recorder, recorder.capture("the whole step", self.run, (key,)))

    def _record_pieces(self, key: StepKey, recorder: Recorder) -> list[Any]:
        hidden = self._decode(key, recorder.run_step, recorder.capture)
        if not self._interceptions and not key.has_masks:
            return self._keep(key, recorder, recorder.capture("head and sampler", self._sample, (key, hidden)))
        if not self._interceptions:
            made = recorder.capture("head", self._make_logits, (key, hidden))
            return self._record_sampler(key, recorder, made)
        rows = recorder.capture("rows with logits", self._rows_with_logits, (key, hidden))
        with paths_from(self.head.root), Breaker(recorder, self._interceptions).recording(), stacks_from_here():
            logits = self.head(rows)
        return self._record_sampler(key, recorder, (logits, hidden, rows))

    def _keep(self, key: StepKey, recorder: Recorder, outputs: Sequence[torch.Tensor]) -> list[Any]:
        """The outputs of a step, which other samplers may be recorded behind."""
        if key == key.greedy and not recorder.knows_calls and not recorder.cells:
            _, logits, hidden = outputs
            self._greedy = _Greedy(key, tuple(recorder.steps), logits, hidden, self.weights(key))
        return recorder.outputs(outputs)

    def _record_behind(self, key: StepKey, greedy: _Greedy, recorder: Recorder) -> list[Any]:
        recorder.steps += greedy.steps
        return self._record_sampler(key, recorder, (greedy.logits, greedy.hidden, greedy.hidden))

    def _record_sampler(self, key: StepKey, recorder: Recorder, made: tuple[torch.Tensor, ...]) -> list[Any]:
        """Masks come from the host, just before they are needed: see Note [Masks behind the decoder]."""
        if key.has_masks:
            recorder.run_between(_MASKS, self._send_masks, (), {})
        return recorder.outputs(recorder.capture("sampler", self._sample_from, (key, *made)))

    def _send_masks(self) -> tuple[()]:
        self._buffers.masks.send()
        return ()

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
        return self._sample_from(key, *self._make_logits(key, hidden))

    def _make_logits(self, key: StepKey, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = self._rows_with_logits(key, hidden)
        head = self.head.of_one_row if key.bucket.num_tokens == 1 and self._runs_few(key) else self.head
        return head(rows), hidden, rows

    def _sample_from(
        self, key: StepKey, logits: torch.Tensor, hidden: torch.Tensor, rows: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        views = self._buffers.views(key.bucket)
        wanted = adjust(logits, self._buffers.entries.views(key.num_adjusted)) if key.num_adjusted else logits
        tokens = sample(
            self._buffers.masks.keep_allowed(wanted) if key.has_masks else wanted,
            views.temperature,
            views.top_k,
            views.top_p,
            views.random_keys,
            min_p=views.min_p,
            mode=key.sampling,
        )
        return tokens, logits, hidden if key.every_row else rows

    def _rows_with_logits(self, key: StepKey, hidden: torch.Tensor) -> torch.Tensor:
        has_all = key.bucket.kind == "mixed" and self._rows_of_last_piece(key) is None
        return hidden.index_select(0, self._buffers.views(key.bucket).logit_rows) if has_all else hidden

    def _rows_of_last_piece(self, key: StepKey) -> torch.Tensor | None:
        """None for all: of a step of decoding every row has logits."""
        is_whole = key.bucket.kind == "decode" or key.every_row or self.needs_all_rows
        return None if is_whole else self._buffers.views(key.bucket).logit_rows

    def _decoder_for(self, key: StepKey) -> Decoder:
        if not key.takes_embeds:
            return self.few.decoder if self.few is not None and self._runs_few(key) else self.decoder
        assert self.decoder_of_embeds is not None
        return self.decoder_of_embeds

    def _runs_few(self, key: StepKey) -> bool:
        """Whether it runs pieces of its own: see Note [Pieces of their own for decoding]."""
        return self.few is not None and not key.takes_embeds and key.bucket.has_few_rows(self.few.num_rows)


def _call(label: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What :meth:`Recorder.capture` is without a recorder."""
    return function(*args)
