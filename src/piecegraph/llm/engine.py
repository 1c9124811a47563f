"""The loop: schedule, write the batch, run the step, take the tokens, tell what is new.

Note [Looking ahead]
~~~~~~~~~~~~~~~~~~~~
While the device runs a step, the host would wait for its tokens, and then the device for the host. So where the next
step can be known without them (:meth:`Scheduler.schedule_ahead`), it is launched first, and takes its tokens from where
the device left them. Results are valid until the next step is launched, so a request that wants logits or hidden states
keeps its steps from being followed like that.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from piecegraph.errors import RequestError
from piecegraph.events import Event, EventLog
from piecegraph.llm.batch import BatchBuffers
from piecegraph.llm.forward import Forward, StepKey
from piecegraph.llm.request import Request, SamplingParams
from piecegraph.llm.results import Completion, RequestMetrics, StepResult, TokenLogprob
from piecegraph.llm.sampling import logprobs
from piecegraph.llm.scheduler import Scheduler
from piecegraph.llm.sizing import StepSizes
from piecegraph.llm.step import StepPlan, Work
from piecegraph.llm.stop import IncrementalText

_ROWS_AT_ONCE = 512
"""Rows of logits made at once for prompt log-probabilities: a vocabulary is wide."""


@dataclass
class Generation:
    """One request on its way, and what is kept to be told at its end."""

    request: Request
    prompt: str | None
    text: IncrementalText | None
    on_new: Callable[[Generation, str, list[int]], None] | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    hidden_states: list[torch.Tensor] = field(default_factory=list)
    num_steps: int = 0
    num_replays: int = 0
    error: RequestError | None = None

    @property
    def is_done(self) -> bool:
        return self.request.is_done or self.error is not None

    def completion(self) -> Completion:
        """The answer so far."""
        request, params = self.request, self.request.params
        return Completion(
            prompt=self.prompt,
            prompt_token_ids=request.tokens[: request.num_prompt].tolist(),
            text=self.text.text if self.text is not None else None,
            token_ids=request.generated,
            finish_reason=request.finish_reason or "error",
            error=self.error or request.error,
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
    """Where chosen tokens arrive on the host: two places in turn, as one step may be under way behind another."""

    def __init__(self, max_seqs: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._places = [torch.empty(max_seqs, dtype=torch.long, pin_memory=is_cuda) for _ in range(2)]
        self._events = [torch.cuda.Event() if is_cuda else None for _ in range(2)]
        self._next = 0

    def take(self, tokens: torch.Tensor) -> Callable[[], list[int]]:
        """Send tokens to the host; returns what waits for them."""
        place, event = self._places[self._next], self._events[self._next]
        self._next ^= 1
        place[: len(tokens)].copy_(tokens, non_blocking=True)
        if event is not None:
            event.record()

        def read() -> list[int]:
            if event is not None:
                event.synchronize()
            found: list[int] = place[: len(tokens)].tolist()
            return found

        return read


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that may still be running."""

    plan: StepPlan
    result: StepResult
    is_replayed: bool
    read: Callable[[], list[int]]
    """Waits for the chosen tokens."""


