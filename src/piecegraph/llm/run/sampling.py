"""Choosing tokens from logits, on the device.

Plain torch functions on [rows, vocabulary] that never wait for the host and draw no random numbers of their own, so
that they can be captured. Each row brings one uniform number, which depends on the request's seed and the token's
position alone (:func:`uniform`): a request samples the same tokens whatever runs beside it.

Note [Sampling modes]
~~~~~~~~~~~~~~~~~~~~~
Sorting a vocabulary is dear and only ``top_k`` and ``top_p`` need it. A batch runs in the cheapest mode that serves all
its rows, but a row's token must not depend on that choice. So a row without ``top_k`` and ``top_p`` is always drawn
from the distribution in the order of the vocabulary, and one with them always in order of probability, even if both are
in one batch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from piecegraph.llm.run.request import SamplingParams

SamplingMode = Literal["greedy", "plain", "truncated"]
"""What the rows of a batch need at most: the likeliest token, a draw from all tokens, a draw from the likeliest."""

BAD_LOGITS = -1
"""The token of a row whose logits are not numbers."""

HOTTEST = float(np.finfo(np.float32).max)
"""What a higher temperature is sent to the device as, where it would be infinite. Nothing is lost: at both, all tokens
are equally likely but those whose logit is minus infinity.
"""
_TABLE_BYTES = 128 * 2**20
"""Of one table of log-probabilities: a vocabulary is wide."""

_STEP, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The constants of splitmix64."""
_SCALE = 2.0**-23
"""23 bits: a float32 total times the largest of these numbers is still below it, so that no draw falls off the end."""


def uniform(seed: int, position: int) -> float:
    """A number from 0 up to but not including 1, the same for a seed and a position for ever.

    >>> uniform(1, 7) == uniform(1, 7) != uniform(1, 8)
    True
    """
    return float(uniforms(np.array([seed], np.uint64), np.array([position], np.int64))[0])


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.integer]) -> NDArray[np.float32]:
    """:func:`uniform` for each pair of a uint64 seed and a position, as float32."""
    counters = positions.astype(np.uint64) * np.uint64(_STEP)
    bits = _mixed(_mixed(seeds + np.uint64(_STEP)) + counters)
    return (bits >> np.uint64(41)).astype(np.float32) * np.float32(_SCALE)


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64; arithmetic on uint64 arrays wraps around."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    return z ^ (z >> np.uint64(31))


def mode_of(params: SamplingParams) -> SamplingMode:
    """What one request needs."""
    if params.temperature == 0:
        return "greedy"
    return "truncated" if params.top_k or params.top_p < 1 else "plain"


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row, the first of equals; :data:`BAD_LOGITS` for a row that is not numbers."""
    largest, tokens = logits.max(dim=-1)
    return torch.where(largest.isfinite(), tokens, BAD_LOGITS)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    *,
    mode: SamplingMode = "truncated",
) -> torch.Tensor:
    """One token for each row, int64.

    The order is that of transformers: temperature, then ``top_k`` (tokens as likely as the k-th stay), then ``top_p``
    (the token that reaches it stays).

    Args:
        logits: [rows, vocabulary].
        temperature: [rows], finite; 0 takes the most likely token.
        top_k: [rows]; 0 is off.
        top_p: [rows]; 1 is off.
        uniform: [rows], from 0 up to but not including 1.
        mode: see Note [Sampling modes]; it must be enough for every row.
    """
    best = greedy(logits)
    if mode == "greedy":
        return best
    is_greedy = temperature == 0
    largest = logits.amax(dim=-1, keepdim=True).float()
    # Relative to the largest: a small temperature must not overflow.
    scaled = (logits.float() - largest) / torch.where(is_greedy, 1.0, temperature).unsqueeze(-1)
    tokens = _draw(scaled.exp(), uniform)
    if mode == "truncated":
        is_truncated = (top_k > 0) | (top_p < 1)
        tokens = torch.where(is_truncated, _draw_truncated(scaled, top_k, top_p, uniform), tokens)
    return torch.where(is_greedy | (best < 0), best, tokens)


def _draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first index at which the running sum of the weights exceeds ``uniform`` times their total."""
    sums = weights.cumsum(dim=-1)
    return (sums <= sums[:, -1:] * uniform.unsqueeze(-1)).sum(dim=-1).clamp_(max=weights.shape[-1] - 1)


def _draw_truncated(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    # Stable, so that equally likely tokens come in the order of the vocabulary on every device.
    ordered, tokens = scaled.sort(dim=-1, descending=True, stable=True)
    vocab_size = scaled.shape[-1]
    last = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size) - 1
    weights = ordered.exp().masked_fill(ordered < ordered.gather(-1, last.unsqueeze(-1)), 0.0)
    sums = weights.cumsum(dim=-1)
    before = (sums - weights) / sums[:, -1:]
    is_kept = (before < top_p.unsqueeze(-1)) | (top_p >= 1).unsqueeze(-1)
    is_kept[:, 0] = True  # a top_p above 0 may be 0 in float32
    return tokens.gather(-1, _draw(weights.masked_fill(~is_kept, 0.0), uniform).unsqueeze(-1)).squeeze(-1)


class Logprobs(NamedTuple):
    """Log-probabilities of rows of logits, before temperature and truncation."""

    chosen: torch.Tensor
    """float32 [rows]: of the given token."""
    top: torch.Tensor
    """float32 [rows, k]: of the most likely tokens, largest first."""
    top_tokens: torch.Tensor
    """int64 [rows, k]."""


def logprobs(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> Logprobs:
    """Log-probabilities of ``tokens`` (one for each row) and of the ``k`` most likely ones."""
    table = logits.float().log_softmax(dim=-1)
    chosen = table.gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    top, top_tokens = table.topk(min(k, table.shape[-1]), dim=-1)
    return Logprobs(chosen, top, top_tokens)


def rows_at_once(vocab_size: int) -> int:
    """How many rows of logits are looked at together where there may be many.

    >>> rows_at_once(151_936), rows_at_once(2**40)
    (220, 1)
    """
    return max(1, _TABLE_BYTES // (4 * vocab_size))


def logprobs_bytes(num_rows: int, vocab_size: int) -> int:
    """What :func:`logprobs` needs at most: logits, the same in float32, and the table made of them.

    Args:
        num_rows: of a step. Rows of a prompt are looked at in parts of :func:`rows_at_once`.
        vocab_size: their width.
    """
    return 3 * 4 * vocab_size * max(num_rows, rows_at_once(vocab_size))
