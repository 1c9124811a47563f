"""Modules whose code was generated: by torch.fx, by torch.export, by TorchScript."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecegraph
from piecegraph.errors import TraceError

WIDTH = 3
OPTIONS = {"graph_device": "simulated", "cache": False}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).eval()


def exported() -> nn.Module:
    size = torch.export.Dim("size")
    return torch.export.export(blocks(), (torch.ones(2, WIDTH),), dynamic_shapes=({0: size},)).module()


def scripted() -> nn.Module:
    return torch.jit.script(blocks())


def frozen() -> nn.Module:
    return torch.jit.freeze(scripted())  # type: ignore[no-any-return, no-untyped-call]


def jit_traced() -> nn.Module:
    return torch.jit.trace(blocks(), torch.ones(2, WIDTH))  # type: ignore[no-any-return, no-untyped-call]


def symbolically_traced() -> nn.Module:
    return torch.fx.symbolic_trace(blocks())


@pytest.mark.parametrize("frontend", ["auto", "trace", "breakable"])
@pytest.mark.parametrize("is_installed", [False, True], ids=["compiled", "installed"])
@pytest.mark.parametrize("make", [symbolically_traced, exported, jit_traced, scripted, frozen])
@torch.no_grad()
def test_they_run_as_others_do(make: Callable[[], nn.Module], is_installed: bool, frontend: Any) -> None:
    module, plain = make(), blocks()
    run: Callable[[Tensor], Tensor] = module
    how = piecegraph.install if is_installed else piecegraph.compile
    fast = how(module, backend="eager", frontend=frontend, on_fallback="ignore", options=OPTIONS)
    run = module if is_installed else fast  # type: ignore[assignment]
    is_refused = make in (jit_traced, scripted, frozen) and frontend == "trace"
    with pytest.raises(TraceError, match="PG201") if is_refused else contextlib.nullcontext():
        for size in (2, 3, 2):
            x = torch.randn(size, WIDTH)
            assert torch.equal(run(x), plain(x))
        if make is not frozen:  # its weights are constants
            for parameter in (*module.parameters(), *plain.parameters()):
                parameter.mul_(2)
        x = torch.randn(2, WIDTH)
        assert torch.equal(run(x), plain(x))


class ByName(nn.Module):
    """Looks its parts up by names that are no code."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = piecegraph.compile(lambda x: x * 2, backend="eager", options=OPTIONS)
        self.number = 2

    def forward(self, x: Tensor) -> Tensor:
        for name in ("linear", "scale"):
            x = getattr(self, name)(x)
        return x * vars(self)["number"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("frontend", ["auto", "breakable"])
@torch.no_grad()
def test_an_installed_module_may_look_up_its_own_attributes(frontend: Any) -> None:
    module, x = ByName(), torch.randn(2, WIDTH)
    expected = module(x)
    piecegraph.install(module, backend="eager", frontend=frontend, on_fallback="ignore", options=OPTIONS)
    for number in (2, 3, 2):
        module.number = number
        assert torch.equal(module(x), expected / 2 * number)
