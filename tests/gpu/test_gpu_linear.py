"""Linears of few rows, against cuBLAS in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from piecegraph.llm.kernels import linear

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("columns", "depth"), [(4096, 1024), (1000, 72), (2048, 3072), (28672, 512), (4096, 4096), (64, 9000)]
)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 16, 17, 32, 33])
def test_few_rows(rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = (
        torch.randn(rows, depth, device="cuda", dtype=dtype),
        torch.randn(columns, depth, device="cuda", dtype=dtype),
    )
    bias = torch.randn(columns, device="cuda", dtype=dtype) if rows % 2 else None
    found = torch.ops.piecegraph.linear(x[None], weight, bias)
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert found.shape == (1, rows, columns)
    assert (found[0].float() - expected).norm() <= 4e-3 * expected.norm()
    assert linear.choose_tile(1, columns, depth) is not None
