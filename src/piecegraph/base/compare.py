"""Whether two results are the same: up to rounding, or to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Relative to the norm. Wide enough for the same arithmetic at another size (other kernels, TF32), far below a
changed row.
"""


def difference(found: Any, expected: Any) -> str | None:
    """What differs between two values, or None if they agree."""
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        return (
            None
            if type(found) is type(expected) and found == expected
            else f"{found!r:.40} instead of {expected!r:.40}"
        )
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{found.dtype} {tuple(found.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    if not (expected.is_floating_point() or expected.is_complex()):
        return None if torch.equal(found, expected) else "other values"
    wide = torch.complex128 if expected.is_complex() else torch.float64
    limit = TOLERANCE.get(expected.dtype, 1e-3)
    found, expected = found.detach().to(wide), expected.detach().to(wide)
    if bool((found.isnan() != expected.isnan()).any()):
        return "NaN"
    if bool((found.isinf() != expected.isinf()).any()):
        return "other infinities"
    kept = ~expected.isnan() & ~expected.isinf()
    a, b = (torch.where(kept, t, 0) for t in (found, expected))
    error = float((a - b).abs().norm() / b.abs().norm().clamp_min(1e-30)) if b.numel() else 0.0
    return None if error <= limit else f"a relative difference of {error:.1e}"


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over the norm of what is expected."""
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm().clamp_min(1e-30))


def first_difference(found: Sequence[Any], expected: Sequence[Any]) -> str | None:
    """The first difference in two lists of values."""
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        text = difference(a, b)
        if text is not None:
            return f"{text} in result {index}"
    return None


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and type hold the same bits: NaN is then equal to itself."""
    return torch.equal(_bytes_of(a), _bytes_of(b))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """What every type can be compared as: ``torch.equal`` has no kernel for some."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride until here
