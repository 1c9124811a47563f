"""The recorder's rules, on simulated graphs: fixed addresses, recycled memory, what cannot be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecegraph
from piecegraph.errors import AddressError, CallError
from piecegraph.tape.simulated import SimulatedGraphs
from tests.cases.modules import MLP, HiddenSync, Stack, attend_into, attention

SIMULATED = {"graph_device": "simulated"}


def compile_simulated(model: Any, **arguments: Any) -> Any:
    options = {**SIMULATED, **arguments.pop("options", {})}
    return piecegraph.compile(model, **{"backend": "eager", "capture_sizes": [8, 4], **arguments}, options=options)


# --- the simulator itself: if it let mistakes pass, the tests on it would mean nothing


def capture(device: SimulatedGraphs, function: Callable[..., Any], *args: Any) -> tuple[Any, Callable[[], None]]:
    device.begin(keep_nodes=False)
    result = device.call(function, args, {})
    captured = device.end()
    assert captured is not None
    return result, captured.replay


def test_a_replay_reads_the_addresses_of_the_recording() -> None:
    device = SimulatedGraphs()
    with device.session(), torch.no_grad():
        x = torch.ones(4)
        y, replay = capture(device, lambda a: a + 1, x)
        x.fill_(5)
        replay()
        assert torch.equal(y, torch.full((4,), 6.0))
        moved = torch.full((4,), 9.0)  # a caller that passes another tensor is not noticed by a graph
        replay()
        assert torch.equal(y, torch.full((4,), 6.0))
        del moved


def test_memory_that_nobody_holds_is_recycled_by_later_captures() -> None:
    device = SimulatedGraphs()
    with device.session(), torch.no_grad():
        x = torch.ones(4)
        y, first = capture(device, lambda a: a + 1, x)
        address_only = y.untyped_storage().data_ptr()
        del y
        _, second = capture(device, lambda a: a * 2, x)
        first()
        second()
        assert device.owns(x) is False
        block = next(b for b in device._blocks if b.memory.data_ptr() == address_only)
        assert block.memory.view(torch.float32).isnan().all()


def test_memory_that_is_held_is_not_recycled() -> None:
    device = SimulatedGraphs()
    with device.session(), torch.no_grad():
        x = torch.ones(4)
        y, first = capture(device, lambda a: a + 1, x)
        _, second = capture(device, lambda a: a * 2, x)
        first()
        second()
        assert torch.equal(y, torch.full((4,), 2.0))


def test_between_sizes_all_of_it_is_recycled() -> None:
    device = SimulatedGraphs()
    with device.session(), torch.no_grad():
        y, replay = capture(device, lambda a: a + 1, torch.ones(4))
        device.end_size()
        assert y.isnan().all()
        replay()
        assert torch.equal(y, torch.full((4,), 2.0))


def test_host_reads_are_forbidden_while_capturing() -> None:
    device = SimulatedGraphs()
    with device.session(), torch.no_grad():
        device.begin(keep_nodes=False)
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            torch.ones(4).nonzero()
        device.abandon()
        torch.ones(4).nonzero()


# --- sizes share memory, and replay in any order


@pytest.mark.parametrize("attend", [attention, attend_into])
@pytest.mark.parametrize("arguments", [{}, {"frontend": "breakable"}], ids=str)
def test_sizes_in_any_order(attend: Any, arguments: dict[str, Any]) -> None:
    model = Stack(attend)
    ops = ["pgtest::attention", "pgtest::attention_out"]
    fast = compile_simulated(model, splitting_ops=ops, capture_sizes=[16, 8, 4, 2], **arguments)
    with torch.no_grad():
        fast.capture(torch.randn(16, 12))
        for size in (2, 16, 4, 3, 13, 8, 16, 2):
            x = torch.randn(size, 12)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    stats = fast.stats()
    assert stats["coverage"] == 1.0
    assert [size["graphs"] for size in stats["plans"][0]["sizes"].values()] == [4] * 4
    assert [size["eager_steps"] for size in stats["plans"][0]["sizes"].values()] == [3] * 4


def test_sizes_are_recorded_largest_first() -> None:
    fast = compile_simulated(MLP(), capture_sizes=[2, 16, 8])
    with torch.no_grad():
        fast(torch.randn(2, 12))
    assert list(fast.stats()["plans"][0]["sizes"]) == ["16", "8", "2"]


# --- what cannot be captured


class ForbidsHiddenSync(SimulatedGraphs):
    """Fails like a GPU does, in the middle of a piece."""

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "hidden_sync" in getattr(getattr(function, "__self__", None), "code", ""):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore text")
        return super().call(function, args, kwargs)


def test_a_piece_that_cannot_be_captured_runs_eagerly_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piecegraph.engine.mode.SimulatedGraphs", ForbidsHiddenSync)
    model = HiddenSync()
    fast = compile_simulated(model, splitting_ops=[attention], dynamic_dims={"x": 0}, on_fallback="ignore")
    with torch.no_grad():
        for size in (8, 4, 3, 8):
            x = torch.randn(size, 12)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    stats = fast.stats()
    assert stats["events"] == {"PG401": 1}
    assert stats["plans"][0]["sizes"]["4"]["graphs"] == 1
    assert stats["plans"][0]["sizes"]["4"]["eager_steps"] == 2
    assert "PG401 piece 0 from modules.py" in fast.explain()


class RunsOutOfMemory(SimulatedGraphs):
    def begin(self, *, keep_nodes: bool) -> None:
        if self.num_rows > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB. and so on")
        super().begin(keep_nodes=keep_nodes)

    num_rows = 0


def test_out_of_memory_drops_the_size_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piecegraph.engine.mode.SimulatedGraphs", RunsOutOfMemory)

    def prepare(sizes: dict[str, int]) -> None:
        RunsOutOfMemory.num_rows = sizes["s0"]

    model = MLP()
    fast = compile_simulated(model, capture_sizes=[32, 16, 8], options={"prepare": prepare}, on_fallback="ignore")
    with torch.no_grad():
        for size in (8, 16, 5, 30):
            x = torch.randn(size, 12)
            torch.testing.assert_close(fast(x), model(x))
    stats = fast.stats()
    assert list(stats["plans"][0]["sizes"]) == ["8"]
    assert stats["events"]["PG402"] == 3  # two sizes dropped, and one call of a dropped size
    assert "size 32: CUDA out of memory" in fast.explain()


# --- addresses


def test_a_weight_that_was_moved_before_the_first_replay() -> None:
    model = Stack(attention)
    fast = compile_simulated(model, splitting_ops=[attention], padding="never")
    with torch.no_grad():
        x = torch.randn(8, 12)
        fast.capture(x)
        model.layers[1].mlp.up.weight.data = model.layers[1].mlp.up.weight.data * 2
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert "layers.1.mlp.up.weight" in fast.explain()


def test_all_weights_moved_after_the_first_replay() -> None:
    model = Stack(attention)
    fast = compile_simulated(model, splitting_ops=[attention])
    with torch.no_grad():
        x = torch.randn(8, 12)
        fast(x)
        model._apply(lambda tensor: tensor * 2)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert fast.stats()["events"] == {"PG515": 1}
    assert fast.stats()["coverage"] == 1.0


def test_every_replay_is_checked_if_asked_for() -> None:
    model = Stack(attention)
    fast = compile_simulated(model, splitting_ops=[attention], options={"check_addresses": "always"})
    with torch.no_grad():
        x = torch.randn(8, 12)
        for _ in range(3):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        last = model.layers[-1].mlp.down
        last.weight.data = last.weight.data * 2
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert "layers.2.mlp.down.weight" in fast.explain()


changing = {"returns": "fresh"}


@piecegraph.eager_op
def changes(x: Tensor) -> Tensor:
    if changing["returns"] == "view":
        return x[:4]
    return x.clone() if changing["returns"] == "fresh" else x.new_zeros(x.shape[0] + 1, x.shape[1])


def test_an_eager_op_that_returns_another_shape_than_recorded() -> None:
    changing["returns"] = "fresh"
    fast = compile_simulated(lambda x: changes(x * 2) + 1, frontend="breakable", capture_sizes="auto")
    with torch.no_grad():
        fast.capture(torch.ones(4, 3))
        changing["returns"] = "longer"
        with pytest.raises(CallError, match=r"PG521.*returned torch.float32 \(5, 3\).*test_record.py"):
            fast(torch.ones(4, 3))


moved = {"view": False}


@piecegraph.eager_op
def moving_view(x: Tensor) -> Tensor:
    return x[x.shape[0] // 2 :] if moved["view"] else x[: x.shape[0] // 2]


def test_an_eager_op_whose_view_moves() -> None:
    fast = compile_simulated(lambda x: moving_view(x * 2) + 1, frontend="breakable", capture_sizes="auto")
    with torch.no_grad():
        fast.capture(torch.ones(4, 3))
        moved["view"] = True
        with pytest.raises(AddressError, match="PG520 result 0 of cut 0 .*moving_view.* has moved"):
            fast(torch.ones(4, 3))


# --- recording leaves no trace


class Counter(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x * self.count + torch.rand_like(x) * 0


@pytest.mark.parametrize("arguments", [{}, {"frontend": "breakable"}], ids=str)
def test_recording_changes_neither_state_nor_random_numbers(arguments: dict[str, Any]) -> None:
    model = Counter()
    fast = compile_simulated(model, capture_sizes=[8, 4, 3], **arguments)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with torch.no_grad():
        fast.capture(torch.ones(8, 3))
        assert model.count == 0
        assert torch.equal(torch.rand(3), expected)
        for number in (1, 2, 3):
            assert torch.equal(fast(torch.ones(3, 3)), torch.full((3, 3), float(number)))


def test_a_warm_up_runs_equal_pieces_once() -> None:
    calls: list[int] = []

    def counting(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            calls.append(id(module))
            return module.forward(*args)

        return run

    model, x, counts = Stack(attention, num_layers=5), torch.randn(8, 12), []
    with torch.no_grad():
        for sizes in ([8, 4], [8, 4, 2]):
            calls.clear()
            fast = compile_simulated(model, splitting_ops=[attention], backend=counting, capture_sizes=sizes)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
            counts.append(len(calls))
    distinct, pieces = len(set(calls)), fast.stats()["plans"][0]["pieces"]
    assert pieces > distinct
    assert counts[1] - counts[0] == distinct + (pieces - 1) + pieces, (
        "a warm-up, the recording, which runs what an eager op is to read, and a replay that tries the padding"
    )


def test_a_warm_up_runs_every_piece_that_gives_indices() -> None:
    class Lookup(nn.Module):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.register_buffer("last", torch.tensor(rows - 1))
            self.register_buffer("table", torch.randn(rows, 12))

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.index_select(self.table, 0, self.last.expand(x.shape[0]))

    model = nn.Sequential(*(Lookup(rows) for rows in (9, 5, 2)))  # an index of the first is none of the last
    cuts = [torch.ops.aten.index_select]
    fast = compile_simulated(model, splitting_ops=cuts, capture_sizes="auto", on_fallback="raise")
    with torch.no_grad():
        x = torch.randn(8, 12)
        torch.testing.assert_close(fast(x), model(x))
