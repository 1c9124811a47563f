"""What is compiled, or installed, inside of what is compiled: part of the outer plan, it runs once for a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecegraph


class Count(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x + self.count + torch.rand(1)


@pytest.mark.filterwarnings("ignore::piecegraph.errors.PiecegraphWarning")
@pytest.mark.parametrize("way", ["compile", "install"])
@pytest.mark.parametrize("device", ["simulated", "auto"])
@pytest.mark.parametrize("frontend", ["auto", "breakable"])
def test_it_does_what_it_does_alone(frontend: str, device: str, way: str) -> None:
    options = {"cache": False, **({"graph_device": device} if device == "simulated" else {})}
    settings: dict[str, Any] = {"frontend": frontend, "backend": "eager", "options": options}
    module, plain = Count(), Count()
    inner: Any = piecegraph.compile(module, **settings) if way == "compile" else module
    if way == "install":
        piecegraph.install(module, **settings)

    @piecegraph.compile(**settings)
    def outer(x: Tensor) -> Tensor:
        return inner(x) * 1

    with torch.no_grad():
        for seed, size in enumerate((3, 3, 5, 3)):
            torch.manual_seed(seed)
            expected = plain(torch.zeros(size, 2))
            torch.manual_seed(seed)
            assert torch.equal(outer(torch.zeros(size, 2)), expected)
            assert module.count == plain.count
