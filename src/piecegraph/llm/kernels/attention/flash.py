"""Prompts by FlashAttention 4, if it is installed (``flash-attn-4``); rows of decoding by our own kernel, which is the
quicker one for them.

It takes a batch as our kernels do: everything is read on the device, and the grid is fixed by the bucket. What it
leaves to others is done when keys and values are written: padded rows become zeros, and so do the values behind the end
of a prompt in its last block, which it multiplies by zero (Note [What may be NaN] in ``triton_steps.py``).
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from piecegraph.llm.kernels.attention import triton_paged
from piecegraph.llm.kernels.attention.kernel import AttentionKernel
from piecegraph.llm.kernels.attention.plain_prompts import supports, use_for, why_left
from piecegraph.llm.specs import (
    AttentionBatch,
    AttentionLayer,
    LatentLayer,
    Rejected,
    SequenceRows,
    Support,
)

BLOCK_SIZE = 128
"""As many keys as it takes at once: a block is then one copy. With 16 it took 1.09 to 1.12 times as long on an H200."""
MIN_TOKENS = 384
"""Of a step; below that our own kernel was as quick."""
WIDTHS = (64, 96, 128)
"""Of heads, for which it takes as many keys at once."""


def _for_prompts(operands: triton_paged.Operands, batch: AttentionBatch) -> triton_paged.AttendPrompts | None:
    """What attends with prompts; None if our own kernel does."""
    if min(operands.q.shape[0], batch.max_query_len) < MIN_TOKENS or why_left(operands.layer, WIDTHS):
        return None
    return _attend_prompts


def _attend_prompts(operands: triton_paged.Operands, batch: AttentionBatch, rows: SequenceRows) -> None:
    _flash_attention()(
        triton_paged.whole_key(operands.q, operands.q_rest),
        triton_paged.whole_key(operands.key_cache, operands.rest_cache),
        operands.value_cache,
        cu_seqlens_q=rows.starts,
        seqused_k=rows.lens,
        max_seqlen_q=batch.max_query_len,
        max_seqlen_k=batch.max_seq_len,
        page_table=rows.table,
        softmax_scale=operands.layer.scale,
        causal=True,
        out=operands.out,
    )


@functools.cache
def _flash_attention() -> Callable[..., Any]:
    """Its import takes seconds. The function that takes ``out`` is not one of its public ones; the extra pins it."""
    from flash_attn.cute import interface  # type: ignore[import-not-found, unused-ignore]

    # Its compiler warns of arguments of its own at every variant.
    warnings.filterwarnings("ignore", message="Argument aux_data", category=UserWarning)
    function: Callable[..., Any] = interface._flash_attn_fwd
    return function


@functools.cache
def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:  # of the package around it
        return False


def _supports(layer: AttentionLayer | LatentLayer, dtype: torch.dtype, device: torch.device) -> Support:
    if not _is_installed():
        return Rejected("flash-attn-4 is not installed")
    return supports(layer, dtype, device)


def _use_for(layers: Sequence[AttentionLayer | LatentLayer]) -> Support:
    return use_for(layers, WIDTHS, f"FlashAttention 4 in steps of {MIN_TOKENS} tokens or more")


attend, attend_turned = triton_paged.attending(_for_prompts)

KERNEL = AttentionKernel(
    name="flash",
    supports=_supports,
    use_for=_use_for,
    capture_safe=triton_paged.KERNEL.capture_safe,
    attend=attend,
    attend_turned=attend_turned,
    attend_latent=triton_paged.attend_latent,
    prepare=triton_paged.prepare,
    block_size=BLOCK_SIZE,
    compiles_when_launched=True,
)
