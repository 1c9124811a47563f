"""Who put what into a graph: on simulated graphs, whose nodes are ops, against truths that are found in other ways."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecegraph
from piecegraph.base import torch_compat
from piecegraph.base.call_stack import path_of
from piecegraph.base.origin import GraphNode, LaunchCall
from piecegraph.errors import KernelError, PiecegraphWarning, RecordError
from piecegraph.provenance.ledger import Ledger
from piecegraph.provenance.observe import OpObserver
from piecegraph.tape.nodes import CudaNodes
from piecegraph.tape.simulated import SimulatedGraphs
from piecegraph.tape.tape import GraphStep
from tests.cases.attribution import (
    SPLITTING_OPS,
    WeightReaders,
    graph_records,
    is_known,
    make_decoder,
    matmul_modules,
)
from tests.cases.known_lines import (
    SIZE,
    Layers,
    Nest,
    Place,
    Remembers,
    compile_known,
    eager_calls,
    place_of,
    places_in,
    places_in_layer,
    rows,
)

FRONTENDS = pytest.mark.parametrize("frontend", ["trace", "breakable"])
HOW = pytest.mark.parametrize("how", ["call", "capture"])


def record(fast: Any, x: Tensor, how: str = "call") -> list[Any]:
    """The graphs of what is compiled, after a first call."""
    with torch.no_grad():
        fast(x) if how == "call" else fast.capture(x)
    records = graph_records(fast._engine.recorded.tapes())
    assert all(node.call is not None for each in records for node in each.nodes)
    return records


# ---- the truth is known


@HOW
@FRONTENDS
def test_every_node_has_its_line_and_module(frontend: str, how: str) -> None:
    fast = compile_known(Layers(), frontend=frontend)
    assert places_in(record(fast, rows(), how)) == places_in_layer("layers.0") + places_in_layer("layers.1")


@HOW
@FRONTENDS
def test_what_runs_between_graphs_has_its_place_too(frontend: str, how: str) -> None:
    fast = compile_known(Layers(), frontend=frontend)
    record(fast, rows(), how)
    assert list(map(place_of, eager_calls(fast._engine.recorded.tapes()))) == [
        Place("pgtest::unsafe", "layers.0", "x = unsafe(x)"),
        Place("pgtest::unsafe", "layers.1", "x = unsafe(x)"),
    ]


@FRONTENDS
def test_stacks_begin_in_the_model_and_not_at_who_called_it(frontend: str) -> None:
    records = record(compile_known(Layers(1), frontend=frontend), rows())
    tanh = next(call for each in records for call in each.calls if call.op == "aten::tanh")
    assert [line.text for line in tanh.origins[0].stack] == [
        "x = layer(x)",
        "x = squash(self.gate(x))",
        "return torch.tanh(x)",
    ]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_matmuls_are_those_of_the_weights_that_they_read(family: str) -> None:
    model = make_decoder(family, "tiny", torch.device("cpu"), torch.float32)
    ids = torch.randint(0, 256, (1, 8))
    fast = compile_known(model, splitting_ops=SPLITTING_OPS, dynamic_dims={}, capture_sizes="auto")
    state: list[SimulatedGraphs] = []
    begin = SimulatedGraphs.begin

    def remember(device: SimulatedGraphs, *, keep_nodes: bool) -> None:
        state.append(device)
        begin(device, keep_nodes=keep_nodes)

    truth = WeightReaders(model, lambda: bool(state) and state[-1].num_nodes() is not None)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), truth:
        patch.setattr(SimulatedGraphs, "begin", remember)
        fast.capture(ids)
    records = graph_records(fast._engine.recorded.tapes())
    assert all(node.call is not None for each in records for node in each.nodes)
    calls = [call for each in records for call in each.calls]
    assert all(map(is_known, calls))
    assert len(truth.modules) == 3 * 7  # seven linears in each of three layers
    assert list(matmul_modules(records, truth.names.values())) == truth.modules


@pytest.mark.parametrize(("backend", "num_nodes"), [("inductor", {1}), ("eager", {2, 6, 8})])
def test_layers_that_share_their_code_are_told_apart(backend: str, num_nodes: set[int]) -> None:
    """Compiled by Inductor, a piece is one node here; its origins are those of its own layer."""
    fast = compile_known(Layers(3), backend=backend)
    records = record(fast, rows())
    modules = [{origin.module.split(".")[1] for call in each.calls for origin in call.origins} for each in records]
    assert modules == [{"0"}, {"0", "1"}, {"1", "2"}, {"2"}]
    assert {len(each.nodes) for each in records} == num_nodes


@FRONTENDS
def test_modules_inside_their_like(frontend: str) -> None:
    places = places_in(record(compile_known(Nest(2), frontend=frontend), rows()))
    line = "return torch.sin(self.inner(x))"
    assert places == [Place("aten::sin", path, line) for path in ("inner.inner", "inner", "")]


@FRONTENDS
def test_several_sizes(frontend: str) -> None:
    fast = compile_known(Layers(1), frontend=frontend, capture_sizes=[8, 4, 2])
    records = record(fast, rows(), "capture")
    assert {each.phase for each in records} == {"8", "4", "2"}
    for phase in ("8", "4", "2"):
        assert places_in([each for each in records if each.phase == phase]) == places_in_layer("layers.0")


def test_joined_linears_have_a_place() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) * self.k(x)

    fast = compile_known(Joined().eval(), options={"fuse_linears": True})
    (only,) = record(fast, rows())
    matmuls = [call for call in only.calls if call.op == "aten::addmm"]
    assert len(matmuls) == 1
    assert is_known(matmuls[0])
    assert matmuls[0].origins[0].module in ("q", "k")
    fast.close()


def test_a_model_that_a_function_calls() -> None:
    model = Layers(1)

    def run(x: Tensor) -> Tensor:
        return model(x) * 3.0

    for frontend in ("trace", "breakable"):
        places = places_in(record(compile_known(run, frontend=frontend), rows(), "capture"))
        assert [place.module.removeprefix("model.") for place in places[:-1]] == [
            place.module for place in places_in_layer("layers.0")
        ]
        assert places[-1] == Place("aten::mul", "", "return model(x) * 3.0")


# ---- what it costs, and what it must not change


@FRONTENDS
def test_off_nothing_is_kept(frontend: str) -> None:
    fast = compile_known(Layers(), frontend=frontend, options={"provenance": False})
    with torch.no_grad():
        fast(rows())
    steps = [step for tape in fast._engine.recorded.tapes() for step in tape.steps]
    assert [step.inside for step in steps if isinstance(step, GraphStep)] == [None] * 3
    assert list(eager_calls(fast._engine.recorded.tapes())) == []


@FRONTENDS
@pytest.mark.parametrize("make", [Layers, lambda: Nest(3), Remembers], ids=["layers", "nest", "remembers"])
def test_outputs_are_the_same_with_it_and_without(make: Callable[[], nn.Module], frontend: str) -> None:
    results = []
    for provenance in (True, False):
        torch.manual_seed(0)
        fast = compile_known(make().eval(), frontend=frontend, options={"provenance": provenance})
        with torch.no_grad():
            results.append([fast(rows(seed=seed)) for seed in range(3)])
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        expected = [model(rows(seed=seed)) for seed in range(3)]
    for on, off, eager in zip(*results, expected, strict=True):
        assert torch.equal(on, off)
        torch.testing.assert_close(on, eager)


# ---- when a capture fails


_under_capture: list[None] = []


@torch.library.custom_op("pgtest::fails_in_capture", mutates_args=())
def fails_in_capture(x: Tensor) -> Tensor:
    if _under_capture:
        raise RuntimeError("operation not permitted when stream is capturing")
    return x * 1.0


@fails_in_capture.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class FailsInCapture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers(1)

    def forward(self, x: Tensor) -> Tensor:
        y = fails_in_capture(torch.cos(x))
        return self.layers(torch.tanh(y))


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell the op above that it is captured."""
    record_call = SimulatedGraphs.record

    def tell(device: SimulatedGraphs, function: Any, args: Any, kwargs: Any) -> Any:
        _under_capture.append(None)
        try:
            return record_call(device, function, args, kwargs)
        finally:
            _under_capture.pop()

    monkeypatch.setattr(SimulatedGraphs, "record", tell)


