"""Tracing: dynamic dimensions, what is refused, and that nothing of the caller's is touched."""

from __future__ import annotations

from typing import Any, Optional

import pytest
import torch
from torch import Tensor, nn

import piecegraph
from piecegraph.base import torch_compat
from piecegraph.errors import ConfigError, TraceError
from piecegraph.graph.example import read_example
from piecegraph.graph.signature import Binder
from piecegraph.graph.tracer import Traced, trace


def trace_it(function: Any, *args: Any, dynamic_dims: Any = "auto", **kwargs: Any) -> Traced:
    settings: dict[str, Any] = {"dynamic_dims": dynamic_dims, "static_inputs": (), "training": None}
    return trace(function, read_example(function, Binder(function), args, kwargs, **settings), {})


def carriers(traced: Traced) -> list[list[tuple[str, int]]]:
    found: list[list[tuple[str, int]]] = [[] for _ in traced.signature.size_names]
    for leaf in traced.signature.tensors:
        for dim, size in leaf.dynamic:
            found[size].append((leaf.name, dim))
    return found


# --- where the size dimension comes from


def test_from_the_argument() -> None:
    traced = trace_it(lambda x, y: x @ y.T, torch.ones(3, 4), torch.ones(5, 4), dynamic_dims={"x": 0, "y": -2})
    assert carriers(traced) == [[("x", 0)], [("y", 0)]]


def test_from_marks() -> None:
    x = torch.ones(3, 4)
    torch._dynamo.mark_dynamic(x, 1)
    assert carriers(trace_it(lambda x: x + 1, x)) == [[("x", 1)]]


def annotated(a: Tensor, b: Optional[Tensor], c: "torch.Tensor | None", n: int) -> Tensor:  # noqa: UP037, UP045
    return a + (0 if b is None else b) + (0 if c is None else c) + n


def test_from_annotations() -> None:
    traced = trace_it(annotated, torch.ones(3), torch.ones(3), torch.ones(3), 2)
    assert carriers(traced) == [[("a", 0), ("b", 0), ("c", 0)]]
    assert carriers(trace_it(annotated, torch.ones(3), None, None, 2)) == [[("a", 0)]]


def test_the_argument_wins_over_marks_and_annotations() -> None:
    x = torch.ones(3, 4)
    torch._dynamo.mark_dynamic(x, 1)
    assert carriers(trace_it(annotated, x, None, None, 2, dynamic_dims={"a": 0})) == [[("a", 0)]]


def test_equal_sizes_share_a_symbol_and_names_keep_them_apart() -> None:
    x, y = torch.ones(3, 3), torch.ones(3, 3)
    shared = trace_it(lambda x, y: x.sum() + y.sum(), x, y, dynamic_dims={"x": 0, "y": 0})
    assert carriers(shared) == [[("x", 0), ("y", 0)]]
    apart = trace_it(lambda x, y: x.sum() + y.sum(), x, y, dynamic_dims={"x": {0: "a"}, "y": {0: "b"}})
    assert carriers(apart) == [[("x", 0)], [("y", 0)]]
    square = trace_it(lambda x: x.sum(), x, dynamic_dims={"x": (0, 1)})
    assert carriers(square) == [[("x", 0)], [("x", 1)]]


def test_inside_containers() -> None:
    traced = trace_it(lambda batch: batch["x"] * 2, {"x": torch.ones(3)}, dynamic_dims={"batch.x": 0})
    assert carriers(traced) == [[("batch.x", 0)]]


