# mypy: ignore-errors
# (what Triton compiles is not Python: the types of arguments are those of the device)
"""The Triton kernels of ``truncate.py``: see Note [A threshold by its bits] there. Grids are (rows, parts of a row)."""

from __future__ import annotations

import triton
import triton.language as tl

_BITS: tl.constexpr = tl.constexpr(4)  # that one pass finds
VALUES: tl.constexpr = tl.constexpr(16)  # that they can have
PASSES: tl.constexpr = tl.constexpr(8)  # for 32 bits
FIRST_OF_WEIGHTS: tl.constexpr = tl.constexpr(1)  # the first pass that weights need
FIRST_REFINED: tl.constexpr = tl.constexpr(3)  # the first pass over candidates alone
CANDIDATES: tl.constexpr = tl.constexpr(512)  # that are written down of a part at most
BLOCK: tl.constexpr = tl.constexpr(4096)  # tokens of a part
_TILE: tl.constexpr = tl.constexpr(512)  # that are looked at at once
_FEW: tl.constexpr = tl.constexpr(128)  # candidates that are


@triton.jit
def _load(row, places, count, IS_WEIGHT: tl.constexpr):
    """(keys, amounts) of tokens: keys are larger where numbers are, amounts are what is added up.

    Weights are 1 at most, and those below 2^-29 next to nothing together. Their bits are pushed together, six that say
    least are lost, so that the first four bits of a key are never set and need no pass.
    """
    is_inside = places < count
    numbers = tl.load(row + places, is_inside, 0.0).to(tl.float32)
    bits = tl.where(numbers == 0.0, 0.0, numbers).to(tl.uint32, bitcast=True)  # there are two zeros
    if IS_WEIGHT:
        return tl.where(bits < 0x31000000, bits >> 6, bits & 0x0FFFFFFF), numbers
    return tl.where((bits >> 31) == 0, bits | 0x80000000, bits ^ 0xFFFFFFFF), is_inside.to(tl.float32)


@triton.jit
def _load_candidates(candidates, places, num, IS_WEIGHT: tl.constexpr):
    """The same, of those that were written down."""
    keys = tl.load(candidates + places, places < num, 0)
    if IS_WEIGHT:
        return keys, tl.where(keys < 0x01000000, keys << 6, keys | 0x30000000).to(tl.float32, bitcast=True)
    return keys, (places < num).to(tl.float32)


@triton.jit
def _is_wanted(limit, count, IS_WEIGHT: tl.constexpr):
    return (limit < 1.0) if IS_WEIGHT else (limit > 0) & (limit < count)


@triton.jit
def _resolve(sums, found, targets, row, number, limit, num_parts, IS_WEIGHT: tl.constexpr, PARTS: tl.constexpr):
    """(threshold as far as it is known behind some passes, what tokens have to add up to)."""
    first: tl.constexpr = FIRST_OF_WEIGHTS if IS_WEIGHT else 0
    num_rows, before = tl.num_programs(0), number - 1
    parts, values = tl.arange(0, PARTS), tl.arange(0, VALUES)
    at = ((before % 2) * num_rows + row) * num_parts * VALUES
    of_parts = tl.load(sums + at + parts[:, None] * VALUES + values[None, :], (parts < num_parts)[:, None], 0.0)
    total = tl.sum(of_parts, 0)
    if IS_WEIGHT:
        target = tl.load(targets + row, before > first, 0.0)
        if before == first:  # one token is kept, however small its share
            target = tl.maximum(limit * tl.sum(tl.where(values == 0, total, 0.0), 0), 1e-30)
    else:
        target = limit.to(tl.float32)
    steps = tl.sum(((total >= target) & (values > 0)).to(tl.int64), 0)
    known = tl.load(found + before * num_rows + row, before > first, 0)
    return known + (steps << (_BITS * (PASSES - number))), target


@triton.jit
def _next_keys(sums, found, targets, row, number, limit, IS_WEIGHT: tl.constexpr, PARTS: tl.constexpr):
    """The smallest key for each value of the next bits. What is known so far is written down."""
    known = tl.zeros([], dtype=tl.int64)
    if number > (FIRST_OF_WEIGHTS if IS_WEIGHT else 0):
        known, target = _resolve(sums, found, targets, row, number, limit, tl.num_programs(1), IS_WEIGHT, PARTS)
        if tl.program_id(1) == 0:
            tl.store(found + number * tl.num_programs(0) + row, known)
            tl.store(targets + row, target)
    return (known + (tl.arange(0, VALUES).to(tl.int64) << (_BITS * (PASSES - 1 - number)))).to(tl.uint32)


