"""Calls: what is served from a plan, what falls back, and that every loss is counted and told."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecegraph
from piecegraph.errors import CallError, FallbackError, PiecegraphWarning, RecordError
from tests.cases.modules import MLP, Branches, MixesRows, Squeezes, Stack, attention


def compile_eager(model: Any, **arguments: Any) -> Any:
    return piecegraph.compile(model, **{"backend": "eager", "on_fallback": "ignore", **arguments})


def events_of(fast: Any) -> dict[str, int]:
    events: dict[str, int] = fast.stats()["events"]
    return events


# --- modes


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_served_under_no_grad_and_inference_mode_alike(mode: Any) -> None:
    model = MLP()
    fast = compile_eager(model, capture_sizes=[8], on_fallback="raise")
    for current in (mode, torch.no_grad, torch.inference_mode, mode):
        with current():
            x = torch.randn(8, 12)
            torch.testing.assert_close(fast(x), model(x))
    assert fast.stats()["coverage"] == 1.0


def test_a_call_that_needs_gradients_runs_eagerly_and_is_counted() -> None:
    model = MLP()
    fast = compile_eager(model)
    x = torch.randn(8, 12)
    fast(x).sum().backward()
    assert model.up.weight.grad is not None
    assert events_of(fast) == {"PG501": 1}
    with torch.no_grad():
        fast(x)
    assert fast.stats()["coverage"] == 0.5


def test_nothing_requires_gradients() -> None:
    fast = compile_eager(MLP().requires_grad_(False), on_fallback="raise")
    fast(torch.randn(8, 12))
    assert fast.stats()["coverage"] == 1.0


def test_autocast_runs_eagerly() -> None:
    fast = compile_eager(nn.Linear(12, 3))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert fast(torch.randn(8, 12)).dtype == torch.bfloat16
    assert events_of(fast) == {"PG506": 1}


# --- policies


def test_each_distinct_fallback_warns_once_and_points_at_the_call() -> None:
    fast = piecegraph.compile(MLP(), backend="eager")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            fast(torch.randn(8, 12))
    assert [w.category for w in told] == [PiecegraphWarning]
    assert str(told[0].message).startswith("PG501")
    assert told[0].filename == __file__
    assert events_of(fast) == {"PG501": 3}


def test_fallbacks_can_be_errors() -> None:
    fast = compile_eager(MLP(), on_fallback="raise")
    with pytest.raises(FallbackError, match=r"PG501.*torch.no_grad\(\)"):
        fast(torch.randn(8, 12))


# --- signatures


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda fast: fast(torch.ones(8, 12, dtype=torch.float64), 2), "x is torch.float64, planned for torch.float32"),
        (lambda fast: fast(torch.ones(8, 12, 1), 2), "x has 3 dimensions, planned for 2"),
        (lambda fast: fast(torch.ones(8, 13), 2), r"x.shape\[1\] is 13, planned for 12"),
        (lambda fast: fast(torch.ones(8, 12), 3), "n is 3, planned for 2"),
        (lambda fast: fast(torch.ones(8, 12), 2.0), "n is 2.0, planned for 2"),
        (lambda fast: fast(torch.ones(8, 12), 2, torch.ones(8)), "extra is a Tensor, planned for None"),
        (lambda fast: fast(torch.ones(8, 13), 2, torch.ones(8)), "extra is a Tensor, planned for None"),
    ],
)
def test_a_call_that_does_not_match_is_told_and_still_right(call: Any, reason: str) -> None:
    def function(x: Tensor, n: int, extra: Any = None) -> Tensor:
        return x * n

    fast = piecegraph.compile(function, backend="eager", capture_sizes=[8])
    with torch.no_grad():
        fast(torch.ones(8, 12), 2)
        with pytest.warns(PiecegraphWarning, match=f"PG502 call: {reason}"):
            found = call(fast)
    assert found.sum() in (8 * 12 * 2, 8 * 13 * 2, 8 * 12 * 3)
    assert len(fast._engine.plans) == 1, "never a silent recompile"


def test_a_changed_dtype_that_eager_cannot_handle_either_says_both() -> None:
    fast = compile_eager(MLP(), capture_sizes=[8])
    with torch.no_grad():
        fast(torch.ones(8, 12))
        with pytest.raises(CallError, match="PG502.*x is torch.float64, planned for torch.float32; run eagerly"):
            fast(torch.ones(8, 12, dtype=torch.float64))
        fast(torch.ones(8, 12))


def test_capture_plans_for_another_signature() -> None:
    fast = compile_eager(lambda x, n: x * n, dynamic_dims={"x": 0}, capture_sizes=[4, 2], on_fallback="raise")
    with torch.no_grad():
        fast.capture(torch.ones(4), 2).capture(torch.ones(4), 3)
        assert fast(torch.ones(2), 2).tolist() == [2, 2]
        assert fast(torch.ones(2), 3).tolist() == [3, 3]
    assert len(fast._engine.plans) == 2


def test_arguments_by_position_by_name_and_by_default_are_the_same_call() -> None:
    def function(x: Tensor, scale: float = 2.0, *, shift: float = 1.0) -> Tensor:
        return x * scale + shift

    fast = compile_eager(function, on_fallback="raise")
    with torch.no_grad():
        x = torch.ones(3)
        for found in (fast(x), fast(x=x), fast(x, 2.0), fast(shift=1.0, x=x), fast(x, scale=2.0)):
            assert found.tolist() == [3, 3, 3]
    assert len(fast._engine.plans) == 1


def test_sizes_that_should_agree_but_do_not() -> None:
    fast = compile_eager(lambda x, y: x.sum() + y.sum(), dynamic_dims={"x": 0, "y": 0}, capture_sizes=[4])
    with torch.no_grad():
        fast(torch.ones(4), torch.ones(4))
        assert fast(torch.ones(4), torch.ones(3)) == 7
    assert events_of(fast)["PG502"] == 1


def test_training_mode_is_part_of_the_plan() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    fast = compile_eager(model, dynamic_dims={"input": 0})
    with torch.no_grad():
        x = torch.ones(4, 4)
        expected = fast(x)
        fast.train()
        assert not torch.equal(fast(x), expected)
        fast.eval()
        assert torch.equal(fast(x), expected)
    assert events_of(fast) == {}


def test_a_function_without_sizes_is_recorded_once_for_each_signature_up_to_a_limit() -> None:
    fast = compile_eager(lambda x: x * 2, dynamic_dims={}, options={"max_signatures": 2})
    with torch.no_grad():
        for size in (2, 3, 2, 3, 4, 4):
            assert fast(torch.ones(size)).shape == (size,)
    assert len(fast._engine.plans) == 2
    assert events_of(fast) == {"PG509": 2}
    assert fast.stats()["replayed"] == 4


def test_overlapping_inputs_one_of_them_written_to() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x + y

    fast = compile_eager(function)
    with torch.no_grad():
        assert fast(torch.ones(3), torch.ones(3)).tolist() == [3, 3, 3]
        shared = torch.ones(3)
        assert fast(shared, shared).tolist() == [4, 4, 4]
    assert events_of(fast) == {"PG206": 1}


# --- sizes


def test_a_size_above_the_largest_runs_the_pieces_without_graphs() -> None:
    model = Stack(attention)
    fast = compile_eager(model, splitting_ops=[attention], capture_sizes=[8, 4])
    with torch.no_grad():
        for size in (8, 9, 100):
            x = torch.randn(size, 12)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert events_of(fast) == {"PG503": 2}
    assert fast.stats()["replayed"] == 1


def test_without_graphs_inputs_of_any_layout_are_right() -> None:
    model = MLP()
    fast = compile_eager(model, cudagraph_mode="none", backend="inductor", on_fallback="raise")
    with torch.no_grad():
        for x in (
            torch.randn(6, 12),
            torch.randn(12, 6).T,
            torch.randn(6, 24)[:, ::2],
            torch.randn(1, 12).expand(6, 12),
        ):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert fast.stats()["replayed"] == 0


@pytest.mark.parametrize("graph_device", ["auto", "simulated"])
def test_inputs_of_any_layout_are_right(graph_device: str) -> None:
    model = MLP()
    fast = compile_eager(model, capture_sizes=[6], on_fallback="raise", options={"graph_device": graph_device})
    with torch.no_grad():
        for x in (
            torch.randn(12, 6).T,
            torch.randn(6, 12),
            torch.randn(6, 24)[:, ::2],
            torch.randn(1, 12).expand(6, 12),
        ):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_channels_last_stays_channels_last() -> None:
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    fast = compile_eager(conv, dynamic_dims={"input": 0}, capture_sizes=[2])
    with torch.no_grad():
        x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
        torch.testing.assert_close(fast(x), conv(x))
        assert fast(x).is_contiguous(memory_format=torch.channels_last)


def test_the_ladder_is_recorded_as_sizes_occur() -> None:
    fast = compile_eager(MLP(), options={"max_sizes": 2})
    with torch.no_grad():
        fast(torch.randn(20, 12))
        fast(torch.randn(21, 12))
        assert list(fast.stats()["plans"][0]["sizes"]) == ["24"]
        fast(torch.randn(60, 12))
        fast(torch.randn(5, 12))  # a third size is one too many: it is padded to what there is
        fast(torch.randn(65, 12))  # and this one has nothing to be padded to
    assert list(fast.stats()["plans"][0]["sizes"]) == ["24", "64"]
    assert events_of(fast) == {"PG510": 1, "PG509": 1}


def test_capture_records_the_ladder_up_to_the_example() -> None:
    fast = compile_eager(MLP()).capture(torch.randn(20, 12))
    assert list(fast.stats()["plans"][0]["sizes"]) == ["20", "16", "8", "4", "2", "1"]


@pytest.mark.parametrize("frontend", ["trace", "breakable"])
@pytest.mark.parametrize("graph_device", ["auto", "simulated"])
def test_a_size_larger_than_those_before_leaves_them_where_they_are(frontend: str, graph_device: str) -> None:
    """It needs larger buffers. Tapes that were recorded before read the smaller ones."""
    options = {"graph_device": graph_device}
    fast = compile_eager(lambda x: x * 2, dynamic_dims={"x": 0}, frontend=frontend, options=options)
    with torch.no_grad():
        for size in (8, 5, 16, 6, 7, 8, 16):  # 6 and 7 first occur behind 16, and run as 8
            x = torch.randn(size, 3)
            assert torch.equal(fast(x), x * 2), size
    assert list(fast.stats()["plans"][0]["sizes"]) == ["8", "16"]


def test_listed_sizes_can_be_lazy_too() -> None:
    fast = compile_eager(MLP(), capture_sizes=[16, 8, 4], options={"lazy": True})
    with torch.no_grad():
        fast(torch.randn(7, 12))
    assert list(fast.stats()["plans"][0]["sizes"]) == ["8"]


def test_padding_is_refused_where_it_changes_real_rows() -> None:
    model = MixesRows()
    fast = compile_eager(model, capture_sizes=[8, 4])
    with torch.no_grad():
        for size in (8, 7, 4):
            x = torch.randn(size, 12)
            torch.testing.assert_close(fast(x), model(x))
    assert events_of(fast) == {"PG404": 1, "PG504": 1}
    assert "padding of s0: refused (padding gives a relative difference" in fast.explain()


def test_padding_can_be_forced_or_forbidden() -> None:
    forced = compile_eager(MixesRows(), capture_sizes=[8], padding="always", on_fallback="raise")
    forbidden = compile_eager(MLP(), capture_sizes=[8], padding="never")
    with torch.no_grad():
        forced(torch.randn(7, 12))
        forbidden(torch.randn(7, 12))
    assert forced.stats()["coverage"] == 1.0
    assert events_of(forbidden) == {"PG504": 1}


def test_padding_that_writes_where_a_call_would_not_is_refused() -> None:
    """Padded slots of zero overwrite row 0 of the cache: told by the state, not by any result."""

    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.zeros(10, 3))

        def forward(self, x: Tensor, slots: Tensor) -> Tensor:
            self.rows.index_copy_(0, slots % 10, x)
            return x * 2

    model = Cache()
    fast = compile_eager(model, dynamic_dims={"x": 0, "slots": 0}, capture_sizes=[8])
    with torch.no_grad():
        fast.capture(torch.ones(8, 3), torch.arange(1, 9))
        fast(torch.ones(4, 3), torch.arange(1, 5))
    assert model.rows[1:5].eq(1).all()
    assert model.rows[0].eq(0).all()
    assert events_of(fast) == {"PG404": 1, "PG504": 1}


@pytest.mark.parametrize("graph_device", ["auto", "simulated"])
@pytest.mark.parametrize("first", [[0, 0], [2, 1]])
@pytest.mark.parametrize("function", [lambda x: x.sort(0).values, lambda x: x.amax(0), lambda x: x.amin(0)])
def test_padding_of_integers_is_refused_whatever_the_first_call_holds(
    function: Any, first: list[int], graph_device: str
) -> None:
    def forward(x: Tensor) -> Tensor:
        return function(x)

    fast = compile_eager(forward, capture_sizes=[2, 16], options={"graph_device": graph_device})
    for numbers in (first, [0, 0, 0], [3, 1, 4, 2], [-2, -1, -3]):
        x = torch.tensor(numbers)
        assert torch.equal(fast(x), function(x))


def test_padding_is_decided_by_a_call_that_shows_it() -> None:
    table = torch.arange(1, 9)

    def forward(x: Tensor) -> Tensor:
        return table[x]

    fast = compile_eager(forward, capture_sizes=[8])
    for _ in range(2):
        assert fast(torch.zeros(5, dtype=torch.int64)).tolist() == [1] * 5  # what padding holds, too
    assert events_of(fast) == {"PG404": 2, "PG504": 2}
    assert fast(torch.tensor([3, 1, 2])).tolist() == [4, 2, 3]
    assert "padding of s0: allowed" in fast.explain()


def test_random_numbers_after_a_padded_call_are_those_after_the_function() -> None:
    def forward(x: Tensor) -> Tensor:
        torch.rand(x.shape[0], 3)
        return x + 1

    fast = compile_eager(forward, frontend="breakable", capture_sizes=[8])
    drawn = []
    for function in (forward, fast):
        torch.manual_seed(0)
        function(torch.ones(5, 4))
        drawn.append(torch.rand(2))
    assert torch.equal(*drawn)
    assert "it draws random numbers" in fast.explain()


@pytest.mark.parametrize("frontend", ["auto", "breakable"])
@pytest.mark.parametrize("device", ["auto", "simulated"])
def test_random_numbers_of_a_generator_of_ones_own(frontend: str, device: str) -> None:
    generator = torch.Generator()

    def forward(x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, generator=generator)

    fast = compile_eager(forward, frontend=frontend, options={"graph_device": device})
    drawn = []
    for function in (forward, fast):
        generator.manual_seed(3)
        drawn.append([function(torch.zeros(size)) for size in (4, 4, 6, 1, 4)])
    for found, expected in zip(*drawn, strict=True):
        assert torch.equal(found, expected)


def test_rows_are_not_padded_that_a_generator_of_ones_own_draws_for() -> None:
    generator = torch.Generator()

    def forward(x: Tensor) -> Tensor:
        torch.rand(x.shape[0], 3, generator=generator)
        return x + 1

    fast = compile_eager(forward, frontend="breakable", capture_sizes=[8])
    drawn = []
    for function in (forward, fast):
        generator.manual_seed(0)
        function(torch.ones(5, 4))
        drawn.append(torch.rand(2, generator=generator))
    assert torch.equal(*drawn)
    assert "it draws random numbers" in fast.explain()


def test_random_numbers_that_nobody_reads_are_drawn_all_the_same() -> None:
    def forward(x: Tensor) -> Tensor:
        nn.functional.dropout(x, 0.5, training=True)
        return x + 1

    fast = compile_eager(forward)
    drawn = []
    for function in (forward, fast):
        torch.manual_seed(0)
        function(torch.ones(8, 4))
        drawn.append(torch.rand(2))
    assert torch.equal(*drawn)


def test_looking_at_a_size_of_one_draws_no_random_numbers() -> None:
    def forward(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    fast = compile_eager(forward)
    drawn = []
    for function in (forward, fast):
        torch.manual_seed(0)
        drawn.append(torch.cat([function(torch.ones(1, 4)), torch.rand(1, 4)]))
    assert torch.equal(*drawn)


def test_nothing_is_recorded_from_an_empty_example() -> None:
    fast = compile_eager(MLP(), capture_sizes=[4])
    with torch.no_grad():
        with pytest.raises(CallError, match="PG507 MLP cannot be captured: there are no rows to plan with"):
            fast.capture(torch.empty(0, 12))
        fast(torch.ones(2, 12))
        with pytest.raises(CallError, match="PG507 the example has size 0: there are no rows to record with"):
            fast.capture(torch.empty(0, 12))


@pytest.mark.parametrize("frontend", ["trace", "breakable"])
def test_nothing_is_planned_from_an_empty_call(frontend: str) -> None:
    model, reference = nn.BatchNorm1d(4), nn.BatchNorm1d(4)  # writes nothing without rows
    fast = compile_eager(model, frontend=frontend)
    with torch.no_grad():
        for size in (0, 3, 4):
            x = torch.randn(size, 4)
            torch.testing.assert_close(fast(x), reference(x))
    torch.testing.assert_close(model.running_mean, reference.running_mean)
    assert events_of(fast)["PG507"] == 1


def test_padded_rows_hold_what_was_asked_for() -> None:
    seen = []

    @piecegraph.eager_op
    def look(x: Tensor) -> Tensor:
        seen.append(x.tolist())
        return x

    options = {"pad_values": {"x": -1}, "graph_device": "simulated"}
    fast = compile_eager(
        lambda x: look(x * 1) + 0, frontend="breakable", dynamic_dims={"x": 0}, capture_sizes=[4], options=options
    )
    with torch.no_grad():
        for x in ([1, 2], [1, 2, 3, 4], [7]):
            fast(torch.tensor(x))
    assert seen[-1] == [7, -1, -1, -1]
    assert [1, 2, -1, -1] in seen


def test_a_size_of_one_that_behaves_differently_runs_eagerly() -> None:
    fast = compile_eager(Squeezes(), capture_sizes=[4])
    with torch.no_grad():
        assert fast(torch.ones(1, 12)).shape == (12,)
        assert fast(torch.ones(2, 12)).shape == (2, 12)
    assert events_of(fast) == {"PG508": 1}


def test_a_size_of_one_that_the_function_fixes_is_planned_as_it_is() -> None:
    table = torch.zeros(8, 4)

    def forward(x: Tensor) -> Tensor:
        rows = x[1:]
        table[: rows.shape[0]] = rows
        return x + 1

    fast = compile_eager(forward, dynamic_dims="auto")
    for size in (1, 3, 1):
        x = torch.randn(size, 4)
        assert torch.equal(fast(x), x + 1)
        assert torch.equal(table[: size - 1], x[1:])
    assert fast.stats()["replayed"] >= 2


def test_a_size_that_takes_another_branch_runs_eagerly_and_names_the_line() -> None:
    fast = compile_eager(Branches(), capture_sizes=[16, 8])
    with torch.no_grad():
        fast(torch.ones(8, 12))
        assert fast(torch.ones(3, 12)).eq(3).all(), "the padded size would take the other branch"
        assert fast(torch.ones(6, 12)).eq(2).all()
    assert events_of(fast) == {"PG505": 1}
    assert "x.shape[0] > 4" in fast.explain()


def test_empty_inputs_run_eagerly() -> None:
    fast = compile_eager(MLP(), capture_sizes=[4])
    with torch.no_grad():
        assert fast(torch.ones(0, 12)).shape == (0, 12)
    assert events_of(fast) == {"PG507": 1}


def test_heavy_padding_is_noted() -> None:
    fast = compile_eager(MLP(), capture_sizes=[64], on_fallback="raise")
    with torch.no_grad():
        fast(torch.ones(5, 12))
    assert events_of(fast) == {"PG510": 1}


def test_the_cut_ops_find_a_batch_that_fits() -> None:
    sizes_seen: list[int] = []
    batch: list[int] = []

    @piecegraph.eager_op
    def needs_batch(x: Tensor) -> Tensor:
        sizes_seen.append(batch[0])
        assert batch[0] <= x.shape[0]
        return x + 1

    def prepare(sizes: dict[str, int]) -> None:
        batch[:] = [sizes["s0"]]

    options = {"prepare": prepare, "graph_device": "simulated"}
    fast = compile_eager(
        lambda x: needs_batch(x * 2), frontend="breakable", dynamic_dims={"x": 0}, capture_sizes=[8, 4], options=options
    )
    batch[:] = [8]
    fast.capture(torch.ones(8))
    assert {8, 4, 5} <= set(sizes_seen), "warm-up and recording at both sizes, the padding test in between"


# --- static inputs


def test_static_inputs_are_read_and_written_in_place() -> None:
    def append(cache: Tensor, x: Tensor, position: Tensor) -> Tensor:
        cache.index_copy_(0, position, x)
        return cache.sum(0)

    cache = torch.zeros(16, 3)
    options = {"static_inputs": ["cache"], "graph_device": "simulated"}
    fast = compile_eager(append, dynamic_dims={"x": 0, "position": 0}, capture_sizes=[2], options=options)
    with torch.no_grad():
        fast.capture(cache, torch.ones(2, 3), torch.tensor([0, 1]))
        assert cache.eq(0).all(), "recording leaves it as it was"
        for step in range(4):
            fast(cache, torch.ones(2, 3), torch.tensor([2 * step, 2 * step + 1]))
        assert cache[:8].eq(1).all()
        assert events_of(fast).get("PG502") is None
        fast(cache.clone(), torch.ones(2, 3), torch.tensor([0, 1]))
    assert events_of(fast)["PG502"] == 1
    assert "declared static but lies at another address" in fast.explain()


# --- the end


def test_after_close_calls_are_an_error_and_the_module_still_works() -> None:
    model = MLP()
    fast = compile_eager(model, capture_sizes=[8])
    x = torch.randn(8, 12)
    with torch.no_grad():
        fast(x)
        fast.close()
        for call in (lambda: fast(x), lambda: fast.capture(x)):
            with pytest.raises(CallError, match="PG106"):
                call()
        model(x)
        with piecegraph.eager():
            torch.testing.assert_close(fast(x), model(x))


def test_an_op_that_fails_in_the_first_run_is_told_as_such() -> None:
    """Torch bounds what ``masked_select`` returns by the size of one operand, and asserts it where it runs."""
    fast = compile_eager(torch.masked_select, options={"graph_device": "simulated"})
    with torch.no_grad(), pytest.raises(RecordError, match="PG403.*Runtime assertion failed"):
        fast(torch.randn(5, 1), torch.ones(5, 5, dtype=torch.bool))
