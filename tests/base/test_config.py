"""Bad arguments: a clear error with a code, at the call that is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import piecegraph
from piecegraph.base.config import make_config
from piecegraph.errors import ConfigError, PiecegraphError


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ({"capture_sizes": []}, "PG102", "capture_sizes is empty"),
        ({"capture_sizes": [0]}, "PG102", "capture_sizes holds 0"),
        ({"capture_sizes": [-4]}, "PG102", "capture_sizes holds -4"),
        ({"capture_sizes": [1.5]}, "PG102", "capture_sizes holds 1.5"),
        ({"capture_sizes": [True]}, "PG102", "capture_sizes holds True"),
        ({"capture_sizes": ["8"]}, "PG102", "capture_sizes holds '8'"),
        ({"capture_sizes": 8}, "PG102", "capture_sizes is 8"),
        ({"capture_sizes": [(1, 2), 3]}, "PG102", "mixes sizes"),
        ({"splitting_ops": "aten::mm"}, "PG104", "a list of ops"),
        ({"options": {"clone_output": True}}, "PG101", "did you mean 'clone_outputs'?"),
        ({"options": {"zzz": 1}}, "PG101", "known options"),
        ({"options": {"max_sizes": 0}}, "PG101", "positive integer"),
        ({"options": {"lazy": "yes"}}, "PG101", "options['lazy'] is 'yes'"),
        ({"options": {"prepare": 3}}, "PG101", "not callable"),
        ({"cudagraph_mode": "half"}, "PG101", "cudagraph_mode is 'half'"),
        ({"padding": True}, "PG101", "padding is True"),
        ({"frontend": "jit"}, "PG101", "frontend is 'jit'"),
        ({"backend": "tvm"}, "PG101", "backend is 'tvm'"),
        ({"backend": 3}, "PG101", "backend is 3"),
        ({"on_fallback": "crash"}, "PG101", "on_fallback is 'crash'"),
        ({"passes": [3]}, "PG101", "passes holds 3"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], code: str, text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        piecegraph.compile(torch.nn.Linear(2, 2), **arguments)
    assert raised.value.code == code
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("op", "hint"),
    [
        ("aten::nonzer", "did you mean 'aten::nonzero'?"),
        ("mm", "did you mean 'aten::mm'?"),
        ("nowhere::nothing_like_it_at_all", "namespace::name"),
        ("aten::add.NoSuch", "did you mean 'aten::add'?"),
    ],
)
def test_wrong_op_names(op: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="PG104") as raised:
        piecegraph.compile(torch.nn.Linear(2, 2), splitting_ops=[op])
    assert hint in str(raised.value)


def test_an_op_that_is_neither_an_op_nor_a_name() -> None:
    with pytest.raises(ConfigError, match="PG104"):
        piecegraph.compile(torch.nn.Linear(2, 2), splitting_ops=[3])


@pytest.mark.parametrize("model", [3, "model", torch.nn.Linear])
def test_things_that_cannot_be_compiled(model: Any) -> None:
    with pytest.raises(ConfigError, match="PG105"):
        piecegraph.compile(model)


def test_sizes_are_sorted_and_unique() -> None:
    assert make_config(capture_sizes=[1, 8, 8, 4]).capture_sizes == ((8,), (4,), (1,))


def test_one_number_for_each_dynamic_dimension() -> None:
    fast = piecegraph.compile(lambda x: x + 1, dynamic_dims={"x": (0, 1)}, capture_sizes=[4], backend="eager")
    with pytest.raises(ConfigError, match="PG102.*2 dynamic sizes"):
        fast(torch.ones(4, 5))


def test_a_wrong_argument_does_not_harm_the_module() -> None:
    module = torch.nn.Linear(2, 2)
    with pytest.raises(PiecegraphError):
        piecegraph.compile(module, capture_sizes=[])
    assert module(torch.ones(1, 2)).shape == (1, 2)
