"""How much the logits of a model may differ from those of transformers, and whether they do.

Note [How much may differ]
~~~~~~~~~~~~~~~~~~~~~~~~~~
In half precision two right answers differ by what rounding makes of them, and that depends on the model: routers on the
fence send a token to another expert, recurrences carry errors on. So the model itself is asked how much it makes of
rounding: its embeddings are jittered by half a rounding step, and its logits may differ by a multiple of what that does
to them. A model that is wrong is off by about the norm of its logits.

Single rows may be on the other side of a fence, so the rows are judged together: half of them must be close, and most
must not be far off. Prompts, what is behind the reach of a layer, and steps of decoding are other kernels, or other
ways through them, so each is judged by itself: few rows of one would be lost among many of another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

_TOLERANCES = ((0.5, 2e-3), (1.0, 1e-2))
"""In float32: a share of the rows, and what is allowed for them, of the norm of a row of logits. Some layers (Zamba2's)
compute one token by another formula than many, so that single rows of a right model differ by a little more.
"""
_HALF_TOLERANCES = ((0.5, 0.05), (0.8, 0.15))
"""In half precision: the same, if the model itself does not make more of rounding."""
_MOST_TOLERANCE = 0.6
"""What is never allowed, whatever the model makes of rounding."""
_ROUNDINGS = 4
"""Rounding happens in every layer, the jitter once."""

_FAR_OFF = 1e3
"""Of what is no number."""

Errors = Mapping[str, torch.Tensor]
"""By how much of their norm rows of logits differ, for each kind of rows. See Note [How much may differ]."""


@dataclass(frozen=True, slots=True)
class Finding:
    """How much some share of the rows of a kind differ at most, and what is allowed."""

    kind: str
    share: float
    difference: float
    allowed: float

    @property
    def severity(self) -> float:
        return self.difference / self.allowed


def findings(errors: Errors, dtype: torch.dtype) -> list[Finding]:
    """How much the rows of each kind differ, beside what is allowed in a precision."""
    tolerances = _TOLERANCES if dtype.itemsize > 2 else _HALF_TOLERANCES
    return [
        Finding(kind, share, float(rows.quantile(share)), allowed)
        for kind, rows in errors.items()
        for share, allowed in tolerances
        if len(rows)
    ]


def widened(found: Sequence[Finding], of_rounding: Errors) -> list[Finding]:
    """The same, allowing for what the model itself makes of rounding: the errors of :func:`jittered` logits."""
    return [
        replace(finding, allowed=_allowed(finding, float(of_rounding[finding.kind].quantile(finding.share))))
        for finding in found
    ]


def _allowed(finding: Finding, of_rounding: float) -> float:
    return min(_MOST_TOLERANCE, max(finding.allowed, _ROUNDINGS * of_rounding))


def row_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """By how much of its norm each row of logits is off."""
    norms: torch.Tensor = expected.float().norm(dim=-1).clamp(min=1e-6)
    differences: torch.Tensor = (found.float() - expected.float()).norm(dim=-1)
    return (differences / norms).nan_to_num(nan=_FAR_OFF, posinf=_FAR_OFF)


@contextlib.contextmanager
def jittered(model: Any) -> Iterator[None]:
    """Embeddings are off by half a rounding step at most. See Note [How much may differ]."""
    step = torch.finfo(model.dtype).eps / 2

    def jitter(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(output.shape, generator=torch.Generator().manual_seed(0)).to(output.device) * 2 - 1
        return (output.float() * (1 + step * noise)).to(output.dtype)

    hook = model.get_input_embeddings().register_forward_hook(jitter)
    try:
        yield
    finally:
        hook.remove()
