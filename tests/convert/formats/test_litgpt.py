"""LitGPT checkpoints: genuine ones of every family and both row orders give the upstream's logits."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from llmconv.convert import to_hf
from llmconv.convert.formats import formats
from llmconv.convert.formats.litgpt.config import family_of, settings_of, to_config
from llmconv.convert.models.head_and_dtype import settled
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from tests.builders.torch_states import FIXTURES

FOLDER = FIXTURES / "litgpt"
CASES = {
    "llama3": "llama",
    "tinyllama_old_order": "llama",
    "mistral_window": "mistral",
    "mixtral": "mixtral",
    "phi3": "phi3",
    "phi2": "phi",
    "qwen2_5": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "pythia": "gpt_neox",
    "pythia_old_order": "gpt_neox",
    "falcon7b": "falcon",
    "falcon40b": "falcon",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "stablelm": "stablelm",
    "gemma3": "gemma3_text",
    "phi4_mini": "phi3",
}


@pytest.mark.slow_rows("mixtral", "phi2", "olmo", "stablelm")
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_upstream_model(tmp_path: Path, logits_of: Callable[..., Any], case: str) -> None:
    to_hf(FOLDER / case, tmp_path / "hf")
    with np.load(FOLDER / case / "reference.npz") as reference:
        assert np.abs(logits_of(tmp_path / "hf", reference["input_ids"]) - reference["logits"]).max() < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_only_this_format_claims_folder_and_file(case: str) -> None:
    for path in (FOLDER / case, FOLDER / case / "lit_model.pth"):
        assert [name for name, found in formats().items() if found.detect(path)] == ["litgpt"]
    assert open_training(FOLDER / case).config["model_type"] == CASES[case]


def test_the_order_of_rows_is_reported_as_the_version() -> None:
    assert open_training(FOLDER / "pythia").version == "litgpt"
    assert open_training(FOLDER / "pythia_old_order").version == "litgpt before 2025"


def folder_of(tmp_path: Path, case: str = "llama3", **changes: Any) -> Path:
    """A copy whose `model_config.yaml` has `changes`."""
    folder = shutil.copytree(FOLDER / case, tmp_path / case)
    content = yaml.safe_load((folder / "model_config.yaml").read_text()) | changes
    (folder / "model_config.yaml").write_text(yaml.safe_dump(content))
    return folder


def change_state(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    content = torch.load(folder / "lit_model.pth")
    change(content.get("model", content))
    torch.save(content, folder / "lit_model.pth")
    return folder


def test_without_its_yaml_it_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "model_config.yaml").unlink()
    with pytest.raises(InputRefused, match=r"no `model_config\.yaml`"):
        open_training(folder)


def test_a_config_next_to_it_is_kept_with_the_padded_vocabulary(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "hidden_size": 32, "vocab_size": 90, "x": 1})
    )
    config = open_training(folder).config
    assert (config["x"], config["vocab_size"], config["num_hidden_layers"]) == (1, 96, 2)


@pytest.mark.parametrize(("case", "matrix"), [("llama3", "qkv"), ("pythia_old_order", "attn")])
def test_a_fused_matrix_of_other_rows_has_the_name_in_the_file(case: str, matrix: str, tmp_path: Path) -> None:
    name = f"transformer.h.0.attn.{matrix}.weight"
    folder = change_state(folder_of(tmp_path, case), lambda state: state.update({name: state[name][1:]}))
    with pytest.raises(MalformedInput, match=f"1 fused matrices: `{re.escape(name)}`"):
        open_training(folder)


@pytest.mark.parametrize(
    "said",
    [{"model_type": "gpt_neox"}, {"hidden_size": 64}, {"rope_theta": 1.0}, {"rope_parameters": {"rope_theta": 2.0}}],
    ids=str,
)
def test_a_config_that_contradicts_the_yaml_is_refused(tmp_path: Path, said: dict[str, Any]) -> None:
    folder = folder_of(tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | said))
    with pytest.raises(MalformedInput, match="next to `llama3` declares"):
        open_training(folder)


def test_a_head_that_is_the_embedding_is_tied(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    change_state(folder, lambda state: state.update({"lm_head.weight": state["transformer.wte.weight"].clone()}))
    found = settled(open_training(folder))
    assert "lm_head.weight" not in found and found.config["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("transformer.h.1.mlp.fc_2.weight"),
        lambda state: state.pop("transformer.ln_f.weight"),
        lambda state: state.update({"transformer.h.2.norm_1.weight": torch.ones(32)}),
        lambda state: state.update({"transformer.h.0.attn.qkv.weight": torch.ones(60, 32)}),
        lambda state: state.update({"transformer.h.0.attn.attn.weight": torch.ones(64, 32)}),
        lambda state: state.update({"transformer.h.0.attn.qkv.lora_A": torch.ones(2, 32)}),
        lambda state: state.update({"transformer.h.0.norm_1.weight": complex(1, 2)}),
        lambda state: state.update({"transformer.h.0.attn.qkv.quant_map": torch.ones(2)}),
    ],
)
def test_a_state_dict_that_is_not_that_model_is_refused(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    with pytest.raises(InputRefused):
        open_training(change_state(folder_of(tmp_path), change))


IMPOSSIBLE: list[dict[str, Any]] = [
    {"n_layer": 0},
    {"n_layer": "2"},
    {"n_embd": None},
    {"n_head": True},
    {"n_head": -4},
    {"n_query_groups": 3},
    {"head_size": 0},
    {"norm_eps": "x"},
    {"rope_adjustments": [1]},
    {"padded_vocab_size": 97},
    {"n_layer": 1 << 40},
    {"n_layer": 1 << 30},
    {"n_expert": 1 << 60, "mlp_class_name": "LLaMAMoE"},
    {"sliding_window_size": 4, "sliding_window_indices": None, "sliding_window_layer_placing": "some"},
    {"sliding_window_size": 4, "sliding_window_indices": None, "sliding_window_layer_stride": 0},
    {"n_layer": 3},
    {"intermediate_size": None},
]


@pytest.mark.parametrize("change", IMPOSSIBLE, ids=str)
def test_an_impossible_yaml_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(MalformedInput):
        open_training(folder_of(tmp_path, **change))


UNKNOWN: list[dict[str, Any]] = [
    {"post_mlp_norm": True},
    {"rope_interleave": True},
    {"norm_qk": True, "norm_qk_type": "olmo2"},
    {"norm_1": False},
    {"latent_attention": {"kv_lora_rank": 4}},
    {"attention_scores_scalar": 99},
    {"final_logit_softcapping": 30.0},
    {"norm_class_name": "LayerNorm"},
    {"rotary_percentage": 0.5, "attn_bias": True},
    {"norm_1": False, "norm_2": False, "post_mlp_norm": True, "norm_qk": True, "norm_qk_type": "olmo2"},
    {"rope_local_base_freq": 10000.0, "rope_indices": [1, 0]},
    {"mlp_class_name": "GemmaMLP"},
    {"rope_adjustments": {"factor": 2.0, "beta_fast": 1}},
    {"rope_adjustments": {"factor": "x"}},
    {"rope_condense_ratio": 2},
    {"sliding_window_size": 4, "sliding_window_indices": [1, 0]},
]


@pytest.mark.parametrize("change", UNKNOWN, ids=str)
def test_a_model_that_transformers_does_not_have_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(InputRefused):
        open_training(folder_of(tmp_path, **change))


def test_every_model_of_litgpt_has_a_family() -> None:
    """`configs.json` has what decides of all 210 entries of `litgpt.config.configs` of 0.5.13, by kind."""
    kinds = json.loads((FOLDER / "configs.json").read_text())
    assert {family_of(settings_of(fields, "x"), "x") for fields in kinds} == {*CASES.values()}


def test_windows_and_rotary_bases_of_other_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedInput, match="two rope bases"):
        open_training(folder_of(tmp_path, "gemma3", rope_indices=[1, 0, 0]))


def test_the_epsilon_is_that_which_litgpt_computes_with(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "gemma")  # the released `config.json` has 1e-6, LitGPT's own table the default
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma", "rms_norm_eps": 1e-6}))
    found = open_training(folder)
    assert found.config["rms_norm_eps"] == 1e-5 and any("1e-06" in warning for warning in found.warnings)


def test_positions_that_litgpt_does_not_scale_are_reported(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "phi4_mini")
    scaling = {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
    (folder / "config.json").write_text(json.dumps({"model_type": "phi3", "rope_scaling": scaling}))
    found = open_training(folder)
    assert found.config["rope_scaling"] == scaling and any("longrope" in warning for warning in found.warnings)


def test_the_language_model_of_a_multimodal_gemma_3_is_what_litgpt_has(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "gemma3")
    text = {"model_type": "gemma3_text", "hidden_size": 32, "initializer_range": 0.5}
    outer = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}}
    (folder / "config.json").write_text(json.dumps({**outer, "eos_token_id": [1, 6], "text_config": text}))
    found = open_training(folder).config
    assert found["architectures"] == ["Gemma3ForCausalLM"] and "vision_config" not in found
    assert (found["eos_token_id"], found["initializer_range"]) == ([1, 6], 0.5)


def test_positions_that_are_divided_become_linear_scaling() -> None:
    lit = settings_of(yaml.safe_load((FOLDER / "tinyllama_old_order" / "model_config.yaml").read_text()), "x")
    content = {**vars(lit), "rope_condense_ratio": 8}
    config = to_config(settings_of(content, "x"), "llama", "x")
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize("old", [{"sliding_window_layer_placing": "interleaved"}, {"sliding_window_layer_stride": 2}])
def test_windows_in_the_older_fields_are_the_same(tmp_path: Path, old: dict[str, Any]) -> None:
    folder = folder_of(tmp_path, "gemma2", sliding_window_indices=None, **old)
    assert open_training(folder).config == open_training(FOLDER / "gemma2").config


def test_old_field_names_and_missing_ones_are_understood() -> None:
    old = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 90, "padding_multiple": 64, "_norm_class": "RMSNorm"}
    old |= {"_mlp_class": "LLaMAMLP", "intermediate_size": 48, "bias": False, "parallel_residual": False}
    lit = settings_of(old | {"rotary_percentage": 1.0, "condense_ratio": 1}, "x")
    assert (lit.padded_vocab_size, lit.head_size, lit.n_query_groups, family_of(lit, "x")) == (128, 8, 4, "llama")


def test_a_gemma_without_its_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedInput):
        open_training(folder_of(tmp_path, "gemma", name="mine"))


@pytest.mark.parametrize("case", ["qwen3", "pythia"])
def test_a_field_of_another_count_does_not_hide_a_wrong_shape(case: str, tmp_path: Path) -> None:
    whole = Path(shutil.copytree(FOLDER / case, tmp_path / case))
    to_hf(whole, tmp_path / "whole")
    state = torch.load(whole / "lit_model.pth", weights_only=True)
    tensors = state.get("model", state)
    name = next(name for name in tensors if name.endswith("mlp.proj.weight"))
    tensors[name] = tensors[name][:-1].clone()
    torch.save(state, whole / "lit_model.pth")
    config = json.loads((tmp_path / "whole/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_foo_layers": 5000}))
    with pytest.raises(MalformedInput):
        to_hf(whole, tmp_path / "out", config=[tmp_path / "config.json"])
