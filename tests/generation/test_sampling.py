"""Sampling: the filters are those of transformers, and the draws have their distribution."""

from __future__ import annotations

from pathlib import Path
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
from llmconv.generation.logits_processors import GraphModel, search
from llmconv.generation.loop import LoopEngine
from llmconv.generation.row import (
    RowStart,
    TokenCandidates,
    keep_top_k,
    narrowed,
    penalized,
    pick_token,
    softmax,
)
from llmconv.generation.token_rules import TokenRules
from llmconv.runtime.extra_inputs import ModelCall
from llmconv.runtime.runner import ArrayCache, Choices, Runner, Step, default_positions
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


@pytest.mark.parametrize(
    "fields", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": 2.0}, {"num_beams": 0}]
)
def test_invalid_settings_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageProblem, match="invalid "):
        GenerationSettings(**fields)


NAN = np.array([[[0.5, np.nan, 0.1, 0.2]]], np.float32)
HUGE = np.array([[[0.5, np.inf, 0.1, 0.2]]], np.float32)


@pytest.mark.parametrize("logits", [NAN, HUGE], ids=["NaN", "infinite"])
@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("way", ["plain", "processor", "choices"])
def test_no_token_is_picked_of_logits_that_are_no_numbers(way: str, samples: bool, logits: Array) -> None:
    settings = GenerationSettings(do_sample=samples, extra={"no_repeat_ngram_size": 2} if way == "processor" else {})
    engine = LoopEngine(Counting(logits), default_positions, Path())
    row = engine._row(0, RowStart([1, 2], 4), settings, str)
    tokens = np.array([[[1, 0, 3, 2]]])
    choices = Choices(tokens, logits) if way == "choices" else None
    with pytest.raises(MalformedInput, match="NaN or infinite"):
        row.pick(Step(logits, ArrayCache({}, 2), choices), 0)


def test_no_beam_goes_on_after_logits_that_are_no_numbers() -> None:
    settings = GenerationSettings(num_beams=2)
    with pytest.raises(MalformedInput, match="NaN or infinite"):
        search(GraphModel(Counting(NAN), default_positions, 4), [1, 2], 3, settings)


class Counting(Runner):
    """Returns the same logits [1, 1, vocabulary] in every step."""

    def __init__(self, logits: Array) -> None:
        self._logits = logits

    def _run_prompt(self, call: ModelCall, *_: Any) -> Step:
        rows, tokens = call.attention_mask.shape
        return Step(self._logits.repeat(rows, axis=0), ArrayCache({}, tokens))


@pytest.mark.parametrize("extra", [{}, {"no_repeat_ngram_size": 9}], ids=["own loop", "processors"])
def test_a_penalty_of_presence_follows_that_of_repetition(extra: dict[str, Any]) -> None:
    """As docs/serving.md says: 3 / 2 - 1 is less than 0.6, and (3 - 1) / 2 is not."""
    settings = GenerationSettings(repetition_penalty=2.0, rules=TokenRules(presence_penalty=1.0), extra=extra)
    row = LoopEngine(Counting(NAN), default_positions, Path())._row(0, RowStart([0], 4), settings, str)
    row.push(1)
    assert row.pick(Step(np.array([[[0.0, 3.0, 0.6]]], np.float32), ArrayCache({}, 2)), 0) == 2
