"""Sampling: the filters are those of transformers, and the draws have their distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llmconv.errors import MalformedInput, UsageProblem
from llmconv.generation import GenerationSettings
from llmconv.generation.row import TokenCandidates, keep_top_k, narrowed, penalized, pick_token, softmax
from llmconv.tensors import Array

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.25, 0.05]))


def drawing(**fields: Any) -> GenerationSettings:
    """Settings that sample."""
    return GenerationSettings(do_sample=True, **fields)


def draws(fields: GenerationSettings, count: int = 4000) -> Array:
    """How often each token comes."""
    generator = np.random.default_rng(fields.seed)
    tokens = [pick_token(LOGITS, fields, generator) for _ in range(count)]
    return np.bincount(tokens, minlength=5) / count


def kept_by_transformers(logits: Array, seen: list[int], fields: GenerationSettings) -> Array:
    """Scores after transformers' own processors."""
    steps = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(fields.repetition_penalty)])
    steps.append(TemperatureLogitsWarper(fields.temperature))
    steps += [TopKLogitsWarper(fields.top_k)] if fields.top_k else []
    steps += [TopPLogitsWarper(fields.top_p)] if fields.top_p < 1 else []
    steps += [MinPLogitsWarper(fields.min_p)] if fields.min_p is not None else []
    return np.asarray(steps(torch.tensor([seen]), torch.from_numpy(logits[None]))[0].numpy())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocabulary=st.sampled_from([7, 100, 3000]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 50]),
    top_p=st.sampled_from([0.1, 0.5, 0.93, 1.0]),
    min_p=st.sampled_from([None, 0.05, 0.4]),
    repetition_penalty=st.sampled_from([0.8, 1.3]),
)
def test_kept_tokens_and_probabilities_are_as_in_transformers(seed: int, vocabulary: int, **fields: Any) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=3, size=vocabulary)
    seen = rng.integers(0, vocabulary, size=6).tolist()
    chosen = drawing(**fields)
    expected = kept_by_transformers(logits, seen, chosen)
    changed = penalized(logits, np.array(seen), chosen.repetition_penalty)
    kept = keep_top_k(changed, chosen.top_k)
    found = narrowed(TokenCandidates(kept, changed[kept] / chosen.temperature), chosen)
    assert found.tokens.tolist() == np.flatnonzero(np.isfinite(expected)).tolist()
    assert np.allclose(softmax(found.scores), softmax(expected[found.tokens]), rtol=1e-9)


def test_without_sampling_the_likeliest_token_is_picked() -> None:
    generator = np.random.default_rng(0)
    assert pick_token(LOGITS, GenerationSettings(temperature=0.5), generator) == 1
    assert pick_token(LOGITS, drawing(temperature=0), generator) == 1
    assert generator.random() == np.random.default_rng(0).random()


def test_temperature_one_samples_the_distribution() -> None:
    assert np.allclose(draws(drawing()), np.exp(LOGITS), atol=0.03)


def test_a_low_temperature_sharpens() -> None:
    assert draws(drawing(temperature=0.1))[1] > 0.98


@pytest.mark.slow
def test_only_kept_tokens_are_sampled() -> None:
    assert draws(drawing(top_k=3, top_p=0.5))[[0, 2, 4]].tolist() == [0, 0, 0]


@pytest.mark.parametrize("top_k", [0, 5, 99])
def test_top_k_of_0_or_of_all_keeps_all(top_k: int) -> None:
    assert keep_top_k(LOGITS, top_k).tolist() == [0, 1, 2, 3, 4]


def test_large_logits_do_not_overflow() -> None:
    assert softmax(np.array([1e4, 1e4])).tolist() == [0.5, 0.5]


def test_nan_logits_are_reported() -> None:
    with pytest.raises(MalformedInput, match="NaN"):
        pick_token(np.array([1.0, np.nan]), GenerationSettings(), np.random.default_rng(0))


@pytest.mark.parametrize(
    "fields", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": 2.0}, {"num_beams": 0}]
)
def test_invalid_settings_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageProblem, match="invalid "):
        GenerationSettings(**fields)
