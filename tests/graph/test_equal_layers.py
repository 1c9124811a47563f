"""Layers that are equal are traced once, and the graph is that of all of them; see Note [Equal layers]."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, nn

import piecegraph
from piecegraph.base import torch_compat
from piecegraph.graph import equal_layers
from piecegraph.graph.equal_layers import find_stack
from piecegraph.graph.example import read_example
from piecegraph.graph.fx_nodes import module_path
from piecegraph.graph.signature import Binder
from piecegraph.graph.sources import Weight
from piecegraph.graph.tracer import Traced, trace

WIDTH = 8


class Layer(nn.Module):
    """A norm, two linears, a view, and what is written in place."""

    def __init__(self, number: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.number = number
        self.eps = eps
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        self.act = functools.partial(nn.functional.gelu, approximate="tanh")

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        left, right = self.linear(self.norm(x)).chunk(2, -1)
        out = torch.empty_like(left)
        out.copy_(self.act(left) * right + self.eps)
        return x.view(-1, WIDTH) + self.down(out.view(-1, WIDTH)) * scale[None]


class Wide(Layer):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x, scale).relu()


class Numbered(Layer):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x, scale) * (1.0 if self.number % 4 else 2.0)


class Model(nn.Module):
    """A loop over layers, between what is before and behind it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(WIDTH)
        self.config = SimpleNamespace()

    def forward(self, x: Tensor) -> Tensor:
        x, scale = self.embed(x), self.scale * 2
        for layer in self.layers[: len(self.layers)]:
            x = layer(x, scale)
        return self.norm(x.to(torch.float32))


class Gathered(Model):
    def forward(self, x: Tensor) -> Tensor:
        scale, seen = self.scale * 2, []
        for layer in self.layers:
            x = layer(x, scale)
            seen.append(x)
        return torch.stack(seen).sum(0)


class Skipping(Model):
    def forward(self, x: Tensor) -> Tensor:
        scale, before = self.scale * 2, x
        for layer in self.layers:
            x, before = layer(x, scale) + before, x
        return self.norm(x)


class Residual(Model):
    """What is behind each layer in the loop is there behind the last one, too."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale * 2
        for layer in self.layers:
            x = x + layer(x, scale).relu().mul_(0.5)
        return self.norm(x)


class Paired(Model):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.norms = nn.ParameterList([torch.randn(WIDTH) for _ in layers])

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, self.norms[number])
        return x


class Counted(Model):
    def forward(self, x: Tensor) -> Tensor:
        for number in range(6):
            x = self.layers[number](x, self.scale)
        return x


class InSequence(nn.Module):
    """As most models for images are."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6))
        self.body = nn.Sequential(*blocks)
        self.body.register_forward_hook(lambda module, args, out: out * 2)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x))
        return result


class Typed(Model):
    def __init__(self, *layers: nn.Module, period: int) -> None:
        super().__init__(*layers)
        self.config.kinds = ["odd" if number % period == period - 1 else "even" for number in range(len(layers))]

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, self.scale * (2 if self.config.kinds[number] == "odd" else 3))
        return x


def traced(model: nn.Module, *, is_whole: bool = False) -> Traced:
    x = torch.randn(4, WIDTH)

    def forward_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            result: Tensor = model(x)
            return result

        return forward

    model.requires_grad_(False)
    forward = forward_of(model)
    binder = Binder(forward)
    example = read_example(forward, binder, (), {"x": x}, dynamic_dims={"x": 0}, static_inputs=(), training=False)
    return trace(forward, example, dict(model.named_parameters()), None if is_whole else find_stack(model, forward_of))


def rows(found: Traced) -> list[Any]:
    """The graph as text: weights by their names, values by their place."""
    places: dict[torch.fx.Node, Any] = {
        node: source.name if isinstance(source, Weight) else str(source) for node, source in found.inputs.items()
    }
    text = []
    for node in found.graph.nodes:
        if node.op == "placeholder":
            continue
        args = torch.fx.map_arg((node.args, node.kwargs), lambda arg: f"<{places[arg]}>")  # type: ignore[arg-type]
        value = torch_compat.meta_value(node)
        layout = (str(value.shape), str(value.stride()), value.dtype) if isinstance(value, Tensor) else str(value)
        text.append((node.op, str(node.target), str(args), module_path(node), node.meta.get("stack_trace"), layout))
        places[node] = len(places)
    return text


