"""The loop: schedule, write the batch, run the step, take the tokens, tell what is new.

Note [Looking ahead]
~~~~~~~~~~~~~~~~~~~~
While the device runs a step, the host would wait for its tokens, and then the device for the host. So where the next
step can be known without them (:meth:`Scheduler.schedule_ahead`), it is launched first, and takes its tokens from where
the device left them. Results are valid until the next step is launched, so a request that wants logits or hidden states
keeps its steps from being followed like that.

Note [A step that fails]
~~~~~~~~~~~~~~~~~~~~~~~~
Whatever is raised between the launch of a step and its last word (no memory for somebody's log-probabilities, Ctrl-C)
leaves steps that have run but were never committed. To run them again would be wrong where layers keep a state. So all
requests start over from the tokens they have, and those that had ended without being told are told.

Note [One cache, several schedulers]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Each scheduler has block numbers of its own for the one memory. So only one of them may have requests running, and when
another takes over, the one before forgets the prefixes it knew: their blocks are about to be overwritten.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from piecegraph.base.events import Event, EventLog
from piecegraph.base.text import count_of
from piecegraph.engine.eager_interception import unintercepted
from piecegraph.errors import RequestError
from piecegraph.llm.cache.paged import PagedCache
from piecegraph.llm.run.batch import BatchBuffers
from piecegraph.llm.run.forward import Forward, StepKey
from piecegraph.llm.run.request import Request, SamplingParams
from piecegraph.llm.run.results import Completion, RequestMetrics, StepResult, TokenLogprob
from piecegraph.llm.run.sampling import logprobs, rows_at_once
from piecegraph.llm.run.scheduler import Scheduler
from piecegraph.llm.run.sizing import StepSizes
from piecegraph.llm.run.step import StepPlan, Work
from piecegraph.llm.run.stop import IncrementalText


@dataclass
class Generation:
    """One request on its way, and what is kept to be told at its end."""

    request: Request
    prompt: str | None
    text: IncrementalText | None
    on_new: Callable[[Generation, str, list[int]], None] | None = None
    """Told of every new token, and of the end."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    hidden_states: list[torch.Tensor] = field(default_factory=list)
    num_steps: int = 0
    num_replays: int = 0
    num_read: int = 0
    """Tokens of the request that ``text`` has, or that are not part of it."""
    num_told: int = 0
    """Tokens of the request that ``on_new`` knows, the prompt included."""

    is_watched: bool = False
    """Whether its text must be known at every step. Otherwise it is made once, at the end."""
    wants_details: bool = False
    """Whether more than the chosen tokens is read of its steps."""

    def __post_init__(self) -> None:
        params = self.request.params
        self.num_read = self.num_told = self.request.num_prompt
        self.is_watched = self.on_new is not None or bool(params.stop)
        self.wants_details = params.logprobs is not None or params.wants_every_row

    @property
    def is_done(self) -> bool:
        return self.request.is_done

    def new_text(self) -> str:
        """The text that became safe since the last call."""
        text, request = self.text, self.request
        if text is None:
            return ""
        # A token that ends the text is not part of it; a stop text is found in it, and cut off there.
        is_ended_by_token = request.finish_reason == "stop" and not text.is_stopped
        end = len(request.tokens) - is_ended_by_token
        new = text.add(request.tokens[self.num_read : end])
        self.num_read = end
        return new + text.finish() if request.is_done else new

    def new_tokens(self) -> list[int]:
        """The tokens since the last call."""
        tokens = self.request.tokens[self.num_told :].tolist()
        self.num_told += len(tokens)
        return tokens

    def completion(self) -> Completion:
        """The answer so far."""
        request, params = self.request, self.request.params
        self.new_text()
        return Completion(
            prompt=self.prompt,
            prompt_token_ids=request.tokens[: request.num_prompt].tolist(),
            text=self.text.text if self.text is not None else None,
            token_ids=request.generated,
            finish_reason=request.finish_reason or "error",
            error=request.error,
            logprobs=self.logprobs if params.logprobs is not None else None,
            prompt_logprobs=self.prompt_logprobs if params.prompt_logprobs is not None else None,
            hidden_states=torch.cat(self.hidden_states) if self.hidden_states else None,
            metrics=self._metrics(),
        )

    def _metrics(self) -> RequestMetrics:
        request = self.request
        end = request.finish_time if request.finish_time is not None else time.perf_counter()
        first, num_new = request.first_token_time, len(request.tokens) - request.num_prompt
        return RequestMetrics(
            num_prompt_tokens=request.num_prompt,
            num_new_tokens=num_new,
            num_cached_tokens=request.num_cached,
            num_preemptions=request.num_preemptions,
            time_to_first_token_s=None if first is None else first - request.arrival_time,
            seconds_per_token=(end - first) / (num_new - 1) if first is not None and num_new > 1 else None,
            total_s=end - request.arrival_time,
            graph_coverage=self.num_replays / self.num_steps if self.num_steps else 0.0,
        )


