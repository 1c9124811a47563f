from __future__ import annotations

import math

import pytest
import torch

from piecegraph.base.compare import same_bits

TYPES = [torch.float32, torch.bfloat16, torch.complex32, torch.complex64, torch.float8_e4m3fn, torch.bool, torch.int64]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (3, 4), (0, 2)])
def test_bits_of_every_type_are_compared(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    assert same_bits(tensor, tensor.clone())
    assert same_bits(tensor, torch.zeros(shape).to(dtype)) is (tensor.numel() == 0)


def test_nan_is_equal_to_itself_and_zeros_of_two_signs_differ() -> None:
    assert same_bits(torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]))
    assert not same_bits(torch.tensor(0.0), torch.tensor(-0.0))


def test_values_are_compared_however_they_lie_in_memory() -> None:
    square = torch.randn(4, 4, dtype=torch.complex64)
    assert same_bits(square.T, square.T.contiguous())
    assert same_bits(square[:1, ::3].T[:1], square[:1, :1])
    assert same_bits(square.conj(), square.conj().resolve_conj())
    assert not same_bits(square.conj(), square)