def is_right(found: Traced, model: nn.Module) -> bool:
    x = torch.randn(3, WIDTH)
    inputs = [
        source.tensor if isinstance(source, Weight) else x if "Call" in type(source).__name__ else len(x)
        for source in found.inputs.values()
    ]
    (result,) = torch.fx.GraphModule(found.owner, found.graph)(*inputs)
    return torch.allclose(result, model(x), atol=1e-5)


def alternating(*kinds: Callable[[int], nn.Module], count: int, head: int = 0) -> list[nn.Module]:
    first = [Layer(number, eps=0.5 + number) for number in range(head)]
    return [*first, *(kinds[number % len(kinds)](head + number) for number in range(count))]


@pytest.mark.parametrize(
    ("model", "num_traced"),
    [
        (lambda: Model(*alternating(Layer, count=6)), 2),
        (lambda: Model(*alternating(Layer, Wide, count=8)), 4),
        (lambda: Model(*alternating(Layer, Layer, Wide, count=11)), 8),  # two and three times three
        (lambda: Model(*alternating(Layer, count=7, head=2)), 4),
        (InSequence, 2),
        (lambda: Residual(*alternating(Layer, count=5)), 2),
        (lambda: Residual(*alternating(Layer, Wide, count=7, head=1)), 6),
    ],
    ids=["equal", "two kinds", "three kinds, and some", "behind others", "in sequence", "ops behind", "kinds and ops"],
)
def test_the_graph_is_that_of_all_layers(model: Callable[[], nn.Module], num_traced: int) -> None:
    torch.manual_seed(0)
    made = model()
    stack = find_stack(made)
    assert stack is not None
    assert stack.num_traced == num_traced
    some, whole = traced(made), traced(made, is_whole=True)
    assert [str(decision) for decision in some.decisions] == [
        f"layers: {num_traced} of {stack.num_layers} traced (the others are equal to them but for their weights)"
    ]
    assert rows(some) == rows(whole)
    assert sorted(some.origin.sources) == sorted(whole.origin.sources)
    assert set(some.outside.names) == set(whole.outside.names)
    assert is_right(some, made)


def test_blocks_that_meet_share_no_memory() -> None:
    graph = traced(Model(*alternating(Layer, count=6))).graph
    made = [node for node in graph.nodes if node.target is torch.empty_like]
    storages = [torch_compat.storage_id(torch_compat.meta_value(node)) for node in made]
    assert len(storages) == 6
    for number in range(4):
        assert len(set(storages[number : number + 3])) == 3


@pytest.mark.parametrize(
    "model",
    [
        lambda: Model(*(Numbered(number) for number in range(6))),
        lambda: Gathered(*alternating(Layer, count=6)),
        lambda: Paired(*alternating(Layer, count=6)),
        lambda: Typed(*alternating(Layer, count=9), period=3),
        lambda: Counted(*alternating(Layer, count=6)),
    ],
    ids=["its number", "all are read behind", "a weight beside", "ops between", "layers by number"],
)
def test_all_are_traced_where_more_depends_on_a_layer(model: Callable[[], nn.Module]) -> None:
    made = model()
    assert find_stack(made) is not None, "the layers themselves look equal"
    found = traced(made)
    assert found.decisions == ()
    assert rows(found) == rows(traced(made, is_whole=True))
    assert is_right(found, made)


