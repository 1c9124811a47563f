"""Batches for attention kernels, and what attention over them must give, computed without cache, blocks or padding.

Everything a kernel must not read is poisoned: cache and padded rows are NaN, table entries without a block are out of
range. Blocks that lie wholly before what a window or chunk lets the first query see have no block either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from piecegraph.llm.kernels.attention.kernel import AttentionKernel
from piecegraph.llm.specs import AttentionBatch, AttentionLayer, LatentLayer, SequenceRows

NO_BLOCK = 1 << 30
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """(queries, length in the cache) of each real sequence, and the bucket they are padded to."""

    name: str
    spans: tuple[tuple[int, int], ...]
    padded_tokens: int = 0
    padded_seqs: int = 0
    block_size: int = 16
    max_seq_len: int = 0
    """The bucket's bound; 0 for the longest sequence."""
    max_prompts: int = 0
    """How many sequences may follow those that come first with one query each; 0 if these are not told apart."""
    query_bound: int = 0
    """The bucket's bound; 0 for the most queries of a sequence."""

    @property
    def num_tokens(self) -> int:
        return sum(count for count, _ in self.spans) + self.padded_tokens

    @property
    def num_seqs(self) -> int:
        return len(self.spans) + self.padded_seqs

    @property
    def max_query_len(self) -> int:
        return self.query_bound or max(count for count, _ in self.spans)

    @property
    def bound(self) -> int:
        return self.max_seq_len or max(length for _, length in self.spans)


@dataclass(frozen=True)
class Problem:
    """The inputs of one call of a kernel, and its right result for all rows."""

    arguments: dict[str, Any]
    expected: torch.Tensor
    batch: AttentionBatch


