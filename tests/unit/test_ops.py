"""A wide range of single ops on a CPU, through simulated graphs."""

from __future__ import annotations

import pytest
import torch

from tests.cases.check import check_op
from tests.cases.ops import OP_CASES, OpCase

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", OP_CASES, ids=lambda case: case.name)
def test_op_through_simulated_graphs(case: OpCase) -> None:
    check_op(case, CPU, backend="eager", options={"graph_device": "simulated"})
