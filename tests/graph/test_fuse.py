"""Linears of one input become one matmul, where nothing can tell the difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piecegraph
from piecegraph.base import torch_compat
from tests.cases.modules import attention


class Layer(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(12, 12, bias), nn.Linear(12, 12, bias), nn.Linear(12, 12, bias)
        self.out, self.gate, self.up, self.down = (
            nn.Linear(12, 12, bias), nn.Linear(12, 20, bias), nn.Linear(12, 20, bias), nn.Linear(20, 12, bias),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).view(-1, 2, 6) for part in (self.q, self.k, self.v))
        x = x + self.out(attention(q, k, v).reshape(-1, 12))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(bias=bias) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def compile_fused(model: nn.Module, **arguments: Any) -> Any:
    options = {"graph_device": "simulated", "fuse_linears": True}
    arguments = {"backend": "eager", "on_fallback": "raise", "capture_sizes": [8, 4], **arguments}
    return piecegraph.compile(model, splitting_ops=[attention], **arguments, options=options)


def count_linears(fast: Any) -> int:
    program = fast._engine.plans[0].body._program
    codes = [step.function.__self__.code for step in program.steps if step.is_captured]
    return sum(code.count("linear(") for code in codes)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_the_result_is_the_same(bias: bool, backend: str) -> None:
    model = Model(bias=bias)
    fast = compile_fused(model, backend=backend)
    with torch.no_grad():
        for size in (8, 3, 4, 8):
            x = torch.randn(size, 12)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert fast.stats()["compiles"] == 3, "layers are still equal"
    assert (
        "fused linears: 8 groups (layers.0.q + layers.0.k + layers.0.v; layers.0.gate + layers.0.up" in fast.explain()
    )


def test_four_matmuls_a_layer_are_left_of_seven() -> None:
    fast = compile_fused(Model())
    with torch.no_grad():
        fast(torch.randn(8, 12))
    assert count_linears(fast) == 4 * 4


def test_equal_layers_take_torch_no_longer_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run_fake = torch_compat.run_fake
    monkeypatch.setattr(torch_compat, "run_fake", lambda *args: calls.append(args) or run_fake(*args))
    with torch.no_grad():
        compile_fused(Model()).capture(torch.randn(8, 12))
    assert len(calls) == 4, "what q, k and v make together, and what gate and up make; of each, its parts"


def test_nothing_is_stored_twice_and_loading_weights_reaches_the_graphs() -> None:
    model, other = Model(), Model()
    fast = compile_fused(model)
    with torch.no_grad():
        x = torch.randn(8, 12)
        fast(x)
        layer = model.layers[0]
        assert layer.k.weight.data_ptr() == layer.q.weight.data_ptr() + layer.q.weight.numel() * 4
        fast.load_state_dict(other.state_dict())
        torch.testing.assert_close(fast(x), other(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_called_in_it", [False, True])
def test_a_model_that_was_made_in_inference_mode_stays_one(is_called_in_it: bool) -> None:
    with torch.inference_mode():
        model = Model(bias=True)
    model.layers[1].k = torch.nn.Linear(12, model.layers[1].k.out_features)
    fast, x = compile_fused(model), torch.randn(8, 12)
    with torch.inference_mode(is_called_in_it), torch.no_grad():
        expected = model(x)
        for _ in range(2):
            torch.testing.assert_close(fast(x), expected, rtol=1e-4, atol=1e-5)
        assert "fused linears: 7 groups" in fast.explain(), "one group was made in both modes"
        torch.testing.assert_close(model(x), expected)
        fast.close()
        torch.testing.assert_close(model(x), expected)
    assert not fast.stats()["events"]


def test_close_gives_the_parameters_their_own_memory_back() -> None:
    model = Model()
    fast = compile_fused(model)
    with torch.no_grad():
        x = torch.randn(8, 12)
        expected = model(x)
        fast(x)
        fast.close()
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert len(storages) == len(list(model.parameters()))


def test_a_second_plan_finds_the_weights_joined() -> None:
    model = Model().eval()
    fast = compile_fused(model, dynamic_dims={"x": 0})
    with torch.no_grad():
        fast(torch.randn(8, 12))
        model.train()
        fast.capture(torch.randn(8, 12))
        for training in (True, False):
            model.train(training)
            x = torch.randn(8, 12)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_weights_that_move_afterwards_are_noticed() -> None:
    model = Model()
    fast = compile_fused(model, padding="never")
    with torch.no_grad():
        x = torch.randn(8, 12)
        fast.capture(x)
        model.layers[2].v.weight.data = model.layers[2].v.weight.data * 2
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert "layers.2.v.weight" in fast.explain()


class Tied(nn.Module):
    """One weight in two groups, an input that is written to in between, other inputs, a single bias."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 12, False), nn.Linear(12, 12, False), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        first = self.a(y)
        y.add_(1)
        return first + self.b(y) + self.c(y) + self.a(x)


def test_what_cannot_be_joined_is_left_alone() -> None:
    model = Tied()
    fast = compile_fused(model)
    with torch.no_grad():
        x = torch.randn(8, 12)
        torch.testing.assert_close(fast(x), model(x))
    assert "fused linears: 0 groups" in fast.explain()


def test_a_joined_matmul_has_the_places_of_all_its_linears(tmp_path: Path) -> None:
    options = {"fuse_linears": True, "provenance": True, "graph_device": "simulated"}
    with torch.no_grad():
        fast = piecegraph.compile(Layer(bias=False), backend="eager", dynamic_dims={"x": 0}, options=options)
        fast(torch.ones(4, 12))
        (joint,) = fast.kernels.select(op="aten::mm", module="k").kernels
        assert joint.call is not None
        assert [origin.module for origin in joint.call.origins] == ["q", "k", "v"]
        (saved,) = fast.kernels.select(op="aten::mm", module="k").dump(tmp_path)
    assert torch.load(saved)["outputs"].shape == (4, 36)
