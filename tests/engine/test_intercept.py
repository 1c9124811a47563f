"""Callbacks around an op: in eager code, in cuts, in pieces."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piecegraph
from piecegraph.errors import CallError, ConfigError, LowerError
from piecegraph.graph import interception
from piecegraph.graph.cut_rules import CutRules
from piecegraph.graph.split import split
from tests.graph.test_trace import trace_it


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.tanh()


@torch.library.custom_op("piecegraph_intercept::scale", mutates_args=())
def scale(x: Tensor, factor: float) -> Tensor:
    return x * factor


@scale.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


@pytest.fixture(autouse=True)
def no_gradients_and_nothing_left() -> Iterator[None]:
    gc.collect()  # functions of other tests would be listed, too
    with torch.no_grad():
        yield
    assert interception.registry.live == (), "a test left an interception behind"


numbers = itertools.count()
DIRECT: dict[str, Any] = {}
TAPES = {"graph_device": "simulated"}


@pytest.fixture(params=["eager-direct", "eager-tapes", "inductor-direct", "inductor-tapes"])
def compile_it(request: pytest.FixtureRequest) -> Callable[..., Any]:
    backend, how = request.param.split("-")

    def compile_it(model: Any, **arguments: Any) -> Any:
        options = {**(TAPES if how == "tapes" else DIRECT), **arguments.pop("options", {})}
        return piecegraph.compile(model, backend=backend, on_fallback="raise", options=options, **arguments)

    return compile_it


def named(name: str) -> nn.Module:
    """A model of a class of its own: functions of other tests may still be alive."""
    model: nn.Module = type(name, (Model,), {})()
    return model


def compile_quickly(model: Any, **arguments: Any) -> Any:
    arguments = {"backend": "eager", "on_fallback": "raise", "options": TAPES, **arguments}
    return piecegraph.compile(model, **arguments)


def test_observe_change_and_go_back(compile_it: Callable[..., Any]) -> None:
    name = f"Observed{next(numbers)}"
    model = named(name)
    fast = compile_it(model, capture_sizes=[8, 4])
    x, other = torch.randn(8, 4), torch.randn(3, 4)
    before, other_before = fast(x), fast(other)
    compiles, runner = fast.stats()["compiles"], fast._engine.plans[0]
    seen: list[Any] = []
    with piecegraph.intercept(F.linear, before=lambda *args: seen.append([tuple(a.shape) for a in args])) as handle:
        torch.testing.assert_close(fast(x), before)
        assert handle.num_calls == 6
        assert seen[:2] == [[(8, 4), (8, 4), (8,)], [(8, 8), (4, 8), (4,)]]
        seen.clear()
        torch.testing.assert_close(fast(other), other_before)
        assert [shapes[0] for shapes in seen] == [(3, 4), (3, 8)] * 3, "callbacks see no padding and no rehearsal"
        assert fast.stats()["plans"][0]["cuts"] == 6
        assert "intercepted" in fast.explain()
        assert repr(handle) == f"<piecegraph.intercept('aten::linear'): 6 cuts in {name}, eager code; 12 calls>"
    with piecegraph.intercept(F.linear, after=lambda result, *args: torch.zeros_like(result)):
        torch.testing.assert_close(fast(x), x.tanh())
        used = fast.stats()["compiles"]
    assert torch.equal(fast(x), before)
    assert torch.equal(fast(other), other_before)
    assert fast._engine.plans[0] is runner
    assert fast.stats()["compiles"] == used, "going back compiles nothing"
    assert used - compiles <= 3, "equal pieces between the cuts are compiled once, for both interceptions"
    assert fast.stats()["plans"][0]["cuts"] == 0
    assert repr(handle) == "<piecegraph.intercept('aten::linear'): removed; 12 calls>"


def test_replace_and_change_arguments(compile_it: Callable[..., Any]) -> None:
    torch.manual_seed(0)  # fused kernels round otherwise: of some weights by as much as is allowed
    model = Model()
    fast = compile_it(model)
    x = torch.randn(5, 4)
    fast(x)

    def doubled(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, weight * 2, bias)  # the op itself: interception is off in here

    def add_one(x: Tensor, *rest: Tensor) -> tuple[Any, Any]:
        return (x + 1, *rest), {}

    for callbacks in ({"replace": doubled}, {"before": add_one}, {"before": add_one, "after": lambda r, *_: r * 3}):
        with piecegraph.intercept("aten::linear", **callbacks):
            found = [fast(x), fast(-x)]
            expected = [model(x), model(-x)]
        for one, another in zip(found, expected, strict=True):
            torch.testing.assert_close(one, another, msg=str(callbacks))
            assert not torch.allclose(one, model(x))


def test_results_are_laid_out_as_compiled_code_expects(compile_it: Callable[..., Any]) -> None:
    def function(x: Tensor) -> Tensor:
        return torch.relu(x * 2) + 1

    fast = compile_it(function, dynamic_dims={"x": 0})
    x = torch.randn(3, 4)
    with piecegraph.intercept("aten::relu", replace=lambda x: x.T.contiguous().T * 3):
        torch.testing.assert_close(fast(x), x * 6 + 1)


def test_a_pattern_picks_one_layer(compile_it: Callable[..., Any]) -> None:
    model = Model()
    fast = compile_it(model)
    x = torch.randn(4, 4)
    fast(x)

    def only_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return bias + 0 * (x @ weight.T)

    for pattern, count in (("layers.1", 2), ("layers.*.up", 3), ("layers.2.down", 1), ("up", 3), ("u", 0)):
        with piecegraph.intercept(F.linear, replace=only_bias, module=pattern) as h:
            found = fast(x)
            assert h.num_calls == count, pattern
            torch.testing.assert_close(model(x), found)
            assert h.num_calls == 2 * count, "in eager code, too"
            assert repr(h).count(f"{count} cut") == (count > 0)


def test_paths_in_a_module_that_torch_wrote() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    fast, x = compile_quickly(model, dynamic_dims={"input": 0}), torch.randn(3, 4)
    with piecegraph.intercept(F.linear, replace=lambda x, weight, bias: x * 0 + 7, module="2") as handle:
        assert fast(x).eq(7).all()
        assert model(x).eq(7).all()
        assert handle.num_calls == 2


def test_a_function_without_the_op_keeps_its_tapes() -> None:
    fast = compile_quickly(Model())
    x = torch.randn(4, 4)
    fast(x)
    runner = fast._engine.plans[0]
    with piecegraph.intercept("aten::cumsum", before=lambda *args: None) as handle:
        fast(x)
        assert fast._engine.plans[0] is runner
        assert repr(handle) == "<piecegraph.intercept('aten::cumsum'): eager code; 0 calls>"


def test_several_wrap_each_other(compile_it: Callable[..., Any]) -> None:
    fast = compile_it(lambda x: torch.relu(x) + 0)
    order: list[str] = []

    def noted(name: str) -> dict[str, Any]:
        return {
            "before": lambda *_: order.append(f"{name} before"),
            "after": lambda *_: order.append(f"{name} after"),
        }

    with piecegraph.intercept("aten::relu", **noted("first")), piecegraph.intercept("aten::relu", **noted("last")):
        for run in (fast, torch.relu):
            order.clear()
            run(torch.ones(2))
            assert order == ["last before", "first before", "first after", "last after"]
    first = piecegraph.intercept("aten::relu", **noted("first"))
    last = piecegraph.intercept("aten::relu", replace=lambda x: x - 5)
    order.clear()
    assert fast(torch.ones(2)).tolist() == [-4, -4]
    assert order == [], "a replacement takes the place of what is inside"
    first.remove()
    first.remove()
    assert fast(torch.ones(2)).tolist() == [-4, -4]
    last.remove()
    assert fast(torch.ones(2)).tolist() == [1, 1]


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.piecegraph_intercept.scale(x + 1, 2.0) * 10


@pytest.mark.parametrize("op", ["piecegraph_intercept::scale", scale, torch.ops.piecegraph_intercept.scale.default])
def test_a_custom_op_that_is_a_cut_is_intercepted_once(op: Any) -> None:
    model = Scaled()
    fast = compile_quickly(model, splitting_ops=["piecegraph_intercept::scale"])
    x = torch.ones(3)
    assert fast(x).tolist() == [40] * 3
    with piecegraph.intercept(op, before=lambda x, factor: ((x, factor + 1), {})) as handle:
        assert fast(x).tolist() == [60] * 3
        assert fast(x).tolist() == [60] * 3
        assert handle.num_calls == 2
        assert "listed in splitting_ops; intercepted" in fast.explain()
        assert model(x).tolist() == [60] * 3
        assert scale(x, 1.0).tolist() == [2] * 3
        assert handle.num_calls == 4
    assert fast(x).tolist() == [40] * 3


def test_methods_constants_and_several_results() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(2.0))

        def forward(self, x: Tensor) -> Tensor:
            limited = torch.maximum(x, self.table)
            return torch.cat([x.add(1), torch.sort(x, 0)[0], limited.clone().mul_(2), torch.tensor([[3.0, 4.0]])])

    model = Table()
    fast, x = compile_quickly(model), torch.randn(4, 2)
    expected = model(x)
    for op in ("aten::add", "aten::sort", "aten::maximum", "aten::clone", "aten::mul_", "aten::cat"):
        with piecegraph.intercept(op, before=lambda *args, **kwargs: (args, kwargs)) as handle:
            found = [fast(x), fast(x)]
            assert handle.num_calls == 2, op
        assert found[0].equal(expected)
        assert found[1].equal(expected)
    with piecegraph.intercept("aten::sort", replace=lambda x, *_: (x * 0, torch.zeros(x.shape, dtype=torch.int64))):
        assert fast(x)[4:8].eq(0).all()
    with piecegraph.intercept("aten::sort", replace=lambda x, *_: x * 0):
        with pytest.raises(CallError, match="PG722.*returns 2 values"):
            fast(x)


def test_eager_code() -> None:
    model, x = Model(), torch.randn(2, 4)
    plain = model(x)
    with piecegraph.intercept(F.linear, before=lambda *_: None) as linears:
        with piecegraph.intercept("aten::addmm", before=lambda *_: None) as products:
            assert torch.equal(model(x), plain)
    assert (linears.num_calls, products.num_calls) == (6, 6), "a function and what it is made of"
    with piecegraph.intercept("aten::mul", replace=lambda a, b: a - b) as handle:
        assert (x * 1).equal(x - 1)
        assert torch.mul(x, 1).equal(x - 1)
        assert x.mul(1).equal(x - 1)
        assert handle.num_calls == 3
    assert (x * 1).equal(x)


def test_eager_runs_of_compiled_functions_are_intercepted() -> None:
    model, x = Model(), torch.randn(4, 4)
    fast = compile_quickly(model, on_fallback="ignore")
    fast(x)

    def count(run: Callable[[], Any]) -> int:
        with piecegraph.intercept(F.linear, before=lambda *_: None, module="layers.0.*") as handle:
            run()
        return handle.num_calls

    def in_another_thread(run: Callable[[], Any]) -> Callable[[], Any]:
        def start() -> None:
            thread = threading.Thread(target=torch.no_grad()(run))
            thread.start()
            thread.join()

        return start

    def eagerly() -> None:
        with piecegraph.eager():
            fast(x)

    for run in (lambda: fast(x), eagerly, lambda: fast(x.double().float()[:0])):
        assert count(run) == 2
        assert count(in_another_thread(run)) == 2


@pytest.mark.parametrize("options", [DIRECT, TAPES])
def test_the_breakable_front_end(options: dict[str, Any]) -> None:
    name = "Taped" if options else "Direct"
    model = named(name)
    fast = piecegraph.compile(model, frontend="breakable", on_fallback="raise", options=options)
    x = torch.randn(3, 4)
    before = fast(x)
    runner = fast._engine.plans[0]
    shapes: list[Any] = []
    with piecegraph.intercept(
        F.linear, before=lambda x, *_: shapes.append(tuple(x.shape)), after=lambda r, *_: r * 2, module="layers.1"
    ) as handle:
        found = fast(x)
        assert shapes == [(3, 4), (3, 8)]
        torch.testing.assert_close(fast(x), found)
        assert repr(handle) == (
            f"<piecegraph.intercept('aten::linear', module='layers.1'): 2 cuts in {name}, eager code; 4 calls>"
        )
        torch.testing.assert_close(model(x), found)
        assert ("intercepted" in fast.explain()) == (options is TAPES)
    assert torch.equal(fast(x), before)
    assert fast._engine.plans[0] is runner


@piecegraph.eager_op
def marked(x: Tensor) -> Tensor:
    return torch.relu(x) * 2


def test_ops_in_marked_functions() -> None:
    fast = compile_quickly(lambda x: marked(x + 1) + 1, frontend="breakable")
    x = torch.ones(2)
    assert fast(x).tolist() == [5, 5]
    with piecegraph.intercept("aten::relu", after=lambda result, x: result + 1) as handle:
        assert fast(x).tolist() == [7, 7]
        assert fast(x).tolist() == [7, 7]
        assert handle.num_calls == 2
    assert fast(x).tolist() == [5, 5]


def test_a_plan_made_while_an_op_is_intercepted(compile_it: Callable[..., Any]) -> None:
    model, x = Model(), torch.randn(4, 4)
    with piecegraph.intercept(F.gelu, replace=lambda x: x * 0) as handle:
        fast = compile_it(model)
        fast.capture(x)
        assert handle.num_calls == 0, "recording runs no callback"
        torch.testing.assert_close(fast(x), model(x))
        assert handle.num_calls == 6
    torch.testing.assert_close(fast(x), model(x))


def test_a_size_of_one(compile_it: Callable[..., Any]) -> None:
    model = Model()
    fast = compile_it(model)
    with piecegraph.intercept(F.gelu, replace=lambda x: x * 0) as handle:
        torch.testing.assert_close(fast(torch.ones(1, 4)), torch.ones(1, 4) * 0 + fast(torch.ones(1, 4)))
        assert handle.num_calls == 6


def test_full_mode_is_cut_for_the_time_being() -> None:
    model, x = Model(), torch.randn(4, 4)
    fast = compile_quickly(model, cudagraph_mode="full")
    before = fast(x)
    with piecegraph.intercept(F.gelu, before=lambda x: None) as handle:
        torch.testing.assert_close(fast(x), before)
        assert handle.num_calls == 3
        assert fast.stats()["events"] == {"PG724": 1}
    assert torch.equal(fast(x), before)
    assert fast.stats()["plans"][0]["cuts"] == 0


def test_an_exception_says_whose_callback_raised_it() -> None:
    fast, x = compile_quickly(Model()), torch.randn(4, 4)
    before = fast(x)

    def fails(*_: Any) -> None:
        raise KeyError("mine")

    for run in (fast, Model()):
        with piecegraph.intercept(F.gelu, after=fails, module="layers.1"):
            with pytest.raises(KeyError, match="mine") as caught:
                run(x)
        note = "raised by the after callback of piecegraph.intercept('aten::gelu', module='layers.1')"
        assert caught.value.__notes__ == [note]
    assert torch.equal(fast(x), before)


@pytest.mark.parametrize("frontend", ["trace", "breakable"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: x[:1], r"callback of intercept\('aten::relu'\) returned torch.float32 \(1,\).*compiled for.*\(4,\)"),
        (lambda x: x.double(), "returned torch.float64"),
        (lambda x: None, "returned a NoneType"),
    ],
)
def test_a_result_that_does_not_fit(wrong: Any, message: str, frontend: str) -> None:
    fast = compile_quickly(lambda x: torch.relu(x) + 1, frontend=frontend)
    answers = [torch.relu]
    with piecegraph.intercept("aten::relu", replace=lambda x: answers[-1](x)):
        for _ in range(2):
            answers.append(wrong)
            with pytest.raises(CallError, match=f"PG722.*{message}"):
                fast(torch.ones(4))
            answers.append(lambda x: x * 2)
            assert fast(torch.ones(4)).tolist() == [3] * 4


def test_a_view_stays_a_view() -> None:
    fast = compile_quickly(lambda x: torch.relu(x).view(-1) + 1)
    with piecegraph.intercept("aten::view", before=lambda *args: None) as handle:
        assert fast(torch.ones(2)).tolist() == [2, 2]
        assert handle.num_calls == 1
    with piecegraph.intercept("aten::view", after=lambda result, *_: result * 2):
        with pytest.raises(CallError, match="PG722.*view of an argument"):
            fast(torch.ones(2))


def test_an_op_between_streams_cannot_be_intercepted() -> None:
    side, main = torch.Stream(device="cpu"), torch.Stream(device="cpu")

    def function(x: Tensor) -> Tensor:
        y = x + 1
        side.wait_stream(main)
        with side:
            z = torch.relu(y)
        main.wait_stream(side)
        return z * 3

    traced = trace_it(function, torch.ones(3))

    def cut_at(op: str) -> list[str | None]:
        added = interception.Interception(op, print, None, None, None)
        segments = split(traced, CutRules("auto"), full=False, interceptions=[added])
        return [segment.verdict.reason if segment.verdict else None for segment in segments]

    assert cut_at("aten::mul")[-1] == "intercepted"
    with pytest.raises(LowerError, match="PG723 aten::relu cannot be intercepted.*fork to another CUDA stream"):
        cut_at("aten::relu")


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigError, match="PG721.*no callback"):
        piecegraph.intercept(F.linear)
    with pytest.raises(ConfigError, match="PG721.*after=3"):
        piecegraph.intercept(F.linear, after=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="PG104.*aten::linear"):
        piecegraph.intercept("aten::linea", before=print)
    with piecegraph.intercept("aten::relu", before=lambda x: x):
        with pytest.raises(CallError, match="PG722.*before callback.*returned a Tensor.*\\(args, kwargs\\)"):
            torch.relu(torch.ones(2))


def test_nothing_is_left_on_the_stack_whatever_the_order() -> None:
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    from torch.utils.flop_counter import FlopCounterMode

    first = piecegraph.intercept(F.linear, before=lambda *_: None)
    with FlopCounterMode(display=False) as counter:
        first.remove()
        second = piecegraph.intercept(F.linear, before=lambda *_: None)
        Block()(torch.ones(2, 4))
    assert counter.get_total_flops() == 256
    Block()(torch.ones(2, 4))
    assert (first.num_calls, second.num_calls) == (0, 4)
    assert counter.get_total_flops() == 256
    second.remove()
    assert _get_current_dispatch_mode_stack() == []
    assert _get_current_function_mode_stack() == []


def test_torch_compile_is_not_disturbed() -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x: torch.relu(x) * 2, fullgraph=True)
    with piecegraph.intercept("aten::relu", replace=lambda x: x - 1) as handle:
        assert compiled(torch.ones(3)).tolist() == [2, 2, 2]
        assert handle.num_calls == 0
        assert torch.relu(torch.ones(3)).tolist() == [0, 0, 0]


def test_fake_tensors_pass_untouched() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with piecegraph.intercept("aten::relu", replace=lambda x: x[:1]) as handle:
        with FakeTensorMode():
            assert torch.relu(torch.ones(3)).shape == (3,)
        assert handle.num_calls == 0


def test_handles_do_not_keep_functions_alive() -> None:
    fast = compile_quickly(named("Forgotten"))
    fast(torch.ones(2, 4))
    with piecegraph.intercept(F.linear, before=lambda *_: None) as handle:
        fast(torch.ones(2, 4))
        assert "6 cuts in Forgotten" in repr(handle)
        del fast
        gc.collect()
        assert "Forgotten" not in repr(handle)
