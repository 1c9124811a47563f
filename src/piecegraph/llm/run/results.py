"""What a user gets for a prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from piecegraph.errors import PiecegraphError
from piecegraph.llm.run.request import FinishReason


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability, and the most likely tokens in its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token, log-probability), most likely first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """What a request cost."""

    num_prompt_tokens: int
    num_new_tokens: int
    num_cached_tokens: int
    """Of the prompt, found in the cache."""
    num_preemptions: int
    time_to_first_token_s: float | None
    seconds_per_token: float | None
    """After the first."""
    total_s: float
    token_times_s: tuple[float, ...]
    """When each new token was known, counted from the call on as ``time_to_first_token_s``, which is the first."""
    graph_coverage: float
    """The share of the request's steps that were replayed from a tape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The answer to one prompt."""

    prompt: str | None
    prompt_token_ids: list[int]
    text: str | None
    """None without a tokenizer."""
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None
    """The stop text or token that ended it; None if it was the model's own token, or none."""
    error: PiecegraphError | None
    """Why the request could not be served, or not to its end."""
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[TokenLogprob | None] | None
    """The first token of a prompt has none."""
    hidden_states: torch.Tensor | None
    """[tokens, hidden size] of the prompt and all generated tokens but the last."""
    metrics: RequestMetrics


class StepResult(NamedTuple):
    """What one step of the model gives, on the device."""

    tokens: torch.Tensor
    """The chosen token of each sequence."""
    logits: torch.Tensor
    """Of the last token of each sequence."""
    hidden: torch.Tensor
    """Of every token, or, if they were not asked for, of the last token of each sequence."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """New text of one prompt, while it is being generated."""

    index: int
    """Which of the answers: of the prompts, if each has one."""
    text: str
    token_ids: list[int]
    finished: Completion | None
    """The whole answer, with the last chunk."""
    logprobs: list[TokenLogprob] | None = None
    """Of the new tokens, if they were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an answer has ended, as the engine knows it: without its text, which is made where it is read."""

    finish_reason: FinishReason
    stop_reason: str | int | None
    error: PiecegraphError | None
    metrics: RequestMetrics
    ends_with_mark: bool
    """Whether the last token is what ended it, and not part of the text."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    hidden_states: torch.Tensor | None = None


News = tuple[Any, int, list[int], list[TokenLogprob] | None, Ending | PiecegraphError | None]
"""What is new of an answer: the call, as its reader knows it; the number of the answer; new tokens, and their
log-probabilities if they were asked for; how it ended, if it has, or why the whole call cannot go on.
"""


def cut_metrics(metrics: RequestMetrics, num_new: int) -> RequestMetrics:
    """The same of an answer that ended with an earlier token than its request, or has none."""
    if num_new >= metrics.num_new_tokens:
        return metrics
    times = metrics.token_times_s[:num_new]
    return replace(
        metrics,
        num_new_tokens=num_new,
        time_to_first_token_s=metrics.time_to_first_token_s if times else None,
        seconds_per_token=(times[-1] - times[0]) / (num_new - 1) if num_new > 1 else None,
        total_s=times[-1] if times else metrics.total_s,
        token_times_s=times,
    )
