"""Interceptions between real graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import piecegraph
from tests.engine.test_intercept import Model

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"backend": "eager"},
        {"backend": "inductor"},
        {"backend": "inductor", "cudagraph_mode": "full"},
        {"frontend": "breakable"},
    ],
    ids=str,
)
def test_observe_replace_and_go_back(arguments: dict[str, Any]) -> None:
    model = Model().to(CUDA).eval()
    fast = piecegraph.compile(model, capture_sizes=[16, 4], on_fallback="raise", **arguments)
    inputs = [torch.randn(size, 4, device=CUDA) for size in (16, 4, 3, 1)]
    with torch.no_grad():
        before = [fast(x) for x in inputs]
        with piecegraph.intercept(F.gelu, before=lambda x: None) as observed:
            for x, expected in zip(inputs, before, strict=True):
                torch.testing.assert_close(fast(x), expected, rtol=1e-4, atol=1e-4)
        assert observed.num_calls == 3 * len(inputs)
        compiles = fast.stats()["compiles"]
        with piecegraph.intercept(F.gelu, replace=torch.tanh, module="layers.1"):
            for _ in range(3):
                for x in inputs:
                    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
            assert fast.stats()["coverage"] == 1.0
        for x, expected in zip(inputs, before, strict=True):
            assert torch.equal(fast(x), expected)
        assert fast.stats()["compiles"] <= compiles + 2
