# mypy: ignore-errors
# (what Triton compiles is not Python: the types of arguments are those of the device. Nor does it know structures:
# every pointer, stride and constant is an argument of its own, which makes functions longer than elsewhere.)
"""Triton kernels for layers that keep a state: see ``state_triton.py`` for what they are launched with.

All inputs are contiguous, a row for each token. A sequence with as many tokens in the batch as it has at all starts
from nothing, whatever its slot holds.

Note [The delta rule in chunks]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Token by token, a state S decays by a factor, is corrected by a row ``key (x) delta`` where ``delta = beta * (value - S
key)``, and answers a query. Within a chunk of tokens each delta depends on those before it through the products of
their keys: a triangular system ``(1 + A) delta = beta * (value - decayed S key)``, where S is the state before the
chunk. Its inverse, and what queries see of keys in the chunk, depend on keys, queries and gates alone, so one kernel
computes those of all chunks at once. A second kernel goes through the chunks of a sequence in order, by matrix products
alone, and keeps its columns of the state on the chip all the while.

Note [The inverse of a chunk]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``1 + A`` is inverted in blocks along its diagonal, row by row in the smallest; two neighbours X and Y become one block
by ``-Y A X`` below them. What is multiplied are inverses of blocks, which are small. A sum of powers of A would be
shorter, and wrong: where keys are equal and nothing decays, powers grow beyond all bounds before they vanish.
"""

from __future__ import annotations

import triton
import triton.language as tl

from piecegraph.llm.kernels.attention.triton_steps import find_sequence


