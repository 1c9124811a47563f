"""The ops and modules of the CPU tests through real CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from benchmarks.zoo import ZOO, ZooModel

from tests.cases.check import check_module, check_op
from tests.cases.modules import MODULE_CASES, ModuleCase
from tests.cases.ops import OP_CASES, OpCase
from tests.cases.zoo import check_zoo_model
from tests.engine.test_modules import check_losses

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("case", OP_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_op(case: OpCase, backend: str) -> None:
    check_op(case, CUDA, backend=backend)


@pytest.mark.parametrize("case", MODULE_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_module(case: ModuleCase, backend: str) -> None:
    check_losses(case, check_module(case, CUDA, backend=backend, rtol=1e-3, atol=1e-3))


@pytest.mark.parametrize("model", ZOO, ids=lambda model: model.name)
@pytest.mark.parametrize(
    "arguments", [{"backend": "eager"}, {"backend": "inductor"}, {"frontend": "breakable"}], ids=str
)
def test_zoo_model(model: ZooModel, arguments: dict[str, str]) -> None:
    check_zoo_model(model, CUDA, **arguments)


@pytest.mark.parametrize("case", MODULE_CASES, ids=lambda case: case.name)
def test_breakable_module(case: ModuleCase) -> None:
    check_losses(case, check_module(case, CUDA, frontend="breakable", rtol=1e-3, atol=1e-3), breakable=True)
