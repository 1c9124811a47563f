# mypy: ignore-errors
# (what Triton compiles is not Python: the types of arguments are those of the device)
"""The Triton kernels of ``race.py``: random numbers are made where they are used, and rows are searched in parts."""

from __future__ import annotations

import triton
import triton.language as tl

from piecegraph.llm.kernels.skinny_kernels import await_writes


@triton.jit
def _load_weights(logits, best, temperature, row, columns, count, row_stride):
    """What tokens weigh in a draw; relative to the likeliest, as a small temperature must not overflow."""
    here = logits + row * row_stride
    largest = tl.load(here + tl.maximum(tl.load(best + row), 0)).to(tl.float32)
    heat = tl.load(temperature + row)
    divisor = tl.full(columns.shape, 1.0, tl.float32) * tl.where(heat == 0.0, 1.0, heat)
    values = tl.load(here + columns, columns < count, float("-inf")).to(tl.float32)
    # Rounded as by everybody else: quicker ones lose the smallest and the largest temperatures.
    return tl.exp(tl.div_rn(values - largest, divisor))


@triton.jit
def weights_kernel(logits, best, temperature, weights, count, row_stride, BLOCK: tl.constexpr):
    """Write down what tokens weigh. Grid: (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    found = _load_weights(logits, best, temperature, row, columns, count, row_stride)
    tl.store(weights + row * count + columns, found, columns < count)


@triton.jit
def draw_parts_kernel(
    table,
    best,
    temperature,
    keys,
    largest,
    winners,
    count,
    row_stride,
    HAS_WEIGHTS: tl.constexpr,
    STEP: tl.constexpr,
    MIX_1: tl.constexpr,
    MIX_2: tl.constexpr,
    LARGEST: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The highest score of each part of a row and its place. Grid: (rows, parts).

    HAS_WEIGHTS: the table holds weights, and not logits.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    if HAS_WEIGHTS:
        weight = tl.load(table + row * row_stride + columns, columns < count, 0.0)
    else:
        weight = _load_weights(table, best, temperature, row, columns, count, row_stride)
    bits = tl.load(keys + row) + (columns + 1).to(tl.int64) * STEP
    bits = (bits ^ (bits >> 30)) * MIX_1
    bits = (bits ^ (bits >> 27)) * MIX_2
    uniform = (bits & LARGEST).to(tl.float32) * SCALE
    # -log(1 - uniform), where 1 - uniform would round what is left of a small number away.
    small = uniform * (1.0 + uniform * (0.5 + uniform * (1.0 / 3.0)))
    number = tl.where(uniform < 0.001, small, -tl.log(1.0 - uniform))
    top, place = tl.max(tl.where(columns < count, weight / number, -1.0), 0, return_indices=True)
    tl.store(largest + row * tl.num_programs(1) + part, top)
    tl.store(winners + row * tl.num_programs(1) + part, part * BLOCK + place)


@triton.jit
def winner_kernel(largest, winners, best, temperature, out, num_parts, BLOCK: tl.constexpr):
    """The place of the highest score of all parts; the likeliest token where that is wanted, or none. Grid: rows."""
    row, parts = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    tops = tl.load(largest + row * num_parts + parts, parts < num_parts, -2.0)
    _, part = tl.max(tops, 0, return_indices=True)
    place = tl.load(winners + row * num_parts + part).to(tl.int64)
    likeliest = tl.load(best + row)
    is_settled = (tl.load(temperature + row) == 0.0) | (likeliest < 0)
    tl.store(out + row, tl.where(is_settled, likeliest, place))


@triton.jit
def largest_of_parts_kernel(logits, largest, places, count, row_stride, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """The largest of each part of a row and its place. What is no number counts as infinite. Grid: (rows, parts)."""
    await_writes(EARLY, False)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * row_stride + columns, columns < count, float("-inf")).to(tl.float32)
    top, place = tl.max(tl.where(values == values, values, float("inf")), 0, return_indices=True)
    tl.store(largest + row * tl.num_programs(1) + part, top)
    tl.store(places + row * tl.num_programs(1) + part, part * BLOCK + place)


@triton.jit
def first_largest_kernel(largest, places, out, num_parts, BAD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """The place of the largest of all parts, the first of equals. Grid: rows.

    BAD if it is infinite, one less if that is below zero: then all are.
    """
    await_writes(EARLY, False)
    row, parts = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    tops = tl.load(largest + row * num_parts + parts, parts < num_parts, float("-inf"))
    top, part = tl.max(tops, 0, return_indices=True)
    place = tl.load(places + row * num_parts + part).to(tl.int64)
    tl.store(out + row, tl.where(tl.abs(top) < float("inf"), place, tl.where(top < 0, BAD - 1, BAD)))


@triton.jit
def keep_allowed_kernel(logits, masks, out, count, num_bits, row_stride, mask_stride, BLOCK: tl.constexpr):
    """Copy logits whose bit is set, and write minus infinity for the others. Grid: (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < count
    eight = tl.load(masks + row * mask_stride + columns // 8, is_inside & (columns < num_bits), 0).to(tl.int32)
    values = tl.load(logits + row * row_stride + columns, is_inside, 0.0).to(tl.float32)
    is_allowed = ((eight >> (columns % 8)) & 1) != 0
    tl.store(out + row * count + columns, tl.where(is_allowed, values, float("-inf")), is_inside)