def _wants_details(work: Work) -> bool:
    params = work.request.params
    return params.logprobs is not None or params.wants_every_row


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
        self._buffers = buffers
        self._sizes = sizes
        self._events = events
        self._record_unseen = record_unseen
        self._looks_ahead = looks_ahead
        self._ahead: _Launched | None = None
        self._landing = Landing(buffers.limits.max_seqs, buffers.device)
        self._generations: dict[str, Generation] = {}
        self._ids = itertools.count()

    def add(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        prompt: str | None = None,
        decode: Callable[[list[int]], str] | None = None,
    ) -> Generation:
        """Queue a prompt. Raises a RequestError if it can never be served."""
        request = Request(str(next(self._ids)), tokens, params, seed=seed)
        self.scheduler.add(request)
        text = IncrementalText(decode, params.stop, request.tokens[-8:]) if decode is not None else None
        generation = Generation(request, prompt, text)
        self._generations[request.id] = generation
        return generation

    def abort(self, generation: Generation) -> None:
        """End a request now and free what it holds."""
        self.scheduler.abort(generation.request.id)
        self._generations.pop(generation.request.id, None)

    def step(self) -> bool:
        """Run one step; False if there is nothing to do. See Note [Looking ahead]."""
        current, self._ahead = self._ahead, None
        if current is None:
            plan = self.scheduler.schedule()
            if plan is None:
                return False
            current = self._launch(plan)
        ahead = self._ahead_of(current.plan)
        if ahead is not None:
            self._ahead = self._launch(ahead, fed=current.result.tokens)
        chosen = current.read()
        self._tell_details(current.plan, chosen, current.result)
        self.scheduler.commit(current.plan, chosen)
        self._tell_tokens(current, chosen)
        return True

    def run(self, plan: StepPlan) -> StepResult:
        """Run the tokens of a plan that another scheduler made."""
        return self._launch(plan).result

    def _ahead_of(self, plan: StepPlan) -> StepPlan | None:
        """The step to launch behind one whose tokens are not known yet, if there is one."""
        if not self._looks_ahead or any(_wants_details(work) for work in plan.works):
            return None
        ahead = self.scheduler.schedule_ahead(plan)
        if ahead is None:
            return None
        key = StepKey(self._sizes.bucket_for(ahead), self._buffers.sampling_mode)
        # Recording writes a batch of its own to the buffers, where the tokens of this step would be lost.
        return None if key not in self.forward.tapes and self._may_record(key) else ahead

    def _may_record(self, key: StepKey) -> bool:
        return self._record_unseen is not None and key.bucket in self._sizes.all()

    def _launch(self, plan: StepPlan, fed: torch.Tensor | None = None) -> _Launched:
        bucket = self._sizes.bucket_for(plan)
        self._buffers.fill(plan, bucket, fed=fed)
        key = StepKey(bucket, self._buffers.sampling_mode)
        if key not in self.forward.tapes and self._record_unseen is not None:
            self._record(key, plan)
        result = StepResult(*self.forward.run(key))
        return _Launched(plan, result, key in self.forward.tapes, self._landing.take(result.tokens[: plan.num_seqs]))

    def _record(self, key: StepKey, plan: StepPlan) -> None:
        """Record a size that was left for its first use."""
        if self._record_unseen is not None and self._may_record(key):
            self._record_unseen(key)
            self._buffers.fill(plan, key.bucket)  # recording wrote a batch of its own
        if key not in self.forward.tapes:
            reason = f"{key} runs the compiled pieces without graphs"
            self._events.emit(Event("PG503", "step", reason, "add a larger capture size"))

    def _tell_tokens(self, launched: _Launched, chosen: Sequence[int]) -> None:
        for work, token in zip(launched.plan.works, chosen, strict=True):
            generation = self._generations.get(work.request.id)
            if generation is None:
                continue  # ended while the step ran
            generation.num_steps += 1
            generation.num_replays += launched.is_replayed
            if work.samples and token >= 0:
                self._add_text(generation, token)
            if work.request.is_done:
                del self._generations[work.request.id]
                self._notify(generation, generation.text.finish() if generation.text is not None else "", [])

    def _add_text(self, generation: Generation, token: int) -> None:
        new = ""
        request = generation.request
        if generation.text is not None and request.finish_reason != "stop":
            new = generation.text.add([token])
            if generation.text.is_stopped and not request.is_done:
                self.scheduler.finish(request, "stop")
        self._notify(generation, new, [token])

    @staticmethod
    def _notify(generation: Generation, new: str, tokens: list[int]) -> None:
        if generation.on_new is not None:
            generation.on_new(generation, new, tokens)

    # -- what some requests want to know besides their tokens

    def _tell_details(self, plan: StepPlan, chosen: Sequence[int], result: StepResult) -> None:
        first = 0
        for row, work in enumerate(plan.works):
            params, generation = work.request.params, self._generations.get(work.request.id)
            if generation is None:
                continue
            if params.logprobs is not None and work.samples and chosen[row] >= 0:
                generation.logprobs += _describe(result.logits[row : row + 1], [chosen[row]], params.logprobs)
            if params.wants_every_row:
                self._tell_rows(generation, work, result.hidden[first : first + work.num_tokens])
            first += work.num_tokens

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
        for start in range(0, len(following), _ROWS_AT_ONCE):
            tokens = following[start : start + _ROWS_AT_ONCE].tolist()
            table = self.forward.head(new[start : start + len(tokens)])
            generation.prompt_logprobs += _describe(table, tokens, wanted)


def _describe(logits: torch.Tensor, tokens: Sequence[int], k: int) -> list[TokenLogprob]:
    found = logprobs(logits, torch.tensor(tokens, device=logits.device), k)
    rows: Any = zip(tokens, found.chosen.tolist(), found.top_tokens.tolist(), found.top.tolist(), strict=True)
    return [TokenLogprob(token, chosen, tuple(zip(ids, values, strict=True))) for token, chosen, ids, values in rows]