@pytest.mark.usefixtures("capturing")
def test_a_piece_that_cannot_be_captured_runs_eagerly_and_the_others_are_known() -> None:
    fast = compile_known(FailsInCapture(), capture_sizes=[8, 4], on_fallback="warn")
    with pytest.warns(PiecegraphWarning, match="PG401"):
        records = record(fast, rows(), "capture")
    outside = list(eager_calls(fast._engine.recorded.tapes()))
    assert {origin.op for call in outside for origin in call.origins} >= {"pgtest::fails_in_capture", "pgtest::unsafe"}
    assert [each.phase for each in records] == ["8", "4"]
    last = Place("aten::addmm", "layers.layers.0.out", "return self.out(x)")
    assert [places_in([each]) for each in records] == [[last], [last]]
    with torch.no_grad():
        torch.testing.assert_close(fast(rows()), fast._original(rows()))


@pytest.mark.usefixtures("capturing")
def test_a_capture_that_fails_leaves_the_next_one_right() -> None:
    """Without a program there is nothing to fall back to: the size is lost, and other functions are not."""
    with torch.no_grad(), pytest.raises(RecordError, match="PG403"):
        compile_known(FailsInCapture(), frontend="breakable")(rows())
    places = places_in(record(compile_known(Layers(1), frontend="breakable"), rows()))
    assert places == places_in_layer("layers.0")


# ---- the ledger


def a_call(op: str) -> Callable[[], LaunchCall]:
    return lambda: LaunchCall(op)


class Counted:
    """A capture that is only a number of nodes."""

    def __init__(self) -> None:
        self.count: int | None = 0
        self.ledger = Ledger(self)

    def num_nodes(self) -> int | None:
        return self.count

    def launch(self, op: str, num_nodes: int) -> None:
        self.ledger.begin()
        self.count = (self.count or 0) + num_nodes
        self.ledger.end(a_call(op))

    def owners(self) -> list[str | None]:
        nodes = [GraphNode("kernel", "k", None, None, None)] * (self.count or 0)
        found = self.ledger.finish_graph("piece 0", "4")(nodes)
        return [None if node.call is None else found.calls[node.call].op for node in found.nodes]


