"""torch's own ``varlen_attn``: FlashAttention over ragged batches.

Its kernel in torch reads keys and values that lie in one piece. So a batch without cached prefix is served from the
fresh keys and values, and any other has what it can see gathered from the cache first. Only where FlashAttention 3 is
activated (``torch.nn.attention.activate_flash_attention_impl``) and torch passes the block table on (2.13) is the cache
read in place. The lengths are read on the host, hence nothing here may be captured.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import current_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from piecegraph.llm.kernels.attention.kernel import AttentionKernel
from piecegraph.llm.kernels.attention.reference import write_to_cache
from piecegraph.llm.specs import Accepted, AttentionBatch, AttentionLayer, LatentLayer, Rejected, StepKind, Support

MAX_WIDTH = 256


@dataclass(frozen=True, slots=True)
class _Spans:
    """For each real sequence, how many queries it has and which of its keys they can see, on the host."""

    queries: tuple[int, ...]
    first_keys: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def keys(self) -> tuple[int, ...]:
        return tuple(end - first for first, end in zip(self.first_keys, self.ends, strict=True))


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    layer: AttentionLayer,
    batch: AttentionBatch,
) -> None:
    """See :class:`~piecegraph.llm.kernels.attention.kernel.Attend`."""
    write_to_cache(k, key_cache, batch)
    write_to_cache(v, value_cache, batch)
    spans = _spans(layer, batch)
    num_real = sum(spans.queries)
    out[num_real:].zero_()
    if num_real == 0:
        return
    num_seqs = len(spans.queries)
    options: dict[str, Any] = {"scale": layer.scale, "window_size": (layer.window - 1 if layer.window else -1, 0)}
    if _takes("enable_gqa"):  # torch 2.11 has no such switch: there, fewer kv heads are simply accepted
        options["enable_gqa"] = layer.num_heads != layer.num_kv_heads
    if spans.queries == spans.ends:
        keys, values, key_starts = k[:num_real], v[:num_real], batch.query_starts[: num_seqs + 1]
    elif _reads_blocks():
        keys, values, key_starts = key_cache, value_cache, None
        options |= {"seqused_k": batch.seq_lens[:num_seqs], "block_table": batch.block_table[:num_seqs]}
        spans = _Spans(spans.queries, (0,) * num_seqs, spans.ends)
    else:
        keys, values = (_gather(cache, spans, batch) for cache in (key_cache, value_cache))
        key_starts = _starts(spans.keys, q.device)
    query_starts = batch.query_starts[: num_seqs + 1]
    widest = max(spans.queries), max(spans.keys)
    result: Any = varlen_attn(q[:num_real], keys, values, query_starts, key_starts, *widest, **options)
    out[:num_real] = result


def _spans(layer: AttentionLayer, batch: AttentionBatch) -> _Spans:
    starts, lengths = batch.query_starts.tolist(), batch.seq_lens.tolist()
    queries = tuple(end - start for start, end in itertools.pairwise(starts) if end > start)
    ends = tuple(length for length in lengths if length)
    first_keys = tuple(
        max(0, end - count - layer.window + 1) if layer.window else 0 for count, end in zip(queries, ends, strict=True)
    )
    return _Spans(queries, first_keys, ends)


def _gather(cache: torch.Tensor, spans: _Spans, batch: AttentionBatch) -> torch.Tensor:
    """The keys (or values) that are seen, one sequence after another, in one piece.

    What lies before the first of them may be gone: a layer with a window does not keep it.
    """
    slots = []
    for i, (first, end) in enumerate(zip(spans.first_keys, spans.ends, strict=True)):
        positions = torch.arange(first, end, device=cache.device)
        slots.append(
            batch.block_table[i][positions // batch.block_size] * batch.block_size + positions % batch.block_size
        )
    flat = torch.cat(slots)
    return cache[flat // batch.block_size, flat % batch.block_size]


def _starts(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return torch.tensor(starts, dtype=torch.int32, device=device)


@functools.cache
def _takes(parameter: str) -> bool:
    return parameter in inspect.signature(varlen_attn).parameters


def _reads_blocks() -> bool:
    return _takes("block_table") and current_flash_attention_impl() == "FA3"


def _supports(layer: AttentionLayer | LatentLayer, dtype: torch.dtype, device: torch.device) -> Support:
    if device.type != "cuda":
        return Rejected("varlen_attn needs a CUDA device")
    if torch.cuda.get_device_capability(device) < (8, 0):
        return Rejected("FlashAttention needs compute capability 8.0")
    if dtype not in (torch.float16, torch.bfloat16):
        return Rejected(f"FlashAttention computes in half types, not {dtype}")
    return _supports_layer(layer)


def _supports_layer(layer: AttentionLayer | LatentLayer) -> Support:
    if isinstance(layer, LatentLayer):
        return Rejected("it has no latent form")
    if layer.softcap or layer.has_sinks or layer.chunk:
        return Rejected("varlen_attn knows no softcap, sinks or chunks")
    if layer.key_width != layer.value_width:
        return Rejected("varlen_attn needs keys and values of one width")
    if layer.key_width > MAX_WIDTH or layer.key_width % 8:
        return Rejected(f"FlashAttention takes widths up to {MAX_WIDTH} in steps of 8, not {layer.key_width}")
    return Accepted()


def _capture_safe(kind: StepKind) -> Support:
    return Rejected("it reads the lengths of the sequences on the host")


KERNEL = AttentionKernel(name="varlen", supports=_supports, capture_safe=_capture_safe, attend=attend)
