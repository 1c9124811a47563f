"""What runs inside of a compiled call calls it again, while its buffers are in use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import piecegraph

SETTINGS: dict[str, Any] = {
    "backend": "eager",
    "on_fallback": "ignore",
    "options": {"graph_device": "simulated", "cache": False},
}
INNER: list[Callable[[Tensor], Tensor]] = []
"""What the ops below call."""


@torch.library.custom_op("piecegraph_inside::ask", mutates_args=())
def ask(x: Tensor) -> Tensor:
    return _ask(x)


@ask.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _ask(x: Tensor) -> Tensor:
    """As a search does that evaluates smaller problems by the same model."""
    return INNER[0](x[: x.shape[0] // 2]).sum() + x if x.shape[0] > 1 and INNER else x.clone()


@pytest.fixture(autouse=True)
def _inner() -> Iterator[None]:
    yield
    INNER.clear()


def _cut(x: Tensor) -> Tensor:
    return (ask(x * 2) + x).sin() * x


def _eager(x: Tensor) -> Tensor:
    return (piecegraph.eager_op(_ask)(x * 2) + x).sin() * x


@pytest.mark.parametrize("function", [_cut, _eager])
def test_an_op_that_calls_what_it_runs_in(function: Callable[[Tensor], Tensor]) -> None:
    fast = piecegraph.compile(function, dynamic_dims={"x": 0}, **SETTINGS)
    torch.manual_seed(0)
    with torch.no_grad():
        for _ in range(2):
            for size in (8, 5, 8, 3):
                x = torch.randn(size)
                INNER[:] = [function]
                expected = function(x)
                INNER[:] = [fast]
                torch.testing.assert_close(fast(x), expected)
    stats = fast.stats()
    assert stats["events"]["PG518"] > 0
    assert stats["replayed"] > 0


def test_another_compiled_function_is_replayed_inside() -> None:
    inner = piecegraph.compile(lambda x: x.cos(), dynamic_dims={"x": 0}, **SETTINGS)
    outer = piecegraph.compile(_cut, dynamic_dims={"x": 0}, **SETTINGS)
    with torch.no_grad():
        for size in (8, 5, 8):
            INNER[:] = [torch.cos]
            expected = _cut(x := torch.randn(size))
            INNER[:] = [inner]
            torch.testing.assert_close(outer(x), expected)
    assert "PG518" not in inner.stats()["events"] | outer.stats()["events"]
    assert inner.stats()["replayed"] > 0


def test_a_callback_that_calls_what_it_is_called_by() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x * 2) + x

    fast = piecegraph.compile(function, dynamic_dims={"x": 0}, **SETTINGS)
    with torch.no_grad():
        fast(x := torch.randn(8))
        inner = list[Tensor]()
        with piecegraph.intercept("aten::gelu", after=lambda result, *args: inner.append(fast(-x))):
            torch.testing.assert_close(fast(x), function(x))
    torch.testing.assert_close(inner[0], function(-x))
    assert fast.stats()["events"]["PG518"] >= 1


def test_a_call_after_one_that_raised_is_replayed() -> None:
    fast = piecegraph.compile(_cut, dynamic_dims={"x": 0}, **SETTINGS)

    def fail(x: Tensor) -> Tensor:
        raise ValueError("no answer")

    with torch.no_grad():
        fast(x := torch.randn(8))
        INNER[:] = [fail]
        with pytest.raises(ValueError, match="no answer"):
            fast(x)
        INNER.clear()
        replays = fast.stats()["replayed"]
        torch.testing.assert_close(fast(x), _cut(x))
    assert fast.stats()["replayed"] == replays + 1
