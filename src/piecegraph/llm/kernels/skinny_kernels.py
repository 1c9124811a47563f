# mypy: ignore-errors
# (what Triton compiles is not Python: the types of arguments are those of the device)
"""Triton kernels for steps of few rows: the time is that of reading each weight once, so they care for that alone.

What stands around a linear is small beside its weight: a norm before it, an activation, a residual behind it. Each is
a kernel less if the linear does it along the way. With EARLY they begin while the kernel before them ends, and read
weights at once: see Note [Early launches].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def await_writes(EARLY: tl.constexpr, CHAINED: tl.constexpr):
    """From here on, what kernels before have written may be read."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
    if EARLY:
        tl.extra.cuda.gdc_wait()
        if not CHAINED:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _weights(weight, columns, is_column, start, K: tl.constexpr, BLOCK_K: tl.constexpr):
    ks = start + tl.arange(0, BLOCK_K)
    mask = is_column[:, None] & (ks < K)[None, :]
    return tl.load(weight + columns[:, None].to(tl.int64) * K + ks[None, :], mask, 0.0, eviction_policy="evict_first")


@triton.jit
def _silu_times(gate, up):
    return gate / (1 + tl.exp(-gate)) * up


@triton.jit
def one_row_kernel(
    x,
    weight,
    bias,
    gain,
    residual,
    out,
    n,
    eps,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    EARLY: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One row: every product is its own, and sums are made once, at the end. Grid: tiles of columns.

    The norm is of the whole row, so it is a factor of the sums. IS_GATED: the weight holds those of the gate and behind
    them the others, and a tile has both of a column side by side. AHEAD: how many blocks of a weight are read before
    the row is there, 1 or 2.
    """
    ROWS: tl.constexpr = 2 * BLOCK_N if IS_GATED else BLOCK_N
    places = tl.arange(0, ROWS)
    columns = tl.program_id(0) * BLOCK_N + (places // 2 if IS_GATED else places)
    is_column = columns < n
    weight_rows = columns + (places % 2) * n if IS_GATED else columns
    part = _weights(weight, weight_rows, is_column, 0, K, BLOCK_K)
    next_part = part
    if AHEAD > 1 and K > BLOCK_K:
        next_part = _weights(weight, weight_rows, is_column, BLOCK_K, K, BLOCK_K)
    await_writes(EARLY, CHAINED)
    total = tl.zeros([ROWS, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        if start == BLOCK_K and AHEAD > 1:
            part = next_part
        elif start > 0:
            part = _weights(weight, weight_rows, is_column, start, K, BLOCK_K)
        ks = start + tl.arange(0, BLOCK_K)
        row = tl.load(x + ks, ks < K, 0.0).to(tl.float32)
        if HAS_NORM:
            squares += row * row
            row *= tl.load(gain + ks, ks < K, 0.0).to(tl.float32)
        total += part.to(tl.float32) * row[None, :]
    result = tl.sum(total, 1)
    if HAS_NORM:
        result *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    if HAS_BIAS:
        result += tl.load(bias + weight_rows, is_column, 0.0).to(tl.float32)
    if IS_GATED:
        gate, up = tl.split(tl.reshape(result, [BLOCK_N, 2]))
        result = _silu_times(gate, up)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if HAS_RESIDUAL:
        result += tl.load(residual + columns, columns < n, 0.0).to(tl.float32)
    tl.store(out + columns, result.to(out.dtype.element_ty), columns < n)


@triton.jit
def _narrow_weights(weight, starts, ks):
    return tl.load(weight + starts[None, None, :] + ks[:, :, None], eviction_policy="evict_first")


@triton.jit
def _add_products(total, squares, weights, x, gain, rows, m, x_stride, ks, HAS_NORM: tl.constexpr):
    """One step of depth: the gain of a norm is part of the rows, its root mean square is left to the end."""
    at = x + rows[None, :, None] * x_stride + ks[:, None, :]
    values = tl.load(at, (rows < m)[None, :, None], 0.0)
    if HAS_NORM:
        wide = values.to(tl.float32)
        squares += tl.sum(wide * wide, 2)
        values = (wide * tl.load(gain + ks).to(tl.float32)[:, None, :]).to(values.dtype)
    return tl.dot(values, weights, total, input_precision="ieee"), squares


@triton.jit
def narrow_kernel(
    x,
    weight,
    bias,
    gain,
    residual,
    out,
    m,
    n,
    eps,
    x_stride,
    residual_stride,
    out_stride,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    PREFETCHES: tl.constexpr,
    EARLY: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Some rows and few columns: tiles are narrow, or there were too few of them, and each warp adds up a part of K.

    Grid: (tiles of columns, tiles of rows). K is a multiple of PARTS * BLOCK_K, and of 1024 with PREFETCHES. If it is
    PARTS * BLOCK_K, all weights of a tile are read before the rows are there. IS_GATED: as for one row.
    """
    WIDTH: tl.constexpr = 2 * BLOCK_N if IS_GATED else BLOCK_N
    IS_ONE_STEP: tl.constexpr = K == PARTS * BLOCK_K
    places = tl.arange(0, WIDTH)
    columns = tl.program_id(0) * BLOCK_N + (places // 2 if IS_GATED else places)
    weight_rows = columns + (places % 2) * n if IS_GATED else columns
    starts = tl.where(columns < n, weight_rows, 0).to(tl.int64) * K
    rows = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    ks = (tl.arange(0, PARTS) * (K // PARTS))[:, None] + tl.arange(0, BLOCK_K)[None, :]
    if IS_ONE_STEP:
        weights = _narrow_weights(weight, starts, ks)
    elif EARLY and PREFETCHES:
        lines = tl.arange(0, 16) * 64
        for start in range(0, K, 1024):
            at = weight + starts[:, None] + (start + lines)[None, :]
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
            )
    await_writes(EARLY, CHAINED)
    total = tl.zeros([PARTS, BLOCK_M, WIDTH], tl.float32)
    squares = tl.zeros([PARTS, BLOCK_M], tl.float32)
    if IS_ONE_STEP:
        total, squares = _add_products(total, squares, weights, x, gain, rows, m, x_stride, ks, HAS_NORM)
    else:
        for start in tl.range(0, K // PARTS, BLOCK_K, num_stages=NUM_STAGES):
            weights = _narrow_weights(weight, starts, start + ks)
            total, squares = _add_products(total, squares, weights, x, gain, rows, m, x_stride, start + ks, HAS_NORM)
    result = tl.sum(total, 0)
    if HAS_NORM:
        result *= tl.rsqrt(tl.sum(squares, 0) / K + eps)[:, None]
    if HAS_BIAS:
        result += tl.load(bias + weight_rows, columns < n, 0.0).to(tl.float32)[None, :]
    if IS_GATED:
        gate, up = tl.split(tl.reshape(result, [BLOCK_M, BLOCK_N, 2]))
        result = _silu_times(gate, up)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_inside = (rows < m)[:, None] & (columns < n)[None, :]
    if HAS_RESIDUAL:
        at = residual + rows[:, None] * residual_stride + columns[None, :]
        result += tl.load(at, is_inside, 0.0).to(tl.float32)
    tl.store(out + rows[:, None] * out_stride + columns[None, :], result.to(out.dtype.element_ty), is_inside)


@triton.jit
def some_rows_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    m,
    n,
    x_stride,
    residual_stride,
    out_stride,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Tiles of rows, on tensor cores. Grid: (tiles of columns, tiles of rows). IS_GATED: as for one row."""
    WIDTH: tl.constexpr = 2 * BLOCK_N if IS_GATED else BLOCK_N
    places = tl.arange(0, WIDTH)
    columns = tl.program_id(0) * BLOCK_N + (places // 2 if IS_GATED else places)
    weight_rows = columns + (places % 2) * n if IS_GATED else columns
    rows = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    depth = tl.arange(0, BLOCK_K)
    is_row, is_column = rows < m, columns < n
    total = tl.zeros([WIDTH, BLOCK_M], tl.float32)
    x_at = x + rows[None, :] * x_stride + depth[:, None]
    weight_at = weight + weight_rows[:, None].to(tl.int64) * K + depth[None, :]
    await_writes(EARLY, CHAINED)
    for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        is_inside = start + depth < K
        w = tl.load(weight_at + start, is_column[:, None] & is_inside[None, :], 0.0, eviction_policy="evict_first")
        v = tl.load(x_at + start, is_row[None, :] & is_inside[:, None], 0.0)
        total = tl.dot(w, v, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + weight_rows, is_column, 0.0).to(tl.float32)[:, None]
    if IS_GATED:
        gate, up = tl.split(tl.permute(tl.reshape(total, [BLOCK_N, 2, BLOCK_M]), [0, 2, 1]))
        total = _silu_times(gate, up)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_inside = is_row[None, :] & (columns < n)[:, None]
    if HAS_RESIDUAL:
        at = residual + rows[None, :] * residual_stride + columns[:, None]
        total += tl.load(at, is_inside, 0.0).to(tl.float32)
    tl.store(out + rows[None, :] * out_stride + columns[:, None], total.to(out.dtype.element_ty), is_inside)


@triton.jit
def norm_kernel(
    x, gain, out, x_stride, out_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The root mean square of each row becomes 1. Grid: rows."""
    await_writes(EARLY, CHAINED)
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_inside = columns < WIDTH
    values = tl.load(x + row * x_stride + columns, is_inside, 0.0).to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    values *= tl.load(gain + columns, is_inside, 0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, values.to(out.dtype.element_ty), is_inside)


@triton.jit
def gate_kernel(both, out, n, both_stride, out_stride, BLOCK: tl.constexpr, EARLY: tl.constexpr, CHAINED: tl.constexpr):
    """The SiLU of the first half of a row, times the second. Grid: (rows, blocks of columns)."""
    await_writes(EARLY, CHAINED)
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(both + row * both_stride + columns, columns < n, 0.0).to(tl.float32)
    up = tl.load(both + row * both_stride + n + columns, columns < n, 0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, _silu_times(gate, up).to(out.dtype.element_ty), columns < n)


@triton.jit
def load_turned(base, rows, inside, gain, cos, sin, eps, WIDTH: tl.constexpr, HAS_NORM: tl.constexpr):
    """[heads, WIDTH] of one token, normed if they have a gain, and turned: a column goes with the one half a head away.

    Zeros where there is nothing to read.
    """
    columns = tl.arange(0, WIDTH)
    others = (columns + WIDTH // 2) % WIDTH
    values = tl.load(base + rows[:, None] + columns[None, :], inside[:, None], 0.0).to(tl.float32)
    partners = tl.load(base + rows[:, None] + others[None, :], inside[:, None], 0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(values * values, 1) / WIDTH + eps)[:, None]
        values *= scale * tl.load(gain + columns).to(tl.float32)[None, :]
        partners *= scale * tl.load(gain + others).to(tl.float32)[None, :]
    partners = tl.where((columns < WIDTH // 2)[None, :], -partners, partners)
    cos_row, sin_row = tl.load(cos + columns).to(tl.float32), tl.load(sin + columns).to(tl.float32)
    return (values * cos_row[None, :] + partners * sin_row[None, :]).to(base.dtype.element_ty)


@triton.jit
def heads_kernel(
    q,
    k,
    v,
    q_gain,
    k_gain,
    cos,
    sin,
    q_out,
    k_out,
    v_out,
    q_stride,
    k_stride,
    v_stride,
    turn_stride,
    eps,
    WIDTH: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EARLY: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """What attention is given, one head behind the other. Grid: (tokens, heads of queries, keys and values)."""
    await_writes(EARLY, CHAINED)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns, one = tl.arange(0, WIDTH), tl.arange(0, 1)
    cos += token * turn_stride
    sin += token * turn_stride
    if head < Q_HEADS:
        row = q + token * q_stride + head * WIDTH
        result = load_turned(row, one, one == 0, q_gain, cos, sin, eps, WIDTH, HAS_NORM)
        tl.store(q_out + (token * Q_HEADS + head) * WIDTH + columns[None, :], result)
    elif head < Q_HEADS + K_HEADS:
        row = k + token * k_stride + (head - Q_HEADS) * WIDTH
        result = load_turned(row, one, one == 0, k_gain, cos, sin, eps, WIDTH, HAS_NORM)
        tl.store(k_out + (token * K_HEADS + head - Q_HEADS) * WIDTH + columns[None, :], result)
    else:
        first = (head - Q_HEADS - K_HEADS) * WIDTH
        tl.store(v_out + token * K_HEADS * WIDTH + first + columns, tl.load(v + token * v_stride + first + columns))
