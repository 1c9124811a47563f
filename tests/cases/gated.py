"""A block as models have it: a linear whose columns are a gate and what it lets through, and one behind them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Gated(nn.Module):
    """In half precision, unless it is told otherwise."""

    def __init__(self, hidden: int, inner: int, dtype: torch.dtype = torch.bfloat16, *, has_bias: bool = False) -> None:
        super().__init__()
        self.both = nn.Linear(hidden, 2 * inner, bias=has_bias, dtype=dtype)
        self.down = nn.Linear(inner, hidden, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.down.in_features
        gate, up = self.both(x).split([inner, inner], -1)
        return self.down(F.silu(gate) * up)
