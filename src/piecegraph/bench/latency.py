"""What many requests had to wait for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from piecegraph.bench.result import quantile


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Of requests that ran together. A gap is the time between two tokens of a request."""

    seconds: float
    """From the first request to the last token."""
    new_tokens_s: float
    """New tokens a second."""
    all_tokens_s: float
    """The same with those of the prompts."""
    first_p50_ms: float
    """Until the first token."""
    first_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    gap_worst_ms: float


def latency_of(times_s: Sequence[Sequence[float]], *, seconds: float, num_prompt: int, num_new: int) -> Latency:
    """Of the moments of each request's tokens, counted from when it was asked for.

    >>> latency_of([(0.5, 0.6, 0.8)], seconds=1.0, num_prompt=7, num_new=3).gap_worst_ms
    200.0
    """
    first = [each[0] * 1e3 for each in times_s]
    gaps = [(b - a) * 1e3 for each in times_s for a, b in itertools.pairwise(each)] or [0.0]
    return Latency(
        seconds=seconds,
        new_tokens_s=num_new / seconds,
        all_tokens_s=(num_new + num_prompt) / seconds,
        first_p50_ms=quantile(first, 0.5),
        first_p99_ms=quantile(first, 0.99),
        gap_p50_ms=quantile(gaps, 0.5),
        gap_p99_ms=quantile(gaps, 0.99),
        gap_worst_ms=quantile(gaps, 1.0),
    )
