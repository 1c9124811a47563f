"""Functions of torch that a program replaces by its own: a faster attention, one that keeps a log."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piecegraph
from piecegraph.base.torch_functions import describe_functions, replaced_functions

OPTIONS = {"graph_device": "simulated", "cache": False}


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[None], x[None], x[None])


def activate(x: Tensor) -> Tensor:
    return torch.sin(x).relu() + 1


def transform(x: Tensor) -> Tensor:
    return torch.fft.fft(x).real


def five_times(x: Tensor, *others: Any, **options: Any) -> Tensor:
    return x * 5


MODULE = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
CASES: list[tuple[Callable[[Tensor], Tensor], Any, str]] = [
    (attend, F, "scaled_dot_product_attention"),
    (activate, torch, "sin"),
    (activate, torch.Tensor, "relu"),
    (transform, torch.fft, "fft"),
    (MODULE, F, "linear"),
    (MODULE, F, "relu"),
]


@pytest.mark.parametrize("frontend", ["trace", "breakable"])
@pytest.mark.parametrize(("function", "home", "name"), CASES, ids=[name for _, _, name in CASES])
@torch.no_grad()
def test_they_are_called(
    function: Callable[[Tensor], Tensor], home: Any, name: str, frontend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = piecegraph.compile(function, backend="eager", frontend=frontend, options=OPTIONS)
    x = torch.randn(3, 4)
    plain, before = function(x), set(replaced_functions())  # packages replace some for all tests
    torch.testing.assert_close(fast(x), plain)
    for _ in range(2):  # a program may go to and fro
        with monkeypatch.context() as patch:
            patch.setattr(home, name, five_times, raising=False)
            assert [now for _, now in set(replaced_functions()) - before] == [five_times]
            other = function(x)
            assert not torch.allclose(other, plain)
            torch.testing.assert_close(fast(x), other)
        torch.testing.assert_close(fast(x), plain)
    assert len(fast.stats()["plans"]) == 2


@torch.no_grad()
def test_what_is_kept_on_a_disk_depends_on_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEGRAPH_CACHE", str(tmp_path))
    x = torch.randn(3, 4)

    def compiled() -> tuple[Tensor, str]:
        fast = piecegraph.compile(attend, backend="eager")
        return fast(x), fast.explain()

    plain, first = compiled()
    assert "cache: cold" in first
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", five_times)
        other, since = compiled()
        torch.testing.assert_close(other, x[None] * 5)
        assert "was kept: versions: functions of torch was " in since
    again, warm = compiled()
    assert torch.equal(again, plain)
    assert "cache: warm" in warm


class Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def relu(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_each_is_described_as_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    as_relu = functools.wraps(F.relu)
    one, other = as_relu(lambda x: x * 9), as_relu(lambda x: x + 9)
    double, triple = (functools.partial(torch.mul, other=number) for number in (2, 3))
    replaced = [Scaled(1).relu, Scaled(2).relu, double, triple, functools.cache(one), other, torch.sin, F.gelu]
    found = {describe_functions()}
    for function in replaced:
        monkeypatch.setattr(F, "relu", function)
        found.add(describe_functions())
    assert len(found) == len(replaced) + 1
    monkeypatch.undo()
    assert describe_functions() in found


def test_torch_replaces_none_by_itself() -> None:
    program = """
import torch
from piecegraph.base.torch_functions import replaced_functions
torch.compile(torch.sin, backend="eager")(torch.ones(3))
assert replaced_functions() == (), replaced_functions()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