@triton.jit
def _not_below(keys, amounts, keys_from):
    """Each amount for each of the values whose keys are not larger."""
    return tl.where(keys[None, :] >= keys_from[:, None], amounts[None, :], 0.0)


@triton.jit
def _add_up_part(row_of_table, part, count, keys_from, IS_WEIGHT: tl.constexpr, TILE: tl.constexpr):
    """What the tokens of a part add up to that are not below each value."""
    mine = tl.zeros([VALUES, TILE], dtype=tl.float32)
    for tile in range(BLOCK // TILE):
        keys, amounts = _load(row_of_table, part * BLOCK + tile * TILE + tl.arange(0, TILE), count, IS_WEIGHT)
        mine += _not_below(keys, amounts, keys_from)
    return tl.sum(mine, 1)


@triton.jit
def _place():
    """(row, part, where what belongs to the part stands)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    return row, part, row * tl.num_programs(1) + part


@triton.jit
def _store_sums(sums, number, place, mine):
    at = (number % 2) * tl.num_programs(0) * tl.num_programs(1) + place
    tl.store(sums + at * VALUES + tl.arange(0, VALUES), mine)


@triton.jit(do_not_specialize=["number"])
def search_kernel(
    table, limits, sums, found, targets, count, row_stride, number, IS_WEIGHT: tl.constexpr, PARTS: tl.constexpr
):
    """One pass: what the tokens of a part add up to that are not below each value of the next bits."""
    row, part, place = _place()
    limit = tl.load(limits + row)
    if _is_wanted(limit, count, IS_WEIGHT):
        keys_from = _next_keys(sums, found, targets, row, number, limit, IS_WEIGHT, PARTS)
        mine = _add_up_part(table + row * row_stride, part, count, keys_from, IS_WEIGHT, _TILE)
        _store_sums(sums, number, place, mine)


@triton.jit
def gather_kernel(
    table, limits, sums, found, targets, candidates, above, count, row_stride,
    IS_WEIGHT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write down which tokens of a part have the bits that are known; behind what those add up to that have larger
    ones, how many there are.
    """
    row, part, place = _place()
    limit = tl.load(limits + row)
    if _is_wanted(limit, count, IS_WEIGHT):
        shift: tl.constexpr = 32 - _BITS * FIRST_REFINED
        known, _ = _resolve(sums, found, targets, row, FIRST_REFINED, limit, tl.num_programs(1), IS_WEIGHT, PARTS)
        known = known.to(tl.uint32) >> shift
        taken, total = tl.zeros([], dtype=tl.int32), tl.zeros([_TILE], dtype=tl.float32)
        for tile in range(BLOCK // _TILE):
            places = part * BLOCK + tile * _TILE + tl.arange(0, _TILE)
            keys, amounts = _load(table + row * row_stride, places, count, IS_WEIGHT)
            is_one = ((keys >> shift) == known) & (places < count)
            order = taken + tl.cumsum(is_one.to(tl.int32), 0) - 1
            tl.store(candidates + place * CANDIDATES + order, keys, is_one & (order < CANDIDATES))
            taken += tl.sum(is_one.to(tl.int32), 0)
            total += tl.where((keys >> shift) > known, amounts, 0.0)
        tl.store(above + place * 2, tl.sum(total, 0))
        tl.store(above + place * 2 + 1, taken.to(tl.float32))


@triton.jit(do_not_specialize=["number"])
def refine_kernel(
    table, limits, sums, found, targets, candidates, above, count, row_stride, number,
    IS_WEIGHT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One pass over the candidates; over all tokens of a part that has too many."""
    row, part, place = _place()
    limit = tl.load(limits + row)
    if _is_wanted(limit, count, IS_WEIGHT):
        keys_from = _next_keys(sums, found, targets, row, number, limit, IS_WEIGHT, PARTS)
        num = tl.load(above + place * 2 + 1).to(tl.int32)
        if num <= CANDIDATES:
            mine = tl.zeros([VALUES, _FEW], dtype=tl.float32)
            for start in range(0, num, _FEW):
                places = start + tl.arange(0, _FEW)
                keys, amounts = _load_candidates(candidates + place * CANDIDATES, places, num, IS_WEIGHT)
                mine += _not_below(keys, amounts, keys_from)
            _store_sums(sums, number, place, tl.load(above + place * 2) + tl.sum(mine, 1))
        else:
            all_of_it = _add_up_part(table + row * row_stride, part, count, keys_from, IS_WEIGHT, _FEW)
            _store_sums(sums, number, place, all_of_it)


@triton.jit
def keep_most_kernel(
    logits, weights, limits, sums, found, count, logits_stride, row_stride, num_passes, PARTS: tl.constexpr
):
    """Put the weights of tokens that are below the threshold to zero."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    limit = tl.load(limits + row)
    if _is_wanted(limit, count, False):
        last, _ = _resolve(sums, found, None, row, num_passes, limit, tl.num_programs(1), False, PARTS)
        for tile in range(BLOCK // _TILE):
            places = part * BLOCK + tile * _TILE + tl.arange(0, _TILE)
            keys = _load(logits + row * logits_stride, places, count, False)[0]
            tl.store(weights + row * row_stride + places, 0.0, (places < count) & (keys < last.to(tl.uint32)))


@triton.jit
def last_kernel(weights, limits, sums, found, targets, candidates, above, count, row_stride, PARTS: tl.constexpr):
    """What the tokens of a part above the threshold add up to, and how many are at it."""
    row, part, place = _place()
    limit = tl.load(limits + row)
    if _is_wanted(limit, count, True):
        last, _ = _resolve(sums, found, targets, row, PASSES, limit, tl.num_programs(1), True, PARTS)
        if part == 0:
            tl.store(found + row, last)
        last, num = last.to(tl.uint32), tl.load(above + place * 2 + 1).to(tl.int32)
        total, num_last = tl.zeros([_FEW], dtype=tl.float32), tl.zeros([_FEW], dtype=tl.float32)
        if num <= CANDIDATES:
            for start in range(0, num, _FEW):
                places = start + tl.arange(0, _FEW)
                keys, amounts = _load_candidates(candidates + place * CANDIDATES, places, num, True)
                total += tl.where(keys > last, amounts, 0.0)
                num_last += ((keys == last) & (places < num)).to(tl.float32)
        else:
            for start in range(part * BLOCK, (part + 1) * BLOCK, _FEW):
                places = start + tl.arange(0, _FEW)
                keys, amounts = _load(weights + row * row_stride, places, count, True)
                total += tl.where(keys > last, amounts, 0.0)
                num_last += ((keys == last) & (places < count)).to(tl.float32)
        beyond = tl.load(above + place * 2, num <= CANDIDATES, 0.0)
        tl.store(sums + place * VALUES, beyond + tl.sum(total, 0))
        tl.store(sums + place * VALUES + 1, tl.sum(num_last, 0))


@triton.jit
def keep_share_kernel(
    weights, limits, min_p, sums, found, targets, count, row_stride, HAS_MIN: tl.constexpr, PARTS: tl.constexpr
):
    """Put the weights of tokens that are below the threshold to zero; of those at it, the first are kept."""
    row, part, place = _place()
    limit = tl.load(limits + row)
    least = tl.load(min_p + row) if HAS_MIN else 0.0
    if (limit < 1.0) | (least > 0.0):
        # Without a limit nobody wrote what is read here, and it does not matter.
        last, target = tl.load(found + row), tl.load(targets + row)
        last = tl.where(limit < 1.0, last, 0).to(tl.uint32)
        parts = tl.arange(0, PARTS)
        at = sums + (place - part + parts) * VALUES
        above = tl.sum(tl.load(at, parts < tl.num_programs(1), 0.0), 0)
        before = tl.sum(tl.load(at + 1, parts < part, 0.0), 0)
        for tile in range(BLOCK // _TILE):
            places = part * BLOCK + tile * _TILE + tl.arange(0, _TILE)
            keys, numbers = _load(weights + row * row_stride, places, count, True)
            is_kept = keys > last
            is_last = ((keys == last) & (places < count)).to(tl.float32)
            num_last = tl.sum(is_last, 0)
            if num_last > 0:
                order = before + tl.cumsum(is_last, 0) - 1.0
                is_kept |= (is_last > 0) & (above + order * numbers < target)
                before += num_last
            is_gone = (is_kept == 0) | (numbers < least)
            tl.store(weights + row * row_stride + places, 0.0, (places < count) & is_gone)
