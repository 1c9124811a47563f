"""Which token wins, of those that may: the likeliest, or a draw by random numbers that are made from a counter, the
same for a key and a place in the vocabulary for ever.

Note [A race of tokens]
~~~~~~~~~~~~~~~~~~~~~~~
A token is drawn by Gumbel-max: each is given an exponential number of its own, the weight of a token divided by its
number is its score, and the highest score wins, with the probability of its weight. A number belongs to a place in the
vocabulary. So logits that differ by rounding give another token only where two scores are that close; a draw from the
running sum of the weights would move with the rounding of every token before it.
"""

from __future__ import annotations

import functools
import importlib.util
import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from piecegraph.llm.kernels.early_launch import early_constants

_STEP, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The constants of splitmix64."""
_LARGEST = 2**63 - 1
_SCALE = (1 - 2.0**-23) * 2.0**-63
"""From 63 bits to a float32 that is below 1 even where the bits were rounded up."""
_PART = 2048
"""Logits that one program looks through."""


def random_keys(seeds: NDArray[np.uint64], positions: NDArray[np.integer]) -> NDArray[np.int64]:
    """What the random numbers of a token are made from: the same for a seed and a position for ever.

    >>> random_keys(np.array([1, 1], np.uint64), np.array([7, 8]))
    array([-6894164319213084917,  4555703879086989499])
    """
    counters = positions.astype(np.uint64) * np.uint64(_STEP)
    return _mixed(_mixed(seeds + np.uint64(_STEP)) + counters).view(np.int64)


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64; arithmetic on uint64 arrays wraps around."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    return z ^ (z >> np.uint64(31))


def exponentials(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Independent numbers of the exponential distribution, made by integer arithmetic on a key and a counter.

    They are those of splitmix64 begun at the key, but for two things that spare work: shifts keep the sign, by which
    one bit of 64 is lost, and the high bits are taken where the last product has left them.

    Args:
        keys: int64 [rows], from :func:`random_keys`.
        count: of each row.

    Returns:
        float32 [rows, count], from 0 to 16. Small ones, which win races, are the finest.
    """
    counters = torch.arange(1, count + 1, device=keys.device).mul_(_signed(_STEP))
    bits = keys.unsqueeze(-1) + counters
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        bits.bitwise_xor_(bits >> shift).mul_(_signed(factor))
    return bits.bitwise_and_(_LARGEST).float().mul_(-_SCALE).log1p_().neg_()