class Landing:
    """Where chosen tokens arrive: two places in turn, as one step may be under way behind another.

    They are copied on the device first: a step's own results may be overwritten as soon as somebody else runs it again.
    """

    def __init__(self, max_seqs: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._kept = [torch.empty(max_seqs, dtype=torch.long, device=device) for _ in range(2)]
        self._on_host = [torch.empty(max_seqs, dtype=torch.long, pin_memory=is_cuda) for _ in range(2)]
        self._events = [torch.cuda.Event() if is_cuda else None for _ in range(2)]
        self._next = 0

    def take(self, tokens: torch.Tensor, count: int) -> tuple[torch.Tensor, Callable[[], list[int]]]:
        """Send the first tokens to the host; returns a copy of them on the device, and what waits for them."""
        kept, place = self._kept[self._next][:count], self._on_host[self._next][:count]
        event = self._events[self._next]
        self._next ^= 1
        kept.copy_(tokens[:count])
        place.copy_(kept, non_blocking=True)
        if event is not None:
            event.record()

        def read() -> list[int]:
            if event is not None:
                event.synchronize()
            found: list[int] = place.tolist()
            return found

        return kept, read


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that may still be running."""

    plan: StepPlan
    result: StepResult
    has_every_row: bool
    """Whether the hidden states are those of all tokens, and not of the last of each sequence."""
    is_replayed: bool
    tokens: torch.Tensor
    """The chosen tokens, to be fed to the next step."""
    read: Callable[[], list[int]]
    """Waits for the chosen tokens."""


class Engine:
    """Serves requests step by step."""

    def __init__(
        self,
        forward: Forward,
        scheduler: Scheduler,
        buffers: BatchBuffers,
        sizes: StepSizes,
        events: EventLog,
        *,
        record_unseen: Callable[[StepKey], None] | None,
        looks_ahead: bool,
    ) -> None:
        self.forward = forward
        self.scheduler = scheduler
        self.has_mrope = buffers.limits.has_mrope
        self._buffers = buffers
        self._sizes = sizes
        self.events = events
        self._record_unseen = record_unseen
        self._recordable = frozenset(sizes.all())
        self._dropped: set[StepKey] = set()
        """Steps that could not be recorded: not tried again."""
        self._looks_ahead = looks_ahead
        self._ahead: _Launched | None = None
        self._landing = Landing(buffers.limits.max_seqs, buffers.device)
        self._generations: dict[str, Generation] = {}
        self._owner: weakref.ref[PagedCache] | None = scheduler.cache.reference
        """Whose blocks the memory holds: see Note [One cache, several schedulers]."""
        self._is_stepping = False
        self._aborted_late: list[Generation] = []
        self._num_detailed = 0
        """Generations that want more than their tokens."""
        self._ids = itertools.count()

    def add(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        prompt: str | None = None,
        mrope_positions: NDArray[np.integer] | None = None,
        decode: Callable[[list[int]], str] | None = None,
        on_new: Callable[[Generation, str, list[int]], None] | None = None,
    ) -> Generation:
        """Queue a prompt. Raises a RequestError if it can never be served.

        Args:
            tokens: the prompt.
            params: how to go on from it.
            seed: used if ``params`` has none.
            prompt: its text, if it was given as one.
            mrope_positions: see :class:`~piecegraph.llm.run.request.Request`.
            decode: the text of tokens; without it there are only tokens.
            on_new: told of new text and tokens while they are generated, and of the end.
        """
        request = Request(str(next(self._ids)), tokens, params, seed=seed, mrope_positions=mrope_positions)
        text = IncrementalText(decode, params.stop, request.tokens[-8:]) if decode is not None else None
        generation = Generation(request, prompt, text, on_new)
        self._hand_over(self.scheduler.cache.reference)
        self.scheduler.add(request)
        self._generations[request.id] = generation
        self._num_detailed += generation.wants_details
        return generation

    def abort(self, generation: Generation) -> None:
        """End a request now and free what it holds."""
        if self._is_stepping:  # garbage collection closes a forgotten stream wherever the thread happens to be
            self._aborted_late.append(generation)
        elif self.scheduler.abort(generation.request.id):
            self._tell_new(generation)

    def abort_all(self) -> None:
        """End every request."""
        for generation in list(self._generations.values()):
            self.abort(generation)
        self._ahead = None

    @unintercepted
    def step(self) -> bool:
        """Run one step; False if there is nothing to do. See Note [A step that fails]."""
        self._is_stepping = True
        try:
            return self._step()
        except BaseException:
            self._ahead = None
            self.scheduler.start_over()
            for generation in [each for each in self._generations.values() if each.is_done]:
                self._tell_new(generation)
            raise
        finally:
            self._is_stepping = False
            while self._aborted_late:
                self.abort(self._aborted_late.pop())

    def _step(self) -> bool:
        """See Note [Looking ahead]."""
        current, self._ahead = self._ahead, None
        if current is None:
            plan = self.scheduler.schedule()
            if plan is None:
                return False
            current = self._launch(plan)
        ahead = self._launch_ahead(current) if self._looks_ahead and not self._num_detailed else None
        chosen = current.read()
        if self._num_detailed:
            self._tell_details(current, chosen)
        self.scheduler.commit(current.plan, chosen)
        self._tell_tokens(current)
        self._ahead = ahead
        return True

    @unintercepted
    def run(self, plan: StepPlan, *, every_row: bool) -> StepResult:
        """Run the tokens of a plan that another scheduler made. There is one cache, so nobody else may be running."""
        self._check_foreign(plan)
        if any(work.request.input_embeds is not None for work in plan.works):
            self.forward.prepare_embeds()
        for work in plan.works:
            assert work.request.blocks is not None
            self._hand_over(work.request.blocks.cache)
        self._ahead = None
        tokens, logits, hidden = self._launch(plan, every_row=every_row).result
        num_rows = plan.num_tokens if every_row else plan.num_seqs
        return StepResult(tokens[: plan.num_seqs], logits[: plan.num_seqs], hidden[:num_rows])

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

    def make_scheduler(self, *, prefix_cache: bool) -> Scheduler:
        """Another scheduler over the same cache, for :meth:`run`."""
        ours = self.scheduler
        cache = PagedCache(
            ours.cache.groups,
            block_size=ours.cache.block_size,
            prefix_cache=prefix_cache and not ours.needs_state,
        )
        return Scheduler(
            ours.limits,
            cache,
            eos_token_ids=ours.eos_token_ids,
            needs_state=ours.needs_state,
            release_state=ours.release_state,
        )

    def _check_foreign(self, plan: StepPlan) -> None:
        limits, why = self.scheduler.limits, ""
        if self.scheduler.num_unfinished:
            why = "generate() is running, and there is one cache"
        elif plan.num_seqs > limits.max_num_seqs or plan.num_tokens > limits.max_batch_tokens:
            size = f"{count_of(plan.num_tokens, 'token')} of {count_of(plan.num_seqs, 'sequence')}"
            why = f"it has {size}, the model was loaded for "
            why += f"max_batch_tokens={limits.max_batch_tokens} and max_num_seqs={limits.max_num_seqs}"
        else:
            why = next(filter(None, (self._why_unfit(work.request) for work in plan.works)), "")
        if why:
            raise RequestError("PG657", "the step cannot be run", why=why, hint="plan it with llm.make_scheduler()")

    def _why_unfit(self, request: Request) -> str:
        shape = (request.num_prompt, self._buffers.limits.embed_width)
        if request.blocks is None:
            return f"request {request.id!r} is not running"
        if request.mrope_positions is not None and not self.has_mrope:
            return f"request {request.id!r} has positions in three dimensions, and the model takes them in one"
        given = shape if request.input_embeds is None else tuple(request.input_embeds.shape)
        return f"the embeddings of request {request.id!r} are of shape {given}, not {shape}" if given != shape else ""

    def _launch(self, plan: StepPlan, fed: torch.Tensor | None = None, *, every_row: bool = False) -> _Launched:
        bucket = self._sizes.bucket_for(plan)
        self._buffers.fill(plan, bucket, fed=fed)
        every_row = bucket.kind == "mixed" and (every_row or self._needs_every_row(plan))
        key = StepKey(bucket, self._buffers.sampling_mode, self._buffers.has_embeds, every_row)
        if fed is None and self._must_record(key):
            self._record(key)
            self._buffers.fill(plan, bucket)  # recording wrote a batch of its own
        is_replayed = key in self.forward.tapes
        if not is_replayed and self._record_unseen is not None:
            reason = f"{key} runs the compiled pieces without graphs"
            self.events.emit(Event("PG503", f"a {bucket.kind} step", reason, "add a larger capture size"))
        result = StepResult(*self.forward.run(key))
        return _Launched(plan, result, every_row, is_replayed, *self._landing.take(result.tokens, plan.num_seqs))

    def _launch_ahead(self, current: _Launched) -> _Launched | None:
        """Launch the step behind one that is running, if it can be known."""
        # The same requests run in the same rows, so they sample in the same mode.
        key = StepKey(self._sizes.decode_bucket(current.plan.num_seqs), self._buffers.sampling_mode)
        if self._must_record(key):
            return None  # not while another step is running
        plan = self.scheduler.schedule_ahead(current.plan)
        return self._launch(plan, fed=current.tokens) if plan is not None else None

    def _needs_every_row(self, plan: StepPlan) -> bool:
        """Whether a request reads more of the step than the row of its last token."""
        return bool(self._num_detailed) and any(
            work.num_tokens > 1 and work.request.params.wants_every_row for work in plan.works
        )

    def _must_record(self, key: StepKey) -> bool:
        """Whether a step has been left to be recorded at its first use."""
        return (
            self._record_unseen is not None
            and key not in self.forward.tapes
            and key.bucket in self._recordable
            and key not in self._dropped
        )

    def _record(self, key: StepKey) -> None:
        assert self._record_unseen is not None
        self._record_unseen(key)
        if key not in self.forward.tapes:
            self._dropped.add(key)

    # -- what is told of a step

    def _tell_tokens(self, launched: _Launched) -> None:
        for work in launched.plan.works:
            request = work.request
            generation = self._generations.get(request.id)
            if generation is None:
                continue  # ended while the step ran
            generation.num_steps += 1
            generation.num_replays += launched.is_replayed
            if request.finish_reason is not None or (work.samples and generation.is_watched):
                self._tell_new(generation)

    def _tell_new(self, generation: Generation) -> None:
        request = generation.request
        new = generation.new_text() if generation.is_watched else ""
        if generation.text is not None and generation.text.is_stopped:
            self.scheduler.finish(request, "stop")
            request.finish_reason = "stop"  # also where the last token that was allowed completed the stop text
        if request.is_done:
            del self._generations[request.id]
            self._num_detailed -= generation.wants_details
        if generation.on_new is not None:
            generation.on_new(generation, new, generation.new_tokens())

    def _tell_details(self, launched: _Launched, chosen: Sequence[int]) -> None:
        plan, result = launched.plan, launched.result
        described: dict[int, Generation] = {}
        first = 0
        for row, work in enumerate(plan.works):
            generation, params = self._generations.get(work.request.id), work.request.params
            if generation is not None and params.wants_every_row:
                start = first if launched.has_every_row else row
                self._tell_rows(generation, work, result.hidden[start : start + work.num_tokens])
            if generation is not None and params.logprobs is not None and work.samples and chosen[row] >= 0:
                described[row] = generation
            first += work.num_tokens
        if described:
            rows = list(described)
            counts = [described[row].request.params.logprobs or 0 for row in rows]
            told = _describe(result.logits[rows], [chosen[row] for row in rows], counts)
            for generation, logprob in zip(described.values(), told, strict=True):
                generation.logprobs.append(logprob)

    def _tell_rows(self, generation: Generation, work: Work, hidden: torch.Tensor) -> None:
        rows, request = work.new_rows, work.request
        if not rows:
            return
        new = hidden[rows.start : rows.stop]
        if request.params.return_hidden_states:
            generation.hidden_states.append(new.to("cpu", copy=True))
        wanted = request.params.prompt_logprobs
        if wanted is None:
            return
        following = request.tokens[work.start + rows.start + 1 : min(work.start + rows.stop + 1, request.num_prompt)]
        size = rows_at_once(self.scheduler.limits.vocab_size)
        for start in range(0, len(following), size):
            tokens = following[start : start + size].tolist()
            table = self.forward.head(new[start : start + len(tokens)])
            generation.prompt_logprobs += _describe(table, tokens, [wanted] * len(tokens))


def _describe(logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """The log-probability of a token in each row, and of a number of the most likely ones."""
    found = logprobs(logits, torch.tensor(tokens, device=logits.device), max(counts))
    rows: Any = zip(tokens, counts, found.chosen.tolist(), found.top_tokens.tolist(), found.top.tolist(), strict=True)
    return [
        TokenLogprob(token, chosen, tuple(zip(ids[:count], values[:count], strict=True)))
        for token, count, chosen, ids, values in rows
    ]
