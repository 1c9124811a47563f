"""How the results of compiled code are compared with those of the original."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import piecegraph
from piecegraph.base.structure import flatten
from piecegraph.errors import PiecegraphError
from tests.cases.modules import CAPTURE_SIZES, SIZES, ModuleCase
from tests.cases.ops import OpCase

SEED = 1234


def _seed(number: int, device: torch.device) -> None:
    """As ``torch.manual_seed``, which formats the whole stack for every kind of device that is not there."""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)


def clone_all(value: Any) -> Any:
    leaves, _, structure = flatten(value)
    return structure.build(iter([leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]))


def assert_same(found: Any, expected: Any, *, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    """Equal structure and types, equal numbers, tensors equal within the tolerance and of the same dtype and shape."""
    found_leaves, paths, found_structure = flatten(found)
    expected_leaves, _, expected_structure = flatten(expected)
    assert found_structure == expected_structure
    for path, a, b in zip(paths, found_leaves, expected_leaves, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(
                a, b, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text, path=path: f"{path}: {text}"
            )
        else:
            assert a == b, path


class OpsTogether:
    """Ops that take the same inputs, compiled as one function. What each of them makes is compared by itself.

    A C++ compiler takes a second for one op, and two seconds for forty.
    """

    def __init__(self, cases: Sequence[OpCase], device: torch.device, **compile_arguments: Any) -> None:
        self._names = [case.name for case in cases]
        functions = [case.function for case in cases]

        def call_all(*inputs: torch.Tensor) -> list[Any]:
            return [function(*inputs) for function in functions]

        fast = piecegraph.compile(call_all, on_fallback="ignore", **compile_arguments)
        generator = torch.Generator().manual_seed(SEED)
        with torch.no_grad():
            self._inputs = [cases[0].make(generator, device) for _ in range(3)]
            self._expected_inputs = clone_all(self._inputs)
            self._expected = [call_all(*inputs) for inputs in self._expected_inputs]
            fast.capture(*clone_all(self._inputs[0]))
            self._found = [fast(*inputs) for inputs in self._inputs]
        self._stats = fast.stats()

    def check(self, case: OpCase) -> None:
        """Compare what one op made at each of three calls."""
        index = self._names.index(case.name)
        for found, expected in zip(self._found, self._expected, strict=True):
            assert_same(found[index], expected[index], rtol=1e-4, atol=1e-4)
        assert_same(self._inputs, self._expected_inputs)
        assert self._stats["coverage"] == 1.0
        assert set(self._stats["events"]) <= {"PG404"}


def check_op(case: OpCase, device: torch.device, **compile_arguments: Any) -> None:
    """Compile an op, call it three times with new data, and compare results and inputs with the op itself.

    On a CPU nothing may be lost but what the case says. On a GPU a piece may also turn out not to be capturable, or be
    beyond the compiler: right, and counted.
    """
    is_inductor = compile_arguments.get("backend") == "inductor"
    expected_losses = {"PG302"} if case.beyond_inductor and is_inductor else set()
    frontend = "auto" if case.refused is None else "trace"
    fast = piecegraph.compile(case.function, frontend=frontend, on_fallback="ignore", **compile_arguments)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        if case.refused is not None:
            with pytest.raises(PiecegraphError) as raised:
                fast(*case.make(generator, device))
            assert raised.value.code.startswith(case.refused)
            return
        for round_number in range(3):
            inputs = case.make(generator, device)
            expected_inputs = clone_all(inputs)
            _seed(round_number, device)
            expected = case.function(*expected_inputs)
            if round_number == 0:
                fast.capture(*clone_all(inputs))
            _seed(round_number, device)
            found = fast(*inputs)
            if not (case.inductor_draws_differently and is_inductor):
                assert_same(found, expected, rtol=1e-4, atol=1e-4)
            assert_same(inputs, expected_inputs, rtol=1e-4, atol=1e-4)
    stats = fast.stats()
    assert stats["coverage"] == 1.0
    losses = set(stats["events"]) - {"PG404"}
    assert losses == expected_losses or (device.type == "cuda" and losses <= {"PG401", "PG302"})


def _make(case: ModuleCase, device: torch.device) -> torch.nn.Module:
    torch.manual_seed(SEED)
    return case.make().eval().to(device)


def check_module(
    case: ModuleCase, device: torch.device, *, rtol: float = 1e-4, atol: float = 1e-4, **compile_arguments: Any
) -> Any:
    """Compile a module, call it at sizes on and between buckets, and compare with the module itself. Returns the
    compiled module.
    """
    module, reference = (_make(case, device) for _ in range(2))
    arguments = {"capture_sizes": CAPTURE_SIZES, "on_fallback": "ignore", **case.arguments, **compile_arguments}
    fast = piecegraph.compile(module, **arguments)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for size in (16, *SIZES, *SIZES):
            inputs = case.inputs(size, generator, device)
            expected_inputs = clone_all(inputs)
            expected = reference(*expected_inputs)
            found = fast(*inputs)
            assert_same(found, expected, rtol=rtol, atol=atol)
            assert_same(inputs, expected_inputs, rtol=rtol, atol=atol)
    for name, buffer in reference.named_buffers():
        assert_same(fast.get_buffer(name), buffer)
    return fast
