"""The loop: schedule, write the batch, run the step, take the tokens, tell what is new."""

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
    ) -> None:
        self.forward = forward
        self.scheduler = scheduler
        self._buffers = buffers
        self._sizes = sizes
        self._events = events
        self._record_unseen = record_unseen
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
        """Run one step; False if there is nothing to do."""
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        result, is_replayed = self.run(plan)
        chosen: list[int] = result.tokens[: plan.num_seqs].tolist()
        self._tell_details(plan, chosen, result)
        self.scheduler.commit(plan, chosen)
        self._tell_tokens(plan, chosen, is_replayed)
        return True

    def run(self, plan: StepPlan) -> tuple[StepResult, bool]:
        """Run the tokens of a plan; also returns whether a tape was replayed."""
        bucket = self._sizes.bucket_for(plan)
        self._buffers.fill(plan, bucket)
        key = StepKey(bucket, self._buffers.sampling_mode)
        is_replayed = self._is_recorded(key, plan)
        return StepResult(*self.forward.run(key)), is_replayed

    def _is_recorded(self, key: StepKey, plan: StepPlan) -> bool:
        if key in self.forward.tapes or self._record_unseen is None:
            return key in self.forward.tapes
        if key.bucket in self._sizes.all():
            self._record_unseen(key)
            self._buffers.fill(plan, key.bucket)  # recording wrote a batch of its own
        if key not in self.forward.tapes:
            reason = f"{key} runs the compiled pieces without graphs"
            self._events.emit(Event("PG503", "step", reason, "add a larger capture size"))
        return key in self.forward.tapes

    def _tell_tokens(self, plan: StepPlan, chosen: Sequence[int], is_replayed: bool) -> None:
        for work, token in zip(plan.works, chosen, strict=True):
            generation = self._generations[work.request.id]
            generation.num_steps += 1
            generation.num_replays += is_replayed
            if work.samples and token >= 0:
                self._add_text(generation, token)
            if work.request.is_done:
                del self._generations[work.request.id]
                self._notify(generation, generation.text.finish() if generation.text is not None else "", [])

    def _add_text(self, generation: Generation, token: int) -> None:
        new = ""
        request = generation.request
        if generation.text is not None and not (request.finish_reason == "stop"):
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
            params = work.request.params
            generation = self._generations[work.request.id]
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
