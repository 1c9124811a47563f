"""Which layers a kernel for plain prompts leaves to our Triton kernels, in words."""

from __future__ import annotations

from collections.abc import Sequence

from piecegraph.llm.specs import Accepted, AttentionLayer, LatentLayer, Rejected, Support


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