def test_nodes_belong_to_the_call_that_was_under_way() -> None:
    counted = Counted()
    counted.ledger.start_graph()
    counted.launch("a", 2)
    counted.launch("nothing", 0)
    counted.launch("b", 1)
    assert counted.owners() == ["a", "a", "b"]


def test_what_is_launched_outside_of_calls_belongs_to_the_step() -> None:
    counted = Counted()
    counted.ledger.start_graph()
    assert counted.count is not None
    counted.count += 1
    counted.launch("a", 1)
    counted.count += 1
    counted.ledger.settle(a_call("step"))
    counted.count += 1  # behind the step: nobody knows
    assert counted.owners() == ["step", "a", "step", None]


def test_between_graphs_and_in_a_spoilt_capture_nothing_is_counted() -> None:
    counted = Counted()
    counted.ledger.start_graph()
    counted.launch("a", 2)
    count, counted.count = counted.count, None
    counted.ledger.begin()
    assert counted.ledger.is_inside
    counted.ledger.end(a_call("between"))
    assert not counted.ledger.is_inside
    counted.ledger.settle(a_call("between"))
    counted.count = count
    assert counted.owners() == ["a", "a"]
    counted.ledger.start_graph()
    counted.count = 0
    counted.launch("b", 1)
    assert counted.owners() == ["b"]


def test_an_op_that_fails_is_over() -> None:
    counted = Counted()
    counted.ledger.start_graph()
    with OpObserver(counted.ledger), pytest.raises(RuntimeError):
        torch.ones(2) @ torch.ones(3)
    assert not counted.ledger.is_inside


def test_nodes_cannot_be_read_without_the_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(KernelError, match=r"PG732 .*cuda-bindings is not installed.*hint"):
        CudaNodes(None)  # type: ignore[arg-type]


# ---- paths of modules


def test_a_part_that_was_replaced_has_its_own_name() -> None:
    model = Layers(2)
    first, second = model.layers[0], model.layers[1]
    assert path_of([model, first], None) == "layers.0"
    model.layers[0], model.layers[1] = second, first
    assert path_of([model, first], None) == "layers.1"
    assert path_of([model, second, second.gate], None) == "layers.0.gate"


def test_a_new_part_does_not_get_the_name_of_one_that_is_gone() -> None:
    """Python gives the id of an object that is gone to the next one, which may sit elsewhere."""
    model = nn.Module()
    for number in range(50):
        model.add_module("first", nn.Module())
        assert path_of([model, model.first], None) == "first"  # type: ignore[list-item]
        del model.first
        model.add_module(f"other{number}", nn.Module())
        assert path_of([model, getattr(model, f"other{number}")], None) == f"other{number}"


def test_paths_start_where_they_are_told_to() -> None:
    model = Layers(1)
    gate = model.layers[0].gate
    assert path_of([gate], model) == "layers.0.gate"
    assert path_of([gate], None) == ""
    assert path_of([gate, nn.Identity()], model) == "layers.0.gate"  # a module that is no part of it
    assert path_of([], None) == ""


def test_a_model_that_is_replaced_in_part_is_recorded_anew_under_its_new_names() -> None:
    model = Layers(1)
    fast = compile_known(model, frontend="breakable")
    record(fast, rows())
    model.layers.insert(0, type(model.layers[0])())
    fast._engine.forget()
    assert places_in(record(fast, rows())) == places_in_layer("layers.0") + places_in_layer("layers.1")


def test_an_installed_module_is_its_own_root() -> None:
    outer = nn.Sequential(Layers(1))
    installed = piecegraph.install(
        outer[0],
        backend="eager",
        capture_sizes=[SIZE],
        dynamic_dims={"x": 0},
        frontend="breakable",
        splitting_ops=["pgtest::unsafe"],
        options={"graph_device": "simulated", "provenance": True},
    )
    with torch.no_grad():
        outer(rows())
    assert places_in(graph_records(installed._engine.recorded.tapes())) == places_in_layer("layers.0")
    installed.close()


def test_launches_of_triton_kernels_are_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no ops. Only those of the thread that watches count, and a kernel that is only compiled does not."""

    class Kernel:
        def fn(self) -> None: ...

        def run(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
            return args

    module = types.ModuleType("triton.runtime.jit")
    module.JITFunction = Kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch_compat.kernels, "triton_launchers", torch_compat.triton_launchers.__wrapped__)
    launched: list[str] = []

    @contextlib.contextmanager
    def around(name: str) -> Iterator[None]:
        launched.append(name)
        yield

    original = Kernel.run
    with torch_compat.triton_launches(around):
        assert Kernel().run(1, 2, grid=(1,)) == (1, 2)
        Kernel().run(warmup=True)
        other = threading.Thread(target=Kernel().run)
        other.start()
        other.join()
    Kernel().run()
    assert launched == ["fn"]
    assert Kernel.run is original