def test_others_may_run_the_model_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = Model(*alternating(Layer, count=6)).eval(), torch.randn(3, WIDTH)
    expected, seen = made(x), []
    real = torch_compat.dynamo_capture

    def run_beside(*args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor() as threads:
            seen.append(threads.submit(made, x).result())
        return real(*args, **kwargs)

    monkeypatch.setattr(torch_compat, "dynamo_capture", run_beside)
    assert traced(made).decisions
    assert len(seen) == 1
    assert torch.equal(seen[0], expected)


def test_a_weight_that_two_layers_share_is_one_input() -> None:
    made = Model(*alternating(Layer, count=6))
    made.layers[5].down.weight = made.layers[1].down.weight  # type: ignore[union-attr]
    found = traced(made)
    assert found.decisions == ()
    assert is_right(found, made)


def _set(layer: Any, name: str, value: object) -> None:
    setattr(layer, name, value)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: _set(layer, "eps", 0.25),
        lambda layer: _set(layer, "more", True),
        lambda layer: _set(layer, "act", functools.partial(nn.functional.gelu, approximate="none")),
        lambda layer: _set(layer, "down", nn.Linear(WIDTH, WIDTH)),
        lambda layer: _set(layer, "norm", nn.LayerNorm(WIDTH, eps=0.1)),
        lambda layer: layer.down.register_forward_hook(lambda module, args, out: out * 2),
        lambda layer: layer.double(),
    ],
    ids=["number", "attribute", "function", "bias", "norm", "hook", "dtype"],
)
def test_one_layer_that_differs_is_traced(change: Callable[[Any], None]) -> None:
    made = Model(*alternating(Layer, count=9))
    change(made.layers[4])
    stack = find_stack(made)
    assert stack is not None
    assert (stack.num_head, stack.block) == (5, 1)
    change(made.layers[8])
    assert find_stack(made) is None


def test_lists_with_an_element_for_each_layer_repeat() -> None:
    stack = find_stack(Typed(*alternating(Layer, count=12), period=3))
    assert stack is not None
    assert (stack.num_head, stack.block) == (0, 3)
    assert find_stack(Typed(*alternating(Layer, count=12), period=12)) is None


def test_a_layer_that_holds_its_model_sees_the_same_model() -> None:
    made = Model(*alternating(Layer, count=6))
    assert find_stack(made) is not None
    for layer in made.layers:
        layer.__dict__["parent"] = made
    assert find_stack(made) is None


def test_few_layers_are_traced_as_they_are() -> None:
    assert find_stack(Model(*alternating(Layer, count=2))) is None
    assert find_stack(nn.Linear(2, 2)) is None
    layer = Layer(0)
    assert find_stack(Model(*[layer] * 9)) is None


class Layers(nn.ModuleList):
    def __init__(self, count: int) -> None:
        super().__init__([Layer(number) for number in range(count)])


def test_unusual_lists_and_weights_are_left_alone() -> None:
    made = Model()
    made.layers = Layers(9)
    assert find_stack(made) is None
    assert find_stack(Model(*(nn.LazyLinear(4) for _ in range(9)))) is None


def test_what_cannot_be_run_on_values_of_a_copy_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such op for fake tensors")

    monkeypatch.setattr(equal_layers, "_run", fail)
    made = Model(*alternating(Layer, count=9))
    found = traced(made)
    assert found.decisions == ()
    assert is_right(found, made)


def test_a_single_row_is_enough_to_tell() -> None:
    """It is traced as two."""
    made = Model(*alternating(Layer, count=6)).eval()
    fast = piecegraph.compile(made, backend="eager", capture_sizes=[4])
    with torch.inference_mode():
        for num_rows in (1, 3):
            x = torch.randn(num_rows, WIDTH)
            assert torch.allclose(fast(x), made(x), atol=1e-6)
    assert "layers: 2 of 6 traced" in fast.explain()


def test_a_compiled_module_traces_some_and_watches_all() -> None:
    made = Model(*alternating(Layer, count=6)).eval()
    fast = piecegraph.compile(made, backend="eager", capture_sizes=[4])
    x = torch.randn(3, WIDTH)
    with torch.inference_mode():
        assert torch.allclose(fast(x), made(x), atol=1e-6)
        assert "layers: 2 of 6 traced" in fast.explain()
        made.layers[5].eps = 0.5  # type: ignore[union-attr]
        assert torch.allclose(fast(x), made(x), atol=1e-6)


