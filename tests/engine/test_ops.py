"""A wide range of single ops on a CPU, through simulated graphs, uncompiled and compiled."""

from __future__ import annotations

import pytest
import torch

from tests.cases.check import check_op
from tests.cases.ops import OP_CASES, OpCase

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", OP_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_op(case: OpCase, backend: str) -> None:
    check_op(case, CPU, backend=backend, options={"graph_device": "simulated"})