def layer(num_heads: int, num_kv_heads: int, width: int, **changes: object) -> AttentionLayer:
    plain = AttentionLayer(
        index=0,
        group=0,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_width=width,
        value_width=width,
        scale=width**-0.5,
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def latent_layer(num_heads: int, latent: int, rope: int, nope: int, value: int) -> LatentLayer:
    return LatentLayer(
        index=0,
        group=0,
        num_heads=num_heads,
        latent_width=latent,
        rope_width=rope,
        nope_width=nope,
        value_width=value,
        scale=(nope + rope) ** -0.5,
    )


def check(
    kernel: AttentionKernel,
    spec: AttentionLayer | LatentLayer,
    sequences: Sequences,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    """Run a kernel once and compare every row."""
    make = latent_problem if isinstance(spec, LatentLayer) else problem
    case = make(spec, sequences, dtype, device)  # type: ignore[operator]
    run(kernel, case)
    assert_close(case.arguments["out"], case.expected, dtype)


def run(kernel: AttentionKernel, case: Problem) -> None:
    function: Callable[..., None] | None = kernel.attend if "key_cache" in case.arguments else kernel.attend_latent
    assert function is not None
    function(**case.arguments)


def check_against(
    kernel: AttentionKernel,
    measure: AttentionKernel,
    spec: AttentionLayer | LatentLayer,
    sequences: Sequences,
    dtype: torch.dtype,
    device: str,
) -> None:
    """As :func:`check`, for sizes at which the definition takes too long: another kernel in float32 is the measure."""
    make = latent_problem if isinstance(spec, LatentLayer) else problem
    case = make(spec, sequences, dtype, device, defined=False)  # type: ignore[operator]
    wide = widened(case)
    run(measure, wide)
    run(kernel, case)
    assert_close(case.arguments["out"], wide.arguments["out"].double(), dtype)


def widened(case: Problem) -> Problem:
    """A copy of everything, in float32."""
    copies = {
        name: value.to(torch.float32, copy=True) if isinstance(value, torch.Tensor) else value
        for name, value in case.arguments.items()
    }
    return dataclasses.replace(case, arguments=copies)


def assert_close(out: object, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert isinstance(out, torch.Tensor)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def problem(
    spec: AttentionLayer,
    sequences: Sequences,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    seed: int = 0,
    defined: bool = True,
) -> Problem:
    """Random inputs for a layer; and the right result by its definition, unless ``defined`` is off."""
    generator = torch.Generator().manual_seed(seed)
    histories = [
        (
            torch.randn(length, spec.num_kv_heads, spec.key_width, generator=generator).to(dtype),
            torch.randn(length, spec.num_kv_heads, spec.value_width, generator=generator).to(dtype),
        )
        for _, length in sequences.spans
    ]
    sinks = torch.randn(spec.num_heads, generator=generator).to(dtype) if spec.has_sinks else None
    batch = _batch(sequences, generator, lambda count, length: _first_kept(spec, count, length))
    q = torch.randn(sequences.num_tokens, spec.num_heads, spec.key_width, generator=generator).to(dtype)
    results = [
        _dense(rows, keys, values, sinks, spec)
        for rows, (keys, values) in zip(_split(q, sequences), histories, strict=True)
        if defined
    ]
    arguments = {
        "q": _poisoned_tail(q, sequences),
        "k": _fresh([keys for keys, _ in histories], sequences),
        "v": _fresh([values for _, values in histories], sequences),
        "out": torch.full((sequences.num_tokens, spec.num_heads, spec.value_width), float("nan"), dtype=dtype),
        "sinks": sinks,
        "key_cache": _cache([keys for keys, _ in histories], sequences, batch),
        "value_cache": _cache([values for _, values in histories], sequences, batch),
    }
    return _on_device(arguments, spec, batch, _padded(results, sequences), device)


def latent_problem(
    spec: LatentLayer,
    sequences: Sequences,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    seed: int = 0,
    defined: bool = True,
) -> Problem:
    """Random inputs for a latent layer; the right result is that of the expanded keys and values."""
    generator = torch.Generator().manual_seed(seed)
    width = spec.latent_width + spec.rope_width
    histories = [torch.randn(length, width, generator=generator).to(dtype) for _, length in sequences.spans]
    up = torch.randn(spec.num_heads * (spec.nope_width + spec.value_width), spec.latent_width, generator=generator)
    up = (up * spec.latent_width**-0.5).to(dtype)
    batch = _batch(sequences, generator, lambda count, length: 0)
    q = torch.randn(sequences.num_tokens, spec.num_heads, spec.nope_width + spec.rope_width, generator=generator)
    q = q.to(dtype)
    results = [
        _dense(rows, *_expand(history, up, spec), None, _expanded(spec))
        for rows, history in zip(_split(q, sequences), histories, strict=True)
        if defined
    ]
    fresh = _fresh(histories, sequences)
    arguments = {
        "q": _poisoned_tail(q, sequences),
        "latent": fresh[:, : spec.latent_width],
        "rope": fresh[:, spec.latent_width :],
        "up_projection": up,
        "out": torch.full((sequences.num_tokens, spec.num_heads, spec.value_width), float("nan"), dtype=dtype),
        "cache": _cache(histories, sequences, batch),
    }
    return _on_device(arguments, spec, batch, _padded(results, sequences), device)


def _expand(history: torch.Tensor, up: torch.Tensor, spec: LatentLayer) -> tuple[torch.Tensor, torch.Tensor]:
    latent, rope = history.double().split([spec.latent_width, spec.rope_width], -1)
    heads = torch.einsum("tr,hdr->thd", latent, up.double().unflatten(0, (spec.num_heads, -1)))
    nope, values = heads.split([spec.nope_width, spec.value_width], -1)
    return torch.cat([nope, rope[:, None].expand(-1, spec.num_heads, -1)], -1), values


def _expanded(spec: LatentLayer) -> AttentionLayer:
    return layer(
        spec.num_heads,
        spec.num_heads,
        spec.nope_width + spec.rope_width,
        value_width=spec.value_width,
        scale=spec.scale,
    )


def _dense(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None, spec: AttentionLayer
) -> torch.Tensor:
    """One sequence, in float64, query by query: the definition."""
    rows = []
    group = spec.num_heads // spec.num_kv_heads
    for i, query in enumerate(q.double(), start=len(keys) - len(q)):
        first = _first_visible(spec, i)
        seen = keys[first : i + 1].double().repeat_interleave(group, 1)
        scores = torch.einsum("hd,khd->hk", query, seen) * spec.scale
        if spec.softcap:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        weights = scores.exp()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + sinks.double().exp()[:, None]
        rows.append(
            torch.einsum("hk,khd->hd", weights / total, values[first : i + 1].double().repeat_interleave(group, 1))
        )
    return torch.stack(rows)


def _first_visible(spec: AttentionLayer, position: int) -> int:
    first = 0
    if spec.window:
        first = max(first, position - spec.window + 1)
    if spec.chunk:
        first = max(first, position - position % spec.chunk)
    return first


def _first_kept(spec: AttentionLayer, count: int, length: int) -> int:
    return _first_visible(spec, length - count)


def _batch(sequences: Sequences, generator: torch.Generator, first_kept: Callable[[int, int], int]) -> AttentionBatch:
    size = sequences.block_size
    widest = -(-sequences.bound // size)
    table = torch.full((sequences.num_seqs, widest), NO_BLOCK, dtype=torch.int32)
    free = (torch.randperm(sequences.num_seqs * widest, generator=generator) + 1).tolist()
    slots = []
    for i, (count, length) in enumerate(sequences.spans):
        for block in range(first_kept(count, length) // size, -(-length // size)):
            table[i, block] = free.pop()
        slots += [int(table[i, p // size]) * size + p % size for p in range(length - count, length)]
    slots += [i % size for i in range(sequences.padded_tokens)]  # block 0
    starts = [0]
    for count, _ in [*sequences.spans, *[(0, 0)] * sequences.padded_seqs]:
        starts.append(starts[-1] + count)
    lengths = [length for _, length in sequences.spans] + [0] * sequences.padded_seqs
    return AttentionBatch(
        query_starts=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        slots=torch.tensor(slots, dtype=torch.int64),
        block_size=size,
        max_query_len=sequences.max_query_len,
        max_seq_len=sequences.bound,
        prompts=_prompts(sequences, starts, lengths, table) if sequences.max_prompts else None,
    )


def _prompts(sequences: Sequences, starts: list[int], lengths: list[int], table: torch.Tensor) -> SequenceRows:
    counts = [count for count, _ in sequences.spans]
    first = next((i for i, count in enumerate(counts) if count != 1), len(counts))
    num_padded = sequences.max_prompts - (len(counts) - first)
    assert num_padded >= 0
    return SequenceRows(
        torch.tensor(starts[first : len(counts)] + [starts[-1]] * (num_padded + 1), dtype=torch.int32),
        torch.tensor(lengths[first : len(counts)] + [0] * num_padded, dtype=torch.int32),
        torch.cat([table[first : len(counts)], table[:1].expand(num_padded, -1)]),
    )


def _cache(histories: list[torch.Tensor], sequences: Sequences, batch: AttentionBatch) -> torch.Tensor:
    """NaN, but for the tokens that came before this batch."""
    size = sequences.block_size
    num_blocks = 1 + batch.block_table.numel()
    cache = torch.full((num_blocks, size, *histories[0].shape[1:]), float("nan"), dtype=histories[0].dtype)
    for table, history, (count, length) in zip(batch.block_table.tolist(), histories, sequences.spans, strict=False):
        for position in range(length - count):
            block = table[position // size]
            if block != NO_BLOCK:
                cache[block, position % size] = history[position]
    return cache


def _split(q: torch.Tensor, sequences: Sequences) -> list[torch.Tensor]:
    counts = [count for count, _ in sequences.spans]
    return list(q[: sum(counts)].split(counts))


def _fresh(histories: list[torch.Tensor], sequences: Sequences) -> torch.Tensor:
    rows = [history[length - count :] for history, (count, length) in zip(histories, sequences.spans, strict=True)]
    tail = torch.full((sequences.padded_tokens, *rows[0].shape[1:]), float("nan"), dtype=rows[0].dtype)
    return torch.cat([*rows, tail])


def _poisoned_tail(q: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    q[sequences.num_tokens - sequences.padded_tokens :] = float("nan")
    return q


def _padded(results: list[torch.Tensor], sequences: Sequences) -> torch.Tensor:
    if not results:
        return torch.empty(0)
    real = torch.cat(results)
    return torch.cat([real, real.new_zeros(sequences.padded_tokens, *real.shape[1:])])


def _on_device(
    arguments: dict[str, torch.Tensor | None],
    spec: AttentionLayer | LatentLayer,
    batch: AttentionBatch,
    expected: torch.Tensor,
    device: str,
) -> Problem:
    moved = {name: None if value is None else value.to(device) for name, value in arguments.items()}
    buffers = {name: getattr(batch, name).to(device) for name in ("query_starts", "seq_lens", "block_table", "slots")}
    rows = batch.prompts
    prompts = None if rows is None else SequenceRows(*(t.to(device) for t in (rows.starts, rows.lens, rows.table)))
    batch = dataclasses.replace(batch, **buffers, prompts=prompts)
    return Problem({**moved, "layer": spec, "batch": batch}, expected.to(device), batch)
