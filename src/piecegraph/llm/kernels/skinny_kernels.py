# mypy: ignore-errors
# (what Triton compiles is not Python: the types of arguments are those of the device)
"""Triton kernels for a matmul of few rows: the time is that of reading the weight once, so they care for that alone."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _weights(weight, columns, is_column, start, K: tl.constexpr, BLOCK_K: tl.constexpr):
    ks = start + tl.arange(0, BLOCK_K)
    mask = is_column[:, None] & (ks < K)[None, :]
    return tl.load(weight + columns[:, None].to(tl.int64) * K + ks[None, :], mask, 0.0, eviction_policy="evict_first")


@triton.jit
def _add_products(
    first, second, third, fourth, part, x, x_stride, start, M: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr
):
    ks = start + tl.arange(0, BLOCK_K)
    is_inside = ks < K
    part = part.to(tl.float32)
    first += part * tl.load(x + ks, is_inside, 0.0).to(tl.float32)[None, :]
    if M > 1:
        second += part * tl.load(x + x_stride + ks, is_inside, 0.0).to(tl.float32)[None, :]
    if M > 2:
        third += part * tl.load(x + 2 * x_stride + ks, is_inside, 0.0).to(tl.float32)[None, :]
        fourth += part * tl.load(x + (M - 1) * x_stride + ks, is_inside, 0.0).to(tl.float32)[None, :]
    return first, second, third, fourth


@triton.jit
def few_rows_kernel(
    x,
    weight,
    bias,
    out,
    n,
    x_stride,
    out_stride,
    M: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Up to four rows: every product is its own, and sums are made once, at the end.

    The first weights are read before the rows are there: see Note [Early launches].
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < n
    part = _weights(weight, columns, is_column, 0, K, BLOCK_K)
    next_part = part
    if K > BLOCK_K:
        next_part = _weights(weight, columns, is_column, BLOCK_K, K, BLOCK_K)
    third_part = part
    if K > 2 * BLOCK_K:
        third_part = _weights(weight, columns, is_column, 2 * BLOCK_K, K, BLOCK_K)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    second = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    third = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    fourth = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        if start == BLOCK_K:
            part = next_part
        if start == 2 * BLOCK_K:
            part = third_part
        if start > 2 * BLOCK_K:
            part = _weights(weight, columns, is_column, start, K, BLOCK_K)
        first, second, third, fourth = _add_products(
            first, second, third, fourth, part, x, x_stride, start, M, K, BLOCK_K
        )
    added = tl.load(bias + columns, is_column, 0.0).to(tl.float32) if HAS_BIAS else tl.zeros([BLOCK_N], tl.float32)
    dtype = out.dtype.element_ty
    tl.store(out + columns, (tl.sum(first, 1) + added).to(dtype), is_column)
    if M > 1:
        tl.store(out + out_stride + columns, (tl.sum(second, 1) + added).to(dtype), is_column)
    if M > 2:
        tl.store(out + 2 * out_stride + columns, (tl.sum(third, 1) + added).to(dtype), is_column)
    if M > 3:
        tl.store(out + 3 * out_stride + columns, (tl.sum(fourth, 1) + added).to(dtype), is_column)


@triton.jit
def some_rows_kernel(
    x,
    weight,
    bias,
    out,
    m,
    n,
    x_stride,
    out_stride,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Tiles of rows, on tensor cores. Grid: (tiles of columns, tiles of rows)."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    depth = tl.arange(0, BLOCK_K)
    is_row, is_column = rows < m, columns < n
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    x_at = x + rows[None, :] * x_stride + depth[:, None]
    weight_at = weight + columns[:, None].to(tl.int64) * K + depth[None, :]
    for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        is_inside = start + depth < K
        w = tl.load(weight_at + start, is_column[:, None] & is_inside[None, :], 0.0, eviction_policy="evict_first")
        v = tl.load(x_at + start, is_row[None, :] & is_inside[:, None], 0.0)
        total = tl.dot(w, v, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + columns, is_column, 0.0).to(tl.float32)[:, None]
    at = out + rows[None, :] * out_stride + columns[:, None]
    tl.store(at, total.to(out.dtype.element_ty), is_row[None, :] & is_column[:, None])
