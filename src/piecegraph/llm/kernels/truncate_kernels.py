# mypy: ignore-errors
# (what Triton compiles is not Python: the types of arguments are those of the device)
"""The Triton kernels of ``truncate.py``: see Note [A threshold by its bits] there. Grids are (rows, parts of a row)."""

from __future__ import annotations

import triton
import triton.language as tl

_BITS: tl.constexpr = tl.constexpr(4)  # that one pass finds
VALUES: tl.constexpr = tl.constexpr(16)  # that they can have
PASSES: tl.constexpr = tl.constexpr(8)  # for 32 bits


@triton.jit
def _load(row, number, count, IS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """(places, numbers, keys, amounts) of a block: keys are larger where numbers are, amounts are what is added up."""
    places = number * BLOCK + tl.arange(0, BLOCK)
    is_inside = places < count
    numbers = tl.load(row + places, is_inside, 0.0).to(tl.float32)
    bits = tl.where(numbers == 0.0, 0.0, numbers).to(tl.uint32, bitcast=True)  # there are two zeros
    if IS_WEIGHT:
        return places, numbers, bits, numbers
    keys = tl.where((bits >> 31) == 0, bits | 0x80000000, bits ^ 0xFFFFFFFF)
    return places, numbers, keys, is_inside.to(tl.float32)


@triton.jit
def _is_wanted(limit, count, IS_WEIGHT: tl.constexpr):
    return (limit < 1.0) if IS_WEIGHT else (limit > 0) & (limit < count)


@triton.jit
def _resolve(sums, found, targets, row, number, limit, num_parts, IS_WEIGHT: tl.constexpr, PARTS: tl.constexpr):
    """(threshold as far as it is known behind some passes, what tokens have to add up to)."""
    num_rows, before = tl.num_programs(0), number - 1
    parts, values = tl.arange(0, PARTS), tl.arange(0, VALUES)
    at = ((before % 2) * num_rows + row) * num_parts * VALUES
    of_parts = tl.load(sums + at + parts[:, None] * VALUES + values[None, :], (parts < num_parts)[:, None], 0.0)
    total = tl.sum(of_parts, 0)
    if IS_WEIGHT:
        target = tl.load(targets + row, before > 0, 0.0)
        if before == 0:  # one token is kept, however small its share
            target = tl.maximum(limit * tl.sum(tl.where(values == 0, total, 0.0), 0), 1e-30)
    else:
        target = limit.to(tl.float32)
    steps = tl.sum(((total >= target) & (values > 0)).to(tl.int64), 0)
    known = tl.load(found + before * num_rows + row, before > 0, 0)
    return known + (steps << (_BITS * (PASSES - number))), target


@triton.jit(do_not_specialize=["number"])
def search_kernel(
    table, limits, sums, found, targets, count, row_stride, number,
    IS_WEIGHT: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One pass: what the tokens of a part add up to that are not below each value of the next bits."""
    row, part, num_parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    limit = tl.load(limits + row)
    if _is_wanted(limit, count, IS_WEIGHT):
        known = tl.zeros([], dtype=tl.int64)
        if number > 0:
            known, target = _resolve(sums, found, targets, row, number, limit, num_parts, IS_WEIGHT, PARTS)
            if part == 0:
                tl.store(found + number * tl.num_programs(0) + row, known)
                tl.store(targets + row, target)
        values = tl.arange(0, VALUES)
        keys_from = (known + (values.to(tl.int64) << (_BITS * (PASSES - 1 - number)))).to(tl.uint32)
        mine = tl.zeros([VALUES], dtype=tl.float32)
        for tile in range(BLOCK // TILE):
            place = part * (BLOCK // TILE) + tile
            _, _, keys, amounts = _load(table + row * row_stride, place, count, IS_WEIGHT, TILE)
            mine += tl.sum(tl.where(keys[None, :] >= keys_from[:, None], amounts[None, :], 0.0), 1)
        at = ((number % 2) * tl.num_programs(0) + row) * num_parts + part
        tl.store(sums + at * VALUES + values, mine)


@triton.jit
def keep_most_kernel(
    logits, weights, limits, sums, found, count, logits_stride, row_stride, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Put the weights of tokens that are below the threshold to zero."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    limit = tl.load(limits + row)
    if _is_wanted(limit, count, False):
        last, _ = _resolve(sums, found, None, row, PASSES, limit, tl.num_programs(1), False, PARTS)
        places, _, keys, _ = _load(logits + row * logits_stride, part, count, False, BLOCK)
        tl.store(weights + row * row_stride + places, 0.0, (places < count) & (keys < last.to(tl.uint32)))


@triton.jit
def last_kernel(weights, limits, sums, found, targets, count, row_stride, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """What the tokens of a part above the threshold add up to, and how many are at it."""
    row, part, num_parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    limit = tl.load(limits + row)
    if _is_wanted(limit, count, True):
        last, _ = _resolve(sums, found, targets, row, PASSES, limit, num_parts, True, PARTS)
        if part == 0:
            tl.store(found + row, last)
        _, _, keys, amounts = _load(weights + row * row_stride, part, count, True, BLOCK)
        at = sums + (row * num_parts + part) * VALUES
        tl.store(at, tl.sum(tl.where(keys > last.to(tl.uint32), amounts, 0.0), 0))
        tl.store(at + 1, tl.sum((keys == last.to(tl.uint32)).to(tl.float32), 0))


@triton.jit
def keep_share_kernel(
    weights, limits, min_p, sums, found, targets, count, row_stride,
    HAS_MIN: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put the weights of tokens that are below the threshold to zero; of those at it, the first are kept."""
    row, part, num_parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    limit = tl.load(limits + row)
    least = tl.load(min_p + row) if HAS_MIN else 0.0
    if (limit < 1.0) | (least > 0.0):
        places, numbers, keys, _ = _load(weights + row * row_stride, part, count, True, BLOCK)
        is_kept = numbers >= least
        if limit < 1.0:
            last, target = tl.load(found + row).to(tl.uint32), tl.load(targets + row)
            parts = tl.arange(0, PARTS)
            at = sums + (row * num_parts + parts) * VALUES
            above = tl.sum(tl.load(at, parts < num_parts, 0.0), 0)
            num_before = tl.sum(tl.load(at + 1, parts < part, 0.0), 0)
            is_last = (keys == last) & (places < count)
            order = num_before + tl.cumsum(is_last.to(tl.float32), 0) - 1.0
            is_kept &= (keys > last) | (is_last & (above + order * numbers < target))
        tl.store(weights + row * row_stride + places, 0.0, (places < count) & (is_kept == 0))
