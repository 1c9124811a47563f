"""The front end without a compiler."""

from __future__ import annotations

import cProfile
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piecegraph
from piecegraph.errors import CallError, FallbackError, RecordError, TraceError
from piecegraph.tape.simulated import SimulatedGraphs
from tests.cases.modules import MLP, eager_attention


def compile_breakable(model: Any, **arguments: Any) -> Any:
    arguments = {"frontend": "breakable", "on_fallback": "raise", "capture_sizes": [8, 4], **arguments}
    return piecegraph.compile(model, **arguments, options={"graph_device": "simulated"})


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MLP(), MLP()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q = layer(x).view(-1, 2, 6)
            x = eager_attention(q, q, q)["out"].reshape(-1, 12)
        return x


def test_marked_functions_break_the_capture() -> None:
    model = Attends()
    fast = compile_breakable(model)
    with torch.no_grad():
        for size in (8, 3, 4, 1, 8):
            x = torch.randn(size, 12)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert fast.stats()["plans"][0]["cuts"] == 2
    assert fast.stats()["plans"][0]["sizes"]["8"]["graphs"] == 3
    text = fast.explain()
    assert "cut eager_attention" in text
    assert "marked as an eager op" in text
    assert "test_breakable.py" in text


class Both(NamedTuple):
    first: Tensor
    rest: dict[str, Tensor]


@dataclass
class Record:
    value: Tensor
    both: Both
    label: str = "fixed"


@piecegraph.eager_op
def structured(x: Tensor, options: dict[str, Any]) -> Record:
    return Record(x * options["scale"], Both(x + 1, {"half": x / 2}))


def test_structured_results_and_arguments() -> None:
    def function(x: Tensor) -> tuple[Tensor, str]:
        record = structured(x * 2, {"scale": 3.0, "unused": [x]})
        return record.value + record.both.first + record.both.rest["half"], record.label

    fast = compile_breakable(function, dynamic_dims={"x": 0})
    with torch.no_grad():
        for size in (8, 5):
            x = torch.randn(size)
            found, expected = fast(x), function(x)
            torch.testing.assert_close(found[0], expected[0])
            assert found[1] == "fixed"


def test_ops_break_at_any_level() -> None:
    def function(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * 2, q, q) + torch.cumsum(q, 0)

    for op in (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention, "aten::cumsum"):
        fast = compile_breakable(function, splitting_ops=[op], capture_sizes="auto")
        with torch.no_grad():
            for _ in range(3):
                q = torch.randn(2, 4, 8)
                torch.testing.assert_close(fast(q), function(q))
        assert fast.stats()["plans"][0]["cuts"] == 1, op


host_value = {"factor": 2.0, "label": "a"}


@piecegraph.eager_op
def reads_host(x: Tensor) -> tuple[Tensor, str]:
    return x * host_value["factor"], host_value["label"]


def test_a_marked_function_reads_the_host_at_every_replay() -> None:
    fast = compile_breakable(lambda x: reads_host(x + 1)[0] * 10, capture_sizes="auto")
    with torch.no_grad():
        for factor in (2.0, 3.0, 5.0):
            host_value["factor"] = factor
            assert fast(torch.ones(2)).tolist() == [20 * factor] * 2


def test_but_what_is_not_a_tensor_may_not_change() -> None:
    fast = compile_breakable(lambda x: reads_host(x + 1)[0], capture_sizes="auto")
    with torch.no_grad():
        fast(torch.ones(2))
        host_value["label"] = "b"
        try:
            with pytest.raises(CallError, match="PG521.*reads_host.*returned something else"):
                fast(torch.ones(2))
        finally:
            host_value["label"] = "a"


def test_what_cannot_be_captured_is_an_error_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("not permitted when stream is capturing")

    monkeypatch.setattr(SimulatedGraphs, "record", fail)
    with torch.no_grad(), pytest.raises(RecordError, match=r"PG403.*test_breakable.py:\d+.*eager_op"):
        compile_breakable(lambda x: x * 2, capture_sizes="auto")(torch.ones(2))


