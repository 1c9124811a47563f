"""Multi-head latent attention as attention with one wide head of keys.

Note [Absorbed latent attention]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A head's key is ``[up_k @ latent, rope]`` and its value ``up_v @ latent``. Because ``(up_k @ latent) . q`` equals
``latent . (up_k^T @ q)``, the query can be carried into the latent space instead of every cached key out of it;
likewise ``up_v`` can be applied once, to the weighted sum of latents. What is left is attention of all heads over one
shared key ``[latent, rope]`` whose first part is also the value: the cache as it is.
"""

from __future__ import annotations

from typing import Protocol

import torch

from piecegraph.llm.specs import AttentionBatch, AttentionLayer, LatentLayer


class AttendCached(Protocol):
    """Attends over a cache that holds the keys and values of the batch already."""

    def __call__(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        layer: AttentionLayer,
        batch: AttentionBatch,
    ) -> None: ...


def attend_absorbed(
    attend_cached: AttendCached,
    q: torch.Tensor,
    up_projection: torch.Tensor,
    out: torch.Tensor,
    cache: torch.Tensor,
    layer: LatentLayer,
    batch: AttentionBatch,
) -> None:
    """The absorbed form in plain torch, over a cache that holds the latents of the batch already."""
    weights = up_projection.to(compute_type(q))
    wide_q = q.to(weights.dtype)
    absorbed = torch.cat([absorb_query(wide_q, weights, layer), wide_q[..., layer.nope_width :]], -1)
    summed = absorbed.new_empty(*absorbed.shape[:2], layer.latent_width)
    keys, values = cache.unsqueeze(2), cache[..., : layer.latent_width].unsqueeze(2)
    attend_cached(absorbed, summed, None, keys, values, shared_key_layer(layer), batch)
    projected = torch.empty_like(out, dtype=weights.dtype)
    project_values(summed, weights, projected, layer)
    out.copy_(projected)


def compute_type(tensor: torch.Tensor) -> torch.dtype:
    """What plain torch computes in: half types are too coarse for sums over many keys."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def shared_key_layer(layer: LatentLayer) -> AttentionLayer:
    """The layer that is left once the projections are absorbed."""
    return AttentionLayer(
        index=layer.index,
        group=layer.group,
        num_heads=layer.num_heads,
        num_kv_heads=1,
        key_width=layer.latent_width + layer.rope_width,
        value_width=layer.latent_width,
        scale=layer.scale,
    )


def absorb_query(q: torch.Tensor, up_projection: torch.Tensor, layer: LatentLayer) -> torch.Tensor:
    """The part of each query that meets the latent, carried into its space: [tokens, heads, latent width].

    Its memory is ordered by head, as the product leaves it.
    """
    key_part = _by_head(up_projection, layer)[:, : layer.nope_width]
    return torch.bmm(q[..., : layer.nope_width].transpose(0, 1), key_part).transpose(0, 1)


def project_values(summed: torch.Tensor, up_projection: torch.Tensor, out: torch.Tensor, layer: LatentLayer) -> None:
    """Carry each head's sum of latents [tokens, heads, latent width] out of the latent space, into ``out``."""
    value_part = _by_head(up_projection, layer)[:, layer.nope_width :]
    torch.bmm(summed.transpose(0, 1), value_part.transpose(1, 2), out=out.transpose(0, 1))


def _by_head(up_projection: torch.Tensor, layer: LatentLayer) -> torch.Tensor:
    return up_projection.view(layer.num_heads, layer.nope_width + layer.value_width, layer.latent_width)
