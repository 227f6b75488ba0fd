"""Adapters whose model and whose base's files call the same tensors differently, against PEFT's merge in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from llmconv.convert import merge_lora
from llmconv.convert.adapters.tensor_names import match_names, match_saved
from llmconv.errors import MalformedInput
from tests.builders.lora_models import assert_equal, causal_lm, train

TEXT: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def llava() -> Any:
    """Old files: `language_model.model.`, `vision_tower.`."""
    text = transformers.LlamaConfig(**TEXT)
    vision = transformers.CLIPVisionConfig(**VISION, image_size=8, patch_size=4, projection_dim=16)
    return transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(vision_config=vision, text_config=text))


def qwen2_vl() -> Any:
    """Old files: `visual.`, `model.`."""
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "mlp_ratio": 1}
    config = transformers.Qwen2VLConfig(text_config={**TEXT, "rope_parameters": rope}, vision_config=vision)
    return transformers.Qwen2VLForConditionalGeneration(config)


def gpt_neox() -> Any:
    """Old files: `embed_out.`."""
    fields = {name: value for name, value in TEXT.items() if name != "num_key_value_heads"}
    return causal_lm("gpt_neox", **fields)


def phimoe() -> Any:
    """Files: `block_sparse_moe.`, and `gate` for `router`."""
    return causal_lm("phimoe", **TEXT, num_local_experts=3, num_experts_per_tok=2)


MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "llava": (llava, {"target_modules": ["q_proj", "lm_head", "linear_1"]}),
    "qwen2_vl": (qwen2_vl, {"target_modules": ["q_proj", "qkv"]}),
    "gpt_neox": (gpt_neox, {"target_modules": ["query_key_value", "lm_head"]}),
    "phimoe": (
        phimoe,
        {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "router.weight"]},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_names_of_the_running_model_find_those_of_the_files(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, fields = MODELS[kind]
    case = train(make(), tmp_path, **fields)
    merge_lora(case.base, [case.adapter], tmp_path / "out")
    assert_equal(tmp_path / "out", case.exact)


def renamed(state: dict[str, torch.Tensor], *pairs: tuple[str, str]) -> dict[str, torch.Tensor]:
    """With the first fitting beginning of each name exchanged."""
    result = {}
    for name, value in state.items():
        old, new = next(((old, new) for old, new in pairs if name.startswith(old)), ("", ""))
        result[new + name.removeprefix(old)] = value
    return result


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["old adapter", "old base"])
def test_old_and_new_names_of_a_multimodal_model_meet(direction: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    case = train(llava(), tmp_path, target_modules=["q_proj", "lm_head", "linear_1"])
    old = [("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head.")]
    towers = [("multi_modal_projector.", "model.multi_modal_projector."), ("vision_tower.", "model.vision_tower.")]
    is_new = "model.language_model.norm.weight" in load_file(case.base / "model.safetensors")
    back = [(new, before) for before, new in [*old, *towers]]
    file = case.base / "model.safetensors" if direction == "old base" else case.adapter / "adapter_model.safetensors"
    exact = case.exact
    if direction == "old base":
        pairs = back if is_new else [*old, *towers]
        exact = renamed(exact, *pairs)
        save_file(renamed(load_file(file), *pairs), file)
    else:
        plain = {name.removeprefix("base_model.model."): value for name, value in load_file(file).items()}
        save_file({f"base_model.model.{name}": value for name, value in renamed(plain, *back).items()}, file)
    merge_lora(case.base, [case.adapter], tmp_path / "out")
    assert_equal(tmp_path / "out", exact)


def test_another_spelling_comes_before_an_exchange_of_prefixes() -> None:
    names = {"text.layers.0.q.weight", "vision.layers.0.q.weight"}
    found = match_names({"tower.layers.0.q.weight"}, names, "adapter", lambda name: name.replace("tower", "vision"))
    assert found == {"tower.layers.0.q.weight": "vision.layers.0.q.weight"}


def test_a_name_left_over_is_an_error_that_names_it() -> None:
    names = ["model.language_model.layers.0.q.weight"]
    wanted = ["language_model.model.layers.0.q.weight", "language_model.model.layers.1.q.weight"]
    with pytest.raises(MalformedInput, match=r"layers\.1\.q"):
        match_names(wanted, names, "adapter")


def test_a_parameter_of_another_module_does_not_match() -> None:
    with pytest.raises(MalformedInput, match="does not have"):
        match_names({"embed.token_adapter.weight"}, {"embed.weight", "norm.weight"}, "adapter")


def test_a_saved_module_moves_as_the_others_do() -> None:
    homes = {"transformer.h.0.attn.weight": "h.0.attn.weight"}
    assert match_saved({"transformer.ln_f.weight"}, homes, {"h.0.attn.weight", "ln_f.weight"}, "adapter") == {
        "transformer.ln_f.weight": "ln_f.weight"
    }


def test_a_saved_module_of_another_version_is_found_without_others() -> None:
    names = {"language_model.model.norm.weight", "language_model.model.embed_tokens.weight"}
    swapped = {"model.language_model.norm.weight": "language_model.model.norm.weight"}
    assert match_saved({*swapped}, {}, names, "adapter", lambda name: swapped[name]) == swapped


def test_a_saved_module_that_the_base_lacks_is_new() -> None:
    assert match_saved({"score.weight"}, {}, {"model.norm.weight"}, "adapter") == {}


def test_a_saved_module_that_may_be_the_bases_is_refused() -> None:
    with pytest.raises(MalformedInput, match=r"could be `text\.norm\.weight`"):
        match_saved({"decoder.norm.weight"}, {}, {"text.norm.weight"}, "adapter")


def test_a_model_that_is_a_part_of_the_base_is_found_among_towers_with_the_same_layers() -> None:
    wanted = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
    names = [f"{start}.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1) for start in TOWERS]
    assert match_names(wanted, names, "ad") == {name: f"language_model.{name}" for name in wanted}
    with pytest.raises(MalformedInput, match="which could be"):
        match_names(wanted, [name for name in names if not name.startswith("language_model")], "ad")


TOWERS = ("language_model.model", "vision_tower.encoder", "audio_tower.encoder")
