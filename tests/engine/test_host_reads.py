"""Functions that read data on the host: each way through them is recorded, and a call follows its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import piecegraph
from piecegraph.engine import breakable
from piecegraph.errors import FallbackError, RecordError
from piecegraph.tape import reads
from tests.cases.check import assert_same
from tests.cases.held import without_collector
from tests.cases.reads import FUNCTIONS, Counts, X, branch, check_calls, check_tiny, draws, paths_of


def compile_reading(model: Any, *, options: dict[str, Any] | None = None, **arguments: Any) -> Any:
    options = {"graph_device": "simulated", **(options or {})}
    return piecegraph.compile(model, **{"frontend": "breakable", "on_fallback": "raise", **arguments}, options=options)


def test_both_ways_of_a_branch_are_replayed() -> None:
    fast = compile_reading(branch)
    check_calls(fast, branch, X + 1, X + 2, X - 1, X - 2, X + 3, X - 3)
    assert fast.stats()["coverage"] == 1.0
    assert paths_of(fast) == {"recorded": 2, "replays": [3, 3], "left": 3, "given_up": False}
    text = fast.explain()
    assert "the host reads its result: True" in text
    assert "reads.py:" in text
    assert "2 paths recorded, replayed 3, 3 times; a tape was left 3 times" in text


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_read(name: str) -> None:
    function = FUNCTIONS[name]
    fast = compile_reading(function)
    check_calls(fast, function, X, X, X + 2, X, X + 2, X + 9, X + 9, X)
    assert fast.stats()["coverage"] == 1.0


MADE_OF_OTHERS: dict[str, Any] = {
    "bool": lambda x: x * 2 if x.sum() > 0 else x * 3,
    "any": lambda x: x * 2 if (x == 0).any() else x * 3,
    "where": lambda x: torch.where(x > 0)[0] * 2,
    "repeat_interleave": FUNCTIONS["repeat_interleave"],
    "contains": lambda x: x * 2 if 3 in x else x * 3,
}
"""They read by ops that are made of others, which modes see whole in inference mode."""


@pytest.mark.parametrize("name", MADE_OF_OTHERS)
def test_what_is_read_in_inference_mode(name: str) -> None:
    function = MADE_OF_OTHERS[name]
    fast = compile_reading(function)
    with torch.inference_mode():
        for x in (X, X + 2, X - 9, X + 0.5, X):
            assert_same(fast(x), function(x))
    assert fast.stats()["coverage"] == 1.0
    assert paths_of(fast)["recorded"] > 1


def test_weights_of_inference_mode_are_read_as_others() -> None:
    with torch.inference_mode():
        weight = torch.zeros(())

    def function(x: Tensor) -> Tensor:
        return x * 2 if weight else x * 3

    fast = compile_reading(function)
    for value in (0.0, 1.0, 0.0):
        with torch.inference_mode():
            weight.fill_(value)
        check_calls(fast, function, X)
    assert fast.stats()["coverage"] == 1.0


def test_padded_rows_decide_nothing_in_inference_mode() -> None:
    def function(x: Tensor) -> Tensor:
        return x * 2 if (x == 0).any() else x * 3

    fast = compile_reading(function, capture_sizes=[4], on_fallback="ignore")
    with torch.inference_mode():
        for x in (torch.zeros(4, 2), torch.zeros(3, 2), torch.ones(3, 2)):
            assert_same(fast(x), function(x))
    assert "padded rows would be part of what the host reads" in fast.explain()


def test_ops_are_taken_apart_by_the_code_that_would_run() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.dropout(x, 0.5, True)

    fast = piecegraph.compile(function, frontend="breakable", on_fallback="raise")
    with torch.inference_mode():
        for seed in range(3):
            torch.manual_seed(seed)
            expected = function(X)
            torch.manual_seed(seed)
            assert_same(fast(X), expected)


def test_a_read_that_was_not_seen_before_recording_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = compile_reading(branch)
    monkeypatch.setattr(breakable.BreakableBody, "reads_data", lambda self, sizes: False)
    with torch.no_grad(), pytest.raises(RecordError, match="PG403.*the host reads data"):
        fast(X)


READ_ARGUMENTS: dict[str, Any] = {
    "tensor_split": lambda x, i: torch.tensor_split(x * 2, i)[0] + 1,
    "by name": lambda x, i: torch.tensor_split(x * 2, tensor_indices_or_sections=i)[0] + 1,
    "method": lambda x, i: (x * 2).tensor_split(i + 1)[1] + 1,
    "op": lambda x, i: torch.ops.aten.tensor_split.tensor_indices_or_sections(x * 2, i)[0] + 1,
    "ops": lambda x, i: torch.ops.aten.tensor_split(x * 2, torch.cat([i, i + 1]))[0] + 1,
    "tensordot": lambda x, i: torch.tensordot(x.outer(x), x.outer(x + 1), dims=torch.stack([i % 2, i % 3])) + 1,
    "repr": lambda x, i: (x * 2, repr(i)),
}
"""They read an argument in C++, or in Python that modes do not see."""


@pytest.mark.parametrize("name", READ_ARGUMENTS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_arguments_that_are_read_without_an_op(name: str, mode: Any) -> None:
    function = READ_ARGUMENTS[name]
    fast = compile_reading(function)
    with mode():
        for index in (0, 1, 3, 1, 0):
            i = torch.tensor([index])
            assert_same(fast(X, i), function(X, i))
    assert fast.stats()["coverage"] == 1.0


def test_without_graphs_the_function_just_runs() -> None:
    function = FUNCTIONS["number returned"]
    fast = piecegraph.compile(function, frontend="breakable", on_fallback="raise")
    check_calls(fast, function, X, X + 2, X + 3)
    assert fast.stats()["coverage"] == 1.0


def test_what_was_written_is_put_back_when_a_tape_is_left() -> None:
    model, reference = Counts("cpu"), Counts("cpu")
    fast = compile_reading(model, options={"static_inputs": ["cache"]})
    cache, expected_cache = torch.zeros(4), torch.zeros(4)
    with torch.no_grad():
        for shift in (0, 1, 1, 0, 3, 2, 2, 5, 4):
            x, expected_x = torch.full((5,), float(shift)), torch.full((5,), float(shift))
            assert_same(fast(x, cache), reference(expected_x, expected_cache))
            assert_same(x, expected_x)
            assert_same(cache, expected_cache)
            assert_same(model.scale, reference.scale)
    assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))
    assert fast.stats()["coverage"] == 1.0
    assert paths_of(fast)["recorded"] == 2
    assert paths_of(fast)["left"] > 1


def test_an_argument_that_one_way_writes_to() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return x.add_(y) if x.sum() > 0 else x + y

    fast = compile_reading(function, on_fallback="ignore")
    check_calls(fast, function, (X - 1, X), (X + 1, X), (X - 1, X), (X + 1, X))
    assert fast.stats()["coverage"] == 1.0
    with torch.no_grad():
        for start in (X - 1, X + 1, X + 1):
            x, expected = start.clone(), start.clone()
            assert_same(fast(x, x), function(expected, expected))
            assert_same(x, expected)


def test_ways_beyond_the_limit_run_eagerly() -> None:
    function = FUNCTIONS["item"]
    fast = compile_reading(function, options={"max_paths": 2}, on_fallback="ignore")
    check_calls(fast, function, X, X + 1, X + 2, X, X + 2, X + 1)
    stats = fast.stats()
    assert stats["events"] == {"PG511": 2}
    assert stats["replayed"] == 4
    assert "2 paths are recorded already" in fast.explain()
    strict = compile_reading(function, options={"max_paths": 1})
    check_calls(strict, function, X)
    with torch.no_grad(), pytest.raises(FallbackError, match="PG511.*max_paths"):
        strict(X + 1)


def test_a_way_that_changes_at_every_call_is_given_up() -> None:
    function = FUNCTIONS["item"]
    fast = compile_reading(function, options={"max_paths": 2}, on_fallback="ignore")
    check_calls(fast, function, *(X + i for i in range(8)))
    assert fast.stats()["events"] == {"PG511": 2, "PG512": 4}
    assert fast.stats()["replayed"] == 2
    assert "given up: 3 calls in a row" in fast.explain()


def test_random_numbers_are_those_of_the_function() -> None:
    fast = compile_reading(draws)
    for number, shift in enumerate((1, -1, -1, 1, -1, 1)):
        x = torch.full((3,), float(shift))
        with torch.no_grad():
            torch.manual_seed(number)
            expected, expected_state = draws(x), torch.get_rng_state()
            torch.manual_seed(number)
            assert_same(fast(x), expected)
        assert torch.equal(torch.get_rng_state(), expected_state)
    assert fast.stats()["coverage"] == 1.0


def test_a_way_that_is_drawn_is_right_if_not_recorded() -> None:
    def function(x: Tensor) -> Tensor:
        return x + 1 if torch.rand(()) > 0.5 else x - 1

    fast = compile_reading(function, on_fallback="ignore")
    with torch.no_grad():
        for seed in range(12):
            torch.manual_seed(seed)
            expected = function(X)
            torch.manual_seed(seed)
            assert_same(fast(X), expected)


@piecegraph.eager_op
def first_half(x: Tensor) -> Tensor:
    return x * (2 if x.sum() > 0 else 3)


def test_what_is_added_up_between_reads_is_added_once() -> None:
    """A graph that is captured is replayed at once: capturing it must not have added anything."""

    def function(x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for _ in range(3):
            total.add_(x)
            if total.max() > 5:
                break
        return total

    fast = compile_reading(function)
    check_calls(fast, function, X, X + 1, X, X / 2)
    assert fast.stats()["coverage"] == 1.0


def test_reads_inside_an_eager_op_belong_to_it() -> None:
    def function(x: Tensor) -> Tensor:
        return first_half(x + 1) + 1

    fast = compile_reading(function)
    check_calls(fast, function, X, X - 5, X + 5)
    (plan,) = fast.stats()["plans"]
    assert plan["paths"] == {}
    assert plan["cuts"] == 1


def rows(x: Tensor) -> Tensor:
    return x * 2 if bool((x > 0).all()) else x - 1


def test_every_size_has_its_own_paths_and_nothing_is_padded() -> None:
    """Padded rows hold zeros: they would be part of what is read."""
    fast = compile_reading(rows, dynamic_dims={"x": 0})
    ones = torch.ones(8, 2)
    check_calls(fast, rows, ones, -ones, ones[:5], -ones[:5], ones[:1], ones)
    (plan,) = fast.stats()["plans"]
    assert {size: paths["recorded"] for size, paths in plan["paths"].items()} == {"8": 2, "5": 2, "1": 1}
    assert fast.stats()["coverage"] == 1.0
    assert "padding of s0: refused (padded rows would be part of what the host reads)" in fast.explain()


def test_sizes_that_are_not_listed_run_without_graphs() -> None:
    fast = compile_reading(rows, dynamic_dims={"x": 0}, capture_sizes=[8, 4], on_fallback="ignore")
    fast.capture(torch.ones(6, 2))
    assert list(fast.stats()["plans"][0]["sizes"]) == ["8", "4"]
    check_calls(fast, rows, torch.ones(8, 2), torch.ones(6, 2), -torch.ones(4, 2))
    assert fast.stats()["events"] == {"PG404": 1, "PG504": 1}


def test_only_some_sizes_read() -> None:
    def function(x: Tensor) -> Tensor:
        return rows(x) if x.shape[0] == 8 else x + 1

    fast = compile_reading(function, dynamic_dims={"x": 0}, on_fallback="ignore")
    check_calls(fast, function, *(sign * torch.ones(size, 2) for size in (5, 8, 7) for sign in (1, -1)))
    assert fast.stats()["coverage"] == 1.0
    assert list(fast.stats()["plans"][0]["paths"]) == ["8"]


def test_what_the_function_raises_is_raised() -> None:
    def function(x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("not numbers")
        return x + 1

    fast = compile_reading(function, on_fallback="ignore")
    check_calls(fast, function, X, X)
    with torch.no_grad(), pytest.raises(ValueError, match="not numbers"):
        fast(X * torch.nan)
    check_calls(fast, function, X)


def test_a_number_that_is_written_is_no_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes a tensor of the host from it."""
    monkeypatch.setattr(reads, "is_host", lambda tensor, device: tensor.dim() == 0)

    def function(x: Tensor) -> Tensor:
        y = x * 2
        y[1:3] = 5
        y[x > 0] = 7.0
        return y + 1

    fast = compile_reading(function)
    check_calls(fast, function, X, X + 1)
    assert fast.stats()["plans"][0]["cuts"] == 0


