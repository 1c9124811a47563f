"""How the models of the benchmarks are checked, on any device."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.zoo import ZooModel

import piecegraph
from tests.cases.check import SEED, assert_same


def check_zoo_model(model: ZooModel, device: torch.device, **arguments: Any) -> Any:
    """Compare at several batch sizes, on and between buckets. Returns the compiled module."""
    torch.manual_seed(SEED)
    module = model.make(True).eval().to(device)
    fast = piecegraph.compile(module, on_fallback="raise", **model.arguments, **arguments)
    with torch.no_grad():
        for batch in (2, 1, 3, 4, 2):
            inputs = {name: tensor.to(device) for name, tensor in model.inputs(batch, True).items()}
            assert_same(fast(**inputs), module(**inputs), rtol=1e-3, atol=1e-3)
    assert fast.stats()["coverage"] == 1.0
    return fast
