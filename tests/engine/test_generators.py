"""Generators of random numbers that a program keeps, seeds anew and replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

import piecegraph

SETTINGS: dict[str, Any] = {"backend": "eager", "options": {"graph_device": "simulated", "cache": False}}
KEPT: dict[str, Generator] = {}
SHARED = Generator()


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = Generator()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, generator=self.generator)


def _attribute() -> tuple[Callable[..., Tensor], Callable[[Generator], None]]:
    module = Noise()
    return module, lambda other: setattr(module, "generator", other)


def _global() -> tuple[Callable[..., Tensor], Callable[[Generator], None]]:
    def function(x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=SHARED)

    return function, lambda other: globals().__setitem__("SHARED", other)


def _closure() -> tuple[Callable[..., Tensor], Callable[[Generator], None]]:
    generator = Generator()

    def function(x: Tensor) -> Tensor:
        return torch.bernoulli(x + 0.5, generator=generator)

    def replace(other: Generator) -> None:
        nonlocal generator
        generator = other

    return function, replace


def _element() -> tuple[Callable[..., Tensor], Callable[[Generator], None]]:
    def function(x: Tensor) -> Tensor:
        return x.clone().normal_(generator=KEPT["noise"])

    return function, lambda other: KEPT.__setitem__("noise", other)


@pytest.mark.parametrize("make", [_attribute, _global, _closure, _element])
@pytest.mark.parametrize("frontend", ["auto", "breakable"])
def test_a_generator_that_is_replaced_is_drawn_from(frontend: str, make: Callable[[], Any]) -> None:
    function, replace = make()
    fast = piecegraph.compile(function, frontend=frontend, **SETTINGS)
    x = torch.zeros(4)

    def drawn(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        replace(Generator().manual_seed(1))
        results = [run(x) for _ in range(3)]
        replace(other := Generator().manual_seed(5))
        results += [run(x) for _ in range(3)]
        other.manual_seed(7)
        return [*results, run(x)]

    with torch.no_grad():
        assert torch.equal(torch.stack(drawn(fast)), torch.stack(drawn(function)))
    assert fast.stats()["replayed"] > 0
