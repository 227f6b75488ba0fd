"""The context length of a model, under the names that its family gives to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmconv.causal_lm import LengthSwitch, context_length, length_of, length_switch


@pytest.mark.parametrize(
    "name", ["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions", "seq_length"]
)
def test_the_context_is_a_field_of_the_config(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "a", name: 448}))
    assert context_length(tmp_path) == 448


def test_a_model_may_declare_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom"}))
    assert context_length(tmp_path) is None


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_coheres_models_reach_the_length_of_their_tokenizer() -> None:
    """Command-R: 131,072 tokens, of which its other field says 8,192; in other families that is the model's own."""
    lengths = {"max_position_embeddings": 8192, "model_max_length": 131072}
    assert length_of({"model_type": "cohere", **lengths}) == 131072
    assert length_of({"model_type": "cohere2", "max_position_embeddings": 8192}) == 8192
    assert length_of({"model_type": "llama", **lengths}) == 8192
    assert length_of({"model_type": "baichuan", "model_max_length": 4096}) == 4096
    assert length_of({"model_type": "cohere", "max_position_embeddings": 8192, "model_max_length": 10**30}) == 8192


ROPES: dict[str, tuple[int, dict[str, Any] | None, int]] = {
    "none": (64, None, 64),
    "default": (64, {"rope_type": "default"}, 64),
    "linear": (64, {"rope_type": "linear", "factor": 4.0}, 256),
    "dynamic": (64, {"rope_type": "dynamic", "factor": 4.0}, 256),
    "yarn": (64, YARN, 256),
    "yarn, its length declared": (256, YARN, 256),
    "yarn, no original length": (64, {"rope_type": "yarn", "factor": 4.0}, 256),
    "longrope": (256, {**LONGROPE, "original_max_position_embeddings": 64}, 256),
    "llama3": (512, {**LLAMA3, "original_max_position_embeddings": 64}, 512),
    "proportional": (64, {"rope_type": "proportional", "factor": 4.0, "partial_rotary_factor": 0.5}, 256),
    "proportional, no factor": (64, {"rope_type": "proportional", "partial_rotary_factor": 0.5}, 64),
}
"""Name to declared length, rotary parameters, and what the model reaches."""


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("legacy", [False, True])
def test_scaling_reaches_further_than_the_declared_length(name: str, legacy: bool) -> None:
    declared, rope, reached = ROPES[name]
    if rope and legacy:
        rope = {**rope, "type": rope["rope_type"]}
        del rope["rope_type"]
    config = {"max_position_embeddings": declared, "rope_scaling" if legacy else "rope_parameters": rope}
    assert length_of(config) == reached


@pytest.mark.parametrize("name", [name for name, (_, rope, _) in ROPES.items() if rope])
def test_at_the_context_no_frequency_turns_further_than_in_training(name: str) -> None:
    """The slowest frequency of transformers' own functions: its angle at the end of the context was trained on."""
    from transformers import LlamaConfig  # noqa: PLC0415
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

    declared, rope, reached = ROPES[name]
    assert rope
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": declared}
    config = LlamaConfig(**sizes, rope_parameters={"rope_theta": 10000.0, **rope})
    assert length_of(config.to_dict()) == reached
    if rope["rope_type"] == "default":
        return
    frequencies, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, None, seq_len=reached)
    slowest = 10000.0 ** (-6 / 8) if "proportional" not in name else 10000.0 ** (-2 / 8)
    original = rope.get("original_max_position_embeddings", declared if "factor" in rope else reached)
    turned = float(frequencies[frequencies > 0][-1]) * reached
    assert turned <= 1.001 * slowest * original


def test_every_rotary_type_of_transformers_is_known() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

    assert ROPE_INIT_FUNCTIONS.keys() <= ROPES.keys()


@pytest.mark.parametrize("name, reached", [("linear", 64), ("yarn", 256), ("dynamic", 256), ("default", 64)])
def test_the_parameters_may_differ_between_layer_types(name: str, reached: int) -> None:
    layers = {"sliding_attention": {"rope_type": "default"}, "full_attention": ROPES[name][1]}
    assert length_of({"max_position_embeddings": 64, "rope_parameters": layers}) == reached


def test_gemma_3_declares_what_its_scaling_reaches() -> None:
    rope = {"rope_type": "linear", "factor": 8.0}
    published = {"max_position_embeddings": 131072, "rope_scaling": rope, "rope_local_base_freq": 10000.0}
    assert length_of(published) == 131072


@pytest.mark.parametrize("factor", [True, "4", None, -4, 0.5, float("nan"), float("inf"), 1e300])
def test_an_odd_factor_changes_nothing(factor: Any) -> None:
    rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 64}
    assert length_of({"max_position_embeddings": 64, "rope_parameters": rope}) == 64


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_of_longrope_and_dynamic_depend_on_the_length(name: str) -> None:
    declared, rope, _ = ROPES[name]
    found = length_switch({"max_position_embeddings": declared, "rope_parameters": rope})
    assert found == (LengthSwitch(64) if name in ("longrope", "dynamic") else None)


def test_a_text_of_phi_3_that_outgrows_the_original_context_is_read_again() -> None:
    rope = {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}
    sizes = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    assert length_switch({"model_type": "phi3", **sizes, "rope_scaling": rope}) == LengthSwitch(4096, reads_again=True)
