"""Runs steps: writes them to the buffers, chooses and replays their tapes, and has what is missing recorded."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from piecegraph.base import torch_compat
from piecegraph.base.events import Event, EventLog
from piecegraph.base.plan import Decision
from piecegraph.base.text import count_of
from piecegraph.engine.planner import cut_while_intercepted
from piecegraph.errors import ModelError
from piecegraph.graph.interception import Interception
from piecegraph.llm.model.traced_model import TracedModel
from piecegraph.llm.ranks.group import Ranks
from piecegraph.llm.run.batch import BatchBuffers
from piecegraph.llm.run.coverage import best_cover, first_keys, later_keys, recorded_with
from piecegraph.llm.run.model_step import ModelStep, StepKey
from piecegraph.llm.run.results import StepResult
from piecegraph.llm.run.sizing import StepSizes
from piecegraph.llm.run.step import Bucket, StepPlan
from piecegraph.llm.run.threads import at_most_threads, choose_threads
from piecegraph.llm.specs import StepKind
from piecegraph.tape.device import GraphDevice
from piecegraph.tape.library import TapeLibrary
from piecegraph.tape.nodes import altered

MakeLibrary = Callable[[ModelStep], TapeLibrary[StepKey]]

TRIED_TOKENS = 16
"""In steps that compare two ways to run a model: the smallest size that is recorded, so that its kernels are there."""
_ROUNDING, _HALF_ROUNDING = 2e-3, 0.03
"""How much of their norm two right results may differ, in float32 and in half precision."""
_MAX_INTERCEPTED = 64
"""Sizes of steps that are recorded while ops are intercepted: every step has its own then."""


class FilledStep(NamedTuple):
    """A step that is written to the buffers."""

    key: StepKey
    """What it runs as."""
    wanted: StepKey
    """What it would run as if everything was recorded."""


class Forward:
    """Runs steps.

    Args:
        model: the compiled model.
        step: what a step of it is.
        buffers: where steps are written to.
        device: what captures graphs; None to call everything directly.
        sizes: which sizes of steps are recorded.
        embeds: the model whose decoder takes embeddings.
        events: where losses are told.
        make_library: makes a library of tapes for steps.
        interceptions: what runs callbacks around ops.
        ranks: those that run the model together; None if it is one process.
        records_at_need: whether steps wait until they are recorded; see Note [No request waits for a recording].
    """

    def __init__(
        self,
        model: TracedModel,
        step: ModelStep,
        buffers: BatchBuffers,
        device: GraphDevice | None,
        sizes: StepSizes,
        embeds: EmbedsModel,
        events: EventLog,
        make_library: MakeLibrary,
        interceptions: tuple[Interception, ...] = (),
        *,
        ranks: Ranks | None = None,
        records_at_need: bool = False,
    ) -> None:
        self.step = step
        self.sizes = sizes
        self.library = make_library(step)
        self.decisions = tuple(
            Decision("interception", count_of(model.num_places(each), "call"), str(each)) for each in interceptions
        )
        """What is different while ops are intercepted."""
        self._model = model
        self._buffers = buffers
        self._device = device
        self._embeds = embeds
        self._events = events
        self._make_library = make_library
        self._interceptions = interceptions
        self._recordable = frozenset(sizes.all())
        self._ranks = ranks
        self._records_at_need = records_at_need
        self._serving: dict[StepKey, StepKey] = {}
        """What serves steps that are not recorded, since something was last recorded."""
        self._unpadded: dict[tuple[Any, ...], tuple[int, ...]] = {}
        """Which sizes are recorded, for each way to choose tokens, since then."""
        self._missed: Counter[StepKey] = Counter()
        """How many steps wanted what is not recorded."""
        self.num_recorded_idle = 0

    @property
    def is_altered(self) -> bool:
        """Whether steps may compute something else than the model. See Note [Altered steps]."""
        return bool(self._interceptions) or (bool(altered) and self.library.leaves_out)

    @property
    def modes(self) -> Mapping[StepKind, Decision]:
        """How each kind of step is recorded."""
        return self.step.modes

    # -- a step

    def fill(
        self, plan: StepPlan, *, sampled: torch.Tensor | None = None, every_row: bool = False, waits: bool = False
    ) -> FilledStep:
        """Write a step to the buffers.

        Args:
            plan: the step.
            sampled: what the step before chose, if it is not committed yet.
            every_row: whether hidden states of all tokens are wanted.
            waits: record it first if nothing that is recorded covers it.
        """
        buffers = self._buffers
        key = wanted = self._write(plan, every_row)
        if wanted not in self.library.tapes:
            if self._is_recordable(wanted) and (self._records_at_need or (waits and self._cover(wanted) == wanted)):
                self._record_one(wanted)
                self._write(plan, every_row)  # recording wrote a batch of its own
            key = self._serve(wanted)
        buffers.send(plan, key.bucket, num_adjusted=key.num_adjusted, sampled=sampled)
        self.step.last = key
        return FilledStep(key, wanted)

    def _write(self, plan: StepPlan, every_row: bool) -> StepKey:
        """Write a step on the host; what it would best run as."""
        buffers, bucket = self._buffers, self.sizes.bucket_for(plan)
        buffers.write(plan)
        is_whole = every_row and bucket.kind == "mixed"
        return StepKey(
            bucket, buffers.sampling_mode, buffers.has_embeds, is_whole, buffers.num_adjusted, buffers.has_masks
        )

    def _serve(self, wanted: StepKey) -> StepKey:
        """What runs a step, recorded or not; it is counted if it should be."""
        if wanted in self.library.tapes:
            return wanted
        if self._is_recordable(wanted):
            self._missed[wanted] += 1
        return self._cover(wanted)

    def _cover(self, wanted: StepKey) -> StepKey:
        """What runs a step that is not recorded: see Note [No request waits for a recording]."""
        if wanted.bucket not in self._recordable:
            return wanted  # larger than all that is
        found = self._serving.get(wanted)
        if found is None:
            # What callbacks do to padded rows is nobody's wish.
            recorded = () if self._interceptions else self.library.tapes
            found = self._serving[wanted] = best_cover(wanted, recorded) or wanted
        return found

    def unpadded_sizes(self) -> tuple[int, ...]:
        """Tokens of mixed steps that run without padding, if they choose tokens as the last step did."""
        last = self.step.last
        if self._device is None or self._records_at_need or last is None:
            return self.sizes.tokens
        choice = last.sampling, last.takes_embeds, last.every_row, last.num_adjusted, last.has_masks
        found = self._unpadded.get(choice)
        if found is None:
            covers = [best_cover(StepKey(bucket, *choice), self.library.tapes) for bucket in self.sizes.under_load()]
            sizes = (key.bucket.num_tokens for key in covers if key is not None)
            found = self._unpadded[choice] = tuple(sorted({*sizes}))
        return found

    def run_step(self, key: StepKey) -> StepResult:
        """Run the step that was written to the buffers.

        The hidden states are those of the rows with logits, or of every row. The results are valid until the next step.
        """
        tape = self.library.tapes.get(key)
        if tape is None:
            with self.step.current(key), at_most_threads(self.step.num_threads):
                return StepResult(*self.step.run(key))
        assert self._device is not None
        self._device.use_caller_stream()
        if tape.is_graphs_only:  # nothing of it asks the host
            return StepResult(*tape.run())
        with self.step.current(key):
            return StepResult(*tape.run())

    def why_not_recorded(self, key: StepKey) -> Event | None:
        """What is lost by a step that is not replayed, where others are."""
        if self._device is None or key in self.library.tapes:
            return None
        subject = f"a {key.bucket.kind} step"
        if self._is_recordable(key):
            reason = f"{key} is not recorded yet, and nothing that is recorded covers it"
            return Event("PG513", subject, reason, "call record_missing() while nothing is running")
        reason = f"{key} runs the compiled pieces without graphs"
        return Event("PG503", subject, reason, "add a larger capture size")

    # -- recording

    @contextlib.contextmanager
    def recording_at_need(self) -> Iterator[None]:
        """Inside, steps wait until they are recorded: they are nobody's, and are to go through tapes."""
        before, self._records_at_need = self._records_at_need, True
        try:
            yield
        finally:
            self._records_at_need = before

    def record_at_start(self, seconds: float) -> None:
        """Record what leaves no step of ordinary requests without cover, and more of it if there is time.

        Args:
            seconds: behind which nothing more is begun.
        """
        end = time.perf_counter() + seconds
        self._record(first_keys(self.sizes), is_quiet=False)

        def goes_on() -> bool:
            has_time = time.perf_counter() < end
            return has_time if self._ranks is None else self._ranks.of_first(has_time)

        for keys in later_keys(self.sizes) if seconds > 0 else ():
            self._record(keys, is_quiet=False, goes_on=goes_on)

    @property
    def missed(self) -> list[StepKey]:
        """What steps wanted and is not recorded, most wanted first."""
        return [key for key, _ in self._missed.most_common() if self._is_recordable(key)]

    @property
    def missing(self) -> list[StepKey]:
        """The same, and what was left out at the start: larger ones first, which are padded most."""
        if self._device is None or self._interceptions:
            return []
        left = [key for group in later_keys(self.sizes) for key in sorted(group, key=self.step.volume, reverse=True)]
        return [*self.missed, *(key for key in left if self._is_recordable(key) and key not in self._missed)]

    def record_idle(self, key: StepKey) -> float:
        """Record what is missing while nothing runs; the seconds it took."""
        start = time.perf_counter()
        num_before = len(self.library.tapes)
        self._record_one(key)
        self.num_recorded_idle += len(self.library.tapes) - num_before
        return time.perf_counter() - start

    def _record_one(self, key: StepKey) -> None:
        """Record a step, and what costs little beside it. Of a greedy step that is recorded already, the memory is
        gone.
        """
        has_others = self.sizes.only is None and not self._interceptions and self._is_recordable(key.greedy)
        self._record([each for each in recorded_with(key) if self._is_recordable(each)] if has_others else [key])

    def _record(
        self, keys: Sequence[StepKey], *, is_quiet: bool = True, goes_on: Callable[[], bool] = lambda: True
    ) -> None:
        try:
            self.library.record(keys, tidies=False, is_quiet=is_quiet, goes_on=goes_on)
        finally:
            self.step.release()
        self._check_recorded()
        for key in keys:
            self._missed.pop(key, None)

    def _check_recorded(self) -> None:
        """Something else may serve steps from now on: the same on all ranks, as they add up what is of one size."""
        self._serving.clear()
        self._unpadded.clear()
        if self._ranks is not None:
            modes = {kind: mode.choice for kind, mode in self.modes.items()}
            self._ranks.check_same("recorded steps", f"{sorted(map(str, self.library.tapes))} {modes}")

    def _is_recordable(self, key: StepKey) -> bool:
        """Whether a step is not recorded, but can be."""
        library = self.library
        if self._device is None or key in library.tapes or key in library.dropped:
            return False
        return len(library.tapes) < _MAX_INTERCEPTED if self._interceptions else key.bucket in self._recordable

    def warm_up(self, keys: Iterable[StepKey]) -> None:
        """Run steps without recording them: what they need is allocated then, and kernels are tuned."""
        for key in keys:
            self.step.fill_example(key, None)
            self.run_step(key)

    # -- interceptions

    def num_places(self, each: Interception) -> int:
        """How many calls of the model an interception is for."""
        return self._model.num_places(each)

    def intercepted(self, interceptions: tuple[Interception, ...]) -> Forward:
        """The same with callbacks: cut at them, and at the steps' own sizes, since what callbacks do to padded rows is
        nobody's wish; unless all steps must be alike.
        """
        if not interceptions:
            return self
        with torch_compat.outside_inference():
            step = self.step.intercepted(self._model.intercepted(interceptions), interceptions)
        if step.modes != self.step.modes:
            self._events.emit(cut_while_intercepted("steps"))
        return Forward(
            self._model,
            step,
            self._buffers,
            self._device,
            self.sizes if self.sizes.only is not None else StepSizes((), (), ()),
            self._embeds,
            self._events,
            self._make_library,
            interceptions,
            ranks=self._ranks,
            records_at_need=True,
        )

    # -- what is tried before it is relied on

    def prepare_embeds(self) -> None:
        """Make the decoder that takes embeddings, and make sure that it is the same model: ids and the embeddings of
        the same ids must give the same.
        """
        model, step = self._embeds.model(), self.step
        if step.decoder_of_embeds is not None:
            return
        with torch_compat.outside_inference():
            step.decoder_of_embeds = model.intercepted(self._interceptions) if self._interceptions else model.decoder
        for every_row in (True, False):
            of_ids = step.try_tokens(TRIED_TOKENS, takes_embeds=False, every_row=every_row)[2]
            of_embeds = step.try_tokens(TRIED_TOKENS, takes_embeds=True, every_row=every_row)[2]
            if not _are_alike(of_ids, of_embeds):
                step.decoder_of_embeds = None
                raise self._embeds.refuse()

    def choose_threads(self, wish: int | Literal["auto"]) -> Decision:
        """Decide how many threads of a CPU steps run with, by steps of one sequence."""
        if self._ranks is not None and wish == "auto":  # to try is to take turns, and they would not take the same
            wish = torch.get_num_threads()
        decision = choose_threads(wish, lambda: self.warm_up([StepKey(Bucket(1, 1, "decode"), "greedy")]))
        self.step.num_threads = int(decision.choice)
        return decision

    def choose_rows(self, num_blocks: int) -> Decision:
        """Decide which rows the last piece is run on. A row must be the same with the others and alone.

        Args:
            num_blocks: of the cache, none of which is anybody's yet.
        """
        step = self.step
        why = step.decoder.why_whole if self.sizes.only is None else "with deterministic=True all steps run alike"
        if not why:
            every, some = (
                step.try_tokens(TRIED_TOKENS, num_blocks, every_row=every_row)[1] for every_row in (True, False)
            )
            is_alike = _are_alike(every, some)
            if self._ranks is not None:
                is_alike = self._ranks.are_all(is_alike)
            why = "" if is_alike else "it makes something else of a row without the others"
        step.needs_all_rows = bool(why)
        if why:
            return Decision("last piece", "on all tokens", why)
        return Decision("last piece", "on rows with logits", "nobody reads what it makes of other tokens")


class EmbedsModel:
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


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results differ by rounding alone."""
    allowed = _ROUNDING if one.dtype == torch.float32 else _HALF_ROUNDING
    return bool((one.float() - other.float()).norm() <= allowed * one.float().norm())
