"""Graphs that choose tokens themselves give the same text as graphs that return logits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmconv.errors import UsageProblem
from llmconv.export.exporter import export
from llmconv.generation import GenerationSettings, generate
from llmconv.generation.row import pick_choice, pick_token

PROMPTS = ["Hello", "What is it?"]
Choosing = Callable[[str], Path]


@pytest.fixture(scope="module")
def choosing(talking: Path, tmp_path_factory: pytest.TempPathFactory) -> Choosing:
    """`choosing(postprocess)` is the talking Llama with graphs that choose tokens."""
    folders: dict[str, Path] = {}

    def folder(postprocess: str) -> Path:
        if postprocess not in folders:
            home = tmp_path_factory.mktemp("choosing")
            ignored = shutil.ignore_patterns("*.onnx", "llmconv.json")
            folders[postprocess] = Path(shutil.copytree(talking, home / "llama", ignore=ignored))
            export(folders[postprocess], postprocess=postprocess, last_logits=True)
        return folders[postprocess]

    return folder


@pytest.mark.slow
@pytest.mark.parametrize("postprocess", ["argmax", "topk:4"])
def test_greedy_text_is_the_same(talking: Path, choosing: Choosing, postprocess: str) -> None:
    expected = generate(talking, PROMPTS, max_new_tokens=8).completions
    assert generate(choosing(postprocess), PROMPTS, max_new_tokens=8).completions == expected


@pytest.mark.slow
def test_sampled_text_is_the_same(talking: Path, choosing: Choosing) -> None:
    fields: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "seed": 5}
    expected = generate(talking, PROMPTS, max_new_tokens=8, **fields).completions
    assert generate(choosing("topk:4"), PROMPTS, max_new_tokens=8, **fields).completions == expected


@pytest.mark.quick_rows("argmax-0")
@pytest.mark.parametrize(("postprocess", "top_k"), [("argmax", 0), ("topk:4", 0), ("topk:4", 5)])
def test_sampling_from_too_many_tokens_is_refused(choosing: Choosing, postprocess: str, top_k: int) -> None:
    with pytest.raises(UsageProblem, match="likeliest tokens alone"):
        generate(choosing(postprocess), PROMPTS, do_sample=True, top_k=top_k)


@pytest.mark.slow_rows("{'repetition_penalty': 1.2}")
@pytest.mark.parametrize("fields", [{"repetition_penalty": 1.2}, {"suppress_tokens": [15]}, {"num_beams": 2}], ids=str)
def test_what_needs_all_logits_is_refused(choosing: Choosing, fields: dict[str, Any]) -> None:
    with pytest.raises(UsageProblem, match="all logits"):
        generate(choosing("topk:4"), PROMPTS, **fields)


def test_a_choice_of_the_graph_equals_that_of_the_logits() -> None:
    rng, settings = np.random.default_rng(0), GenerationSettings(do_sample=True, temperature=1.3, top_k=6, top_p=0.8)
    logits = rng.normal(size=50)
    tokens = np.argsort(-logits)[:6]
    for seed in range(20):
        expected = pick_token(logits, settings, np.random.default_rng(seed))
        assert pick_choice(tokens, logits[tokens] - 7, settings, np.random.default_rng(seed)) == expected
