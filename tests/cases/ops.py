"""Single aten ops as functions of fresh inputs.

Each case makes new inputs on a device from a seed. ``refused`` names the code with which a case must be refused;
without it the result must be equal to the op's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

Make = Callable[[torch.Generator, torch.device], tuple[Any, ...]]


@dataclass(frozen=True)
class OpCase:
    name: str
    function: Callable[..., Any]
    make: Make
    refused: str | None = None
    inductor_draws_differently: bool = False
    """Inductor rewrites the op, so the same seed gives other numbers."""
    beyond_inductor: bool = False
    """Inductor fails on it: the piece runs as it was traced, and that is counted."""
    group: str = ""
    """Ops of one group take the same inputs, and may be compiled together."""


def _normal(*shape: int) -> Make:
    return lambda g, d: (torch.randn(shape, generator=g).to(d),)


def _two(*shape: int) -> Make:
    return lambda g, d: (torch.randn(shape, generator=g).to(d), torch.randn(shape, generator=g).to(d))


def _positive(*shape: int) -> Make:
    return lambda g, d: (torch.rand(shape, generator=g).to(d) + 0.1,)


def _ints(*shape: int) -> Make:
    return lambda g, d: (torch.randint(-9, 9, shape, generator=g).to(d), torch.randint(1, 9, shape, generator=g).to(d))


def _indexed(g: torch.Generator, d: torch.device) -> tuple[Any, ...]:
    return torch.randn(8, 6, generator=g).to(d), torch.randint(0, 8, (5,), generator=g).to(d)


def _gathered(g: torch.Generator, d: torch.device) -> tuple[Any, ...]:
    return (
        torch.randn(8, 6, generator=g).to(d),
        torch.randint(0, 8, (5, 6), generator=g).to(d),
        torch.randn(5, 6, generator=g).to(d),
    )


def _image(g: torch.Generator, d: torch.device) -> tuple[Any, ...]:
    return torch.randn(2, 3, 8, 8, generator=g).to(d), torch.randn(4, 3, 3, 3, generator=g).to(d)


def _spd(g: torch.Generator, d: torch.device) -> tuple[Any, ...]:
    a = torch.randn(5, 5, generator=g)
    return ((a @ a.T + 5 * torch.eye(5)).to(d),)


def _attention(g: torch.Generator, d: torch.device) -> tuple[Any, ...]:
    return tuple(torch.randn(2, 4, 8, 16, generator=g).to(d) for _ in range(3))


UNARY = (
    "abs acos angle arctan asinh atan ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 floor frac i0 "
    "isfinite isinf isnan lgamma log1p logical_not nan_to_num neg positive rad2deg reciprocal round sgn sigmoid sign "
    "signbit sin sinc sinh square tan tanh trunc"
).split()
POSITIVE = "log log10 log2 logit rsqrt sqrt".split()
BINARY = (
    "add atan2 copysign div eq fmax fmin ge gt hypot le logaddexp lt max maximum min minimum mul ne nextafter sub "
    "true_divide"
).split()
INTEGER = "bitwise_and bitwise_or bitwise_xor floor_divide fmod gcd lcm remainder".split()
REDUCTIONS = "all amax amin any argmax argmin count_nonzero logsumexp mean median nansum norm prod std sum var".split()
WITH_DIM = {"amax": (1,), "amin": (1,), "logsumexp": (1,)}
ACTIVATIONS = (
    "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 selu silu softplus "
    "softshrink softsign"
).split()


def _simple() -> list[OpCase]:
    cases = [OpCase(f"torch.{n}", getattr(torch, n), _normal(4, 5), group="unary") for n in UNARY]
    cases += [OpCase(f"torch.{n}", getattr(torch, n), _positive(4, 5), group="positive") for n in POSITIVE]
    cases += [OpCase(f"torch.{n}", getattr(torch, n), _two(4, 5), group="binary") for n in BINARY]
    cases += [OpCase(f"torch.{n}", getattr(torch, n), _ints(4, 5), group="integer") for n in INTEGER]
    for name in REDUCTIONS:
        function = getattr(torch, name)
        dim = WITH_DIM.get(name, ())
        call = lambda x, f=function, d=dim: f(x, *d)  # noqa: E731
        cases.append(OpCase(f"torch.{name}", call, _normal(4, 5), group="reductions"))
    cases += [OpCase(f"F.{n}", getattr(F, n), _normal(4, 5), group="activations") for n in ACTIVATIONS]
    return cases


def _add_(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


def _row_mul_(x: torch.Tensor) -> torch.Tensor:
    x[0].mul_(2)
    return x.sum()


def _setitem(x: torch.Tensor) -> torch.Tensor:
    x[1:3] = 0
    return x * 2


def _swap(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return y, x


def _dropout(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5, training=True)


def _item(x: torch.Tensor) -> torch.Tensor:
    return x * x.argmax().item()


SHAPES = [
    OpCase("cat", lambda x, y: torch.cat([x, y], 1), _two(4, 5)),
    OpCase("stack", lambda x, y: torch.stack([x, y]), _two(4, 5)),
    OpCase("hstack", lambda x, y: torch.hstack([x, y]), _two(4, 5)),
    OpCase("chunk", lambda x: torch.chunk(x, 2, 1), _normal(4, 6)),
    OpCase("split", lambda x: [p * 2 for p in x.split([1, 3])], _normal(4, 6)),
    OpCase("unbind", lambda x: x.unbind(), _normal(3, 6)),
    OpCase("view", lambda x: x.view(-1), _normal(4, 5)),
    OpCase("view then compute", lambda x: x.view(2, 10) + 1, _normal(4, 5)),
    OpCase("transpose", lambda x: x.transpose(0, 1), _normal(4, 5)),
    OpCase("permute contiguous", lambda x: x.permute(2, 0, 1).contiguous(), _normal(2, 3, 4)),
    OpCase("expand", lambda x: x.expand(3, 4, 5), _normal(4, 5)),
    OpCase("repeat", lambda x: x.repeat(2, 3), _normal(4, 5)),
    OpCase("flip", lambda x: x.flip(0), _normal(4, 5)),
    OpCase("roll", lambda x: torch.roll(x, 2, 0), _normal(4, 5)),
    OpCase("narrow", lambda x: x.narrow(0, 1, 2), _normal(4, 5)),
    OpCase("slice", lambda x: x[:, 1::2], _normal(4, 5)),
    OpCase("unsqueeze", lambda x: x.unsqueeze(1), _normal(4, 5)),
    OpCase("diagonal", lambda x: torch.diagonal(x), _normal(4, 4)),
    OpCase("tril", torch.tril, _normal(4, 4)),
    OpCase("as_strided", lambda x: x.as_strided((2, 2), (1, 2)), _normal(4, 5)),
    OpCase("pad", lambda x: F.pad(x, (1, 2)), _normal(4, 5)),
    OpCase("unfold", lambda x: x.unfold(0, 2, 1) * 1, _normal(6, 3)),
    OpCase("meshgrid", lambda x, y: torch.meshgrid(x[0], y[0], indexing="ij"), _two(1, 4)),
    OpCase("movedim", lambda x: torch.movedim(x, 0, 1) + 0, _normal(4, 5)),
    OpCase("identity", lambda x: x, _normal(4, 5)),
    OpCase("swap", _swap, _two(4, 5)),
    OpCase("contiguous of contiguous", lambda x: x.contiguous(), _normal(4, 5)),
    OpCase("to same dtype", lambda x: x.to(torch.float32), _normal(4, 5)),
    OpCase("to half", lambda x: x.to(torch.float16), _normal(4, 5)),
    OpCase("complex", lambda x, y: torch.complex(x, y).abs(), _two(4, 5)),
    OpCase("number", lambda x: x.shape[0] * 2, _normal(4, 5)),
    OpCase("shape", lambda x: (x + 1, x.shape), _normal(4, 5)),
    OpCase("none", lambda x: None, _normal(4, 5)),
]

INDEXING = [
    OpCase("index_select", lambda x, i: x.index_select(0, i), _indexed),
    OpCase("index", lambda x, i: x[i], _indexed),
    OpCase("take_along", lambda x, i, s: torch.take_along_dim(x, i, 0), _gathered),
    OpCase("gather", lambda x, i, s: x.gather(0, i), _gathered),
    OpCase("scatter", lambda x, i, s: x.scatter(0, i, 7.0), _gathered),
    OpCase("scatter_add one row", lambda x, i, s: x.scatter_add(0, i[:1], s[:1]), _gathered),
    OpCase("index_add_", lambda x, i: x.index_add_(0, i[:1], x[:1].clone()), _indexed),
    OpCase("index_copy", lambda x, i: x.index_copy(0, i[:1], x[1:2]), _indexed),
    OpCase("index_fill", lambda x, i: x.index_fill(0, i, 3.0), _indexed),
    OpCase("embedding", lambda x, i: F.embedding(i, x), _indexed),
    OpCase("one_hot", lambda x, i: F.one_hot(i, 8), _indexed),
    OpCase("masked_fill", lambda x: x.masked_fill(x > 0, -1.0), _normal(4, 5)),
    OpCase("where", lambda x, y: torch.where(x > y, x, y), _two(4, 5)),
    OpCase("bucketize", lambda x, y: torch.bucketize(x, y[0].sort().values), _two(4, 5)),
]

INPLACE = [
    OpCase("add_", _add_, _normal(4, 5)),
    OpCase("row mul_", _row_mul_, _normal(4, 5)),
    OpCase("setitem", _setitem, _normal(4, 5)),
    OpCase("relu_", lambda x: torch.relu_(x), _normal(4, 5)),
    OpCase("zero_", lambda x: x.zero_() + 1, _normal(4, 5)),
    OpCase("copy_", lambda x, y: x.copy_(y), _two(4, 5)),
    OpCase("iadd", lambda x, y: (x.__iadd__(y), x.sum()), _two(4, 5)),
    OpCase("out=", lambda x, y: torch.add(x, y, out=torch.empty_like(x)), _two(4, 5)),
    OpCase("clamp_", lambda x: x.clamp_(-1, 1), _normal(4, 5)),
    OpCase("fill_diagonal_", lambda x: x.fill_diagonal_(0.0), _normal(4, 4)),
]

SORTING = [
    OpCase("sort", lambda x: torch.sort(x, 1), _normal(4, 5)),
    OpCase("argsort", lambda x: torch.argsort(x, 1), _normal(4, 5)),
    OpCase("topk", lambda x: torch.topk(x, 3), _normal(4, 5)),
    OpCase("kthvalue", lambda x: torch.kthvalue(x, 2, 1), _normal(4, 5)),
    OpCase("max dim", lambda x: x.max(1), _normal(4, 5)),
    OpCase("cumsum", lambda x: x.cumsum(0), _normal(4, 5)),
    OpCase("cumprod", lambda x: x.cumprod(0), _normal(4, 5)),
    OpCase("cummax", lambda x: x.cummax(0), _normal(4, 5)),
    OpCase("searchsorted", lambda x, y: torch.searchsorted(x.sort(1).values, y), _two(4, 5)),
    OpCase("histc", lambda x: torch.histc(x, 4, -3, 3), _normal(40)),
]

LINEAR_ALGEBRA = [
    OpCase("matmul", torch.matmul, _two(5, 5)),
    OpCase("mm", torch.mm, _two(5, 5)),
    OpCase("bmm", torch.bmm, _two(2, 5, 5)),
    OpCase("addmm", lambda x, y: torch.addmm(x, x, y), _two(5, 5)),
    OpCase("baddbmm", lambda x, y: torch.baddbmm(x, x, y), _two(2, 5, 5)),
    OpCase("einsum", lambda x, y: torch.einsum("ij,jk->ki", x, y), _two(5, 5)),
    OpCase("outer", lambda x, y: torch.outer(x[0], y[0]), _two(1, 5)),
    OpCase("linear", lambda x, y: F.linear(x, y), _two(5, 5)),
    OpCase("dot", lambda x, y: torch.dot(x[0], y[0]), _two(1, 5)),
    OpCase("trace", torch.trace, _normal(5, 5)),
    OpCase("cholesky", torch.linalg.cholesky, _spd),
    OpCase("det", torch.linalg.det, _spd),
    OpCase("inv", torch.linalg.inv, _spd),
    OpCase("solve", lambda a: torch.linalg.solve(a, a[:, :2].contiguous()), _spd),
    OpCase("eigvalsh", torch.linalg.eigvalsh, _spd),
    OpCase("vector_norm", torch.linalg.vector_norm, _normal(5, 5)),
    OpCase("cdist", torch.cdist, _two(5, 5)),
    OpCase("kron", torch.kron, _two(2, 3)),
]

NETWORK = [
    OpCase("softmax", lambda x: F.softmax(x, -1), _normal(4, 5)),
    OpCase("log_softmax", lambda x: F.log_softmax(x, -1), _normal(4, 5)),
    OpCase("layer_norm", lambda x: F.layer_norm(x, (5,)), _normal(4, 5)),
    OpCase("rms_norm", lambda x: F.rms_norm(x, (5,)), _normal(4, 5)),
    OpCase("group_norm", lambda x: F.group_norm(x, 2), _normal(2, 4, 5)),
    OpCase("glu", lambda x: F.glu(x), _normal(4, 6)),
    OpCase("normalize", lambda x: F.normalize(x), _normal(4, 5)),
    OpCase("conv2d", lambda x, w: F.conv2d(x, w, padding=1), _image),
    OpCase("conv_transpose2d", lambda x, w: F.conv_transpose2d(x, w.transpose(0, 1).contiguous()), _image),
    OpCase("max_pool2d", lambda x, w: F.max_pool2d(x, 2), _image),
    OpCase("avg_pool2d", lambda x, w: F.avg_pool2d(x, 2), _image),
    OpCase("adaptive_avg_pool2d", lambda x, w: F.adaptive_avg_pool2d(x, 1), _image),
    OpCase("interpolate", lambda x, w: F.interpolate(x, scale_factor=2), _image),
    OpCase("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), _normal(1, 4, 3, 3)),
    OpCase(
        "scaled_dot_product_attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        _attention,
    ),
    OpCase("cross_entropy", lambda x, i: F.cross_entropy(x[:5], i.clamp(max=5)), _indexed),
    OpCase("mse_loss", F.mse_loss, _two(4, 5)),
    OpCase("cosine_similarity", F.cosine_similarity, _two(4, 5)),
    OpCase("fft", lambda x: torch.fft.rfft(x).abs(), _normal(4, 8)),
]

CREATION = [
    OpCase("arange", lambda x: torch.arange(4, device=x.device) + x, _normal(3, 4)),
    OpCase("zeros_like", torch.zeros_like, _normal(4, 5)),
    OpCase("full", lambda x: torch.full((2, 2), 3.0, device=x.device) + x, _normal(2, 2)),
    OpCase("eye", lambda x: torch.eye(4, device=x.device) @ x, _normal(4, 5)),
    OpCase("linspace", lambda x: torch.linspace(0, 1, 5, device=x.device) * x, _normal(4, 5)),
    OpCase("new_ones", lambda x: x.new_ones(x.shape[0]), _normal(4, 5)),
]

RANDOM = [
    OpCase("rand_like", torch.rand_like, _normal(40, 5)),
    OpCase("randn", lambda x: torch.randn(40, 5, device=x.device) + x, _normal(40, 5)),
    OpCase(
        "bernoulli",
        lambda x: torch.bernoulli(x.sigmoid()),
        _normal(40, 5),
        inductor_draws_differently=True,
    ),
    OpCase("dropout", _dropout, _normal(40, 5)),
    OpCase("multinomial", lambda x: torch.multinomial(x, 3), _positive(40, 5)),
    OpCase("uniform_", lambda x: x.uniform_(), _normal(40, 5)),
    OpCase("randperm", lambda x: x[torch.randperm(40, device=x.device)], _normal(40, 5), beyond_inductor=True),
]

DATA_DEPENDENT = [
    OpCase("nonzero", lambda x: (x > 0).nonzero(), _normal(4, 5)),
    OpCase("masked_select", lambda x: x[x > 0].sum() + x, _normal(4, 5)),
    OpCase("unique", lambda x: x.round().unique(), _normal(4, 5)),
    OpCase("item", _item, _normal(7)),
    OpCase("to cpu", lambda x: x.cpu() + 1, _normal(4, 5)),
]


def _branch(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.sum() > 0 else x - 1


REFUSED = [
    OpCase("data-dependent branch", _branch, _normal(4, 5), refused="PG201"),
    OpCase(
        "tolist",
        lambda x: torch.tensor([int(v) for v in (x > 0).nonzero()[:, 0].tolist()]),
        _normal(4, 5),
        refused="PG201",
    ),
    OpCase("resize_ of an input", lambda x: x.resize_(2, 2), _normal(4, 5), refused="PG201"),
    OpCase("numpy", lambda x: x.detach().cpu().numpy().sum(), _normal(4, 5), refused="PG2"),
]

GROUPS = {
    "rows": "repeat, flip, roll, pad, movedim, to half, masked_fill, sort, argsort, topk, max dim, cumsum, cumprod, "
    "cummax, softmax, log_softmax, layer_norm, rms_norm, normalize, zeros_like, linspace, new_ones",
    "pairs": "cat, stack, hstack, where, bucketize, searchsorted, mse_loss, cosine_similarity",
    "indexed": "index_select, index, index_copy, index_fill, embedding, one_hot, cross_entropy",
    "gathered": "take_along, gather, scatter, scatter_add one row",
    "images": "conv2d, conv_transpose2d, max_pool2d, avg_pool2d, adaptive_avg_pool2d, interpolate",
}
"""Of ops with the same inputs: those that make something new of any number of rows."""
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names.split(", ")}
OTHERS = [
    *SHAPES, *INDEXING, *INPLACE, *SORTING, *LINEAR_ALGEBRA, *NETWORK, *CREATION, *RANDOM, *DATA_DEPENDENT, *REFUSED,
]  # fmt: skip
OP_CASES = [*_simple(), *(replace(case, group=GROUP_OF.get(case.name, "")) for case in OTHERS)]
