"""A request of ``generate`` on its way, and what is collected for its answer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from piecegraph.llm.run.detokenizer import Detokenizer
from piecegraph.llm.run.request import Request
from piecegraph.llm.run.results import Completion, Ending, RequestMetrics, TokenLogprob
from piecegraph.llm.run.sampling import logprobs, rows_at_once
from piecegraph.llm.run.sampling_params import SamplingParams
from piecegraph.llm.run.step import Work
from piecegraph.llm.run.stop import IncrementalText

MakeLogits = Callable[[torch.Tensor], torch.Tensor]
"""Rows of hidden states to rows of logits."""
_NUM_NEIGHBOURS = 8
"""Tokens of a prompt that the text of what is behind it may depend on."""


@dataclass
class Generation:
    """One request on its way, and what is collected for its answer."""

    request: Request
    prompt: str | None
    text: IncrementalText | None
    on_new: Callable[[Generation, str, list[int]], None] | None = None
    """Called with every new token, and at the end."""
    is_streamed: bool = True
    """Whether ``on_new`` is called while tokens come, or at the end alone."""
    prompt_index: int | None = None
    """Which of several prompts it answers; None for the only one."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    hidden_states: list[torch.Tensor] = field(default_factory=list)
    num_graphless: int = 0
    """Steps that were not replayed from a tape."""
    num_read: int = 0
    """Tokens of the request that ``text`` has, or that are not part of it."""
    num_streamed: int = 0
    """Tokens of the request that ``on_new`` was given, the prompt included."""

    is_watched: bool = False
    """Whether its text must be known at every step. Otherwise it is made once, at the end."""
    wants_details: bool = False
    """Whether more than the chosen tokens is read of its steps."""

    def __post_init__(self) -> None:
        params = self.request.params
        self.num_read = self.num_streamed = self.request.num_prompt
        self.is_watched = (self.on_new is not None and self.is_streamed) or bool(params.stop)
        self.wants_details = params.logprobs is not None or params.wants_every_row or bool(params.logits_processors)

    @property
    def is_done(self) -> bool:
        return self.request.is_done

    @property
    def ends_with_mark(self) -> bool:
        """Whether the last token is what ended it: it is not part of the text, unless that is asked for. A stop text is
        found in it, and cut off there; what completes a form is part of it, too.
        """
        request = self.request
        is_ended_by_token = request.finish_reason == "stop" and request.tokens[-1] in request.stop_ids
        return is_ended_by_token and not request.params.include_stop_str_in_output

    def new_text(self) -> str:
        """The text that became safe since the last call."""
        text, request = self.text, self.request
        if text is None:
            return ""
        end = len(request.tokens) - (self.ends_with_mark and not text.is_stopped)
        new = text.add(request.tokens[self.num_read : end])
        self.num_read = end
        return new + text.finish() if request.is_done else new

    def new_tokens(self) -> list[int]:
        """The tokens since the last call."""
        tokens = self.request.tokens[self.num_streamed :].tolist()
        self.num_streamed += len(tokens)
        return tokens

    def ending(self) -> Ending:
        """How it has ended."""
        request = self.request
        return Ending(
            finish_reason=request.finish_reason or "error",
            stop_reason=request.stop_reason,
            error=request.error,
            metrics=self._metrics(),
            ends_with_mark=self.ends_with_mark,
            prompt_logprobs=self.prompt_logprobs if request.params.prompt_logprobs is not None else None,
            hidden_states=torch.cat(self.hidden_states) if self.hidden_states else None,
        )

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
            stop_reason=request.stop_reason,
            error=request.error,
            logprobs=self.logprobs if params.logprobs is not None else None,
            prompt_logprobs=self.prompt_logprobs if params.prompt_logprobs is not None else None,
            hidden_states=torch.cat(self.hidden_states) if self.hidden_states else None,
            metrics=self._metrics(),
        )

    def _metrics(self) -> RequestMetrics:
        request = self.request
        end = request.finish_time if request.finish_time is not None else time.perf_counter()
        num_new, begun = len(request.tokens) - request.num_prompt, request.arrival_time
        times = tuple([known - begun for known in request.token_times])
        return RequestMetrics(
            num_prompt_tokens=request.num_prompt,
            num_new_tokens=num_new,
            num_cached_tokens=request.num_cached,
            num_preemptions=request.num_preemptions,
            time_to_first_token_s=times[0] if times else None,
            seconds_per_token=(end - begun - times[0]) / (num_new - 1) if num_new > 1 else None,
            total_s=end - begun,
            token_times_s=times,
            graph_coverage=1 - self.num_graphless / request.num_steps if request.num_steps else 0.0,
        )

    def add_rows(self, work: Work, hidden: torch.Tensor, head: MakeLogits, vocab_size: int) -> None:
        """Keep what was asked for of every token: of the rows that nothing is kept of yet.

        Args:
            work: which tokens.
            hidden: their hidden states.
            head: makes logits of them.
            vocab_size: the width of these.
        """
        rows, request = work.new_rows, work.request
        if not rows:
            return
        new = hidden[rows.start : rows.stop]
        if request.params.return_hidden_states:
            self.hidden_states.append(new.to("cpu", copy=True))
        wanted = request.params.prompt_logprobs
        if wanted is None:
            return
        following = request.tokens[work.start + rows.start + 1 : min(work.start + rows.stop + 1, request.num_prompt)]
        size = rows_at_once(vocab_size)
        for start in range(0, len(following), size):
            tokens = following[start : start + size].tolist()
            logits = head(new[start : start + len(tokens)])
            self.prompt_logprobs += token_logprobs(logits, tokens, [wanted] * len(tokens))


def text_behind(prompt: Sequence[int], params: SamplingParams, detokenizer: Detokenizer) -> IncrementalText:
    """The text of what is generated behind a prompt, up to its stop texts."""
    hidden = detokenizer.hidden  # which may be many in a row
    shown = itertools.islice((token for token in reversed(prompt) if token not in hidden), _NUM_NEIGHBOURS)
    return IncrementalText(
        detokenizer,
        params.stop,
        list(shown)[::-1],
        min_tokens=params.min_tokens,
        includes_stop=params.include_stop_str_in_output,
        clean=detokenizer.clean,
    )


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """The log-probability of a token in each row, and of a number of the most likely ones."""
    found = logprobs(logits, torch.tensor(tokens, device=logits.device), max(counts))
    rows: Any = zip(tokens, counts, found.chosen.tolist(), found.top_tokens.tolist(), found.top.tolist(), strict=True)
    return [
        TokenLogprob(token, chosen, tuple(zip(ids[:count], values[:count], strict=True)))
        for token, count, chosen, ids, values in rows
    ]
