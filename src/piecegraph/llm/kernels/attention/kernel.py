"""What an attention kernel is: two functions that write to ``out``, and what it says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from piecegraph.llm.kernels.skinny import Heads, rotate
from piecegraph.llm.specs import AttentionBatch, AttentionLayer, LatentLayer, Rejected, StepKind, Support


class Attend(Protocol):
    """Writes the new keys and values to the cache, then attends; zeros for padded rows (Note [Padding of a batch])."""

    def __call__(
        self,
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
        """Attend.

        Args:
            q: [tokens, heads, key width].
            k: [tokens, kv heads, key width].
            v: [tokens, kv heads, value width].
            out: [tokens, heads, value width], written to.
            sinks: [heads], if the layer has them.
            key_cache: [blocks, block size, kv heads, key width], written to.
            value_cache: [blocks, block size, kv heads, value width], written to.
            layer: what the layer sees.
            batch: where the tokens belong.
        """


class AttendTurned(Protocol):
    """The same for queries and keys that are still to be normed and turned."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: Heads,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        layer: AttentionLayer,
        batch: AttentionBatch,
    ) -> None:
        """Attend.

        Args:
            q: [1, tokens, heads * key width], as ``k`` and ``v``: rows as a linear made them.
            k: of keys.
            v: of values.
            heads: what is to be done to queries and keys.
            out: and the others, as in :class:`Attend`.
        """


class AttendLatent(Protocol):
    """The same for multi-head latent attention, in the absorbed form: the cache is never expanded to heads."""

    def __call__(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        up_projection: torch.Tensor,
        out: torch.Tensor,
        cache: torch.Tensor,
        layer: LatentLayer,
        batch: AttentionBatch,
    ) -> None:
        """Attend.

        Args:
            q: [tokens, heads, nope width + rope width].
            latent: [tokens, latent width].
            rope: [tokens, rope width]: the rotated part of the key, one for all heads.
            up_projection: [heads * (nope width + value width), latent width].
            out: [tokens, heads, value width], written to.
            cache: [blocks, block size, latent width + rope width], written to.
            layer: the widths.
            batch: where the tokens belong.
        """


class Supports(Protocol):
    """Whether a kernel can serve a layer."""

    def __call__(self, layer: AttentionLayer | LatentLayer, dtype: torch.dtype, device: torch.device) -> Support: ...


class UseFor(Protocol):
    """Whether a kernel that can serve all layers of a model is of use for it, and which layers it serves how."""

    def __call__(self, layers: Sequence[AttentionLayer | LatentLayer]) -> Support: ...


class CaptureSafe(Protocol):
    """Whether a kernel may be captured into a CUDA graph: all it reads of a batch, it reads on the device."""

    def __call__(self, kind: StepKind) -> Support: ...


class Prepare(Protocol):
    """Allocates what a kernel keeps between calls, such as a workspace: during a capture it must not be allocated.

    Called before the layers run, more than once for a model: what is there already should be kept.
    """

    def __call__(self, layers: Sequence[AttentionLayer | LatentLayer], device: torch.device) -> None: ...


class ReadBatch(Protocol):
    """Reads on the host what all layers of a group need of a batch; the kernel finds it in ``batch.host``.

    Called once for a step, before its layers run, where steps are not captured whole.
    """

    def __call__(self, batch: AttentionBatch) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernel:
    """One implementation of attention over the paged cache."""

    name: str
    supports: Supports
    capture_safe: CaptureSafe
    attend: Attend
    attend_turned: AttendTurned | None = None
    """None if heads are turned before it."""
    attend_latent: AttendLatent | None = None
    """None if it has no latent form."""
    prepare: Prepare | None = None
    """None if it keeps nothing between calls."""
    read_batch: ReadBatch | None = None
    """None if it reads a batch on the device, or in every layer anew."""
    use_for: UseFor | None = None
    """None if it serves all layers in the same way."""
    block_size: int = 16
    """Tokens in a block of the cache that suit it best."""
    compiles_when_launched: bool = False
    """Whether a launch waits for a compiler, which is not Triton's."""

    def attend_rows(
        self,
        rows: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        q_gain: torch.Tensor | None,
        k_gain: torch.Tensor | None,
        eps: float,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        layer: AttentionLayer,
        batch: AttentionBatch,
    ) -> None:
        """Attend with what one linear made of tokens, [1, tokens, width of queries, keys and values]."""
        q, k, v = rows.split([count * width for count, width in layer.heads], -1)
        heads = Heads(cos, sin, q_gain, k_gain, eps)
        if self.attend_turned is not None:
            self.attend_turned(q, k, v, heads, out, sinks, key_cache, value_cache, layer, batch)
            return
        q, k, v = rotate(q, k, v, heads)
        self.attend(q, k, v, out, sinks, key_cache, value_cache, layer, batch)

    def verdict(self, layer: AttentionLayer | LatentLayer, dtype: torch.dtype, device: torch.device) -> Support:
        """As ``supports``, and says no to a latent layer if there is no function for it."""
        if isinstance(layer, LatentLayer) and self.attend_latent is None:
            return Rejected("it has no latent form")
        return self.supports(layer, dtype, device)