def test_a_guessed_dimension_that_the_model_fixes_is_just_not_dynamic() -> None:
    def multiply(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    assert carriers(trace_it(multiply, torch.ones(3, 4), torch.ones(4, 5))) == [[("x", 0)]]


def test_an_explicit_dimension_that_the_model_fixes_is_an_error() -> None:
    with pytest.raises(TraceError, match=r"PG205 w.shape\[0\] cannot vary"):
        trace_it(lambda x, w: x @ w, torch.ones(3, 4), torch.ones(4, 5), dynamic_dims={"w": 0})


@pytest.mark.parametrize(
    ("dims", "text"),
    [
        ({"z": 0}, "there is no such input. hint: inputs: x"),
        ({"x": 2}, "it has 2"),
        ({"x": "0"}, "write 0"),
        ({"x": {0: 5}}, "write 0"),
    ],
)
def test_wrong_dynamic_dims(dims: Any, text: str) -> None:
    with pytest.raises(ConfigError, match="PG103") as raised:
        trace_it(lambda x: x + 1, torch.ones(3, 4), dynamic_dims=dims)
    assert text in str(raised.value)


def test_dimensions_of_one_name_must_agree() -> None:
    with pytest.raises(ConfigError, match="PG103 y.shape.*other dimensions named 'n' are 3"):
        trace_it(lambda x, y: x, torch.ones(3), torch.ones(4), dynamic_dims={"x": {0: "n"}, "y": {0: "n"}})


# --- what is refused


def branch(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x
    return -x


def test_what_cannot_be_traced_names_the_line_and_what_to_do() -> None:
    with pytest.raises(TraceError) as raised:
        trace_it(branch, torch.ones(3))
    text = str(raised.value)
    assert raised.value.code == "PG201"
    assert "test_trace.py" in text
    assert "`if x.sum() > 0:`" in text
    assert 'frontend="breakable"' in text


class CountsInPython(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.log: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(1)
        return x + self.calls


def test_python_state_is_refused_and_left_alone() -> None:
    module = CountsInPython()
    with pytest.raises(TraceError, match="PG202.*self"):
        trace_it(module.forward, torch.ones(3))
    assert (module.calls, module.log) == (0, [])


class SetsAndResets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flag = False

    def forward(self, x: Tensor) -> Tensor:
        self.flag = True
        y = x + 1
        self.flag = False
        return y


def test_state_that_is_set_back_is_fine() -> None:
    trace_it(SetsAndResets().forward, torch.ones(3))


class Opaque:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_arguments_whose_changes_cannot_be_seen_are_refused() -> None:
    with pytest.raises(TraceError, match="PG203 box is a Opaque"):
        trace_it(lambda x, box: x + box.value, torch.ones(3), Opaque(1))
    with pytest.raises(TraceError, match="PG203"):
        trace_it(lambda x: x, torch.ones(3).to_sparse())


def test_a_size_that_only_the_caller_reads_is_refused() -> None:
    def shape(x: Tensor) -> Any:
        return x.shape

    with pytest.raises(TraceError, match=r"PG204 the result holds a size in \[0\]"):
        trace_it(shape, torch.ones(3, 4))


class Counts(Opaque):
    """Has a way of its own to be copied, so that its attributes are not all there is to it."""

    def __reduce__(self) -> Any:
        return Counts, (0,)


def test_results_that_cannot_be_rebuilt_are_refused() -> None:
    with pytest.raises(TraceError, match=r"PG204 the result holds a Counts in \[1\]"):
        trace_it(lambda x: (x, Counts(x + 1)), torch.ones(3))
    with pytest.raises(TraceError, match="PG204 the result holds a float computed from data"):
        trace_it(lambda x: (x, x.sum().item()), torch.ones(3))


@piecegraph.eager_op
def outside(x: Tensor) -> Tensor:
    return x + 1


def test_an_eager_op_cannot_be_traced() -> None:
    with pytest.raises(TraceError, match="PG107.*custom_op"):
        trace_it(lambda x: outside(x), torch.ones(3))


# --- what is left alone


def test_no_marks_are_left_and_nothing_is_executed() -> None:
    x = torch.arange(6.0).view(3, 2)
    trace_it(lambda x: x.mul_(2), x, dynamic_dims={"x": 0})
    assert not hasattr(x, "_dynamo_dynamic_indices")
    assert torch.equal(x, torch.arange(6.0).view(3, 2))


@pytest.mark.parametrize("size", [0, 1])
def test_sizes_of_zero_and_one_are_traced_as_two(size: int) -> None:
    assert carriers(trace_it(lambda x: x + 1, torch.ones(size, 4), dynamic_dims={"x": 0})) == [[("x", 0)]]


def sized(x: Tensor, y: Any) -> Tensor:
    return torch.ones(x.shape[0], 4) + y


def test_a_size_may_be_all_that_is_read_of_a_tensor() -> None:
    traced = trace_it(sized, torch.ones(3, 4), 2)
    assert carriers(traced) == [[("x", 0)]]
    assert list(traced.sizes.symbols.values()) == [0]


def test_a_size_that_is_all_that_is_read_of_a_tensor_may_be_fixed() -> None:
    assert carriers(trace_it(sized, torch.ones(3, 4), torch.ones(3, 4))) == []


def test_a_part_of_a_tensor_is_traced_like_a_whole_one() -> None:
    traced = trace_it(lambda x: x + 1, torch.ones(6, 4)[1:], dynamic_dims={"x": 0})
    assert torch_compat.free_symbols(torch_compat.meta_value(next(iter(traced.inputs)))) == tuple(traced.sizes.symbols)


def test_what_is_written_is_known() -> None:
    buffer = torch.zeros(4)

    def write(x: Tensor, y: Tensor) -> Tensor:
        x[0].add_(1)
        buffer.add_(1)
        return x + y

    traced = trace_it(write, torch.ones(2, 4), torch.ones(2, 4))
    assert traced.written_calls == (0,)
    assert [weight.tensor is buffer for weight in traced.written_weights] == [True]


def test_weights_that_begin_inside_their_memory_are_not_taken_for_written() -> None:
    """Torch makes their fakes by writing. Linears that were joined lie so, and could not be joined by another plan."""
    memory = torch.randn(4, 4, 4)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.written = (torch.nn.Parameter(part, requires_grad=False) for part in memory[1:3])
            self.register_buffer("view", memory[3])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.written.add_(1)
            self.view.add_(1)
            return x @ self.read + self.written + self.view

    model = Model()
    traced = trace_it(model, torch.randn(4, 4))
    assert {id(weight.tensor) for weight in traced.written_weights} == {id(model.written), id(model.view)}
