"""Sampling: pure functions, checked against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from llmconv.runtime.sampling import Sampling, keep_top_k, keep_top_p, pick_token, softmax

from llmconv.errors import UsageProblem

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.25, 0.05]))


def draws(sampling: Sampling, count: int = 4000) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """How often each token comes."""
    generator = np.random.default_rng(sampling.seed)
    tokens = [pick_token(LOGITS, sampling, generator) for _ in range(count)]
    return np.bincount(tokens, minlength=5) / count


def test_temperature_zero_picks_the_likeliest_and_draws_nothing() -> None:
    generator = np.random.default_rng(0)
    assert pick_token(LOGITS, Sampling(), generator) == 1
    assert generator.random() == np.random.default_rng(0).random()


def test_temperature_one_draws_the_distribution() -> None:
    assert np.allclose(draws(Sampling(temperature=1.0)), np.exp(LOGITS), atol=0.03)


def test_a_low_temperature_sharpens() -> None:
    assert draws(Sampling(temperature=0.1))[1] > 0.98


def test_top_k_keeps_the_k_likeliest() -> None:
    assert np.isfinite(keep_top_k(LOGITS, 2)).tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("top_k", [0, 5, 99])
def test_top_k_of_nothing_or_of_all_keeps_all(top_k: int) -> None:
    assert np.isfinite(keep_top_k(LOGITS, top_k)).all()


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, {1}), (0.39, {1}), (0.41, {1, 3}), (0.66, {1, 2, 3}), (1.0, {0, 1, 2, 3, 4})]
)
def test_top_p_keeps_the_fewest_that_reach_p(top_p: float, kept: set[int]) -> None:
    assert set(np.flatnonzero(np.isfinite(keep_top_p(LOGITS, top_p)))) == kept


def test_nothing_outside_the_kept_tokens_is_ever_drawn() -> None:
    assert draws(Sampling(temperature=1.0, top_k=3, top_p=0.5))[[0, 2, 4]].tolist() == [0, 0, 0]


def test_large_logits_do_not_overflow() -> None:
    assert softmax(np.array([1e4, 1e4])).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_impossible_settings_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UsageProblem, match="cannot be sampled with"):
        Sampling(**options)  # type: ignore[arg-type]
