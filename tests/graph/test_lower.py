"""Compiling: each distinct piece once, passes and options in the key, failures counted and survived."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecegraph
from piecegraph.errors import FallbackError
from tests.cases.modules import SizeArithmetic, Stack, attend_into, attention

OPS = [attention, torch.ops.pgtest.attention_out]


def compile_stack(num_layers: int, **arguments: Any) -> Any:
    fast = piecegraph.compile(Stack(attention, num_layers), splitting_ops=OPS, capture_sizes=[8], **arguments)
    with torch.no_grad():
        fast(torch.randn(8, 12))
    return fast


@pytest.mark.parametrize("num_layers", [2, 5, 9])
@pytest.mark.parametrize("attend", [attention, attend_into])
def test_equal_layers_are_three_compiles(num_layers: int, attend: Any) -> None:
    calls = []

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        calls.append(module)
        return module.forward

    model = Stack(attend, num_layers)
    fast = piecegraph.compile(model, splitting_ops=OPS, capture_sizes=[8], backend=backend)
    x = torch.randn(8, 12)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    stats = fast.stats()
    assert stats["compiles"] == len(calls) == 3
    assert stats["plans"][0]["pieces"] == num_layers + 1
    assert fast.plan.num_distinct == 3


def test_inductor_compiles_equal_layers_once() -> None:
    assert compile_stack(4).stats()["compiles"] == 3


def test_derived_sizes_do_not_make_layers_different() -> None:
    fast = piecegraph.compile(SizeArithmetic(), splitting_ops=[attention], capture_sizes=[8], backend="eager")
    with torch.no_grad():
        fast(torch.randn(8, 12))
    assert fast.plan.num_distinct == 3


class DifferentConstants(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for factor in (2.0, 2.0, 3.0):
            x = attention(*[(x * factor).view(-1, 2, 6)] * 3).reshape(-1, 12)
        return x


def test_other_constants_are_other_pieces() -> None:
    fast = piecegraph.compile(DifferentConstants(), splitting_ops=[attention], dynamic_dims={"x": 0}, backend="eager")
    with torch.no_grad():
        fast(torch.randn(8, 12))
    assert fast.plan.num_distinct == 4


def swap_gelu_for_relu(module: torch.fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "gelu":
            node.target = torch.relu
            node.kwargs = {}


def test_passes_change_the_pieces_and_their_keys() -> None:
    plain, changed = compile_stack(2, backend="eager"), compile_stack(2, backend="eager", passes=[swap_gelu_for_relu])
    plain_keys, changed_keys = ([piece.key for piece in fast.plan.pieces] for fast in (plain, changed))
    assert not set(plain_keys) & set(changed_keys)
    model = Stack(attention, 2)
    fast = piecegraph.compile(model, splitting_ops=OPS, backend="eager", passes=[swap_gelu_for_relu])
    x = torch.randn(8, 12)
    with torch.no_grad():
        found = fast(x)
        original, torch.nn.functional.gelu = torch.nn.functional.gelu, torch.relu
        try:
            expected = model(x)
        finally:
            torch.nn.functional.gelu = original
    torch.testing.assert_close(found, expected)


def test_a_pass_that_does_nothing_is_part_of_the_key() -> None:
    plain, passed = compile_stack(2, backend="eager"), compile_stack(2, backend="eager", passes=[lambda module: None])
    assert {p.key for p in plain.plan.pieces}.isdisjoint(p.key for p in passed.plan.pieces)


def broken(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    raise KeyError("no such kernel")


def test_a_piece_that_cannot_be_compiled_runs_as_it_was_traced() -> None:
    model = Stack(attention, 2)
    fast = piecegraph.compile(model, splitting_ops=OPS, capture_sizes=[8], backend=broken, on_fallback="ignore")
    x = torch.randn(8, 12)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert fast.stats()["events"] == {"PG302": 3}
    assert "no such kernel" in fast.explain()


def test_and_is_an_error_if_asked_for() -> None:
    with pytest.raises(FallbackError, match="PG302"):
        compile_stack(2, backend=broken, on_fallback="raise")


class WritesOneOfTwoViews(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        z = attention(y.view(-1, 2, 6), y.view(-1, 2, 6), y.view(-1, 2, 6)).reshape(-1, 12)
        first, whole = z[:2], z
        z = attention(z.view(-1, 2, 6), z.view(-1, 2, 6), z.view(-1, 2, 6)).reshape(-1, 12)
        first.add_(1)
        return whole + z


def test_a_piece_that_writes_to_one_of_two_overlapping_inputs_is_not_compiled() -> None:
    model = WritesOneOfTwoViews()
    arguments: dict[str, Any] = {
        "dynamic_dims": {"x": 0},
        "capture_sizes": [8],
        "options": {"graph_device": "simulated"},
    }
    fast = piecegraph.compile(model, splitting_ops=[attention], on_fallback="ignore", **arguments)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(8, 12)
            torch.testing.assert_close(fast(x), model(x))
    assert fast.stats()["events"].get("PG303") == 1


def test_two_instances_of_one_class_keep_their_own_weights() -> None:
    first, second = Stack(attention, 2), Stack(attention, 2)
    fast = [
        piecegraph.compile(model, splitting_ops=OPS, capture_sizes=[8], backend="eager") for model in (first, second)
    ]
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(8, 12)
            torch.testing.assert_close(fast[0](x), first(x))
            torch.testing.assert_close(fast[1](x), second(x))
