"""Rotary frequencies that depend on the length: graphs compute them from the positions of each call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmconv.export import export
from llmconv.runtime import OrtGraph, Runner, default_positions
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.tensors import Array
from tests.conftest import DECODER, save_tiny

ORIGINAL = 16
HALF = 8
SCALINGS: dict[str, dict[str, Any]] = {
    "longrope": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.1 * i for i in range(HALF)],
            "long_factor": [2.0 + i for i in range(HALF)],
            "original_max_position_embeddings": ORIGINAL,
        },
        "max_position_embeddings": 4 * ORIGINAL,
    },
    "dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        "max_position_embeddings": ORIGINAL,
    },
}


REACHING = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
FIXED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {**REACHING, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
    "yarn": REACHING,
    "yarn, all of its fields": {
        **REACHING,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
        "attention_factor": 1.3,
    },
    "yarn, scales of DeepSeek": {**REACHING, "mscale": 1.0, "mscale_all_dim": 0.7},
}
"""Frequencies that do not depend on the length."""
KINDS = SCALINGS | {
    name: {
        "rope_parameters": {"rope_type": name.partition(",")[0], "rope_theta": 10000.0, **fields},
        "max_position_embeddings": 4 * ORIGINAL,
    }
    for name, fields in FIXED.items()
}
BY_LAYERS = {f"{name} in one type of layers": fields for name, fields in KINDS.items() if "," not in name}


def test_the_kinds_are_all_that_transformers_has() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

    assert {name.partition(",")[0] for name in KINDS} == ROPE_INIT_FUNCTIONS.keys()


@pytest.mark.slow
@pytest.mark.one_row_in(3)
@pytest.mark.parametrize("kind", [*KINDS, *BY_LAYERS])
def test_graphs_turn_positions_as_the_model_far_behind_the_original_context(kind: str, tmp_path: Path) -> None:
    if kind in KINDS:
        folder = save_tiny("llama", tmp_path / "model", **KINDS[kind])
    else:
        own = BY_LAYERS[kind]["rope_parameters"]
        plain = {"rope_type": "default", "rope_theta": 10000.0}
        fields = {**DECODER, **BY_LAYERS[kind], "rope_parameters": {"full_attention": own, "sliding_attention": plain}}
        types = ["sliding_attention", "full_attention"] * 2
        folder = save_tiny(
            "gemma3_text", tmp_path / "model", **fields, head_dim=16, layer_types=types, sliding_window=8
        )
    export(folder)
    for prompt in (ORIGINAL - 3, ORIGINAL + 1, 2 * ORIGINAL + 2):
        expected = logits_of(EagerRunner(folder, "float64"), prompt, 5)
        assert np.allclose(logits_of(OrtRunner.from_folder(folder), prompt, 5), expected, atol=2e-5)


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`scaled(kind)` is an exported Llama with that rotary scaling."""
    folders: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = save_tiny("llama", tmp_path_factory.mktemp("scaled") / kind, **SCALINGS[kind])
            export(folders[kind])
        return folders[kind]

    return folder


def logits_of(runner: Runner, prompt: int, steps: int) -> Array:
    """The logits of a prompt and of steps after it."""
    ids = np.random.default_rng(0).integers(0, 96, (2, prompt + steps))
    mask = np.ones_like(ids)
    positions = default_positions(mask, prompt + steps)
    step = runner.prefill(ids[:, :prompt], mask[:, :prompt], positions[:, :prompt])
    logits = [step.logits]
    for at in range(prompt, prompt + steps):
        step = runner.decode(ids[:, at : at + 1], mask[:, : at + 1], positions[:, at : at + 1], step.present)
        logits.append(step.logits)
    return np.concatenate(logits, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [ORIGINAL - 3, ORIGINAL, ORIGINAL + 1, 2 * ORIGINAL], ids=lambda n: f"{n} tokens")
@pytest.mark.parametrize("kind", SCALINGS)
def test_prompts_and_steps_on_both_sides_of_the_original_context(
    kind: str, prompt: int, scaled: Callable[[str], Path]
) -> None:
    expected = logits_of(EagerRunner(scaled(kind), "float64"), prompt, 5)
    assert np.allclose(logits_of(OrtRunner.from_folder(scaled(kind)), prompt, 5), expected, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCALINGS)
def test_the_frequencies_differ_beyond_the_original_context(kind: str, scaled: Callable[[str], Path]) -> None:
    graph = OrtGraph(scaled(kind) / "prefill.onnx")
    ids = np.random.default_rng(0).integers(0, 96, (1, ORIGINAL))
    mask = np.ones_like(ids)
    near = default_positions(mask, ORIGINAL)
    # Rotated by one angle, scores of pairs do not change, so only other frequencies have an effect.
    here, there = (graph.run(ids, mask, near + by).logits for by in (0, 2 * ORIGINAL))
    assert not np.allclose(here, there, atol=1e-3)


@pytest.mark.slow
def test_the_eager_model_forgets_the_lengths_of_earlier_prompts(scaled: Callable[[str], Path]) -> None:
    fresh, used = (EagerRunner(scaled("dynamic"), "float64") for _ in range(2))
    logits_of(used, 3 * ORIGINAL, 0)
    assert np.array_equal(logits_of(used, ORIGINAL + 1, 1), logits_of(fresh, ORIGINAL + 1, 1))
