"""The same tokens as transformers, alone and in batches, for several families."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmconv.generation import TextModel
from tests.builders.slow_rows import slow_but
from tests.generation.conftest import Expected

FAMILIES = ["llama", "gpt2", "gemma2"]
FIELDS = [
    {"repetition_penalty": 1.4},
    {"num_beams": 3},
    {"num_beams": 4, "length_penalty": 0.3, "early_stopping": True},
    {"no_repeat_ngram_size": 2},
    {"suppress_tokens": [15, 41, 64]},
    {"watermarking_config": {"bias": 4.0, "greenlist_ratio": 0.4}},
    {"num_beams": 2, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    {"min_new_tokens": 6, "eos_token_id": [15, 41, 10, 64]},
]


def prompts_of(seed: int, count: int) -> list[list[int]]:
    """Random prompts of mixed lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 96, size=int(length)).tolist() for length in rng.integers(1, 40, size=count)]


def continued(model: TextModel, prompts: list[list[int]], **fields: object) -> list[list[int]]:
    """New tokens of every prompt of a batch."""
    tokens: list[list[int]] = [[] for _ in prompts]
    for piece in model.stream(prompts, model.defaults.but(**fields)):
        tokens[piece.index] += [] if piece.token is None else [piece.token]
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnx", "torch"])
@pytest.mark.parametrize("family", slow_but(FAMILIES, "llama", "gpt2"))
def test_a_batch_of_random_prompts_is_greedily_continued_as_by_transformers(
    talking_as: Callable[[str], Path], expected: Expected, family: str, backend: str
) -> None:
    folder = talking_as(family)
    model = TextModel.open(folder, backend=backend)
    prompts = prompts_of(FAMILIES.index(family), 5)
    found = continued(model, prompts, max_new_tokens=14)
    assert found == [expected(folder, prompt, max_new_tokens=14, do_sample=False) for prompt in prompts]


@pytest.mark.quick_rows("{'min_new_tokens': 6, 'eos_token_id': [15, 41, 10, 64]}")
@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_other_fields_of_the_generation_config_are_as_in_transformers(
    talking: Path, expected: Expected, fields: dict[str, object]
) -> None:
    model = TextModel.open(talking)
    prompts = prompts_of(7, 2)
    found = continued(model, prompts, max_new_tokens=12, **fields)
    assert found == [expected(talking, prompt, max_new_tokens=12, do_sample=False, **fields) for prompt in prompts]


@pytest.mark.slow
def test_max_length_counts_the_prompt(talking: Path, expected: Expected) -> None:
    model, prompts = TextModel.open(talking), [[5, 6, 7], [8] * 11]
    found = continued(model, prompts, max_length=12)
    assert found == [expected(talking, prompt, max_length=12, do_sample=False) for prompt in prompts]
    assert [len(tokens) for tokens in found] == [9, 1]


@pytest.mark.slow
def test_the_default_length_is_twenty_tokens(talking: Path, expected: Expected) -> None:
    found = continued(TextModel.open(talking), [[5, 6, 7]])
    assert found == [expected(talking, [5, 6, 7], do_sample=False, max_new_tokens=20)]
