"""The random numbers that tokens are drawn by. The kernel that makes them is tried in test_attention_triton.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from piecegraph.llm.kernels.race import exponentials, random_keys


def test_random_numbers_are_even_and_independent() -> None:
    seeds, positions = np.meshgrid(np.arange(60, dtype=np.uint64), np.arange(60))
    numbers = exponentials(torch.from_numpy(random_keys(seeds.ravel(), positions.ravel())), 200)
    assert numbers.dtype == torch.float32
    assert 0 < numbers.min() < numbers.max() < 17
    even = (-numbers).exp().view(60, 60, 200)  # by position, seed and place in the vocabulary
    counts = torch.histc(even, 1000, 0, 1).double()
    expected = even.numel() / 1000
    assert abs(((counts - expected) ** 2 / expected).sum() - 999) < 4 * (2 * 999) ** 0.5
    for dim in range(3):
        for distance in (1, 2, 16):
            there, here = (even.narrow(dim, start, even.shape[dim] - distance) - 0.5 for start in (0, distance))
            correlation = 12 * (there * here).mean()
            assert abs(correlation) < 5 / here.numel() ** 0.5, (dim, distance)
        means = even.mean([other for other in range(3) if other != dim])
        spread = (12 * even.numel() / even.shape[dim]) ** -0.5
        assert (means - 0.5).abs().max() < 4.5 * spread


def test_the_numbers_stay_the_same_for_ever() -> None:
    seeds, positions = np.array([0, 0, 1, 2**64 - 1], np.uint64), np.array([0, 1, 0, 2**40])
    found = exponentials(torch.from_numpy(random_keys(seeds, positions)), 300)
    assert found[:, [0, 1, 299]].flatten().tolist() == pytest.approx(
        [
            0.448067,
            0.202888,
            0.770104,
            0.324925,
            0.728801,
            0.363904,
            0.462591,
            1.905584,
            1.973589,
            1.569487,
            0.514493,
            0.614666,
        ],
        rel=1e-5,
    )
