"""A wide range of single ops on a CPU, through simulated graphs, uncompiled and compiled."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.cases.check import OpsTogether, check_op
from tests.cases.ops import OP_CASES, OpCase

CPU = torch.device("cpu")
SIMULATED: dict[str, Any] = {"graph_device": "simulated"}


@functools.cache
def compiled_together(group: str) -> OpsTogether:
    cases = [case for case in OP_CASES if case.group == group]
    return OpsTogether(cases, CPU, backend="inductor", options=SIMULATED)


@pytest.mark.parametrize("case", OP_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_op(case: OpCase, backend: str) -> None:
    if backend == "inductor" and case.group:
        compiled_together(case.group).check(case)
    else:
        check_op(case, CPU, backend=backend, options=SIMULATED)