class Counting(Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / len(self.layers)


class Nudging(Model):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale * 2
        for number, layer in enumerate(self.layers):
            x = layer(x, scale)
            if number == 5:
                x = x + 2e-7
        return x


class Scaled(Model):
    """Of zeros it makes zeros."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.scale)
        return x / len(self.layers)


class ReadingTheLast(Model):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.scale)
        return x * self.layers[-1].norm.weight  # type: ignore[no-any-return, union-attr, operator]


class EndingOtherwise(Model):
    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, self.scale if number < 5 else self.norm.weight)
        return x


class WithNumberBehind(Model):
    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, self.scale) * (2.0 if number == 4 else 1.0)
        return x


class WithoutTheLast(Model):
    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, self.scale)
            if number < 5:
                x = x.relu()
        return x


class Twice(Model):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for layer in self.layers:
                x = layer(x, self.scale)
        return x


@pytest.mark.parametrize(
    "kind",
    [Counting, Nudging, ReadingTheLast, EndingOtherwise, Skipping, WithNumberBehind, WithoutTheLast, Twice],
)
def test_a_function_that_counts_its_layers_is_traced_again(kind: type[Model]) -> None:
    made = kind(*alternating(Layer, count=6)).eval()
    x = torch.randn(3, WIDTH)
    for _ in range(2):
        fast = piecegraph.compile(made, backend="eager", capture_sizes=[4])
        with torch.inference_mode():
            assert torch.allclose(fast(x), made(x), atol=1e-6)
        assert "traced (the others" not in fast.explain()
        assert fast.stats()["events"] == {}


class Returning(Model):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:  # type: ignore[override]
        return super().forward(x), len(self.layers)


def test_numbers_that_are_returned_are_those_of_all_layers() -> None:
    made = Returning(*alternating(Layer, count=6)).eval()
    fast, x = piecegraph.compile(made, backend="eager", capture_sizes=[4]), torch.randn(3, WIDTH)
    with torch.inference_mode():
        for _ in range(2):
            assert fast(x)[1] == 6


class WithNumbers(Layer):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x, torch.tensor([2.0, 3.0]).repeat(WIDTH // 2))


def test_neither_zeros_nor_constants_hide_that_layers_are_alike() -> None:
    made = Model(*alternating(WithNumbers, count=6)).eval()
    fast = piecegraph.compile(made, backend="eager", capture_sizes=[4])
    with torch.inference_mode():
        fast(torch.zeros(3, WIDTH))
        x = torch.randn(3, WIDTH)
        assert torch.allclose(fast(x), made(x), atol=1e-6)
    assert "layers: 2 of 6 traced" in fast.explain()


def test_a_branch_of_zeros_is_seen() -> None:
    """And may get other weights later."""
    made = Scaled(*alternating(Layer, count=6)).eval()
    for layer in made.layers:
        nn.init.zeros_(layer.down.weight)
    fast = piecegraph.compile(made, backend="eager", capture_sizes=[4])
    x = torch.randn(3, WIDTH)
    with torch.inference_mode():
        fast(x)
        for layer in made.layers:
            layer.down.weight.copy_(torch.eye(WIDTH))
        assert torch.allclose(fast(x), made(x), atol=1e-6)


@pytest.mark.parametrize("value", [0.0, math.nan], ids=["zeros", "NaN"])
def test_a_first_call_that_would_show_nothing_is_traced_in_full(value: float) -> None:
    made = Scaled(*alternating(Layer, count=6)).eval()
    for layer in made.layers:
        nn.init.zeros_(layer.linear.bias)
        layer.eps = 0.0
    fast = piecegraph.compile(made, backend="eager", capture_sizes=[4])
    with torch.inference_mode():
        fast(torch.full((3, WIDTH), value))
        x = torch.randn(3, WIDTH)
        assert torch.allclose(fast(x), made(x), atol=1e-6)


def test_a_function_over_a_model_traces_some() -> None:
    made, x = Model(*alternating(Layer, count=6)).eval(), torch.randn(3, WIDTH)
    fast = piecegraph.compile(lambda x: made(x) * 2, backend="eager", options={"graph_device": "simulated"})
    with torch.no_grad():
        assert torch.allclose(fast(x), made(x) * 2, atol=1e-6)
        assert "layers: 2 of 6 traced" in fast.explain()
        made.layers.pop(2)
        assert torch.allclose(fast(x), made(x) * 2, atol=1e-6)


def test_weights_that_were_made_in_inference_mode() -> None:
    with torch.inference_mode():
        made, x = Model(*alternating(Layer, count=6)).to(torch.float64).eval(), torch.randn(3, WIDTH)
        made.norm.to(torch.float32)
        fast = piecegraph.compile(made, backend="eager", options={"graph_device": "simulated"})
        assert torch.allclose(fast(x.double()), made(x.double()), atol=1e-6)
    assert "layers: 2 of 6 traced" in fast.explain()