@triton.jit
def _is_padding(query_starts, num_seqs, num_real, block, BLOCK: tl.constexpr):
    """Whether a block is that of a padded sequence (see ``find_sequence``): then nobody need search for it."""
    seq = block - num_real // BLOCK
    is_sequence = (seq >= 0) & (seq < num_seqs)
    return tl.load(query_starts + seq, is_sequence, -1) == num_real


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def convolve_kernel(
    hidden,
    weight,
    bias,
    out,
    states,
    query_starts,
    seq_lens,
    slots,
    num_tokens,
    num_seqs,
    channels,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A causal convolution over the inputs of each sequence, remembered ones included. Grid: (blocks of tokens, blocks
    of channels).
    """
    block = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channel < channels
    rows = tl.arange(0, BLOCK_T)

    num_real = tl.load(query_starts + num_seqs)
    if (block + 1) * BLOCK_T > num_real:  # padding begins in or before this block of rows
        token = block * BLOCK_T + rows
        padded = ((token >= num_real) & (token < num_tokens))[:, None] & is_channel[None, :]
        zeros = tl.zeros([BLOCK_T, BLOCK_C], dtype=out.dtype.element_ty)
        tl.store(out + token.to(tl.int64)[:, None] * channels + channel[None, :], zeros, mask=padded)
    if _is_padding(query_starts, num_seqs, num_real, block, BLOCK_T):
        return

    seq = find_sequence(query_starts, num_seqs, block, BLOCK_T)
    start = tl.load(query_starts + seq)
    count = tl.load(query_starts + seq + 1) - start
    first = (block - (start // BLOCK_T + seq)) * BLOCK_T
    if first >= count:
        return

    token = first + rows
    inputs = hidden + start.to(tl.int64) * channels + channel[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
    for tap in tl.static_range(WIDTH):
        source = token - (WIDTH - 1) + tap
        is_here = ((source >= 0) & (token < count))[:, None] & is_channel[None, :]
        x = tl.load(inputs + source.to(tl.int64)[:, None] * channels, is_here, 0.0)
        w = tl.load(weight + channel * WIDTH + tap, is_channel, 0.0)
        total += x.to(tl.float32) * w.to(tl.float32)[None, :]
    if (first < WIDTH - 1) & (tl.load(seq_lens + seq) > count):  # the first tokens of what continues a sequence
        kept = states + tl.load(slots + seq) * (WIDTH - 1) * channels + channel[None, :]
        for tap in tl.static_range(WIDTH - 1):
            source = token + tap
            is_kept = ((source < WIDTH - 1) & (token < count))[:, None] & is_channel[None, :]
            x = tl.load(kept + source[:, None] * channels, is_kept, 0.0)
            w = tl.load(weight + channel * WIDTH + tap, is_channel, 0.0)
            total += x.to(tl.float32) * w.to(tl.float32)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + channel, is_channel, 0.0).to(tl.float32)[None, :]
    if SILU:
        total = total.to(weight.dtype.element_ty).to(tl.float32)  # rounded as it is where the two are apart
        total = total / (1.0 + tl.exp(-total))
    pointers = out + (start + token).to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=(token < count)[:, None] & is_channel[None, :])


@triton.jit
def remember_kernel(
    hidden,
    states,
    query_starts,
    seq_lens,
    slots,
    channels,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Keep the last inputs of each sequence for the next convolution. Grid: (sequences, blocks of channels)."""
    seq = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channel < channels
    start = tl.load(query_starts + seq)
    count = tl.load(query_starts + seq + 1) - start
    if count == 0:
        return
    is_continued = tl.load(seq_lens + seq) > count
    kept = states + tl.load(slots + seq) * (WIDTH - 1) * channels + channel
    # From the oldest on: what moves up is read before it is overwritten.
    for tap in tl.static_range(WIDTH - 1):
        source = count - (WIDTH - 1) + tap
        x = tl.load(hidden + (start + source).to(tl.int64) * channels + channel, is_channel & (source >= 0), 0.0)
        x += tl.load(kept + (tap + count) * channels, is_channel & (source < 0) & is_continued, 0.0)
        tl.store(kept + tap * channels, x, mask=is_channel)


@triton.jit
def _load_keys(base, rows, inside, WIDTH: tl.constexpr, PADDED: tl.constexpr, NORMALISES: tl.constexpr):
    """[rows, PADDED]: queries or keys, of length one if the layer makes them so."""
    column = tl.arange(0, PADDED)
    mask = inside[:, None] & (column < WIDTH)[None, :]
    tile = tl.load(base + rows[:, None] * WIDTH + column[None, :], mask, 0.0).to(tl.float32)
    if NORMALISES:
        tile *= tl.rsqrt(tl.sum(tile * tile, 1) + 1e-6)[:, None]
    return tile


@triton.jit
def _blocks_of(tile, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """[blocks, BLOCK, BLOCK]: those along the diagonal of a tile."""
    COUNT: tl.constexpr = SIZE // BLOCK
    numbers = tl.arange(0, COUNT)
    is_same = numbers[:, None, None, None] == numbers[None, None, :, None]
    return tl.sum(tl.where(is_same, tl.reshape(tile, [COUNT, BLOCK, COUNT, BLOCK]), 0.0), 2)


@triton.jit
def _tile_of(blocks, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """[SIZE, SIZE]: a tile with blocks along its diagonal and zeros elsewhere."""
    COUNT: tl.constexpr = SIZE // BLOCK
    numbers = tl.arange(0, COUNT)
    is_same = numbers[:, None, None, None] == numbers[None, None, :, None]
    return tl.reshape(tl.where(is_same, blocks[:, :, None, :], 0.0), [SIZE, SIZE])


@triton.jit
def _merged(inverse, below, SIZE: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Inverses of blocks of twice the size."""
    number = tl.arange(0, CHUNK) // SIZE
    is_between = (number[:, None] == number[None, :] + 1) & (number % 2 == 0)[None, :]
    product = tl.dot(tl.where(is_between, below, 0.0), inverse, input_precision=PRECISION)
    return inverse - tl.dot(inverse, product, input_precision=PRECISION)


@triton.jit
def _inverse(below, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Of one plus what is below the diagonal: see Note [The inverse of a chunk]."""
    BLOCK: tl.constexpr = 16
    row = tl.arange(0, BLOCK)
    blocks = -_blocks_of(below, CHUNK, BLOCK)
    for i in tl.static_range(1, BLOCK):
        is_row = row[None, :, None] == i
        solved = tl.sum(tl.where(is_row, blocks, 0.0), 1)
        solved += tl.sum(solved[:, :, None] * blocks, 1)
        blocks = tl.where(is_row, solved[:, None, :], blocks)
    blocks += tl.where(row[:, None] == row[None, :], 1.0, 0.0)[None, :, :]
    inverse = _tile_of(blocks, CHUNK, BLOCK)
    if CHUNK > BLOCK:
        inverse = _merged(inverse, below, BLOCK, CHUNK, PRECISION)
    if CHUNK > 2 * BLOCK:
        inverse = _merged(inverse, below, 2 * BLOCK, CHUNK, PRECISION)
    return inverse


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def prepare_kernel(
    query,
    key,
    decay,
    beta,
    out,
    inverses,
    scores,
    query_starts,
    num_tokens,
    num_seqs,
    scale,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    NORMALISES: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What does not depend on the state: see Note [The delta rule in chunks]. Grid: (chunks, heads).

    Row i of a chunk's inverse, and of its scores, lies at its i-th token. Rows of padding get their zeros here, too.
    """
    block = tl.program_id(0)
    head = tl.program_id(1)
    rows = tl.arange(0, CHUNK)

    num_real = tl.load(query_starts + num_seqs)
    if (block + 1) * CHUNK > num_real:  # padding begins in or before this block of rows
        token = block * CHUNK + rows
        column = tl.arange(0, VALUE_PADDED)
        padded = ((token >= num_real) & (token < num_tokens))[:, None] & (column < VALUE)[None, :]
        zeros = tl.zeros([CHUNK, VALUE_PADDED], dtype=out.dtype.element_ty)
        tl.store(out + (token.to(tl.int64) * HEADS + head)[:, None] * VALUE + column[None, :], zeros, mask=padded)
    if _is_padding(query_starts, num_seqs, num_real, block, CHUNK):
        return

    seq = find_sequence(query_starts, num_seqs, block, CHUNK)
    start = tl.load(query_starts + seq)
    count = tl.load(query_starts + seq + 1) - start
    first = (block - (start // CHUNK + seq)) * CHUNK
    if first >= count or count == 1:  # one token takes a step
        return

    inside = first + rows < count
    at = (start + first + rows).to(tl.int64) * HEADS + head
    pointers = at[:, None] * CHUNK + rows[None, :]
    k = _load_keys(key, at, inside, KEY, KEY_PADDED, NORMALISES)
    gate = tl.load(beta + at, inside, 0.0).to(tl.float32)
    fallen = tl.cumsum(tl.load(decay + at, inside, 0.0).to(tl.float32), 0)
    is_until = rows[:, None] >= rows[None, :]
    between = tl.where(is_until, tl.exp(tl.where(is_until, fallen[:, None] - fallen[None, :], 0.0)), 0.0)

    q = _load_keys(query, at, inside, KEY, KEY_PADDED, NORMALISES) * scale
    seen = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
    tl.store(scores + pointers, seen, mask=inside[:, None])

    products = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between * gate[:, None]
    below = tl.where(rows[:, None] > rows[None, :], products, 0.0)
    tl.store(inverses + pointers, _inverse(below, CHUNK, PRECISION), mask=inside[:, None])


@triton.jit
def _step(
    state,
    query,
    key,
    value,
    decay,
    beta,
    out,
    at,
    column,
    scale,
    KEY: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE: tl.constexpr,
    NORMALISES: tl.constexpr,
):
    """The state behind one token, whose answer is written."""
    depth = tl.arange(0, KEY_PADDED)
    is_column = column < VALUE
    q = tl.load(query + at * KEY + depth, depth < KEY, 0.0).to(tl.float32)
    k = tl.load(key + at * KEY + depth, depth < KEY, 0.0).to(tl.float32)
    v = tl.load(value + at * VALUE + column, is_column, 0.0).to(tl.float32)
    if NORMALISES:
        q *= tl.rsqrt(tl.sum(q * q) + 1e-6)
        k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
    state *= tl.exp(tl.load(decay + at).to(tl.float32))
    delta = (v - tl.sum(state * k[:, None], 0)) * tl.load(beta + at).to(tl.float32)
    state += k[:, None] * delta[None, :]
    answer = tl.sum(state * (q * scale)[:, None], 0)
    tl.store(out + at * VALUE + column, answer.to(out.dtype.element_ty), mask=is_column)
    return state


@triton.jit
def chunks_kernel(
    query,
    key,
    value,
    decay,
    beta,
    inverses,
    scores,
    out,
    states,
    query_starts,
    seq_lens,
    slots,
    scale,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NORMALISES: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Any number of tokens of each sequence. Grid: (blocks of values, heads, sequences)."""
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = tl.program_id(1)
    seq = tl.program_id(2)
    start = tl.load(query_starts + seq)
    count = tl.load(query_starts + seq + 1) - start
    if count == 0:
        return
    is_column = column < VALUE
    depth = tl.arange(0, KEY_PADDED)
    is_kept = (depth < KEY)[:, None] & is_column[None, :]
    is_continued = tl.load(seq_lens + seq) > count
    kept = states + ((tl.load(slots + seq) * HEADS + head) * KEY + depth)[:, None] * VALUE + column[None, :]
    state = tl.load(kept, is_kept & is_continued, 0.0)

    if count == 1:
        at = start.to(tl.int64) * HEADS + head
        state = _step(state, query, key, value, decay, beta, out, at, column, scale, KEY, KEY_PADDED, VALUE, NORMALISES)
        tl.store(kept, state, mask=is_kept)
        return

    rows = tl.arange(0, CHUNK)
    at = rows * HEADS
    for first in range(0, count, CHUNK):
        inside = first + rows < count
        begin = (start + first).to(tl.int64) * HEADS + head
        gate = tl.load(beta + begin + at, inside, 0.0).to(tl.float32)
        falls = tl.load(decay + begin + at, inside, 0.0).to(tl.float32)
        fallen, falls_by = tl.cumsum(falls, 0), tl.sum(falls, 0)
        since_start = tl.exp(fallen)[:, None]
        values = at[:, None] * VALUE + column[None, :]
        is_value = inside[:, None] & is_column[None, :]
        v = tl.load(value + begin * VALUE + values, is_value, 0.0).to(tl.float32)
        k = _load_keys(key + begin * KEY, at, inside, KEY, KEY_PADDED, NORMALISES)
        known = tl.dot(k, state, input_precision=PRECISION) * since_start
        tile = at[:, None] * CHUNK + rows[None, :]
        inverse = tl.load(inverses + begin * CHUNK + tile, inside[:, None], 0.0)
        delta = tl.dot(inverse, (v - known) * gate[:, None], input_precision=PRECISION)

        q = _load_keys(query + begin * KEY, at, inside, KEY, KEY_PADDED, NORMALISES) * scale
        answer = tl.dot(q, state, input_precision=PRECISION) * since_start
        seen = tl.load(scores + begin * CHUNK + tile, inside[:, None], 0.0)
        answer = tl.dot(seen, delta, answer, input_precision=PRECISION)
        tl.store(out + begin * VALUE + values, answer.to(out.dtype.element_ty), mask=is_value)

        delta *= tl.exp(falls_by - fallen)[:, None]
        state = tl.dot(tl.trans(k), delta, state * tl.exp(falls_by), input_precision=PRECISION)
    tl.store(kept, state, mask=is_kept)


@triton.jit
def step_kernel(
    query,
    key,
    value,
    decay,
    beta,
    out,
    states,
    query_starts,
    seq_lens,
    slots,
    scale,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NORMALISES: tl.constexpr,
):
    """One token of each sequence, which is the row of its number. Grid: (blocks of values, heads, sequences)."""
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = tl.program_id(1)
    seq = tl.program_id(2)
    is_column = column < VALUE
    at = seq.to(tl.int64) * HEADS + head
    if tl.load(query_starts + seq + 1) == tl.load(query_starts + seq):
        tl.store(out + at * VALUE + column, tl.zeros([BLOCK_V], dtype=out.dtype.element_ty), mask=is_column)
        return
    depth = tl.arange(0, KEY_PADDED)
    is_kept = (depth < KEY)[:, None] & is_column[None, :]
    kept = states + ((tl.load(slots + seq) * HEADS + head) * KEY + depth)[:, None] * VALUE + column[None, :]
    state = tl.load(kept, is_kept & (tl.load(seq_lens + seq) > 1), 0.0)
    state = _step(state, query, key, value, decay, beta, out, at, column, scale, KEY, KEY_PADDED, VALUE, NORMALISES)
    tl.store(kept, state, mask=is_kept)
