"""Functions that ask something of their arguments: a call with another answer than that of the plan runs as written."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecegraph
from piecegraph.graph.asked import questions_in


def asks_grad_mode(x: Tensor) -> Tensor:
    return x * 2 if torch.is_grad_enabled() else x * 3


def asks_inference_mode(x: Tensor) -> Tensor:
    return x * 2 if torch.is_inference_mode_enabled() else x * 3


def asks_inference(x: Tensor) -> Tensor:
    return x * 2 if x.is_inference() else x * 3


def asks_gradients(x: Tensor) -> Tensor:
    return x * 2 if x.requires_grad else x * 3


def asks_type(x: Tensor) -> Tensor:
    return x * 2 if isinstance(x, nn.Parameter) else x * 3


def asks_conjugate(x: Tensor) -> Tensor:
    return x * 2 if x.is_conj() else x * 3


def asks_attribute(x: Tensor) -> Tensor:
    return x * getattr(x, "scale", 3.0)


def plain() -> tuple[Tensor, ...]:
    return (torch.ones(2),)


def made_in_inference_mode() -> tuple[Tensor, ...]:
    with torch.inference_mode():
        return (torch.ones(2),)


def scaled() -> tuple[Tensor, ...]:
    x = torch.ones(2)
    x.scale = 2.0  # type: ignore[attr-defined]
    return (x,)


Arguments = Callable[[], tuple[Tensor, ...]]
CASES: dict[str, tuple[Callable[..., Tensor], Arguments, Arguments, Callable[[], AbstractContextManager[Any]]]] = {
    "gradients are on": (asks_grad_mode, plain, plain, torch.enable_grad),
    "inference mode is on": (asks_inference_mode, plain, plain, torch.inference_mode),
    "a tensor was made in inference mode": (asks_inference, plain, made_in_inference_mode, nullcontext),
    "a tensor requires gradients": (
        asks_gradients,
        plain,
        lambda: (torch.ones(2, requires_grad=True),),
        torch.no_grad,
    ),
    "a tensor is a parameter or buffer": (
        asks_type,
        plain,
        lambda: (nn.Parameter(torch.ones(2), requires_grad=False),),
        nullcontext,
    ),
    "a tensor is conjugated or negated": (
        asks_conjugate,
        lambda: (torch.ones(2, dtype=torch.complex64),),
        lambda: (torch.ones(2, dtype=torch.complex64).conj(),),
        nullcontext,
    ),
    "a tensor has attributes of its own": (asks_attribute, plain, scaled, nullcontext),
}


@pytest.mark.filterwarnings("ignore::piecegraph.errors.PiecegraphWarning")
@pytest.mark.parametrize("frontend", ["auto", "breakable"])
@pytest.mark.parametrize("what", CASES)
def test_another_answer_is_not_that_of_the_plan(what: str, frontend: str) -> None:
    function, first, second, mode = CASES[what]
    options = {"graph_device": "simulated", "cache": False}
    fast = piecegraph.compile(function, backend="eager", frontend=frontend, options=options)
    with torch.no_grad():
        assert torch.equal(fast(*first()), function(*first()))
    with mode():
        arguments = second()
        assert torch.equal(fast(*arguments).detach(), function(*arguments).detach())
    with torch.no_grad():
        assert torch.equal(fast(*first()), function(*first()))
    (event,) = (each for each in fast.stats()["losses"] if each["code"] == "PG517")
    assert what in event["reason"]
    assert function.__name__ in event["reason"]
    assert fast.stats()["replayed"] == 2


@pytest.mark.filterwarnings("ignore::piecegraph.errors.PiecegraphWarning")
@pytest.mark.parametrize("what", ["first", "later"])
def test_one_tensor_twice_where_that_is_asked(what: str) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return x * 2 if x is y else x * 3

    options = {"graph_device": "simulated", "cache": False}
    fast = piecegraph.compile(function, backend="eager", options=options)
    x, y = torch.ones(2, 2).unbind()
    pairs = [(x, x), (x, y)] if what == "first" else [(x, y), (x, x)]
    with torch.no_grad():
        assert [fast(*pair).tolist() for pair in pairs] == [function(*pair).tolist() for pair in pairs]


def test_questions_that_are_none() -> None:
    def function(x: Tensor, mask: Tensor | None, mode: str) -> Tensor:
        return x if mask is None or mode is str else torch.zeros(2, requires_grad=False) + x

    assert questions_in([function.__code__]) == ()
    assert questions_in([nn.Module.__getattr__.__code__]) == (), "of a package"


KEPT = torch.Generator()
STATE = torch.Generator().manual_seed(7).get_state()


def seeds_a_new_generator(x: Tensor) -> Tensor:
    return x + torch.rand(2, generator=torch.Generator().manual_seed(3))


def draws_from_a_new_generator(x: Tensor) -> Tensor:
    return x + torch.rand(2, generator=torch.Generator())


def sets_a_state(x: Tensor) -> Tensor:
    KEPT.set_state(STATE)
    return x + torch.rand(2, generator=KEPT)


def seeds_all(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x + torch.rand(2)


def asks_for_the_seed(x: Tensor) -> Tensor:
    return x + torch.initial_seed()


@pytest.mark.filterwarnings("ignore::piecegraph.errors.PiecegraphWarning")
@pytest.mark.parametrize("frontend", ["auto", "breakable"])
@pytest.mark.parametrize(
    "function", [seeds_a_new_generator, draws_from_a_new_generator, sets_a_state, seeds_all, asks_for_the_seed]
)
def test_what_is_seeded_draws_the_same_again(frontend: Any, function: Callable[[Tensor], Tensor]) -> None:
    options = {"graph_device": "simulated", "cache": False}
    fast = piecegraph.compile(function, backend="eager", frontend=frontend, options=options)
    with torch.no_grad():
        for seed in range(3):
            torch.manual_seed(seed)
            expected, state = function(torch.zeros(2, 2)), torch.get_rng_state()
            torch.manual_seed(seed)
            assert torch.equal(fast(torch.zeros(2, 2)), expected)
            assert torch.equal(torch.get_rng_state(), state)
    assert fast.stats()["coverage"] == 0
    assert "PG517" in fast.explain()


@pytest.mark.parametrize("frontend", ["auto", "breakable"])
def test_a_generator_from_before_the_call_is_replayed(frontend: Any) -> None:
    def function(x: Tensor) -> Tensor:
        return x + torch.rand(2, generator=KEPT) + torch.rand(2, generator=KEPT)

    options = {"graph_device": "simulated", "cache": False}
    fast = piecegraph.compile(function, backend="eager", frontend=frontend, options=options)
    with torch.no_grad():
        KEPT.manual_seed(1)
        expected = [function(torch.zeros(2, 2)) for _ in range(3)]
        KEPT.manual_seed(1)
        assert all(torch.equal(fast(torch.zeros(2, 2)), each) for each in expected)
    assert fast.stats()["coverage"] == 1


@pytest.mark.filterwarnings("ignore::piecegraph.errors.PiecegraphWarning")
def test_a_question_on_a_path_that_is_taken_later() -> None:
    def function(x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x + torch.rand(2, generator=torch.Generator().manual_seed(3))
        return x * 2

    options = {"graph_device": "simulated", "cache": False}
    fast = piecegraph.compile(function, backend="eager", frontend="breakable", options=options)
    with torch.no_grad():
        for x in (-torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2)):
            assert torch.equal(fast(x), function(x))


def asks_for_threads(x: Tensor) -> Tensor:
    return x * torch.get_num_threads()


def asks_for_a_backend(x: Tensor) -> Tensor:
    return x * 2 if torch.backends.cuda.flash_sdp_enabled() else x * 3


def asks_for_a_flag(x: Tensor) -> Tensor:
    return x * 2 if torch.backends.cudnn.benchmark else x * 3


def asks_for_the_environment(x: Tensor) -> Tensor:
    return x * float(os.environ.get("PIECEGRAPH_TEST_FACTOR", "1"))


SETTINGS: dict[Callable[[Tensor], Tensor], Callable[[pytest.MonkeyPatch, bool], object]] = {
    asks_for_threads: lambda patch, is_on: torch.set_num_threads(1 + is_on),
    asks_for_a_backend: lambda patch, is_on: torch.backends.cuda.enable_flash_sdp(is_on),
    asks_for_a_flag: lambda patch, is_on: patch.setattr(torch.backends.cudnn, "benchmark", is_on),
    asks_for_the_environment: lambda patch, is_on: patch.setenv("PIECEGRAPH_TEST_FACTOR", "3" if is_on else "2"),
}


@pytest.mark.parametrize("function", SETTINGS)
@pytest.mark.parametrize("frontend", ["auto", "breakable"])
def test_what_torch_is_set_to(
    function: Callable[[Tensor], Tensor], frontend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"graph_device": "simulated", "cache": False}
    fast = piecegraph.compile(function, backend="eager", frontend=frontend, on_fallback="ignore", options=options)
    threads, flash = torch.get_num_threads(), torch.backends.cuda.flash_sdp_enabled()
    try:
        with torch.no_grad():
            for is_on in (False, True, True, False):
                SETTINGS[function](monkeypatch, is_on)
                assert torch.equal(fast(torch.ones(2, 2)), function(torch.ones(2, 2)))
    finally:
        torch.set_num_threads(threads)
        torch.backends.cuda.enable_flash_sdp(flash)
    assert fast.stats()["coverage"] >= 0.5
