"""Small modules, each with what makes it hard, for every backend and front end."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piecegraph

SIZES = (5, 8, 3, 1, 13, 16, 2)
"""Buckets of the tests are 4, 8 and 16: sizes on and between them, in no order."""
CAPTURE_SIZES = (4, 8, 16)


# --- ops between graphs
# ------------------------------------------------------------------------------------------------------


@torch.library.custom_op("pgtest::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over [tokens, heads, width] that returns a fresh tensor."""
    return _attend(q, k, v)


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("pgtest::attention_out", mutates_args=("out",))
def attention_out(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """The same, into memory the caller owns."""
    out.copy_(_attend(q, k, v))


@attention_out.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    return None


@torch.library.custom_op("pgtest::two_results", mutates_args=())
def two_results(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x.sum(-1)


@two_results.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[0])


@torch.library.custom_op("pgtest::unsafe", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def unsafe(x: Tensor) -> Tensor:
    return x + 1


@unsafe.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("pgtest::hidden_sync", mutates_args=())
def hidden_sync(x: Tensor) -> Tensor:
    """Reads data on the host, and does not say so."""
    x.sum().item()
    return x * 1.0


@hidden_sync.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@piecegraph.eager_op
def eager_attention(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Attention as a plain function with a structured result, for the breakable front end."""
    return {"out": _attend(q, k, v)}


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Row by row in exact arithmetic order: what comes later never touches what came before, not even as zero times
    NaN.
    """
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    later = torch.ones(q.shape[0], q.shape[0], dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    seen = (~later)[None, :, :, None]
    products = torch.where(
        seen, weights[..., None] * v.transpose(0, 1)[:, None], torch.zeros((), device=q.device, dtype=q.dtype)
    )
    return products.sum(2).transpose(0, 1).contiguous()


# --- modules
# -----------------------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A transformer block; ``attend`` is the op between the graphs."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.norm, self.qkv, self.out, self.mlp = nn.LayerNorm(12), nn.Linear(12, 36), nn.Linear(12, 12), MLP()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(x.shape[0], 3, 2, 6).unbind(1)
        x = x + self.out(self.attend(q, k, v).reshape(x.shape[0], 12))
        return self.mlp(x)


def attend_into(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.empty_like(q)
    attention_out(q, k, v, out)
    return out


class Stack(nn.Module):
    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(attend) for _ in range(num_layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass
class Results:
    hidden: Tensor
    count: int
    extra: dict[str, Any]


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Results:
        y = self.mlp(x)
        return Results(
            y,
            x.shape[0],
            {"pair": (y + 1, x), "name": "ok", "nothing": None, "view": x.view(-1), "weight": self.mlp.up.weight},
        )


class Counter(nn.Module):
    """Writes to a buffer at every call."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.mlp(x) * self.calls


class InputWriter(nn.Module):
    """Writes to its argument."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return x + 1


class TwoSizes(nn.Module):
    """Two independent sizes."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x[:, None, :] + y[None, :, :] * 2


class DropoutInEval(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.dropout = MLP(), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.mlp(x))


class SizeArithmetic(nn.Module):
    """Uses a derived size in several layers, as an MoE uses top_k * tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MLP() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        doubled = x.shape[0] * 2
        for layer in self.layers:
            pairs = layer(x)[:, None].expand(-1, 2, -1).reshape(doubled, 12)
            x = (
                attention(pairs.view(doubled, 2, 6), pairs.view(doubled, 2, 6), pairs.view(doubled, 2, 6))
                .reshape(-1, 2, 12)
                .sum(1)
            )
        return x


class TupleCut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        doubled, summed = two_results(self.mlp(x))
        return self.mlp(doubled) + summed[:, None]


class UnsafeTag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(unsafe(self.mlp(x)))


class HiddenSync(nn.Module):
    """Its first piece cannot be captured on a GPU, and only trying shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        y = hidden_sync(self.first(x)).view(-1, 2, 6)
        return self.last(attention(y, y, y).reshape(-1, 12))


class MixesRows(nn.Module):
    """Padding changes real rows: must be refused, and still be right."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class DividesBySize(nn.Module):
    """Padding changes the size the result depends on, not the rows it reads."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.shape[0]


class Squeezes(nn.Module):
    """Behaves differently at size one."""

    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze(0) * 2


class Branches(nn.Module):
    """Takes another branch for small sizes."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 4 else x * 3


class NonzeroInside(nn.Module):
    """A shape that depends on data in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        picked = y[y[:, 0] < 100]
        return self.mlp(y) + picked.sum(0)


@dataclass(frozen=True)
class ModuleCase:
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator, torch.device], tuple[Any, ...]] = lambda n, g, d: (
        torch.randn(n, 12, generator=g).to(d),
    )
    arguments: dict[str, Any] = field(default_factory=dict)
    """For ``compile``."""
    refuses_padding: bool = False
    losses: frozenset[str] = frozenset()
    """Codes of events that are expected from the trace front end."""
    breakable_losses: frozenset[str] = frozenset()


def _two_inputs(n: int, g: torch.Generator, d: torch.device) -> tuple[Any, ...]:
    return torch.randn(n, 12, generator=g).to(d), torch.randn(n // 2 + 1, 12, generator=g).to(d)


TWO_DIMS = {"dynamic_dims": {"x": {0: "rows"}, "y": {0: "columns"}}, "capture_sizes": [(16, 16), (8, 8), (4, 4)]}

MODULE_CASES = [
    ModuleCase("mlp", MLP),
    ModuleCase("fresh result", lambda: Stack(attention), arguments={"splitting_ops": [torch.ops.pgtest.attention]}),
    ModuleCase("out variant", lambda: Stack(attend_into), arguments={"splitting_ops": ["pgtest::attention_out"]}),
    ModuleCase(
        "overload as cut", lambda: Stack(attention), arguments={"splitting_ops": [torch.ops.pgtest.attention.default]}
    ),
    ModuleCase("not cut", lambda: Stack(attention)),
    ModuleCase("structured", Structured),
    ModuleCase("counter", Counter),
    ModuleCase("input writer", InputWriter),
    ModuleCase("two sizes", TwoSizes, _two_inputs, TWO_DIMS),
    ModuleCase("dropout in eval", DropoutInEval),
    ModuleCase("size arithmetic", SizeArithmetic, arguments={"splitting_ops": [attention]}),
    ModuleCase("tuple cut", TupleCut, arguments={"splitting_ops": ["pgtest::two_results"]}),
    ModuleCase("unsafe tag", UnsafeTag),
    ModuleCase("mixes rows", MixesRows, refuses_padding=True),
    ModuleCase("divides by size", DividesBySize, refuses_padding=True),
    ModuleCase("squeezes", Squeezes, losses=frozenset({"PG508"}), breakable_losses=frozenset({"PG504"})),
    ModuleCase("branches", Branches, losses=frozenset({"PG505"})),
    ModuleCase("nonzero inside", NonzeroInside, refuses_padding=True),
]
