"""The kernels of layers that keep a state, on a GPU: every shape against the definition, token by token."""

from __future__ import annotations

import pytest
import torch

from piecegraph.llm.cache.states import StateKernels
from piecegraph.llm.kernels.state_plain import PlainStates
from piecegraph.llm.kernels.state_triton import TritonStates
from tests.cases.states import PROMPTS_AND_DECODE, ConvCase, DeltaCase

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda:0")
KERNELS = {"plain": PlainStates, "triton": TritonStates}
TOLERANCES = {torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""What rounding the results takes, and for half precision products with ten bits."""


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> StateKernels:
    return KERNELS[request.param]()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("channels", "width", "activation", "has_bias"), [(8192, 4, "silu", False), (520, 3, "", True)]
)
def test_convolution(
    kernels: StateKernels, channels: int, width: int, activation: str, has_bias: bool, dtype: torch.dtype
) -> None:
    case = ConvCase(channels, width, activation, has_bias, dtype, CUDA)
    case.check(kernels, PROMPTS_AND_DECODE, 2 * TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("heads", "key", "value", "normalises"),
    [(32, 128, 128, True), (4, 64, 96, False), (2, 256, 256, True), (3, 8, 16, True)],
)
def test_delta_rule(
    kernels: StateKernels, heads: int, key: int, value: int, normalises: bool, dtype: torch.dtype
) -> None:
    case = DeltaCase(heads, key, value, normalises, dtype, CUDA)
    case.check(kernels, PROMPTS_AND_DECODE, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_delta_rule_of_equal_keys(kernels: StateKernels, dtype: torch.dtype) -> None:
    case = DeltaCase(2, 128, 128, True, dtype, CUDA, keys_are_equal=True)
    case.check(kernels, PROMPTS_AND_DECODE, TOLERANCES[dtype])
