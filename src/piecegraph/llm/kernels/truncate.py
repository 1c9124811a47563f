"""Which tokens may be drawn: the likeliest by number, by their share of all weights, or by their own weight.

Note [A threshold by its bits]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Which tokens are kept follows from one number, the logit or weight of the last of them, and to find that does not need
the vocabulary in order. The bits of numbers that are not negative are in the order of the numbers (and with a little
care those of all). So four bits of the threshold are found by going over a row once: what do tokens add up to that are
not below each of the values these bits can have? The parts of a row write down their sums, and whoever goes over a part
next adds them up, in the same order every time: a row's tokens do not depend on the rows beside it. Once twelve bits
are known, few tokens have them. These are written down, and the later passes look at nothing else.

By ``top_p``, 1, 8, 64 and 256 rows of 151,936 logits take 38, 49, 208 and 755 us on an H200; with ``top_k``, too, 60,
85, 373 and 1416; sorted, 101, 409, 1363 and 4655. One program for each row, which finds two bits at a time and stops as
soon as one token is left, takes 206, 207, 218 and 723 for the first.
"""

from __future__ import annotations

import torch

_PASSES_OF = {torch.bfloat16: 4, torch.float16: 5}
"""For numbers that have fewer bits than 32 in single precision."""


def truncate(
    scaled: torch.Tensor,
    weights: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor | None,
) -> torch.Tensor:
    """The weights with zeros for tokens that are not kept.

    First by ``top_k`` (tokens as likely as the k-th stay), then by ``top_p`` (the token that reaches it stays, and of
    equally likely ones the first), then by ``min_p``. The likeliest is kept in any case.

    Args:
        scaled: float32 [rows, vocabulary]: logits, the largest of each row 0.
        weights: ``scaled.exp()``.
        top_k: [rows]; 0 is off.
        top_p: [rows]; 1 is off.
        min_p: [rows]; 0 is off, and so is None.
    """
    smallest = torch.zeros_like(top_p) if min_p is None else min_p
    is_truncated = ((top_k > 0) | (top_p < 1) | (smallest > 0)).unsqueeze(-1)
    return torch.where(is_truncated, _kept_by_sorting(scaled, top_k, top_p, smallest), weights)


def _kept_by_sorting(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """The weights of tokens that are kept, and zeros, in the order of the vocabulary."""
    # Stable, so that equally likely tokens come in the order of the vocabulary on every device.
    ordered, tokens = scaled.sort(dim=-1, descending=True, stable=True)
    vocab_size = scaled.shape[-1]
    last = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size) - 1
    weights = ordered.exp().masked_fill(ordered < ordered.gather(-1, last.unsqueeze(-1)), 0.0)
    sums = weights.cumsum(dim=-1)
    before = (sums - weights) / sums[:, -1:]
    is_kept = (before < top_p.unsqueeze(-1)) | (top_p >= 1).unsqueeze(-1)
    is_kept &= weights >= min_p.unsqueeze(-1)  # the largest weight is 1
    is_kept[:, 0] = True  # a top_p above 0 may be 0 in float32
    return torch.zeros_like(weights).scatter_(-1, tokens, weights.masked_fill_(~is_kept, 0.0))


def launch_truncate(
    logits: torch.Tensor,
    weights: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor | None,
) -> None:
    """The same in place, without sorting: see Note [A threshold by its bits]. Logits need not be scaled."""
    from piecegraph.llm.kernels import truncate_kernels

    rows, count = weights.shape
    num_parts = -(-count // truncate_kernels.BLOCK.value)
    sums = weights.new_empty(2, rows, num_parts, truncate_kernels.VALUES.value)
    found = weights.new_empty(truncate_kernels.PASSES.value, rows, dtype=torch.int64)
    targets = weights.new_empty(rows)
    candidates = weights.new_empty(rows, num_parts, truncate_kernels.CANDIDATES.value, dtype=torch.uint32)
    above = weights.new_empty(rows, num_parts, 2)
    parts = 1 << (num_parts - 1).bit_length()
    grid, strides = (rows, num_parts), (logits.stride(0), weights.stride(0))

    def search(table: torch.Tensor, limits: torch.Tensor, num_passes: int, *, is_weight: bool) -> None:
        begin, end, how = (table, limits, sums, found, targets), (count, table.stride(0)), (is_weight, parts)
        first, refined = truncate_kernels.FIRST_OF_WEIGHTS.value, truncate_kernels.FIRST_REFINED.value
        for number in range(first if is_weight else 0, refined):
            truncate_kernels.search_kernel[grid](*begin, *end, number, *how)
        truncate_kernels.gather_kernel[grid](*begin, candidates, above, *end, *how)
        for number in range(refined, num_passes):
            truncate_kernels.refine_kernel[grid](*begin, candidates, above, *end, number, *how)

    num_passes = _PASSES_OF.get(logits.dtype, truncate_kernels.PASSES.value)
    search(logits, top_k, num_passes, is_weight=False)
    truncate_kernels.keep_most_kernel[grid](logits, weights, top_k, sums, found, count, *strides, num_passes, parts)
    search(weights, top_p, truncate_kernels.PASSES.value, is_weight=True)
    truncate_kernels.last_kernel[grid](
        weights, top_p, sums, found, targets, candidates, above, count, strides[1], parts
    )
    truncate_kernels.keep_share_kernel[grid](
        weights, top_p, min_p, sums, found, targets, count, strides[1], min_p is not None, parts
    )
