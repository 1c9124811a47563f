"""Linears of few rows and what stands around them, against float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from piecegraph.llm.kernels import many_rows, skinny
from piecegraph.llm.kernels.attention import triton_paged
from piecegraph.llm.kernels.linear import has_gated_kernel
from piecegraph.llm.kernels.many_rows import Tiles
from piecegraph.llm.kernels.skinny import Heads, Linear
from piecegraph.llm.specs import AttentionBatch, AttentionLayer

pytestmark = pytest.mark.gpu


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("columns", "depth"), [(4096, 1024), (1000, 72), (2048, 3072), (28672, 512), (4096, 4096), (64, 9000)]
)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 16, 17, 32, 33])
def test_few_rows(rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = draw(rows, depth, dtype=dtype), draw(columns, depth, dtype=dtype)
    bias = draw(columns, dtype=dtype) if rows % 2 else None
    found = torch.ops.piecegraph.linear(x[None], weight, bias)
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert found.shape == (1, rows, columns)
    assert (found[0].float() - expected).norm() <= 4e-3 * expected.norm()
    assert skinny.choose_tile(1, columns, depth) is not None


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("columns", "depth"), [(4096, 1024), (1024, 2048), (1000, 72), (1000, 512), (4096, 4096), (66, 9000)]
)
@pytest.mark.parametrize("rows", [1, 2, 8, 17, 32, 33])
def test_what_is_around_a_linear(rows: int, columns: int, depth: int, has_norm: bool, is_gated: bool) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16
    linear = Linear(
        draw(2 * columns if is_gated else columns, depth, dtype=dtype) / depth**0.5,
        draw(2 * columns if is_gated else columns, dtype=dtype) if rows == 8 else None,
        draw(depth, dtype=dtype) if has_norm else None,
        1e-6,
        None if is_gated else draw(1, rows, columns, dtype=dtype),
        is_gated,
    )
    x = draw(1, rows, depth, dtype=dtype)
    expected = skinny.plain(x.float(), _wide(linear))
    for early in (False, True):
        found = skinny.multiply(x, linear, early=early)
        assert found.shape == (1, rows, columns)
        assert (found.float() - expected).norm() <= 8e-3 * expected.norm()


@pytest.mark.parametrize("tiles", many_rows._TILES, ids=lambda tiles: f"{tiles.width}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("columns", "depth"), [(3072, 1024), (1000, 72), (136, 520), (14336, 4096)])
@pytest.mark.parametrize("rows", [17, 64, 65, 128, 129, 300, 1000, 2500])
def test_gates_of_many_rows(
    rows: int, columns: int, depth: int, dtype: torch.dtype, tiles: Tiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every size with every tile, though another might be chosen; rows that lie apart, too."""
    if not has_gated_kernel(torch.device("cuda", 0)):
        pytest.skip("this is no Hopper GPU, or an older Triton")
    torch.manual_seed(0)
    monkeypatch.setattr(many_rows, "choose_tiles", lambda *sizes: tiles)
    weight = draw(2 * columns, depth, dtype=dtype) / depth**0.5
    x = draw(rows, depth + 8, dtype=dtype)[:, :depth]
    linear = Linear(weight, is_gated=True)
    expected = skinny.plain(x.float(), _wide(linear))
    torch.empty_like(expected, dtype=dtype).fill_(float("nan"))  # what the result finds in its memory
    found = torch.ops.piecegraph.fused_linear(x[None], weight, None, None, 0.0, None, True, False)
    assert found.shape == (1, rows, columns)
    assert (found[0].float() - expected).norm() <= 4e-3 * expected.norm()
    assert (found[0].float() - expected).abs().max() <= 2e-2 * expected.abs().max()


@pytest.mark.parametrize(("columns", "depth", "rows"), [(14336, 4096, 192), (3072, 1024, 320), (72, 64, 100)])
def test_gates_that_are_left_to_cublas(columns: int, depth: int, rows: int) -> None:
    torch.manual_seed(0)
    linear = Linear(draw(2 * columns, depth, dtype=torch.bfloat16) / depth**0.5, is_gated=True)
    x = draw(rows, depth, dtype=torch.bfloat16)
    assert many_rows.choose_tiles(rows, columns, depth, 132) is None or rows == 100
    found, expected = skinny.multiply(x, linear), skinny.plain(x.float(), _wide(linear))
    assert (found.float() - expected).norm() <= 8e-3 * expected.norm()


def test_gates_of_many_rows_in_a_graph() -> None:
    """Places in shared memory, and their barriers, begin anew with every replay."""
    torch.manual_seed(0)
    linears = [Linear(draw(2 * 1024, 1024, dtype=torch.bfloat16) / 32, is_gated=True) for _ in range(6)]
    x = draw(700, 1024, dtype=torch.bfloat16)

    def run() -> torch.Tensor:
        hidden = x
        for linear in linears:
            hidden = skinny.multiply(hidden, linear)
        return hidden

    assert_replays_give(run(), run)


def _wide(linear: Linear) -> Linear:
    tensors = (linear.weight, linear.bias, linear.gain, linear.residual)
    weight, bias, gain, residual = (None if tensor is None else tensor.float() for tensor in tensors)
    assert weight is not None
    return Linear(weight, bias, gain, linear.eps, residual, linear.is_gated)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("num_q", "num_k", "width"), [(16, 8, 128), (4, 4, 64), (6, 2, 80)])
