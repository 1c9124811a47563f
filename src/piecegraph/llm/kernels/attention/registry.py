"""The attention kernels by name, and the choice of one for a model.

One kernel serves all layers of a model. ``auto`` takes the first kernel, in the order of :func:`attention_kernels`,
that supports every layer; the reason it gives names every kernel before it and why that was passed over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from piecegraph.errors import ConfigError
from piecegraph.llm.kernels.attention import cpu, fixed, flash, gluon_paged, reference, triton_paged, varlen
from piecegraph.llm.kernels.attention.kernel import (
    Attend,
    AttendLatent,
    AttentionKernel,
    CaptureSafe,
    Prepare,
    ReadBatch,
    Supports,
)
from piecegraph.llm.specs import Accepted, AttentionLayer, LatentLayer, Rejected, Support

_kernels: dict[str, AttentionKernel] = {
    module.KERNEL.name: module.KERNEL for module in (flash, gluon_paged, triton_paged, varlen, cpu, reference)
}
_by_name_only: set[str] = set()
_fixed = {kernel.name: kernel for kernel in (triton_paged.FIXED_KERNEL, fixed.KERNEL)}
"""The form of a kernel where what a query gets does not depend on what runs beside it."""


def attention_kernels() -> tuple[AttentionKernel, ...]:
    """All kernels, in the order in which ``auto`` tries them.

    >>> [kernel.name for kernel in attention_kernels()]
    ['flash', 'gluon', 'triton', 'varlen', 'cpu', 'reference']
    """
    return tuple(_kernels.values())


def register_attention(
    name: str,
    *,
    supports: Supports,
    capture_safe: CaptureSafe,
    attend: Attend,
    attend_latent: AttendLatent | None = None,
    prepare: Prepare | None = None,
    read_batch: ReadBatch | None = None,
    automatic: bool = False,
) -> AttentionKernel:
    """Add a kernel of your own, to be asked for by its name.

    Args:
        name: what ``attention=`` calls it.
        supports: whether it can serve a layer.
        capture_safe: whether it may run inside a CUDA graph, for a kind of batch.
        attend: the kernel.
        attend_latent: its latent form, if it has one.
        prepare: allocates its workspaces, if it has some. What ``attend`` allocates while it is captured belongs to
            that graph alone.
        read_batch: reads on the host what all layers of a step need, if that is of use.
        automatic: ``auto`` tries it too, before all kernels registered so far.
    """
    if name == "auto" or name in _kernels:
        raise ConfigError(
            "PG101",
            f"an attention kernel cannot be registered as {name!r}",
            why="the name is taken",
            hint="use another",
        )
    kernel = AttentionKernel(
        name=name,
        supports=supports,
        capture_safe=capture_safe,
        attend=attend,
        attend_latent=attend_latent,
        prepare=prepare,
        read_batch=read_batch,
    )
    others = dict(_kernels)
    _kernels.clear()
    _kernels.update({name: kernel, **others} if automatic else {**others, name: kernel})
    if not automatic:
        _by_name_only.add(name)
    return kernel


def unregister_attention(name: str) -> None:
    """Forget a kernel that was registered."""
    del _kernels[name]
    _by_name_only.discard(name)


def choose_kernel(
    wish: str,
    layers: Sequence[AttentionLayer | LatentLayer],
    dtype: torch.dtype,
    device: torch.device,
    *,
    deterministic: bool = False,
) -> tuple[AttentionKernel, str]:
    """The kernel that serves all layers, and why this one.

    Args:
        wish: ``"auto"`` or a name.
        layers: every attention layer of the model.
        dtype: of queries, keys, values and the cache.
        device: where they live.
        deterministic: what a query gets may not depend on what runs beside it.

    Raises:
        ConfigError: there is no kernel of that name, or it does not support a layer, or no kernel does.
    """
    if wish != "auto":
        kernel, note = _named(wish, layers, dtype, device, deterministic)
        return kernel, _noted("asked for by name", note)
    passed_over: list[str] = []
    for kernel in attention_kernels():
        if kernel.name in _by_name_only:
            continue
        kernel, verdict = _form_for_all(kernel, layers, dtype, device, deterministic)
        if isinstance(verdict, Accepted):
            rejections = f"; passed over: {'; '.join(passed_over)}" if passed_over else ""
            return kernel, _noted(f"the first that supports every layer{rejections}", verdict.note)
        passed_over.append(f"{kernel.name} ({verdict.reason})")
    assert deterministic, "the reference kernel supports everything"
    raise ConfigError(
        "PG101", "deterministic is True", why=f"no attention kernel can do that: {'; '.join(passed_over)}"
    )


def _named(
    name: str,
    layers: Sequence[AttentionLayer | LatentLayer],
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool,
) -> tuple[AttentionKernel, str]:
    """The kernel, and how it serves the layers."""
    if name not in _kernels:
        known = ", ".join(["auto", *_kernels])
        raise ConfigError(
            "PG101", f"there is no attention kernel {name!r}", why=f"known: {known}", hint="register it, or use auto"
        )
    kernel, verdict = _form_for_all(_kernels[name], layers, dtype, device, deterministic)
    if isinstance(verdict, Rejected):
        raise ConfigError(
            "PG101",
            f"the attention kernel {name!r} cannot serve this model",
            why=verdict.reason,
            hint='use attention="auto"',
        )
    return kernel, verdict.note


def _noted(reason: str, note: str) -> str:
    return f"{reason}; {note}" if note else reason


def _form_for_all(
    kernel: AttentionKernel,
    layers: Sequence[AttentionLayer | LatentLayer],
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool,
) -> tuple[AttentionKernel, Support]:
    """The form of a kernel that is wanted, and whether it serves all layers."""
    if deterministic:
        if kernel.name not in _fixed:
            return kernel, Rejected("what a query gets may depend on what runs beside it")
        kernel = _fixed[kernel.name]
    for layer in layers:
        verdict = kernel.verdict(layer, dtype, device)
        if isinstance(verdict, Rejected):
            return kernel, Rejected(f"attention layer {layer.index}: {verdict.reason}")
    return kernel, Accepted() if kernel.use_for is None else kernel.use_for(layers)
