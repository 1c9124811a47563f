"""Small modules on a CPU, in both backends and both front ends, called directly and through simulated graphs."""

from __future__ import annotations

import pytest
import torch

from tests.cases.check import check_module
from tests.cases.modules import MODULE_CASES, ModuleCase

CPU = torch.device("cpu")


def check_losses(case: ModuleCase, fast: object, *, breakable: bool = False) -> None:
    events = set(fast.stats()["events"])  # type: ignore[attr-defined]
    refusals = {"PG404", "PG504"} if case.refuses_padding else set()
    assert events - {"PG510"} == refusals | set(case.breakable_losses if breakable else case.losses)


@pytest.mark.parametrize("case", MODULE_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("graph_device", ["auto", "simulated"])
def test_eager_pieces(case: ModuleCase, graph_device: str) -> None:
    check_losses(case, check_module(case, CPU, backend="eager", options={"graph_device": graph_device}))


@pytest.mark.parametrize("case", MODULE_CASES, ids=lambda case: case.name)
def test_inductor_pieces(case: ModuleCase) -> None:
    check_losses(case, check_module(case, CPU, backend="inductor", options={"graph_device": "simulated"}))


@pytest.mark.parametrize("case", MODULE_CASES, ids=lambda case: case.name)
def test_breakable(case: ModuleCase) -> None:
    check_losses(
        case, check_module(case, CPU, frontend="breakable", options={"graph_device": "simulated"}), breakable=True
    )
