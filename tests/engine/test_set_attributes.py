"""Modules that set attributes of their own at every call: attention maps, losses, weights made of other weights."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecegraph
from piecegraph.errors import TraceError

DEVICES = [{"graph_device": "simulated"}, {}]


class Attention(nn.Module):
    """Keeps what people look at later."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.map: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        map_ = self.linear(x).softmax(-1)
        self.map = map_
        self.kept = (map_ * 2, {"turned": x.t(), "given": x, "rounds": 1})
        return x * map_


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention() for _ in range(5)])

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x) + x
        return x, sum(layer.map.mean(-1) for layer in self.layers)  # type: ignore[union-attr, operator, misc]


def compile_it(model: Any, **arguments: Any) -> Any:
    return piecegraph.compile(model, backend="eager", on_fallback="ignore", **arguments)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", DEVICES, ids=str)
@pytest.mark.parametrize("sizes", [[3, 3, 8, 1], [1, 4, 2, 1]], ids=str)
def test_they_are_set_at_every_call(sizes: list[int], options: dict[str, Any]) -> None:
    model = Layers().eval()
    twin, held = copy.deepcopy(model), []
    fast = compile_it(model, capture_sizes=[8, 4], options=options)
    with torch.no_grad():
        for size in sizes:
            x = torch.randn(size, 4)
            close(fast(x), twin(x))
            for layer, other in zip(model.layers, twin.layers, strict=True):
                close((layer.map, layer.kept), (other.map, other.kept))
            assert model.layers[0].kept[1]["given"] is x  # type: ignore[index, union-attr]
            held.append((model.layers[2].map, twin.layers[2].map))
        for found, expected in held:
            close(found, expected)
    assert "set at every call: self.layers.0.map, self.layers.0.kept, self.layers.1.map" in fast.explain()
    assert {loss["code"] for loss in fast.stats()["losses"]} == {"PG510"}, "padded, and nothing else"
    assert fast.stats()["coverage"] == 1.0


def test_all_layers_are_traced_where_they_keep_what_the_model_is_given() -> None:
    """What is kept is in no graph, so that no graph tells that there are more layers."""

    class Keeping(nn.Module):
        def forward(self, x: Tensor, given: Tensor) -> Tensor:
            self.given = given
            return x.sin() + given

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Keeping() for _ in range(6)])

        def forward(self, x: Tensor) -> Tensor:
            given = x
            for layer in self.layers:
                x = layer(x, given)
            return x

    model = Model()
    fast = compile_it(model)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(3)
            fast(x)
            assert all(layer.given is x for layer in model.layers)
    assert fast.stats()["coverage"] == 1.0


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm", [torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm])
def test_weights_that_hooks_make_of_others(norm: Callable[..., nn.Module], training: bool) -> None:
    model, twin = (
        nn.Sequential(norm(nn.Linear(4, 4)), nn.Linear(4, 4), norm(nn.Linear(4, 4))).train(training) for _ in range(2)
    )
    twin.load_state_dict(model.state_dict())
    fast = compile_it(model, options={"graph_device": "simulated"})
    with torch.no_grad():
        for _ in range(4):
            for each in (*model.parameters(), *twin.parameters()):
                each.mul_(1.1)
            x = torch.randn(3, 4)
            close(fast(x), twin(x))
            close([model[0].weight, model[2].weight], [twin[0].weight, twin[2].weight])
            close(model.state_dict(), twin.state_dict())
    assert fast.stats()["coverage"] == 1.0


def test_a_class_that_changes_what_is_set_does_so_once() -> None:
    class Doubling(nn.Module):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value * 2 if isinstance(value, Tensor) else value)

        def forward(self, x: Tensor) -> Tensor:
            self.kept = x.sin()
            return self.kept + 1

    model, x = Doubling(), torch.randn(3)
    fast = compile_it(model)
    with torch.no_grad():
        for _ in range(2):
            close(fast(x), x.sin() * 2 + 1)
            close(model.kept, x.sin() * 2)


def test_views_that_are_no_ops() -> None:
    """They are made by the code around the graph, at every call."""

    class Turning(nn.Module):
        def forward(self, x: Tensor, table: dict[str, Tensor]) -> Tensor:
            self.turned, table["turned"] = x.T, x.mT
            return x.sin()

    model = Turning()
    fast = compile_it(model)
    with torch.no_grad():
        for size in (2, 2, 3):
            x, table = torch.randn(size, 4), {}
            close(fast(x, table), x.sin())
            for found in (model.turned, table["turned"]):
                close(found, x.T)
                assert found.data_ptr() == x.data_ptr()


def test_a_module_that_a_function_names_and_a_hook_that_keeps() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[1].register_forward_hook(lambda module, args, out: setattr(module, "features", out))
    fast = compile_it(lambda x: model(x) + 1, options={"graph_device": "simulated"})
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 4)
            close(fast(x) - 1, model[1].features)
    assert fast.stats()["coverage"] == 1.0


