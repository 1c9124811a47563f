"""Layers that keep a state, in Triton: the host's side, which computes nothing from the data of a batch.

As for attention (Note [Grid fixed by the bucket] in ``attention/triton_paged.py``), grids follow from the size of the
bucket, and which program does what is found on the device. So steps with any mixture of prompts are captured, too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from piecegraph.llm.kernels.attention.triton_paged import can_run
from piecegraph.llm.kernels.attention.triton_tiles import padded, power_of_two
from piecegraph.llm.specs import Accepted, ConvLayer, DeltaLayer, Rejected, StateBatch, StepKind, Support

_BLOCK_VALUES = 32
"""Columns of a state that one program keeps: few enough that one sequence gives work to a whole GPU."""
_CONVOLUTION_TILES = {True: (1, 256, 2), False: (16, 128, 4)}
"""Tokens and channels of a program, and its warps, for decode steps and for others."""
_ROOM = 160 * 1024
"""Bytes of shared memory for long chunks in float32, and for two stages in half precision."""
_MAX_KEY_WIDTH = 256
_ACTIVATIONS = ("", "silu", "swish")


def supports(layers: Sequence[ConvLayer | DeltaLayer], dtype: torch.dtype, device: torch.device) -> Support:
    """Whether there is a kernel for every layer."""
    for layer in layers:
        if isinstance(layer, ConvLayer) and layer.activation not in _ACTIVATIONS:
            return Rejected(f"there is no kernel for a convolution with the activation {layer.activation}")
        if isinstance(layer, DeltaLayer) and layer.key_width > _MAX_KEY_WIDTH:
            return Rejected(f"keys wider than {_MAX_KEY_WIDTH} do not fit on the chip")
    return can_run(dtype, device)


class TritonStates:
    """See :class:`~piecegraph.llm.cache.states.StateKernels`."""

    name = "triton"

    def __init__(self) -> None:
        self._batch: StateBatch | None = None

    def capture_safe(self, kind: StepKind) -> Support:
        return Accepted()

    def use_batch(self, batch: StateBatch) -> None:
        self._batch = batch

    def convolve(
        self,
        states: torch.Tensor,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        activation: str,
    ) -> None:
        batch = self._current()
        (num_tokens, channels), num_seqs = hidden.shape, len(batch.seq_lens)
        tokens, block, num_warps = _CONVOLUTION_TILES[batch.max_query_len == 1]
        width, blocks = weight.shape[1], -(-channels // block)
        _kernels().convolve_kernel[-(-num_tokens // tokens) + num_seqs, blocks](
            hidden,
            weight,
            bias,
            out,
            states,
            batch.query_starts,
            batch.seq_lens,
            batch.state_slots,
            num_tokens,
            num_seqs,
            channels,
            WIDTH=width,
            HAS_BIAS=bias is not None,
            SILU=bool(activation),
            BLOCK_T=tokens,
            BLOCK_C=block,
            num_warps=num_warps,
        )
        _kernels().remember_kernel[num_seqs, blocks](
            hidden,
            states,
            batch.query_starts,
            batch.seq_lens,
            batch.state_slots,
            channels,
            WIDTH=width,
            BLOCK_C=block,
            num_warps=num_warps,
        )

    def delta_rule(
        self,
        states: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        out: torch.Tensor,
        normalises: bool,
    ) -> None:
        batch = self._current()
        heads, width = value.shape[1:]
        block_values = min(_BLOCK_VALUES, padded(width))
        grid = (-(-width // block_values), heads, len(batch.seq_lens))
        where = (out, states, batch.query_starts, batch.seq_lens, batch.state_slots, key.shape[2] ** -0.5)
        shape = {"HEADS": heads, "KEY": key.shape[2], "KEY_PADDED": padded(key.shape[2]), "NORMALISES": normalises}
        values = {"VALUE": width, "BLOCK_V": block_values}
        if batch.max_query_len == 1:
            _kernels().step_kernel[grid](query, key, value, decay, beta, *where, **shape, **values)
            return
        is_half = value.dtype != torch.float32
        chunk, stages = _chunk(shape["KEY_PADDED"], is_half, _has_room(out.device))
        constants = {**shape, "CHUNK": chunk, "PRECISION": "tf32" if is_half else "tf32x3"}
        prepared = self._prepare(query, key, decay, beta, out, constants)
        _kernels().chunks_kernel[grid](
            query, key, value, decay, beta, *prepared, *where, **constants, **values, num_stages=stages
        )

    def _prepare(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        out: torch.Tensor,
        constants: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What each chunk needs besides the state, and zeros in the padded rows of the result."""
        batch = self._current()
        (num_tokens, heads, width), num_seqs, chunk = out.shape, len(batch.seq_lens), constants["CHUNK"]
        inverses, scores = torch.empty(2, num_tokens, heads, chunk, dtype=torch.float32, device=out.device)
        _kernels().prepare_kernel[-(-num_tokens // chunk) + num_seqs, heads](
            query,
            key,
            decay,
            beta,
            out,
            inverses,
            scores,
            batch.query_starts,
            num_tokens,
            num_seqs,
            key.shape[2] ** -0.5,
            VALUE=width,
            VALUE_PADDED=power_of_two(width),
            **constants,
        )
        return inverses, scores

    def _current(self) -> StateBatch:
        assert self._batch is not None, "a layer ran before the memory was given a batch"
        return self._batch


def _chunk(key_padded: int, is_half: bool, has_room: bool) -> tuple[int, int]:
    """Tokens that the delta rule takes at once, and stages of its pipeline: what fits on the chip.

    >>> _chunk(128, True, True), _chunk(128, True, False), _chunk(256, True, True), _chunk(128, False, False)
    ((64, 2), (64, 1), (32, 2), (32, 1))
    """
    chunk = 64 if key_padded <= 128 and (is_half or has_room) else 32
    return chunk, 2 if is_half and has_room else 1


@functools.cache
def _has_room(device: torch.device) -> bool:
    """Whether a program has as much shared memory as on the GPUs of data centers."""
    if device.type != "cuda":
        return True
    properties: Any = torch.cuda.get_device_properties(device)
    return bool(properties.shared_memory_per_block_optin >= _ROOM)


@functools.cache
def _kernels() -> Any:
    """Triton is imported when it is needed: where there is no GPU, it may not be installed."""
    from piecegraph.llm.kernels import state_kernels

    return state_kernels