def draw(weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """One place of each row, with the probability of its weight: see Note [A race of tokens].

    Args:
        weights: float32 [rows, vocabulary], not negative; one of each row must not be small. Overwritten.
        keys: int64 [rows], from :func:`random_keys`.
    """
    return weights.div_(exponentials(keys, weights.shape[-1])).argmax(dim=-1)


def launch_weights(logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """What tokens weigh in a draw, in one kernel. For the arguments see :func:`launch_draw`."""
    from piecegraph.llm.kernels import race_kernels

    rows, count = logits.shape
    weights = logits.new_empty(rows, count, dtype=torch.float32)
    race_kernels.weights_kernel[(rows, -(-count // _PART))](
        logits, best, temperature, weights, count, logits.stride(0), BLOCK=_PART, num_warps=4
    )
    return weights


def launch_draw(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw in two kernels: nothing as wide as the vocabulary is written, and each step of integer arithmetic would be
    a kernel of its own.

    Args:
        logits: [rows, vocabulary], the elements of a row side by side.
        best: int64 [rows]: the likeliest token, or none.
        temperature: [rows]; where it is 0, or there is no likeliest token, that is the result.
        keys: int64 [rows], from :func:`random_keys`.
        weights: float32 [rows, vocabulary]: those of :func:`launch_weights`, if some were changed.
    """
    from piecegraph.llm.kernels import race_kernels

    rows, count = logits.shape
    num_parts, table = -(-count // _PART), logits if weights is None else weights
    largest = logits.new_empty(rows, num_parts, dtype=torch.float32)
    winners = logits.new_empty(rows, num_parts, dtype=torch.int32)
    out = logits.new_empty(rows, dtype=torch.int64)
    race_kernels.draw_parts_kernel[(rows, num_parts)](
        table,
        best,
        temperature,
        keys,
        largest,
        winners,
        count,
        table.stride(0),
        HAS_WEIGHTS=weights is not None,
        STEP=_signed(_STEP),
        MIX_1=_signed(_MIX_1),
        MIX_2=_signed(_MIX_2),
        LARGEST=_LARGEST,
        SCALE=_SCALE,
        BLOCK=_PART,
        num_warps=4,
    )
    block = 1 << (num_parts - 1).bit_length()
    race_kernels.winner_kernel[(rows,)](largest, winners, best, temperature, out, num_parts, BLOCK=block, num_warps=4)
    return out


def first_largest(logits: torch.Tensor, bad: int) -> torch.Tensor:
    """The place of the largest of each row, the first of equals.

    Args:
        logits: [rows, vocabulary].
        bad: what stands for no place, where the largest is infinite or no number; one less where all are minus
            infinity.
    """
    if has_kernels(logits):
        return launch_first_largest(logits, bad)
    largest, places = logits.max(dim=-1)
    return torch.where(largest.isfinite(), places, torch.where(largest == -math.inf, bad - 1, bad))


def launch_first_largest(logits: torch.Tensor, bad: int) -> torch.Tensor:
    """In two kernels: torch's takes one program for a row, and four more kernels to see whether it is a number."""
    from piecegraph.llm.kernels import race_kernels

    rows, count = logits.shape
    num_parts = -(-count // _PART)
    largest = logits.new_empty(rows, num_parts, dtype=torch.float32)
    places = logits.new_empty(rows, num_parts, dtype=torch.int32)
    out = logits.new_empty(rows, dtype=torch.int64)
    early = early_constants(logits.device, is_wanted=True)
    race_kernels.largest_of_parts_kernel[(rows, num_parts)](
        logits, largest, places, count, logits.stride(0), BLOCK=_PART, num_warps=4, **early
    )
    block = 1 << (num_parts - 1).bit_length()
    race_kernels.first_largest_kernel[(rows,)](
        largest, places, out, num_parts, BAD=bad, BLOCK=block, num_warps=4, **early
    )
    return out


def keep_allowed(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """The logits of tokens that may come; minus infinity elsewhere.

    Args:
        logits: [rows, vocabulary].
        masks: uint8 [rows, vocabulary / 8], bits from the lowest on.
    """
    if has_kernels(logits):
        return launch_keep_allowed(logits, masks)
    # A vocabulary is long, so it is gone over twice, and not once for each step of taking bits apart.
    is_allowed = _bytes_of_bits(masks.device).index_select(0, masks.flatten().int()).view(torch.bool)
    is_allowed = is_allowed.view(len(masks), -1)
    # Where the head is wider than the vocabulary, nothing is behind it; where the table is, it is padding.
    missing = logits.shape[-1] - is_allowed.shape[-1]
    is_allowed = F.pad(is_allowed, (0, missing)) if missing > 0 else is_allowed[:, : logits.shape[-1]]
    return torch.where(is_allowed, logits, -math.inf)


def launch_keep_allowed(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """The same in one kernel."""
    from piecegraph.llm.kernels import race_kernels

    rows, count = logits.shape
    out = logits.new_empty(rows, count)
    race_kernels.keep_allowed_kernel[(rows, -(-count // _PART))](
        logits,
        masks,
        out,
        count,
        8 * masks.shape[1],
        logits.stride(0),
        masks.stride(0),
        BLOCK=_PART,
        num_warps=4,
    )
    return out


@functools.cache
def _bytes_of_bits(device: torch.device) -> torch.Tensor:
    """int64 [256]: for each byte eight bytes, 1 for each bit that is set, from the lowest on."""
    with torch.inference_mode(False):  # it stays
        bits = torch.arange(256).unsqueeze(-1) >> torch.arange(8) & 1
        return bits.to(torch.uint8).view(torch.int64).flatten().to(device)


def _signed(number: int) -> int:
    """As an int64, which is what torch multiplies; products wrap around all the same."""
    return number - 2**64 if number > _LARGEST else number


def has_kernels(logits: torch.Tensor) -> bool:
    """Whether kernels of Triton take these logits."""
    return logits.is_cuda and logits.stride(-1) == 1 and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
