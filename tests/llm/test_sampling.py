"""Choosing tokens: against the plainest numpy, against the distribution, and row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piecegraph.llm.kernels.race import random_keys
from piecegraph.llm.run.sampling import (
    BAD_LOGITS,
    HOTTEST,
    NO_TOKEN,
    SamplingMode,
    greedy,
    logprobs,
    mode_of,
    sample,
)
from piecegraph.llm.run.sampling_params import SamplingParams

VOCAB = 11


def kept_tokens(logits: np.ndarray[Any, Any], temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """The probability of each token that may be drawn, step by step as transformers' warpers do it."""
    scores = logits.astype(np.float64) / temperature
    if top_k:
        scores[scores < np.sort(scores)[::-1][min(top_k, len(scores)) - 1]] = -np.inf
    if top_p < 1:
        ascending = np.argsort(scores, kind="stable")
        weights = np.exp(scores[ascending] - scores.max())
        remove = np.cumsum(weights / weights.sum()) <= 1 - top_p
        remove[-1] = False
        scores[ascending[remove]] = -np.inf
    weights = np.exp(scores - scores.max())
    return {int(token): float(weights[token] / weights.sum()) for token in np.flatnonzero(weights)}


def keys(count: int, seed: int = 1234) -> torch.Tensor:
    """Of the first positions of a request."""
    return torch.from_numpy(random_keys(np.full(count, seed, np.uint64), np.arange(count)))


