"""Attention kernels alone, on a GPU: decode and prefill for the heads of Qwen3-0.6B and Llama-8B.

A CUDA graph of 20 calls, each with a cache of its own as the layers of a model have, is replayed; the table shows the
microseconds of one call. Results are compared with the reference before anything is timed.

    python benchmarks/attention.py
    python benchmarks/attention.py --tune            # the tiles of the Triton kernels, side by side
    python benchmarks/attention.py --only decode --heads qwen --block-size 16
    python benchmarks/attention.py --only prefill --block-size 128    # FlashAttention 4, too, where it is installed
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from piecegraph.base.compare import relative_error
from piecegraph.bench.machine import hardware
from piecegraph.bench.timing import Effort, measure
from piecegraph.llm.kernels.attention import flash, gluon_paged, reference, triton_paged, varlen
from piecegraph.llm.kernels.attention.kernel import AttentionKernel
from piecegraph.llm.kernels.attention.triton_tiles import MAX_SPLITS, Tiles, decode_tiles, prefill_tiles
from piecegraph.llm.kernels.chip import chip
from piecegraph.llm.specs import Accepted, AttentionBatch, AttentionLayer

HEADS = {"qwen": (16, 8, 128), "llama": (32, 8, 128)}
DECODES = list(itertools.product([1, 8, 64], [128, 1024, 8192]))
PREFILLS = [(16, 16), (256, 256), (1024, 1024), (4096, 4096), (16384, 16384), (8192, 32768)]
"""New tokens of one sequence, and all of them."""
NUM_CALLS = 20
MAX_CACHE_BYTES = 40 << 30
MAX_SCORES = 4096 * 4096  # of a head, that the reference holds
MAX_ERROR = 0.01  # bfloat16 against the reference
DEVICE, DTYPE = "cuda", torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One batch, and as many caches as there are calls."""

    layer: AttentionLayer
    batch: AttentionBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    gigabytes: float
    """Keys and values that one call reads."""
    tera_operations: float

    def arguments(self, call: int) -> tuple[object, ...]:
        caches = self.caches[call % len(self.caches)]
        return (self.q, self.k, self.v, self.out, None, *caches, self.layer, self.batch)


