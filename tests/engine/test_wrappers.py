"""Tensors that have no memory of their own: nested ones, wrappers around others, sparse ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

import piecegraph
from piecegraph.errors import RecordError

OFFSETS = torch.tensor([0, 2, 4])


class Wrapper(Tensor):
    """Does what the tensor does that it is made of."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Wrapper:
        return Wrapper(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = pytree.tree_map(
            lambda value: value.inner if isinstance(value, Wrapper) else value, (args, kwargs or {})
        )
        wrapped = pytree.tree_map(lambda v: Wrapper(v) if isinstance(v, Tensor) else v, func(*plain[0], **plain[1]))
        return return_and_correct_aliasing(func, args, kwargs or {}, wrapped)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def nested(x: Tensor) -> Tensor:
    return (torch.nested.nested_tensor_from_jagged(x, OFFSETS) * 2).values()


def writes_to_a_nested_tensor(x: Tensor) -> Tensor:
    torch.nested.nested_tensor_from_jagged(x, OFFSETS).mul_(2)
    return x + 1


def writes_to_a_wrapper(x: Tensor) -> Tensor:
    Wrapper(x).mul_(2)
    return x + 1


def sparse(x: Tensor) -> Tensor:
    return (x.to_sparse() * 2).to_dense()


CASES = [nested, writes_to_a_nested_tensor, writes_to_a_wrapper, sparse]


@pytest.mark.parametrize("function", CASES)
@pytest.mark.parametrize("frontend", ["auto", "breakable"])
def test_what_is_written_shows(function: Callable[[Tensor], Tensor], frontend: Any) -> None:
    options = {"cache": False}
    fast = piecegraph.compile(function, frontend=frontend, backend="eager", on_fallback="ignore", options=options)
    for number in (1.0, 2.0, -3.0):
        given, expected = torch.full((4, 3), number), torch.full((4, 3), number)
        assert torch.equal(fast(given), function(expected))
        assert torch.equal(given, expected)


@pytest.mark.parametrize("function", [nested, writes_to_a_nested_tensor, writes_to_a_wrapper])
def test_simulated_graphs_say_that_they_cannot_hold_them(function: Callable[[Tensor], Tensor]) -> None:
    options = {"graph_device": "simulated", "cache": False}
    fast = piecegraph.compile(function, frontend="breakable", backend="eager", on_fallback="ignore", options=options)
    with pytest.raises(RecordError, match="PG403.*which has no memory of its own"):
        fast(torch.ones(4, 3))


@pytest.mark.parametrize("device", ["simulated", "auto"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_module_of_torchscript_runs_eagerly(device: str) -> None:
    script = torch.jit.trace(torch.nn.Linear(3, 3), torch.ones(2, 3))  # type: ignore[no-untyped-call]

    def function(x: Tensor) -> Tensor:
        return script(x) + 1  # type: ignore[no-any-return]

    options = {"graph_device": device, "cache": False}
    fast = piecegraph.compile(function, backend="eager", on_fallback="ignore", options=options)
    for weight in (script.weight, torch.ones(3, 3), torch.zeros(3, 3)):
        script.weight = torch.nn.Parameter(weight)
        torch.testing.assert_close(fast(torch.ones(2, 3)), function(torch.ones(2, 3)))
    assert "TorchScript" in fast.explain()
