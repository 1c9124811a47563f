"""Multi-head latent attention as attention with one wide head of keys.

Note [Absorbed latent attention]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A head's key is ``[up_k @ latent, rope]`` and its value ``up_v @ latent``. Because ``(up_k @ latent) . q`` equals
``latent . (up_k^T @ q)``, the query can be carried into the latent space instead of every cached key out of it;
likewise ``up_v`` can be applied once, to the weighted sum of latents. What is left is attention of all heads over one
shared key ``[latent, rope]`` whose first part is also the value: the cache as it is.
"""

from __future__ import annotations

import torch

from piecegraph.llm.specs import AttentionLayer, LatentLayer


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
