"""Copies and pickles of what is compiled: they are compiled anew, and what is installed stays with the original."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecegraph
from piecegraph.errors import ConfigError

SETTINGS: dict[str, Any] = {"backend": "eager", "options": {"graph_device": "simulated", "cache": False}}


def double(x: Tensor) -> Tensor:
    return x * 2


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make", [copy.deepcopy, pickled, saved])
def test_a_copy_of_a_compiled_module_is_compiled(make: Any) -> None:
    fast, x = piecegraph.compile(nn.Linear(4, 4), **SETTINGS), torch.ones(2, 4)
    with torch.no_grad():
        expected = fast(x)
        other = make(fast)
        other.weight.zero_()
        assert torch.equal(fast(x), expected), "it has weights of its own"
        assert torch.equal(other(x), other.bias.expand(2, 4))
    assert other.stats()["replayed"] == 1


@pytest.mark.parametrize("make", [copy.deepcopy, pickled])
def test_a_copy_of_a_compiled_function_is_compiled(make: Any) -> None:
    fast = piecegraph.compile(double, **SETTINGS)
    with torch.no_grad():
        fast(torch.ones(2))
        other = make(fast)
        assert other(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert fast.stats()["calls"] == other.stats()["replayed"] == 1


@pytest.mark.parametrize("make", [copy.deepcopy, pickled, saved])
def test_a_copy_of_a_model_with_an_installed_part_is_the_model_alone(make: Any) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    installed = piecegraph.install(model[0], **SETTINGS)
    with torch.no_grad():
        expected = model(x)
        other = make(model)
        other[0].weight.zero_()
        assert torch.equal(other(x), other[0].bias.expand(2, 4)), "it runs on weights of its own"
        assert torch.equal(model(x), expected)
    assert installed.stats()["calls"] == 2


def test_an_installed_module_with_a_forward_of_its_own_says_why_it_cannot_be_pickled() -> None:
    module = nn.Linear(4, 4)
    module.forward = double  # type: ignore[method-assign]
    piecegraph.install(module, **SETTINGS)
    with pytest.raises(ConfigError, match=r"PG105 Linear cannot be pickled while it is installed.*close\(\)"):
        pickle.dumps(module)
