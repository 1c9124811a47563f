"""Choosing tokens from logits, on the device.

Plain torch functions on [rows, vocabulary] that never wait for the host and keep no state, so that they can be
captured. Each row brings one key, which depends on the request's seed and the token's position alone, and all its
random numbers are made from that: see Note [A race of tokens] in ``kernels/race.py``.

Note [Sampling modes]
~~~~~~~~~~~~~~~~~~~~~
To find the likeliest tokens of a vocabulary is dear and only ``top_k`` and ``top_p`` need it; ``min_p``, which does
not, comes with them. A batch runs in the cheapest mode that serves all its rows, but a row's token must not depend on
that choice: truncation says which weights are kept, and the race is run in the order of the vocabulary in every mode.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from piecegraph.llm.kernels.race import draw, first_largest, has_kernels, launch_draw, launch_weights
from piecegraph.llm.kernels.truncate import launch_truncate, truncate
from piecegraph.llm.run.sampling_params import SamplingParams

SamplingMode = Literal["greedy", "plain", "truncated"]
"""What the rows of a batch need at most: the likeliest token, a draw from all tokens, a draw from the likeliest."""

BAD_LOGITS = -1
"""The token of a row whose logits are not numbers."""
NO_TOKEN = BAD_LOGITS - 1
"""That of a row whose logits are all minus infinity: no token may come."""

HOTTEST = float(np.finfo(np.float32).max)
"""What a higher temperature is sent to the device as, where it would be infinite. Nothing is lost: at both, all tokens
are equally likely but those whose logit is minus infinity.
"""
_TABLE_BYTES = 128 * 2**20
"""Of one table of log-probabilities: a vocabulary is wide."""


def mode_of(params: SamplingParams) -> SamplingMode:
    """What one request needs."""
    if params.temperature == 0:
        return "greedy"
    return "truncated" if params.top_k or params.top_p < 1 or params.min_p else "plain"


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row, the first of equals; :data:`BAD_LOGITS` or :data:`NO_TOKEN` for none."""
    return first_largest(logits, BAD_LOGITS)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    random_keys: torch.Tensor,
    *,
    min_p: torch.Tensor | None = None,
    mode: SamplingMode = "truncated",
) -> torch.Tensor:
    """One token for each row, int64.

    The order is that of transformers: temperature, then ``top_k`` (tokens as likely as the k-th stay), then ``top_p``
    (the token that reaches it stays), then ``min_p``.

    Args:
        logits: [rows, vocabulary].
        temperature: [rows], finite; 0 takes the most likely token.
        top_k: [rows]; 0 is off.
        top_p: [rows]; 1 is off.
        random_keys: int64 [rows], see :func:`~piecegraph.llm.kernels.race.random_keys`.
        min_p: [rows]; 0 is off, and so is None.
        mode: see Note [Sampling modes]; it must be enough for every row.
    """
    best = greedy(logits)
    if mode == "greedy":
        return best
    if has_kernels(logits):
        weights = None
        if mode == "truncated":
            weights = launch_weights(logits, best, temperature)
            launch_truncate(logits, weights, top_k, top_p, min_p)
        return launch_draw(logits, best, temperature, random_keys, weights)
    is_greedy = temperature == 0
    largest = logits.amax(dim=-1, keepdim=True).float()
    # Relative to the largest: a small temperature must not overflow.
    scaled = (logits.float() - largest) / torch.where(is_greedy, 1.0, temperature).unsqueeze(-1)
    weights = scaled.exp()
    if mode == "truncated":
        weights = truncate(scaled, weights, top_k, top_p, min_p)
    return torch.where(is_greedy | (best < 0), best, draw(weights, random_keys))


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
    # A kernel adds up a row in an order that depends on where it begins: all begin at 16 bytes.
    vocab_size = logits.shape[-1]
    table = F.pad(logits.float(), (0, -vocab_size % 4), value=-math.inf).log_softmax(dim=-1)[:, :vocab_size]
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
