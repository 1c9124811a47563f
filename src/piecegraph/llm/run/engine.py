"""The loop: schedule a step, fill the batch, run it, commit its tokens.

Note [Looking ahead]
~~~~~~~~~~~~~~~~~~~~
While the device runs a step, the host would wait for its tokens, and then the device for the host. So where the next
step can be known without them (:meth:`Scheduler.schedule_ahead`), it is launched first, and takes them from where the
device left them. If it needs masks that follow from them, the host waits for them once the model has been launched, and
commits them then (Note [Masks behind the decoder]). Results are valid until the next step is launched, so a request
that wants logits or hidden states keeps its steps from being followed like that.

Note [A step that fails]
~~~~~~~~~~~~~~~~~~~~~~~~
Whatever is raised between the launch of a step and its last word (no memory for somebody's log-probabilities, Ctrl-C)
leaves steps that have run but were never committed. To run them again would be wrong where layers keep a state. So all
requests start over from the tokens they have, and those that had ended without being told are told.

Note [One cache, several schedulers]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Each scheduler has block numbers of its own for the one memory. So only one of them may have requests running, and when
another takes over, the one before forgets the prefixes it knew: their blocks are about to be overwritten.

Note [Altered steps]
~~~~~~~~~~~~~~~~~~~~
While ops of the model are intercepted or kernels are switched off, steps compute something else, or whoever looks on
wants to see all of it. So no prefix is taken from the cache meanwhile, and what a request has computed in such a step
is in nobody's prefix afterwards. Of several ranks, the first says when that is: kernels are switched in one process.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from piecegraph.base.events import Event, EventLog
from piecegraph.base.text import count_of
from piecegraph.engine.eager_interception import unintercepted
from piecegraph.engine.variants import Variants
from piecegraph.errors import RequestError
from piecegraph.graph.interception import Interception, registry
from piecegraph.llm.cache.paged import PagedCache
from piecegraph.llm.ranks.group import Ranks
from piecegraph.llm.ranks.orders import STEP, Orders
from piecegraph.llm.run.batch import BatchBuffers
from piecegraph.llm.run.detokenizer import Detokenizer
from piecegraph.llm.run.forward import Forward
from piecegraph.llm.run.generation import Generation, text_behind, token_logprobs
from piecegraph.llm.run.model_step import StepKey
from piecegraph.llm.run.processors import choose_token
from piecegraph.llm.run.request import FinishReason, Request
from piecegraph.llm.run.results import StepResult
from piecegraph.llm.run.sampling_params import SamplingParams
from piecegraph.llm.run.scheduler import Scheduler
from piecegraph.llm.run.step import MAX_PROMPTS, StepCounts, StepPlan
from piecegraph.llm.run.stop import IncrementalText
from piecegraph.llm.run.structured import Guide
from piecegraph.llm.run.upload import Download
from piecegraph.tape.library import TapeLibrary


class SampledTokens:
    """Sampled token ids on their way to the host: two places in turn, as one step may be under way behind another.

    They are copied on the device first: a step's own results may be overwritten as soon as somebody else runs it again.
    """

    def __init__(self, max_seqs: int, device: torch.device, ranks: Ranks | None) -> None:
        self._kept = [torch.empty(max_seqs, dtype=torch.long, device=device) for _ in range(2)]
        self._download = Download(max_seqs, torch.long, device)
        self._ranks = ranks

    def send(self, tokens: torch.Tensor, count: int) -> tuple[torch.Tensor, Callable[[], list[int]]]:
        """Send the first tokens to the host; returns a copy of them on the device, and what waits for them."""
        kept = self._kept[0][:count]
        self._kept.reverse()
        kept.copy_(tokens[:count])
        if self._ranks is not None:
            # Equal logits have equal tokens, but ranks that ever disagreed would never be of one mind again.
            self._ranks.take_first(kept)
        return kept, self._download.send(kept).read


@dataclass(slots=True)
class _Launched:
    """A step that may still be running."""

    plan: StepPlan
    key: StepKey
    result: StepResult
    is_replayed: bool
    tokens: torch.Tensor
    """The sampled tokens on the device: what the next step goes on from."""
    read_tokens: Callable[[], list[int]]
    """Waits for them."""
    is_committed: bool = False


class LLMEngine:
    """Serves requests step by step.

    Args:
        name: of the model.
        forward: runs steps.
        scheduler: says what runs next.
        buffers: where steps are written to.
        events: where losses are told.
        looks_ahead: see Note [Looking ahead].
        ranks: those that run the model together; None if it is one process.
    """

    def __init__(
        self,
        name: str,
        forward: Forward,
        scheduler: Scheduler,
        buffers: BatchBuffers,
        events: EventLog,
        *,
        looks_ahead: bool,
        ranks: Ranks | None = None,
    ) -> None:
        self.name = name
        self.scheduler = scheduler
        self.events = events
        self.has_mrope = buffers.limits.has_mrope
        self.counts = StepCounts()
        self._forwards: Variants[Forward] = Variants(forward.num_places, forward.intercepted)
        self._embed_width = buffers.limits.embed_width
        self._looks_ahead = looks_ahead
        self._ahead: _Launched | None = None
        self._masks = buffers.masks
        self._sampled = SampledTokens(buffers.limits.max_seqs, buffers.device, ranks)
        self._ranks = ranks
        self.orders: Orders | None = None
        """Told what others than the scheduler do to requests: of several ranks, the first has it. See Note [One
        schedule].
        """
        self._generations: dict[str, Generation] = {}
        self._num_detailed = 0
        """Generations that want more than their tokens."""
        self._num_watched = 0
        """Generations whose text must be known at every step."""
        self._num_following = 0
        """Generations whose logits are adjusted by the tokens before: see Note [Adjusted logits]."""
        self._owner: weakref.ref[PagedCache] | None = scheduler.cache.reference
        """Whose blocks the memory holds: see Note [One cache, several schedulers]."""
        self.failed: list[Generation] = []
        """Whose tokens the last step that failed computed. They start over, unless somebody ends them."""
        self._is_stepping = False
        self._is_altered = False
        """See Note [Altered steps]."""
        engine = weakref.ref(self)  # it goes with whoever holds the model: no garbage collector need come first
        scheduler.is_altered = lambda: (ours := engine()) is not None and ours._is_altered
        self._left_to_abort: deque[Generation] = deque()
        self._ids = itertools.count()
        self._forwards.current()
        registry.compiled.add(self)

    @property
    def forward(self) -> Forward:
        """What runs the next step: while ops are intercepted, another than otherwise."""
        return self._forwards.current()

    @property
    def libraries(self) -> list[TapeLibrary[Any]]:
        """All that is recorded and in use."""
        return [self._forwards.shown.library]

    def num_places(self, each: Interception) -> int:
        """How many calls of the model an interception is for."""
        return self._forwards.num_places(each)

    def close(self) -> None:
        """End every request, and be reached by no interception any more."""
        for generation in list(self._generations.values()):
            self.abort(generation)
        self._ahead = None
        registry.compiled.discard(self)

    # -- requests

    def prepare(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        prompt: str | None = None,
        mrope_positions: NDArray[np.integer] | None = None,
        detokenizer: Detokenizer | None = None,
        on_new: Callable[[Generation, str, list[int]], None] | None = None,
        is_streamed: bool = True,
        arrival_time: float | None = None,
        guide: Guide | None = None,
    ) -> Generation:
        """A request that is not queued yet. Any thread may make one, also while a step is running.

        Args:
            tokens: the prompt.
            params: how to go on from it.
            seed: used if ``params`` has none.
            prompt: its text, if it was given as one.
            mrope_positions: see :class:`~piecegraph.llm.run.request.Request`.
            detokenizer: makes text of tokens; without it there are only tokens.
            on_new: called with new text and tokens while they are generated, and at the end.
            is_streamed: False to have it called at the end alone.
            arrival_time: see :class:`~piecegraph.llm.run.request.Request`.
            guide: see there.
        """
        request = Request(
            str(next(self._ids)),
            tokens,
            params,
            seed=seed,
            mrope_positions=mrope_positions,
            arrival_time=arrival_time,
            guide=guide,
        )
        text = text_behind(request.tokens, params, detokenizer) if detokenizer is not None else None
        return Generation(request, prompt, text, on_new, is_streamed=is_streamed)

    def enqueue(self, generation: Generation) -> None:
        """Queue a request. Raises a RequestError if it can never be served."""
        self._hand_over(self.scheduler.cache.reference)
        request = generation.request
        self.scheduler.add(request)
        if self.orders is not None:
            prompt = request.tokens[: request.num_prompt].tolist()
            self.orders.tell("enqueue", request.id, prompt, request.params, request.seed, request.mrope_positions)
        self._generations[request.id] = generation
        self._num_detailed += generation.wants_details
        self._num_watched += generation.is_watched
        self._num_following += generation.request.params.adjusts_by_tokens

    def add(self, tokens: Sequence[int], params: SamplingParams, *, seed: int, **arguments: Any) -> Generation:
        """Queue a prompt: :meth:`prepare` and :meth:`enqueue` in one."""
        generation = self.prepare(tokens, params, seed=seed, **arguments)
        self.enqueue(generation)
        return generation

    def fail(self, generation: Generation, error: RequestError) -> None:
        """End a request with an error, between two steps."""
        if not generation.is_done:
            self._finish(generation.request, "error", error)
            self._emit_new(generation)

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a request as another rank did, which has told its user."""
        generation = self._generations.get(request_id)
        if generation is not None:
            self.scheduler.finish(generation.request, reason)
            self._emit_new(generation)

    def _finish(self, request: Request, reason: FinishReason, error: RequestError | None = None) -> None:
        """End a request for a reason that only this process knows."""
        if self.orders is not None:
            self.orders.tell("finish", request.id, reason)
        self.scheduler.finish(request, reason, error)

    def abort(self, generation: Generation) -> None:
        """End a request now and free what it holds."""
        self.abort_later([generation])
        self.abort_left()

    def abort_later(self, generations: Iterable[Generation]) -> None:
        """End requests behind the step that is running, or by the next :meth:`abort_left`. Any thread may ask for it:
        garbage collection closes a forgotten stream wherever a thread happens to be.
        """
        self._left_to_abort.extend(generations)

    def abort_left(self) -> None:
        """End what was to be aborted, unless a step is running."""
        while self._left_to_abort and not self._is_stepping:
            generation = self._left_to_abort.popleft()
            if self.scheduler.abort(generation.request.id):
                if self.orders is not None:
                    self.orders.tell("finish", generation.request.id, "abort")
                self._emit_new(generation)

    # -- one step

    @unintercepted
    def step(self) -> bool:
        """Run one step; False if there is nothing to do."""
        with self._together("a step"), self._starting_over_on_failure():
            if self._ranks is None or self.orders is not None:
                self.alter(self.forward.is_altered)
            if self.orders is not None:
                self.orders.tell(STEP)
            current, self._ahead = self._ahead, None
            if current is None:
                plan = self.scheduler.schedule()
                if plan is None:
                    return False
                current = self._launch(plan)
            ahead = self._launch_ahead(current)
            self._commit(current)
            self._ahead = ahead
            return True

    def alter(self, is_altered: bool) -> None:
        """Take prefixes from the cache or not: see Note [Altered steps]."""
        if is_altered != self._is_altered:
            self._is_altered = is_altered
            if self.orders is not None:
                self.orders.tell("alter", is_altered)

    def _together(self, subject: str) -> contextlib.AbstractContextManager[None]:
        """Around what ranks do together: what fails on one of them stops all."""
        return contextlib.nullcontext() if self._ranks is None else self._ranks.watch.together(subject)

    def _commit(self, launched: _Launched) -> None:
        """Wait for the tokens of a step and give them to its requests; at most once."""
        if launched.is_committed:
            return
        launched.is_committed = True
        tokens = launched.read_tokens()
        if self._num_detailed:
            self._process_logits(launched, tokens)
            self._collect_details(launched, tokens)
        self._emit_tokens(launched, self.scheduler.commit(launched.plan, tokens))

    def _launch(
        self, plan: StepPlan, behind: _Launched | None = None, *, every_row: bool = False, waits: bool = False
    ) -> _Launched:
        """Fill the batch and run it, behind a step that may not be committed yet. The device may still be at it
        afterwards.
        """
        forward = self._forwards.current()
        every_row = every_row or self._needs_every_row(plan)
        sampled = behind.tokens if behind is not None else None
        key, wanted = forward.fill(plan, sampled=sampled, every_row=every_row, waits=waits)
        is_replayed = key in forward.library.tapes
        if not is_replayed and (loss := forward.why_not_recorded(key)) is not None:
            self.events.emit(loss)
        if self._is_altered:
            for work in plan.works:
                work.request.cache_key = None
        self._masks.before = partial(self._commit, behind) if behind is not None else None
        try:
            result = forward.run_step(key)
        finally:
            self._masks.before = None  # or the engine would hold itself
        num_rows = key.bucket.num_tokens
        self.counts.add(plan.kind, plan.num_tokens, num_rows, is_replayed=is_replayed, is_larger=key != wanted)
        return _Launched(plan, key, result, is_replayed, *self._sampled.send(result.tokens, plan.num_seqs))

    def _launch_ahead(self, current: _Launched) -> _Launched | None:
        """Launch the step behind one that is running, if it can be known: see Note [Looking ahead]."""
        if not self._looks_ahead or self._num_detailed or self._num_following:
            return None
        plan = self.scheduler.schedule_ahead(current.plan)
        return self._launch(plan, current) if plan is not None else None

    def _needs_every_row(self, plan: StepPlan) -> bool:
        """Whether a request reads more of the step than the row of its last token."""
        return bool(self._num_detailed) and any(
            work.num_tokens > 1 and work.request.params.wants_every_row for work in plan.works
        )

    @contextlib.contextmanager
    def _starting_over_on_failure(self) -> Iterator[None]:
        """See Note [A step that fails]."""
        self._is_stepping = True
        try:
            yield
        except BaseException:
            self._ahead = None
            self.failed = [self._generations[request.id] for request in self.scheduler.start_over()]
            for generation in [each for each in self._generations.values() if each.is_done]:
                self._emit_new(generation)
            raise
        finally:
            self._is_stepping = False
            self.abort_left()

    # -- between requests

    @property
    def is_idle(self) -> bool:
        """Whether no request of ours is running or waiting."""
        return not self.scheduler.num_unfinished

    @unintercepted
    def record_idle(self, key: StepKey) -> float:
        """Record something while no step is running; the seconds it took. Results of steps are no longer valid."""
        self._ahead = None  # it can only be nobody's
        with self._together("a recording"):
            if self.orders is not None:
                self.orders.tell("record_idle", key)
            return self.forward.record_idle(key)

    # -- what a step gives its requests

    def _emit_tokens(self, launched: _Launched, finished: Sequence[Request]) -> None:
        """Tell those who want to know: most want to know the end alone."""
        if launched.is_replayed and not self._num_watched:
            for request in finished:
                self._emit_new(self._generations[request.id])
            return
        for work in launched.plan.works:
            request = work.request
            generation = self._generations.get(request.id)
            if generation is None:
                continue  # ended while the step ran
            generation.num_graphless += not launched.is_replayed
            if request.finish_reason is not None or (work.samples and generation.is_watched):
                self._emit_new(generation)

    def _emit_new(self, generation: Generation) -> None:
        request = generation.request
        new = self._new_text(generation) if generation.is_watched or generation.on_new is not None else ""
        if generation.text is not None and generation.text.is_stopped:
            self._finish(request, "stop")
            request.stop_reason = generation.text.stopped_at
            request.finish_reason = "stop"  # also where the last token that was allowed completed the stop text
        if request.is_done:
            del self._generations[request.id]
            self._num_detailed -= generation.wants_details
            self._num_watched -= generation.is_watched
            self._num_following -= request.params.adjusts_by_tokens
        if generation.on_new is not None and (generation.is_streamed or request.is_done):
            generation.on_new(generation, new, generation.new_tokens())

    def _new_text(self, generation: Generation) -> str:
        """New text; a tokenizer that makes none ends its request, and no other."""
        try:
            return generation.new_text()
        except RequestError as error:
            request, generation.text = generation.request, None
            self._finish(request, "error", error)
            request.finish_reason, request.error = "error", error  # also where it had just ended otherwise
            return ""

    def _process_logits(self, launched: _Launched, tokens: list[int]) -> None:
        """Choose the tokens of requests with logits processors of their own: see ``run/processors.py``."""
        for row, work in enumerate(launched.plan.works):
            request = work.request
            if not request.params.logits_processors or not work.samples or request.is_done:
                continue
            self.events.emit(Event("PG519", "a step", "logits_processors of a request run in Python"))
            try:
                tokens[row] = choose_token(request, launched.result.logits[row])
            except RequestError as error:
                self.fail(self._generations[request.id], error)

    def _collect_details(self, launched: _Launched, tokens: Sequence[int]) -> None:
        """Log-probabilities and hidden states, where they were asked for. Before the tokens are committed."""
        result, vocab_size = launched.result, self.scheduler.limits.vocab_size
        described: dict[int, Generation] = {}
        first = 0
        for row, work in enumerate(launched.plan.works):
            generation, params = self._generations.get(work.request.id), work.request.params
            if generation is not None and params.wants_every_row:
                start = first if launched.key.every_row else row
                hidden = result.hidden[start : start + work.num_tokens]
                generation.add_rows(work, hidden, self.forward.step.head, vocab_size)
            if generation is not None and params.logprobs is not None and work.samples and tokens[row] >= 0:
                described[row] = generation
            first += work.num_tokens
        if described:
            rows = list(described)
            counts = [described[row].request.params.logprobs or 0 for row in rows]
            found = token_logprobs(result.logits[rows], [tokens[row] for row in rows], counts)
            for generation, logprob in zip(described.values(), found, strict=True):
                generation.logprobs.append(logprob)

    # -- schedulers of others

    @unintercepted
    def run(self, plan: StepPlan, *, every_row: bool) -> StepResult:
        """Run the tokens of a plan that another scheduler made. There is one cache, so nobody else may be running."""
        self.abort_left()
        self._check_foreign(plan)
        if any(work.request.input_embeds is not None for work in plan.works):
            self.forward.prepare_embeds()
        for work in plan.works:
            assert work.request.blocks is not None
            self._hand_over(work.request.blocks.cache)
        self._ahead = None
        # Whoever runs a model step by step sees no more than one of them wait.
        with self._together("a step"):
            self.alter(self.forward.is_altered)
            launched = self._launch(plan, every_row=every_row, waits=True)
        num_rows = plan.num_tokens if every_row else plan.num_seqs
        return StepResult(launched.tokens, launched.result.logits[: plan.num_seqs], launched.result.hidden[:num_rows])

    def make_scheduler(
        self, *, prefix_cache: bool, text_of: Callable[[Request], IncrementalText] | None = None
    ) -> Scheduler:
        """Another scheduler over the same cache, for :meth:`run`."""
        ours = self.scheduler
        cache = PagedCache(
            ours.cache.groups,
            block_size=ours.cache.block_size,
            prefix_cache=prefix_cache and not ours.needs_state,
        )
        scheduler = Scheduler(
            ours.limits,
            cache,
            eos_token_ids=ours.eos_token_ids,
            needs_state=ours.needs_state,
            release_state=ours.release_state,
            text_of=text_of,
        )
        engine = weakref.ref(self)
        scheduler.is_altered = lambda: (theirs := engine()) is not None and theirs.forward.is_altered
        return scheduler

    def _hand_over(self, cache: weakref.ref[PagedCache] | None) -> None:
        """See Note [One cache, several schedulers]."""
        if cache == self._owner:
            return
        before = self._owner() if self._owner is not None else None
        if before is not None:
            if before.num_sequences:
                running = count_of(before.num_sequences, "request")
                why = f"another scheduler has {running} running, and there is one cache"
                raise RequestError("PG657", "the cache is in use", why=why, hint="let them end, or abort them")
            before.forget()
        self._owner = cache

    def _check_foreign(self, plan: StepPlan) -> None:
        limits, why = self.scheduler.limits, ""
        if self.scheduler.num_unfinished:
            why = "generate() is running, and there is one cache"
        elif plan.num_seqs > limits.max_num_seqs or plan.num_tokens > limits.max_batch_tokens:
            size = f"{count_of(plan.num_tokens, 'token')} of {count_of(plan.num_seqs, 'sequence')}"
            why = f"it has {size}, the model was loaded for "
            why += f"max_batch_tokens={limits.max_batch_tokens} and max_num_seqs={limits.max_num_seqs}"
        elif plan.num_seqs > MAX_PROMPTS and (num_prompts := plan.num_seqs - plan.num_decodes) > MAX_PROMPTS:
            why = f"behind those that come first with one token each it has {num_prompts} sequences, "
            why += f"and at most {MAX_PROMPTS} may be there"
        else:
            why = next(filter(None, (self._why_unfit(work.request) for work in plan.works)), "")
        if why:
            raise RequestError("PG657", "the step cannot be run", why=why, hint="plan it with llm.make_scheduler()")

    def _why_unfit(self, request: Request) -> str:
        shape = (request.num_prompt, self._embed_width)
        if request.blocks is None:
            return f"request {request.id!r} is not running"
        if request.params.logits_processors:
            return f"request {request.id!r} has logits_processors, which whoever reads the logits has to call"
        if request.mrope_positions is not None and not self.has_mrope:
            return f"request {request.id!r} has positions in three dimensions, and the model takes them in one"
        if request.input_embeds is not None and self.forward.sizes.only is not None:
            return f"request {request.id!r} brings embeddings, which deterministic=True does not know"
        given = shape if request.input_embeds is None else tuple(request.input_embeds.shape)
        return f"the embeddings of request {request.id!r} are of shape {given}, not {shape}" if given != shape else ""