def draw(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, num_draws: int) -> torch.Tensor:
    """Many draws from one row of logits, or one from each of several."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    return sample(
        logits.expand(num_draws, -1),
        torch.full((num_draws,), temperature),
        torch.full((num_draws,), top_k),
        torch.full((num_draws,), top_p),
        keys(num_draws),
        mode=mode_of(params),
    )


# Distinct logits, far enough apart that float32 and float64 agree on which token reaches top_p.
_logits = st.permutations([-3.0, -1.5, -0.9, -0.2, 0.0, 0.3, 0.8, 1.1, 1.7, 2.2, 2.9])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    _logits,
    st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    st.integers(0, VOCAB + 3),
    st.sampled_from([0.01, 0.31, 0.77, 0.993, 1.0]),
)
def test_every_kept_token_is_drawn_by_its_share_and_no_other(
    row: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    num_draws = 4096
    drawn = torch.bincount(draw(torch.tensor(row), temperature, top_k, top_p, num_draws), minlength=VOCAB).tolist()
    expected = kept_tokens(np.array(row), temperature, top_k, top_p)
    for token, count in enumerate(drawn):
        share = expected.get(token, 0.0)
        assert abs(count - share * num_draws) <= 5 * (num_draws * share * (1 - share)) ** 0.5, (token, expected)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (160, 1.0), (0, 0.8), (200, 0.9)])
def test_draws_by_seed_follow_the_distribution(top_k: int, top_p: float) -> None:
    logits = torch.linspace(-1, 1, 300)[torch.randperm(300, generator=torch.Generator().manual_seed(0))]
    num_draws = 20_000
    drawn = torch.bincount(draw(logits, 1.0, top_k, top_p, num_draws), minlength=300)
    expected = kept_tokens(logits.numpy(), 1.0, top_k, top_p)
    chi_square = sum((float(drawn[t]) - p * num_draws) ** 2 / (p * num_draws) for t, p in expected.items())
    assert int(drawn.sum()) == sum(int(drawn[t]) for t in expected)
    freedom = len(expected) - 1
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5


def test_rounding_of_logits_changes_few_draws() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2000, 2000, generator=generator)
    exact, rounded = (draw(each, 1.0, 0, 1.0, len(logits)) for each in (logits, logits.bfloat16().float()))
    assert int((exact != rounded).sum()) <= 20  # 1 %; drawn from the running sum of the weights, 17 % change


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 97)
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.3, 0.5, 1.0])
    top_k, top_p = torch.tensor([0, 0, 5, 0, 9, 0]), torch.tensor([1.0, 1.0, 1.0, 0.8, 0.7, 1.0])
    together = sample(logits, temperature, top_k, top_p, keys(6))
    for row in range(6):
        params = SamplingParams(
            temperature=float(temperature[row]), top_k=int(top_k[row]), top_p=min(1.0, float(top_p[row]))
        )
        arguments = [each[row : row + 1] for each in (logits, temperature, top_k, top_p, keys(6))]
        assert sample(*arguments, mode=mode_of(params)).item() == together[row]


def test_of_equally_likely_tokens_the_first_of_the_vocabulary_are_kept() -> None:
    logits = torch.zeros(1, 8)
    assert greedy(logits).item() == 0
    assert set(draw(logits[0], 1.0, 0, 0.5, 100).tolist()) == {0, 1, 2, 3}
    # As in transformers, top_k keeps all that are as likely as the k-th.
    assert set(draw(logits[0], 1.0, 2, 1.0, 100).tolist()) == set(range(8))


@pytest.mark.parametrize("mode", ["greedy", "plain", "truncated"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_a_row_that_is_not_numbers_is_marked_and_the_others_are_not(mode: SamplingMode, bad: float | None) -> None:
    logits = torch.linspace(0, 1, 3 * VOCAB).view(3, VOCAB).clone()
    if bad is None:
        logits[1] = -float("inf")
    else:
        logits[1, 4] = bad
    temperature = torch.zeros(3) if mode == "greedy" else torch.ones(3)
    top_k = torch.full((3,), 3 if mode == "truncated" else 0)
    tokens = sample(logits, temperature, top_k, torch.ones(3), keys(3), mode=mode)
    assert tokens[1] == (NO_TOKEN if bad is None else BAD_LOGITS)
    assert 0 <= tokens[[0, 2]].min() <= tokens[[0, 2]].max() < VOCAB


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.tensor([-float("inf"), 0.0, -float("inf"), 0.0, -float("inf")])
    for top_p in (1.0, 0.999):
        assert set(draw(logits, 1.0, 0, top_p, 1000).tolist()) == {1, 3}


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-42, 1e-45, 1e-300])
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(temperature: float) -> None:
    logits = torch.tensor([1e4, 1e4 - 1, -1e4, -float("inf")])
    for top_k in (0, 2):
        assert draw(logits, temperature, top_k, 1.0, 100).unique().tolist() == [0]


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (4, 1.0), (0, 0.999)])
def test_at_the_highest_temperature_all_tokens_that_are_not_masked_are_equally_likely(top_k: int, top_p: float) -> None:
    logits = torch.tensor([1e4, -float("inf"), -1e4, 0.0])
    assert draw(logits, HOTTEST, top_k, top_p, 100).unique().tolist() == [0, 2, 3]


@pytest.mark.parametrize("top_p", [1e-30, 1e-44, 1e-46, 1e-300])
@pytest.mark.parametrize("top_k", [0, 3])
def test_however_small_top_p_is_the_most_likely_token_is_kept(top_k: int, top_p: float) -> None:
    logits = torch.tensor([1.0, -3.0, 5.0, 0.0])
    assert draw(logits, 1.0, top_k, top_p, 100).unique().tolist() == [2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_drawn_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    logits = torch.randn(400).to(dtype)
    assert torch.equal(draw(logits, 0.9, 0, 1.0, 50), draw(logits.float(), 0.9, 0, 1.0, 50))


def test_logprobs_are_those_of_the_raw_logits() -> None:
    torch.manual_seed(2)
    logits = torch.randn(4, VOCAB)
    tokens = torch.tensor([3, 0, 10, BAD_LOGITS])
    found = logprobs(logits, tokens, 3)
    plain = logits.double().numpy() - np.log(np.exp(logits.double().numpy()).sum(-1, keepdims=True))
    assert found.chosen[:3].numpy() == pytest.approx(plain[[0, 1, 2], [3, 0, 10]], abs=1e-6)
    for row in range(4):
        best = np.argsort(-plain[row])[:3]
        assert found.top_tokens[row].tolist() == best.tolist()
        assert found.top[row].numpy() == pytest.approx(plain[row][best], abs=1e-6)
    assert logprobs(logits, tokens, 0).top.shape == (4, 0)
    assert logprobs(logits, tokens, 100).top.shape == (4, VOCAB)