def test_what_nobody_holds_is_given_back_at_once() -> None:
    fast = compile_reading(branch)
    check_calls(fast, branch, X + 1, X - 1)
    with without_collector():
        plan = weakref.ref(fast._engine.plans[0])
        del fast
        assert plan() is None


def test_callbacks_run_once_for_each_call() -> None:
    fast = compile_reading(branch, on_fallback="ignore")
    check_calls(fast, branch, X + 1, X - 1)
    seen: list[Any] = []
    with piecegraph.intercept("aten::mul.Tensor", before=lambda x, y: seen.append(y)):
        check_calls(fast, branch, X + 1, X - 1, X + 1)
    assert len(seen) >= 3
    assert set(fast.stats()["events"]) == {"PG404", "PG511"}
    check_calls(fast, branch, X + 1, X - 1)


def test_a_function_that_writes_to_an_array_runs_as_it_is() -> None:
    def function(x: Tensor) -> Tensor:
        y = x + 1
        y.numpy()[0] = 7
        return y * 2

    fast = compile_reading(function, on_fallback="ignore")
    with torch.no_grad():
        for number in range(5):
            assert torch.equal(fast(X + number), function(X + number))
    assert fast.stats()["events"] == {"PG524": 5}


def test_work_on_memory_of_the_host_runs_at_every_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with float64 in the place of memory of the host."""
    monkeypatch.setattr(reads, "is_host", lambda tensor, device: tensor.dtype == torch.float64)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        host = (x * 2).double()
        host.add_(host.max())
        scaled = x * host[0]
        return (scaled + 1, host.float() + 2) if host.sum() > 0 else (scaled, host.float())

    fast = compile_reading(function)
    check_calls(fast, function, X + 1, X + 2, X - 9, X + 3, X - 8)
    assert paths_of(fast)["recorded"] == 2
    assert "works on memory of the host" in fast.explain()


@pytest.mark.parametrize(("kind", "attention"), [("llama", "sdpa"), ("bart", "sdpa"), ("t5", "eager")])
def test_models_whose_masks_are_read(kind: str, attention: str) -> None:
    fast = check_tiny(kind, attention, "cpu", compile_reading)
    assert fast.stats()["coverage"] == 1.0


def by_dlpack(x: Tensor) -> Tensor:
    return x * float(np.from_dlpack(x).sum())


def by_dlpack_written(x: Tensor) -> Tensor:
    y = x * 1
    array = np.from_dlpack(y)
    if array.flags.writeable:
        array += 1
    return y * 2


@pytest.mark.parametrize("function", [by_dlpack, by_dlpack_written])
@pytest.mark.parametrize("frontend", ["auto", "breakable"])
def test_memory_that_is_handed_to_another_library(function: Callable[[Tensor], Tensor], frontend: Any) -> None:
    options = {"graph_device": "simulated", "cache": False}
    fast = piecegraph.compile(function, frontend=frontend, backend="eager", on_fallback="ignore", options=options)
    with torch.no_grad():
        for number in (1.0, 2.0, 2.0, 5.0):
            assert torch.equal(fast(torch.full((4, 3), number)), function(torch.full((4, 3), number)))
    assert "hands out memory of the host" in fast.explain()