def test_random_numbers_may_not_be_seeded_inside() -> None:
    """A replay would go on where the last one ended."""

    def seeds(x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return x + torch.rand_like(x)

    with torch.no_grad(), pytest.raises(FallbackError, match=r"PG517.*test_breakable.py:\d+.*seeds random numbers"):
        compile_breakable(seeds, capture_sizes="auto")(torch.ones(2))


def test_results_that_cannot_be_rebuilt() -> None:
    with torch.no_grad(), pytest.raises(TraceError, match="PG204.*object"):
        compile_breakable(lambda x: (x, object()), capture_sizes="auto")(torch.ones(2))


def test_a_weight_whose_shape_is_changed_in_place_is_refused_and_put_back() -> None:
    model = nn.Linear(4, 3)

    def forward(x: Tensor) -> Tensor:
        model.weight.t_()
        return x + 1

    with torch.no_grad(), pytest.raises(TraceError, match=r"PG207 aten::t_ changes.*test_breakable.py:\d+"):
        compile_breakable(forward)(torch.ones(5, 4))
    assert model.weight.shape == (3, 4)


def test_python_control_flow_on_sizes_works_without_padding() -> None:
    """The code runs as it is at every exact size, so branches on sizes are right; padding is tried and refused."""

    def function(x: Tensor) -> Tensor:
        return x * (2 if x.shape[0] > 4 else 3)

    fast = compile_breakable(function, dynamic_dims={"x": 0}, on_fallback="ignore")
    with torch.no_grad():
        for size in (8, 4, 6, 3):
            assert torch.equal(fast(torch.ones(size)), function(torch.ones(size))), size


def test_a_call_is_padded_to_a_listed_size_that_never_ran() -> None:
    """Without graphs only the largest size runs when the sizes are prepared."""
    model = nn.Linear(4, 4).eval()
    fast = piecegraph.compile(
        model, frontend="breakable", capture_sizes=[8, 4], dynamic_dims={"input": 0}, on_fallback="raise"
    )
    x = torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert list(fast.stats()["plans"][0]["sizes"]) == ["8", "4"]


VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.T,
    "rows": lambda x: x[1:3],
    "reshaped": lambda x: x.view(2, -1),
    "repeated": lambda x: x.expand(3, *x.shape),
    "other dtype": lambda x: x.view(torch.int32),
    "complex": lambda x: torch.view_as_complex(x.view(-1, 2)).conj(),
    "imaginary": lambda x: torch.view_as_complex(x.view(-1, 2)).conj().imag,
    "list": lambda x: list(x.split([1, 3])),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("graph_device", ["auto", "simulated"])
def test_a_result_that_is_part_of_an_argument_is_part_of_the_callers(name: str, graph_device: str) -> None:
    function = VIEWS[name]
    options = {"graph_device": graph_device}
    fast = piecegraph.compile(function, frontend="breakable", on_fallback="raise", options=options)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(5, 4)[1:]  # does not begin where its storage does
            for found, expected in zip(_as_list(fast(x)), _as_list(function(x)), strict=True):
                assert place(found) == place(expected)
                torch.testing.assert_close(found, expected, equal_nan=True)


def place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.size(), tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _as_list(result: Any) -> list[Tensor]:
    return result if isinstance(result, list) else [result]


def test_padding_does_not_keep_results_from_being_parts_of_an_argument() -> None:
    fast = compile_breakable(lambda x: (x, x[:2], x * 2), dynamic_dims={"x": 0})
    with torch.no_grad():
        for size in (8, 5, 6, 3):
            x = torch.randn(size, 3)
            whole, part, doubled = fast(x)
            assert whole is x
            assert place(part) == place(x[:2])
            assert torch.equal(doubled, x * 2)


def test_without_graphs_every_call_goes_its_own_way() -> None:
    """Nothing is recorded there, so what the function returns may depend on data."""

    def function(x: Tensor, y: Tensor, choice: Tensor) -> tuple[Tensor, float]:
        return (x if bool(choice) else y), x.sum().item()

    fast = piecegraph.compile(function, frontend="breakable", dynamic_dims={}, on_fallback="raise")
    with torch.no_grad():
        for choice in (True, False, True):
            arguments = torch.randn(2), torch.randn(2), torch.tensor(choice)
            found, expected = fast(*arguments), function(*arguments)
            assert found[0] is expected[0]
            assert found[1] == expected[1]


@pytest.mark.parametrize(
    "change", [Tensor.t_, lambda x: x.resize_(9), lambda x: x.set_(torch.ones(2)), lambda x: x.unsqueeze_(0).add_(1)]
)
def test_arguments_whose_shape_is_changed_in_place(change: Any) -> None:
    x = torch.zeros(2, 3)
    with torch.no_grad(), pytest.raises(TraceError, match="PG207.*x are changed in place"):
        compile_breakable(lambda x: change(x), capture_sizes="auto")(x)
    assert x.shape == (2, 3)
    assert not x.any()


@torch.no_grad()
def test_a_profiler_of_python_goes_on() -> None:
    fast = compile_breakable(lambda x: x * 2, dynamic_dims={"x": [0]})
    profiler = cProfile.Profile()
    with profiler:
        assert fast(torch.ones(3)).tolist() == [2.0] * 3
        json.dumps({})
    assert fast.stats()["events"] == {}
    assert any(row.code is json.dumps.__code__ for row in profiler.getstats())


MANY = [[float(i)] for i in range(12_000)]


def test_more_values_than_are_looked_at_are_told() -> None:
    def add(x: torch.Tensor) -> torch.Tensor:
        return x + MANY[0][0]

    fast = piecegraph.compile(add, frontend="breakable", capture_sizes=[4])
    assert fast(torch.ones(4, 2)).tolist() == [[1.0, 1.0]] * 4
    assert "values outside: 10,000 are looked at" in fast.explain()
    MANY[0][0] = 2.0
    assert fast(torch.ones(4, 2)).tolist() == [[3.0, 3.0]] * 4
