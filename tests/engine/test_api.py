"""The compiled object stands in for the original."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecegraph
from piecegraph.errors import ConfigError
from tests.cases.modules import MLP, Stack, attention


def compile_eager(model: Any, **arguments: Any) -> Any:
    return piecegraph.compile(model, backend="eager", on_fallback="raise", **arguments)


# --- modules


def test_attributes_state_and_modes_are_the_originals() -> None:
    model = MLP()
    model.note = "hello"  # type: ignore[assignment]
    fast = compile_eager(model)
    assert isinstance(fast, nn.Module)
    assert fast.note == "hello"
    assert fast.up is model.up
    assert list(fast.state_dict()) == list(model.state_dict())
    assert [name for name, _ in fast.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert fast.eval() is fast
    assert not model.training
    assert not model.up.training
    fast.extra = 3
    assert model.extra == 3
    del fast.extra
    assert not hasattr(model, "extra")
    assert "up" in dir(fast)


def test_loading_weights_in_place_is_seen_by_the_plan() -> None:
    model, other = MLP(), MLP()
    fast = compile_eager(model, capture_sizes=[4], options={"graph_device": "simulated"})
    with torch.no_grad():
        x = torch.randn(4, 12)
        fast(x)
        fast.load_state_dict(other.state_dict())
        torch.testing.assert_close(fast(x), other(x))


def test_hooks_reach_the_original_and_run_around_the_plan() -> None:
    model = MLP()
    fast = compile_eager(model, capture_sizes=[4])
    seen = []
    fast.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    with torch.no_grad():
        fast(torch.randn(3, 12))
        model(torch.randn(2, 12))
    assert seen == [(3, 12), (2, 12)]


def test_moving_the_module_makes_a_new_plan() -> None:
    model = MLP()
    fast = compile_eager(model, capture_sizes=[4], options={"graph_device": "simulated"})
    with torch.no_grad():
        fast(torch.randn(4, 12))
        assert fast.double() is fast
        x = torch.randn(4, 12, dtype=torch.float64)
        torch.testing.assert_close(fast(x), model(x))
    assert fast.stats()["coverage"] == 1.0


def test_it_can_be_a_submodule() -> None:
    model = nn.Sequential(MLP(), MLP())
    x = torch.randn(4, 12)
    with torch.no_grad():
        expected = model(x)
        model[0] = compile_eager(model[0], capture_sizes=[4])
        torch.testing.assert_close(model(x), expected)
    assert list(model.state_dict()) == list(nn.Sequential(MLP(), MLP()).state_dict())


def test_a_copy_has_its_own_weights_and_plan() -> None:
    fast = compile_eager(MLP(), capture_sizes=[4])
    twin = copy.deepcopy(fast)
    with torch.no_grad():
        x = torch.randn(4, 12)
        torch.testing.assert_close(twin(x), fast(x))
        twin.up.weight.zero_()
        assert not torch.equal(twin(x), fast(x))


def test_a_module_with_several_outputs_and_keyword_inputs() -> None:
    class Pair(nn.Module):
        def forward(self, *, left: Tensor, right: Tensor) -> dict[str, Tensor]:
            return {"sum": left + right, "left": left}

    fast = compile_eager(Pair(), capture_sizes=[4])
    with torch.no_grad():
        left, right = torch.ones(3), torch.ones(3)
        found = fast(right=right, left=left)
    assert found["left"] is left
    assert found["sum"].tolist() == [2, 2, 2]


# --- functions


def test_decorators() -> None:
    @piecegraph.compile
    def plain(x: Tensor) -> Tensor:
        """Doubles."""
        return x * 2

    @piecegraph.compile(backend="eager", capture_sizes=[4])
    def with_arguments(x: Tensor) -> Tensor:
        return x * 3

    assert plain.__doc__ == "Doubles."
    assert plain.__name__ == "plain"
    with torch.no_grad():
        assert with_arguments(torch.ones(2)).tolist() == [3, 3]


@pytest.mark.parametrize(
    "function", [torch.relu, functools.partial(torch.add, other=1), torch.nn.functional.gelu, MLP().forward]
)
def test_anything_callable(function: Any) -> None:
    fast = compile_eager(function)
    with torch.no_grad():
        x = torch.randn(3, 12)
        torch.testing.assert_close(fast(x), function(x))


def test_methods_are_refused_rather_than_shared_between_instances() -> None:
    class Owner:
        @piecegraph.compile
        def method(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(ConfigError, match="PG105.*method"):
        Owner().method(torch.ones(2))


def test_disable_returns_the_model_itself() -> None:
    model = MLP()
    assert piecegraph.compile(model, disable=True) is model
    assert piecegraph.compile(disable=True)(model) is model


def test_compiling_twice_is_an_error() -> None:
    with pytest.raises(ConfigError, match="PG105.*compiled already"):
        piecegraph.compile(compile_eager(MLP()))


# --- install and eager


def test_sizes_of_a_call_that_has_none() -> None:
    fast = piecegraph.compile(lambda x: x + 1, backend="eager", capture_sizes=[4])
    with pytest.raises(ConfigError, match=r"PG102 .* gives 1 number .* 0 dynamic sizes \(none\).*annotate parameters"):
        fast(torch.ones(3))


def test_install_replaces_forward_in_place_and_close_puts_it_back() -> None:
    model, other = nn.Sequential(MLP(), MLP()), MLP()
    x = torch.randn(4, 12)
    with torch.no_grad():
        expected = model(x)
        handle = piecegraph.install(model[1], backend="eager", capture_sizes=[4], on_fallback="raise")
        torch.testing.assert_close(model(x), expected)
        other(x)
        assert handle.stats()["calls"] == 1
        with piecegraph.eager():
            torch.testing.assert_close(model(x), expected)
        assert handle.stats()["calls"] == 1
        handle.close()
        torch.testing.assert_close(model(x), expected)
    assert "forward" not in model[1].__dict__


def test_install_twice_or_into_something_else_is_an_error() -> None:
    module = MLP()
    piecegraph.install(module, backend="eager")
    for wrong in (module, compile_eager(MLP()), lambda x: x):
        with pytest.raises(ConfigError, match="PG105"):
            piecegraph.install(wrong)


def test_eager_runs_the_original() -> None:
    model = Stack(attention)
    fast = compile_eager(model, splitting_ops=[attention])
    with torch.no_grad(), piecegraph.eager():
        x = torch.randn(4, 12)
        assert torch.equal(fast(x), model(x))
    assert fast.stats()["calls"] == 0


def test_inside_torch_compile_the_original_is_compiled() -> None:
    fast = compile_eager(lambda x: x * 2)
    with torch.no_grad():
        assert torch.compile(lambda x: fast(x) + 1, backend="eager")(torch.ones(2)).tolist() == [3, 3]


# --- results are the caller's


@pytest.mark.parametrize("graph_device", ["auto", "simulated"])
def test_results_are_the_callers_own(graph_device: str) -> None:
    fast = compile_eager(MLP(), capture_sizes=[8], options={"graph_device": graph_device})
    with torch.no_grad():
        first = fast(torch.randn(8, 12))
        kept = first.clone()
        fast(torch.randn(8, 12))
    assert torch.equal(first, kept)


def test_or_valid_until_the_next_call() -> None:
    fast = compile_eager(MLP(), capture_sizes=[8], options={"graph_device": "simulated", "clone_outputs": False})
    with torch.no_grad():
        first = fast(torch.randn(8, 12))
        assert fast(torch.randn(8, 12)).data_ptr() == first.data_ptr()


def test_padding_between_columns_shows_in_no_result() -> None:
    for options in ({}, {"clone_outputs": False}):
        fast = compile_eager(lambda x: -x, dynamic_dims={"x": 1}, capture_sizes=[8], options=options)
        x = torch.randn(3, 5)
        with torch.no_grad():
            found = fast(x)
        assert found.stride() == (5, 1)
        assert torch.equal(found, -x)


def test_views_of_inputs_are_views_of_the_callers_inputs() -> None:
    fast = compile_eager(lambda x: (x.view(-1), x[1], x.T, x.chunk(2)[1]), capture_sizes="auto")
    with torch.no_grad():
        x = torch.arange(8.0).view(4, 2)
        for found in fast(x):
            found.fill_(-1)
            assert (x == -1).any()
            x.copy_(torch.arange(8.0).view(4, 2))


def test_nothing_is_known_before_the_first_call() -> None:
    fast = compile_eager(MLP())
    assert fast.plan is None
    assert "no plan yet" in fast.explain()
    assert fast.stats()["coverage"] == 0.0


# --- a page to share


def told(path: Path) -> Any:
    """The data of a page."""
    return json.loads(path.read_text().partition('id="data">')[2].partition("</script>")[0])


def test_a_report_of_how_calls_are_run(tmp_path: Path) -> None:
    fast = piecegraph.compile(
        Stack(attention),
        backend="eager",
        splitting_ops=[attention],
        capture_sizes=[4],
        options={"graph_device": "simulated"},
        on_fallback="ignore",
    )
    with torch.no_grad():
        fast(torch.ones(4, 12))
        with piecegraph.trace() as t:
            fast(torch.ones(4, 12))
    fast(torch.ones(4, 12, requires_grad=True))
    path = fast.report(tmp_path / "plan.html")
    html, data = path.read_text(), told(path)
    assert "<title>How Stack runs</title>" in html
    assert html.count('<li class="cut">') == len(fast.plan.cuts) == 3
    assert html.count('<li class="piece') == len(fast.plan.pieces)
    assert [step.get("op") for step in data["plans"][0]["steps"]][1] == "pgtest::attention"
    assert data["stats"] == json.loads(json.dumps(fast.stats()))
    for words in ("66.7 %", "2 of 3", "PG501", "listed in splitting_ops", "Recorded sizes", "weights"):
        assert words in html, words
    with_trace = told(fast.report(str(tmp_path / "both.html"), trace=t))
    assert with_trace["stats"] == data["stats"]
    numbers = set(with_trace["kernels"]["launches"]["replay"])
    assert len(numbers - {-1}) == 1  # one call, one replay


def test_a_report_before_the_first_call(tmp_path: Path) -> None:
    html = compile_eager(MLP()).report(tmp_path / "plan.html").read_text()
    assert "no plan yet" in html
    assert "none yet" in html