@pytest.mark.parametrize("tokens", [1, 7])
def test_heads_are_turned(tokens: int, num_q: int, num_k: int, width: int, has_norm: bool) -> None:
    torch.manual_seed(0)
    rows = draw(1, tokens, (num_q + 2 * num_k) * width, dtype=torch.bfloat16)
    parts = rows.split([num_q * width, num_k * width, num_k * width], -1)
    gains = [draw(width, dtype=torch.bfloat16) if has_norm else None for _ in range(2)]
    heads = Heads(*(draw(1, tokens, width, dtype=torch.bfloat16) for _ in range(2)), *gains, 1e-6)
    wide = Heads(*(None if part is None else part.float() for part in (heads.cos, heads.sin, *gains)), 1e-6)  # type: ignore[arg-type]
    expected = skinny.plain_rotate(*(part.float() for part in parts), wide)
    found = skinny.rotate(*parts, heads)
    for one, other, count in zip(found, expected, (num_q, num_k, num_k), strict=True):
        assert one.shape == (tokens, count, width)
        assert one.is_contiguous()
        assert (one.float() - other).norm() <= 8e-3 * other.norm()


@pytest.mark.parametrize("rows", [1, 8, 16, 17, 64])
def test_a_chain_of_early_kernels_in_a_graph(rows: int) -> None:
    """Each reads what the one before it wrote: beginning too early would show."""
    torch.manual_seed(0)
    gates, downs = ([draw(*shape, dtype=torch.bfloat16) / 32 for _ in range(12)] for shape in ((2048, 1024),) * 2)
    gain = torch.ones(1024, device="cuda", dtype=torch.bfloat16)
    x = draw(rows, 1024, dtype=torch.bfloat16)

    def run(early: bool) -> torch.Tensor:
        hidden = x
        for gate, down in zip(gates, downs, strict=True):
            inner = skinny.multiply(hidden, Linear(gate, None, gain, 1e-6, is_gated=True), early=early)
            hidden = skinny.multiply(inner, Linear(down[:1024], residual=hidden), early=early)
        return hidden

    expected = run(False)
    assert_replays_give(expected, lambda: run(True))


def assert_replays_give(expected: torch.Tensor, run: Callable[[], torch.Tensor]) -> None:
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(20):
        graph.replay()
        assert torch.equal(found, expected)


WIDTH, Q_HEADS, K_HEADS = 128, 16, 8


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 8, 64])
def test_attention_turns_heads(rows: int, has_norm: bool) -> None:
    """Alone, and in a chain with linears around it, in which all wait in line."""
    torch.manual_seed(0)
    layer = AttentionLayer(
        index=0, group=0, num_heads=Q_HEADS, num_kv_heads=K_HEADS, key_width=WIDTH, value_width=WIDTH, scale=WIDTH**-0.5
    )
    gains = [draw(WIDTH, dtype=torch.bfloat16) if has_norm else None for _ in range(2)]
    heads = Heads(*(draw(1, rows, WIDTH, dtype=torch.bfloat16) for _ in range(2)), *gains, 1e-6)
    batch, caches = (
        _decode_batch(rows, 160),
        [draw(rows * 10 + 1, 16, K_HEADS, WIDTH, dtype=torch.bfloat16) for _ in "kv"],
    )
    widths = [count * width for count, width in layer.heads]
    qkv, output = (draw(*shape, dtype=torch.bfloat16) / 32 for shape in ((sum(widths), 1024), (1024, Q_HEADS * WIDTH)))
    x = draw(1, rows, 1024, dtype=torch.bfloat16)
    triton_paged.prepare([layer], x.device)

    def attend(hidden: torch.Tensor, is_turned_before: bool) -> torch.Tensor:
        parts = skinny.multiply(hidden, Linear(qkv), early=True).split(widths, -1)
        out = torch.empty(rows, Q_HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
        if is_turned_before:
            triton_paged.attend(*skinny.rotate(*parts, heads), out, None, *caches, layer, batch)
        else:
            triton_paged.attend_turned(*parts, heads, out, None, *caches, layer, batch)
        return out

    def run(pause: Callable[[], None]) -> torch.Tensor:
        hidden = x
        for _ in range(8):
            out = attend(hidden, False)
            pause()
            hidden = skinny.multiply(out.view(1, rows, -1), Linear(output, residual=x), early=True)
            pause()
        return hidden

    one, other = attend(x, False), attend(x, True)
    assert (one - other).float().norm() <= 8e-3 * other.float().norm()
    assert_replays_give(run(torch.cuda.synchronize), lambda: run(lambda: None))


def _decode_batch(rows: int, length: int) -> AttentionBatch:
    table = (torch.randperm(rows * (length // 16), device="cuda") + 1).view(rows, -1)
    return AttentionBatch(
        query_starts=torch.arange(rows + 1, dtype=torch.int32, device="cuda"),
        seq_lens=torch.full((rows,), length, dtype=torch.int32, device="cuda"),
        block_table=table.int(),
        slots=table[:, -1] * 16 + 15,
        block_size=16,
        max_query_len=1,
        max_seq_len=4096,
    )
