"""What kernels for plain prompts on Hopper GPUs say of themselves: all else is left to our Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from piecegraph.llm.kernels.attention import triton_paged
from piecegraph.llm.kernels.chip import is_hopper
from piecegraph.llm.specs import Accepted, AttentionLayer, LatentLayer, Rejected, Support


def supports(layer: AttentionLayer | LatentLayer, dtype: torch.dtype, device: torch.device) -> Support:
    """See :class:`~piecegraph.llm.kernels.attention.kernel.Supports`."""
    if not is_hopper(device):
        return Rejected("it is for Hopper GPUs")
    if dtype not in (torch.float16, torch.bfloat16):
        return Rejected(f"{dtype} is neither float16 nor bfloat16")
    return triton_paged.KERNEL.supports(layer, dtype, device)


def why_left(layer: AttentionLayer | LatentLayer, widths: Sequence[int]) -> str:
    """Why the prompts of a layer are left; empty if they are not.

    Args:
        layer: what it has to serve.
        widths: of heads, which the other kernel takes.
    """
    if isinstance(layer, LatentLayer):
        return "latent"
    if layer.window or layer.chunk:
        return "a limited reach"
    if layer.softcap or layer.has_sinks:
        return "a soft cap or sinks"
    if layer.key_width != layer.value_width or layer.key_width not in widths:
        return f"heads of {layer.key_width} and {layer.value_width}"
    return ""


def use_for(layers: Sequence[AttentionLayer | LatentLayer], widths: Sequence[int], kernel: str) -> Support:
    """See :class:`~piecegraph.llm.kernels.attention.kernel.UseFor`.

    Args:
        layers: of a model.
        widths: of heads, which the kernel takes.
        kernel: what serves prompts, and of which steps.
    """
    reasons = [why_left(layer, widths) for layer in layers]
    left = sorted({reason for reason in reasons if reason})
    if layers and all(reasons):
        return Rejected(f"prompts of no layer: {', '.join(left)}")
    others = f"; in {sum(map(bool, reasons))} layers by triton ({', '.join(left)})" if left else ""
    return Accepted(f"prompts by {kernel}{others}")