def build(heads: tuple[int, int, int], num_seqs: int, num_queries: int, length: int, block_size: int) -> Case:
    """``num_seqs`` sequences of ``length`` tokens in scattered blocks, the last ``num_queries`` of each being new."""
    num_heads, num_kv_heads, width = heads
    layer = AttentionLayer(
        index=0,
        group=0,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_width=width,
        value_width=width,
        scale=width**-0.5,
    )
    per_seq = -(-length // block_size)
    table = (torch.randperm(num_seqs * per_seq, device=DEVICE) + 1).view(num_seqs, per_seq)
    positions = torch.arange(length - num_queries, length, device=DEVICE)
    slots = table[:, positions // block_size] * block_size + positions % block_size
    num_tokens = num_seqs * num_queries
    batch = AttentionBatch(
        query_starts=torch.arange(0, num_tokens + 1, num_queries, dtype=torch.int32, device=DEVICE),
        seq_lens=torch.full((num_seqs,), length, dtype=torch.int32, device=DEVICE),
        block_table=table.int(),
        slots=slots.flatten(),
        block_size=block_size,
        max_query_len=num_queries,
        max_seq_len=max(length, 16384),  # a bucket's bound is rarely close
    )
    cache_shape = (num_seqs * per_seq + 1, block_size, num_kv_heads, width)
    cache_bytes = 2 * 2 * torch.Size(cache_shape).numel()
    num_caches = max(1, min(NUM_CALLS, MAX_CACHE_BYTES // cache_bytes))

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, dtype=DTYPE)

    pairs = num_seqs * num_queries * (length - (num_queries - 1) / 2)
    return Case(
        layer=layer,
        batch=batch,
        q=rand(num_tokens, num_heads, width),
        k=rand(num_tokens, num_kv_heads, width),
        v=rand(num_tokens, num_kv_heads, width),
        out=torch.empty(num_tokens, num_heads, width, device=DEVICE, dtype=DTYPE),
        caches=[(rand(*cache_shape), rand(*cache_shape)) for _ in range(num_caches)],
        gigabytes=2 * 2 * num_seqs * length * num_kv_heads * width / 1e9,
        tera_operations=4 * pairs * num_heads * width / 1e12,
    )


def captured_us(call: Callable[[int], object]) -> float:
    """Microseconds of one call, from a graph of many."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(NUM_CALLS):
            call(i)
    return measure(graph.replay, Effort(0.1, 30)).median_ms * 1e3 / NUM_CALLS


def eager_us(call: Callable[[int], object]) -> float:
    """The same for what cannot be captured: as the host drives it."""

    def run() -> None:
        for i in range(NUM_CALLS):
            call(i)

    return measure(run, Effort(0.1, 10)).median_ms * 1e3 / NUM_CALLS


def sdpa(case: Case) -> Callable[[int], object]:
    """Causal attention of one sequence that lies in one piece: no cache, no blocks."""
    q, k, v = (tensor.transpose(0, 1)[None].contiguous() for tensor in (case.q, case.k, case.v))
    return lambda i: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def check(case: Case, kernel: AttentionKernel = triton_paged.KERNEL) -> None:
    """Against the reference, or, where its scores would not fit, against the kernel that goes through all of them."""
    is_small = case.batch.max_query_len * int(case.batch.seq_lens[0]) <= MAX_SCORES
    expected = reference.KERNEL if is_small else triton_paged.KERNEL
    kernel.attend(*case.arguments(0))  # type: ignore[arg-type]
    found = case.out.clone()
    expected.attend(*case.arguments(0))  # type: ignore[arg-type]
    error = relative_error(found, case.out)
    assert error < MAX_ERROR, f"wrong result of {kernel.name}: relative error {error:.3g}"


def row(name: str, kernel: str, us: float, case: Case) -> None:
    rates = f"{case.gigabytes / us * 1e6:8.0f} GB/s  {case.tera_operations / us * 1e6:7.1f} TFLOPS"
    print(f"{name:<28} {kernel:<34} {us:9.1f} us  {rates}", flush=True)


def compare(name: str, case: Case, *, is_prefill: bool) -> None:
    check(case)
    row(name, "triton", captured_us(lambda i: triton_paged.attend(*case.arguments(i))), case)  # type: ignore[arg-type]
    row(name, "varlen (eager)", eager_us(lambda i: varlen.attend(*case.arguments(i))), case)  # type: ignore[arg-type]
    if is_prefill:
        for kernel in (gluon_paged.KERNEL, flash.KERNEL):
            if isinstance(kernel.supports(case.layer, DTYPE, torch.device(DEVICE)), Accepted):
                kernel.prepare([case.layer], torch.device(DEVICE))
                check(case, kernel)
                row(name, kernel.name, captured_us(lambda i, run=kernel.attend: run(*case.arguments(i))), case)  # type: ignore[misc]
        if case.batch.max_query_len == int(case.batch.seq_lens[0]):
            row(name, "sdpa (no cache)", captured_us(sdpa(case)), case)


def tune(name: str, case: Case, *, is_prefill: bool) -> None:
    check(case)
    operands = [triton_paged.plain_operands(*case.arguments(i)[:-1]) for i in range(NUM_CALLS)]  # type: ignore[arg-type]
    results = []
    for tiles in prefill_choices(case) if is_prefill else decode_choices(case):
        try:
            us = captured_us(lambda i, tiles=tiles: launch(operands[i], case.batch, tiles, is_prefill=is_prefill))
        except Exception as error:  # noqa: BLE001 # too large for the chip: the next one
            print(f"{name:<28} {describe(tiles):<34} {type(error).__name__}", flush=True)
            torch.cuda.synchronize()
            continue
        results.append((us, tiles))
    for us, tiles in sorted(results, key=lambda result: result[0])[:8]:
        row(name, describe(tiles), us, case)
    chosen = chosen_tiles(case, is_prefill=is_prefill)
    row(name, f"chosen: {describe(chosen)}", {tiles: us for us, tiles in results}.get(chosen, float("nan")), case)


def launch(operands: triton_paged.Operands, batch: AttentionBatch, tiles: Tiles, *, is_prefill: bool) -> None:
    if is_prefill:
        triton_paged.launch_prefill(operands, batch, batch.rows, tiles)
    else:
        triton_paged.launch_decode(operands, batch, tiles)


def chosen_tiles(case: Case, *, is_prefill: bool) -> Tiles:
    shape = triton_paged.plain_operands(*case.arguments(0)[:-1]).shape  # type: ignore[arg-type]
    here = chip(torch.device(DEVICE))
    if is_prefill:
        return prefill_tiles(shape, case.q.shape[0], case.batch.max_query_len, here.num_processors)
    return decode_tiles(shape, case.q.shape[0], case.batch.max_seq_len, here)


def prefill_choices(case: Case) -> Iterable[Tiles]:
    chosen = chosen_tiles(case, is_prefill=True)
    rows = case.batch.max_query_len * chosen.tile_heads
    yield chosen
    for block_m, block_n, num_stages in itertools.product([16, 32, 64, 128], [32, 64, 128], [2, 3, 4]):
        changes = {"block_m": block_m, "block_n": block_n, "num_warps": 8 if block_m == 128 else 4}
        tiles = dataclasses.replace(chosen, **changes, num_stages=num_stages)
        fits = chosen.tile_heads <= block_m <= max(16, 2 * rows) and (block_m >= 64 or rows <= 1024)
        if tiles != chosen and fits:
            yield tiles


def decode_choices(case: Case) -> Iterable[Tiles]:
    chosen = chosen_tiles(case, is_prefill=False)
    parts = case.q.shape[0] * case.layer.num_kv_heads
    limit = min(MAX_SPLITS, 2 * torch.cuda.get_device_properties(DEVICE).multi_processor_count // parts)
    splits = {chosen.num_splits, max(1, chosen.num_splits // 2), *(s for s in (8, 16, 32) if s <= limit)}
    yield chosen
    steps = itertools.product(sorted(splits), [32, 64, 128], [4, 8], [2, 3, 4])
    for num_splits, block_n, num_warps, num_stages in steps:
        changes = {"num_splits": num_splits, "block_n": block_n, "num_warps": num_warps, "num_stages": num_stages}
        tiles = dataclasses.replace(chosen, **changes)
        if tiles != chosen:
            yield tiles


def describe(tiles: Tiles) -> str:
    splits = f" splits {tiles.num_splits}" if tiles.num_splits > 1 else ""
    return f"{tiles.block_m}x{tiles.block_n} warps {tiles.num_warps} stages {tiles.num_stages}{splits}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true", help="time alternative tiles, best first")
    parser.add_argument("--only", choices=["decode", "prefill"], help="one kind of batch")
    parser.add_argument("--heads", choices=HEADS, help="one model's heads")
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a block of the cache")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "a CUDA device is needed\n")
    print(hardware(), f"block size {arguments.block_size}, medians over 30 replays of {NUM_CALLS} calls")
    show = tune if arguments.tune else compare
    for model, heads in HEADS.items():
        if arguments.heads not in (None, model):
            continue
        if arguments.only != "prefill":
            for num_seqs, length in DECODES:
                case = build(heads, num_seqs, 1, length, arguments.block_size)
                show(f"{model} decode {num_seqs} x {length}", case, is_prefill=False)
        if arguments.only != "decode":
            for num_new, length in PREFILLS:
                case = build(heads, 1, num_new, length, arguments.block_size)
                show(f"{model} prefill {num_new} of {length}", case, is_prefill=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
