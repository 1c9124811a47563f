"""Functions that read data on the host, through CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import piecegraph
from tests.cases.check import assert_same
from tests.cases.reads import FUNCTIONS, Counts, X, branch, check_calls, check_tiny, draws, paths_of

pytestmark = pytest.mark.gpu


def compile_reading(model: Any, **arguments: Any) -> Any:
    return piecegraph.compile(model, **{"frontend": "breakable", "on_fallback": "raise", **arguments})


def test_both_ways_of_a_branch_are_replayed() -> None:
    fast, x = compile_reading(branch), X.cuda()
    check_calls(fast, branch, x + 1, x + 2, x - 1, x - 2, x + 3, x - 3)
    assert fast.stats()["coverage"] == 1.0
    assert paths_of(fast) == {"recorded": 2, "replays": [3, 3], "left": 3, "given_up": False}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_read(name: str) -> None:
    function, x = FUNCTIONS[name], X.cuda()
    fast = compile_reading(function)
    check_calls(fast, function, x, x, x + 2, x, x + 2, x + 9, x + 9, x)
    assert fast.stats()["coverage"] == 1.0


def test_what_was_written_is_put_back_when_a_tape_is_left() -> None:
    model, reference = Counts("cuda"), Counts("cuda")
    fast = compile_reading(model, options={"static_inputs": ["cache"]})
    cache, expected_cache = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
    with torch.no_grad():
        for shift in (0, 1, 1, 0, 3, 2, 2, 5, 4):
            x, expected_x = (torch.full((5,), float(shift), device="cuda") for _ in range(2))
            assert_same(fast(x, cache), reference(expected_x, expected_cache))
            assert_same(x, expected_x)
            assert_same(cache, expected_cache)
            assert_same(model.scale, reference.scale)
    assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))
    assert fast.stats()["coverage"] == 1.0


def test_random_numbers_are_those_of_the_function() -> None:
    fast = compile_reading(draws)
    for number, shift in enumerate((1, -1, -1, 1, -1, 1)):
        x = torch.full((3,), float(shift), device="cuda")
        with torch.no_grad():
            torch.manual_seed(number)
            expected, expected_state = draws(x), torch.cuda.get_rng_state()
            torch.manual_seed(number)
            assert_same(fast(x), expected)
        assert torch.equal(torch.cuda.get_rng_state(), expected_state)
    assert fast.stats()["coverage"] == 1.0


def lengths_on_the_host(x: Tensor, lengths: Tensor) -> Tensor:
    mask = (torch.arange(x.shape[1]) < lengths[:, None]).to(x.device)
    return (x * 2).masked_fill(~mask, 0) * lengths[0]


def constants(x: Tensor) -> Tensor:
    table = torch.tensor([1.0, 2.0, 3.0], device=x.device)
    table += x[0, 0]
    return x[:, [0, 2]] * table[:2] + torch.as_tensor(4.0, device=x.device) + x.new_tensor([5.0, 6.0])


def there_and_back(x: Tensor) -> Tensor:
    host = (x + 1).to("cpu")  # without waiting, the next line would race with the copy
    host[0] += 1
    return host.cuda(non_blocking=True) * x + torch.zeros(3).to(x.device)


def drawn_on_the_host(x: Tensor) -> Tensor:
    return x + torch.rand(3).to(x.device)


def longest(x: Tensor, lengths: Tensor) -> Tensor:
    return x[:, : int(lengths.max())] + 1


@pytest.mark.parametrize("function", [lengths_on_the_host, longest], ids=lambda function: function.__name__)
def test_arguments_on_the_host(function: Any) -> None:
    fast = compile_reading(function)
    x = torch.randn(2, 3, device="cuda")
    lengths = [torch.tensor([a, b]) for a, b in ((1, 3), (2, 2), (1, 3), (3, 1))]
    check_calls(fast, function, *((x + i, length) for i, length in enumerate(lengths)))
    assert fast.stats()["coverage"] == 1.0


@pytest.mark.parametrize("function", [constants, there_and_back], ids=lambda function: function.__name__)
def test_memory_of_the_host(function: Any) -> None:
    fast = compile_reading(function)
    x = torch.randn(2, 3, device="cuda")
    check_calls(fast, function, x, x + 1, x + 2)
    assert fast.stats()["coverage"] == 1.0
    assert fast.stats()["plans"][0]["paths"] == {}


def test_a_number_that_is_written_breaks_nothing() -> None:
    def function(x: Tensor) -> Tensor:
        y = torch.where(x > 0, x, 0.0) * 2
        y[1:3] = 5
        y[x > 1] = 7.0
        return y + 1

    fast, x = compile_reading(function), X.cuda()
    check_calls(fast, function, x, x + 1)
    assert fast.stats()["plans"][0]["cuts"] == 0


def test_random_numbers_of_the_host() -> None:
    fast, x = compile_reading(drawn_on_the_host), torch.ones(3, device="cuda")
    with torch.no_grad():
        for seed in range(4):
            torch.manual_seed(seed)
            expected = drawn_on_the_host(x)
            torch.manual_seed(seed)
            assert_same(fast(x), expected)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["llama", "bart", "t5"])
def test_models_whose_masks_are_read(kind: str, attention: str) -> None:
    fast = check_tiny(kind, attention, "cuda", compile_reading)
    assert fast.stats()["coverage"] == 1.0