def test_a_branch_that_sets_at_some_sizes() -> None:
    class Sometimes(nn.Module):
        large: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] > 4:
                self.large = x + 1
            return x * 2

    model = Sometimes()
    fast, expected = compile_it(model, capture_sizes=[8]), None
    with torch.no_grad():
        for size in (3, 6, 4, 7, 1):
            x = torch.randn(size)
            close(fast(x), x * 2)
            expected = x + 1 if size > 4 else expected
            close(model.large, expected)


# --- what is read before it is set is state, and a replay has none


def _adds_up(self: Any, x: Tensor) -> Tensor:
    self.kept = self.kept * 0.9 + x.mean()
    return x + self.kept  # type: ignore[no-any-return]


def _asks_for_none(self: Any, x: Tensor) -> Tensor:
    y = x if self.last is None else x + self.last
    self.last = x.sin()
    return y


def _asks_whether_it_is_there(self: Any, x: Tensor) -> Tensor:
    y = x + self.new if hasattr(self, "new") else x
    self.new = x.sin()
    return y


def _has_a_default(self: Any, x: Tensor) -> Tensor:
    y = x + getattr(self, "new", 0)
    self.new = x.sin()
    return y


def _counts(self: Any, x: Tensor) -> Tensor:
    self.number += 1
    return x.sin()


def _reads_it_elsewhere(self: Any, x: Tensor) -> Tensor:
    before = self.other[0].last
    self.last = x.sin()
    return x if before is None else x + before


def _sets_a_buffer(self: Any, x: Tensor) -> Tensor:
    self.buffer = x.mean()
    return x + self.buffer  # type: ignore[no-any-return]


def _adds_to_a_table(self: Any, x: Tensor) -> Tensor:
    self.table["map"] = x.sin()
    return x + 1


STATE = [
    _adds_up,
    _asks_for_none,
    _asks_whether_it_is_there,
    _has_a_default,
    _counts,
    _reads_it_elsewhere,
    _sets_a_buffer,
    _adds_to_a_table,
]


def _tries(self: Any, x: Tensor) -> Tensor:
    try:
        y = x + self.new
    except AttributeError:
        y = x
    self.new = x.sin()
    return y


def _looks_into_itself(self: Any, x: Tensor) -> Tensor:
    y = x * 2 if "new" in vars(self) else x
    self.new = x.sin()
    return y


def model_of(method: Callable[[Any, Tensor], Tensor]) -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept, self.last, self.number, self.other = torch.zeros(()), None, 0, [self]
            self.table: dict[str, Tensor] = {}
            self.register_buffer("buffer", torch.zeros(()))

        forward = method

    return Model()


@pytest.mark.parametrize("method", STATE)
def test_state_is_refused(method: Callable[[Any, Tensor], Tensor]) -> None:
    fast = compile_it(model_of(method), options={"graph_device": "simulated"})
    with torch.no_grad(), pytest.raises(TraceError, match="PG202"):
        fast(torch.randn(3))


@pytest.mark.parametrize("method", [_tries, _looks_into_itself])
def test_what_may_be_missing_is_right_or_refused(method: Callable[[Any, Tensor], Tensor]) -> None:
    model, twin = model_of(method), model_of(method)
    fast = compile_it(model, options={"graph_device": "simulated"})
    with torch.no_grad(), contextlib.suppress(TraceError):
        for _ in range(4):
            x = torch.randn(3)
            close(fast(x), twin(x))


@torch.library.custom_op("pgtest::add_what_is_kept", mutates_args=())
def add_what_is_kept(x: Tensor) -> Tensor:
    return x + _holders[-1].last


@add_what_is_kept.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


_holders: list[Any] = []


def test_a_custom_op_may_read_what_is_set() -> None:
    def method(self: Any, x: Tensor) -> Tensor:
        self.last = x.sin()
        return add_what_is_kept(x)

    _holders.append(model_of(method))
    fast = compile_it(_holders[-1], splitting_ops=[add_what_is_kept])
    with torch.no_grad(), pytest.raises(TraceError, match="PG202"):
        fast(torch.randn(3))


class Noting(nn.Module):
    """Tells of the call before, in numbers and texts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kind, self.rows = "none", 0

    def forward(self, x: Tensor) -> Tensor:
        self.kind = "long" if x.shape[0] > 4 else "short"
        self.rows = x.shape[0]
        return self.linear(x)


@pytest.mark.parametrize("options", DEVICES, ids=str)
@pytest.mark.parametrize("first", [None, 8, 2])
def test_numbers_and_texts_that_an_earlier_call_has_set_to_the_same(first: int | None, options: dict[str, Any]) -> None:
    """They are set at every call, whatever they were when a size was planned."""
    model = Noting().eval()
    with torch.no_grad():
        if first is not None:
            model(torch.randn(first, 4))
        fast = compile_it(model, options=options)
        for rows in (8, 2, 8, 8, 2):
            fast(torch.randn(rows, 4))
            assert (model.kind, model.rows) == ("long" if rows == 8 else "short", rows)
        model.kind = "of somebody else"
        fast(torch.randn(2, 4))
    assert model.kind == "short"
