"""Classifiers, and models with images, in the files of trainers: all of it is the model's, in every format."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from llmconv.convert import to_hf
from llmconv.errors import UnsupportedInput
from tests.builders.dcp_folders import save as save_dcp

State = dict[str, torch.Tensor]
SIZES = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "num_labels": 3}
KINDS = {
    "llama": ("LlamaForSequenceClassification", transformers.LlamaConfig, {"pad_token_id": 0}),
    "qwen2": ("Qwen2ForTokenClassification", transformers.Qwen2Config, {"num_key_value_heads": 2}),
    "bert": ("BertForSequenceClassification", transformers.BertConfig, {}),
}


@lru_cache(maxsize=8)
def classifier(kind: str) -> Any:
    name, config, more = KINDS[kind]
    torch.manual_seed(0)
    return getattr(transformers, name)(config(**SIZES, num_attention_heads=2, **more))


def base_of(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder / "base")
    return folder / "base"


def safetensors(state: State, _fields: dict[str, Any], folder: Path) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "run.safetensors")
    return folder / "run.safetensors"


def torch_file(state: State, _fields: dict[str, Any], folder: Path) -> Path:
    torch.save(state, folder / "run.bin")
    return folder / "run.bin"


def lightning(state: State, _fields: dict[str, Any], folder: Path) -> Path:
    inside = {f"net.{name}": tensor for name, tensor in state.items()}
    torch.save({"state_dict": inside, "pytorch-lightning_version": "2.6.6"}, folder / "run.ckpt")
    return folder / "run.ckpt"


def distributed(state: State, _fields: dict[str, Any], folder: Path) -> Path:
    return save_dcp(folder / "pytorch_model_fsdp_0", {"model": state})


def composer(state: State, fields: dict[str, Any], folder: Path) -> Path:
    run: dict[str, Any] = {"model": {f"model.{name}": tensor for name, tensor in state.items()}}
    run["integrations"] = {"huggingface": {"model": {"config": {"content": fields}}}}
    torch.save({"state": run}, folder / "ep1.pt")
    return folder / "ep1.pt"


WRITERS: dict[str, Callable[[State, dict[str, Any], Path], Path]] = {
    one.__name__: one for one in (safetensors, torch_file, lightning, distributed, composer)
}


def with_images() -> Any:
    text = transformers.LlamaConfig(**SIZES, num_attention_heads=2)
    vision = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    tower = transformers.CLIPVisionConfig(**vision, image_size=8, patch_size=4, projection_dim=16)
    torch.manual_seed(0)
    config = transformers.LlavaConfig(text_config=text, vision_config=tower, image_token_index=23)
    return transformers.LlavaForConditionalGeneration(config)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_model_with_images_keeps_its_class_and_its_tower(writer: str, tmp_path: Path) -> None:
    model = with_images()
    base = base_of(model, tmp_path)
    path = WRITERS[writer](model.state_dict(), json.loads((base / "config.json").read_text()), tmp_path)
    to_hf(path, tmp_path / "out", config=[base])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [type(model).__name__]
    found, loading = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values()), loading
    assert all(torch.equal(one, model.state_dict()[name]) for name, one in found.state_dict().items())


def test_the_language_model_alone_has_the_causal_class(tmp_path: Path) -> None:
    """Of a model with images its text was trained, and the configuration is that of the whole model."""
    names = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 4, "head_dim": 8}
    text = {**names, "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    config = transformers.Qwen3_5Config(
        text_config={**text, **heads}, architectures=["Qwen3_5ForConditionalGeneration"]
    )
    config.save_pretrained(tmp_path)
    state = transformers.Qwen3_5ForCausalLM(config.text_config).state_dict()
    torch.save(state, tmp_path / "run.bin")
    to_hf(tmp_path / "run.bin", tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == state.keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["Qwen3_5ForCausalLM"]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_classifier_is_the_one_that_it_was(kind: str, writer: str, tmp_path: Path) -> None:
    model = classifier(kind)
    base = base_of(model, tmp_path)
    path = WRITERS[writer](model.state_dict(), json.loads((base / "config.json").read_text()), tmp_path)
    to_hf(path, tmp_path / "out", config=[base])
    found, want = load_file(tmp_path / "out" / "model.safetensors"), load_file(base / "model.safetensors")
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [KINDS[kind][0]]


def test_what_is_beside_a_classifier_is_not_its_head(tmp_path: Path) -> None:
    model = classifier("llama")
    base = base_of(model, tmp_path)
    file = lightning(model.state_dict(), {}, tmp_path)
    content = torch.load(file)
    content["state_dict"]["loss.weight"] = torch.ones(3)
    torch.save(content, file)
    with pytest.raises(UnsupportedInput, match=r"unexpected keys outside the model: `loss\.weight`"):
        to_hf(file, tmp_path / "out", config=[base])
    to_hf(file, tmp_path / "out", config=[base], drop=True)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()


@pytest.mark.parametrize("whole", [True, False])
def test_a_lora_run_of_a_classifier_has_one_of_the_heads_that_peft_names(whole: bool, tmp_path: Path) -> None:
    """PEFT puts `classifier` and `score` into `modules_to_save`; FSDP saves the whole model, or what was trained."""
    transformers.logging.set_verbosity_error()
    name, config, more = KINDS["llama"]
    model = getattr(transformers, name)(config(**SIZES, num_attention_heads=2, **more))
    base = base_of(model, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT asks transformers by an older name
        tuned = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=4, target_modules=["q_proj"]))
    for part, tensor in tuned.named_parameters():
        if "lora_" in part or "modules_to_save" in part:
            tensor.data = torch.randn(tensor.shape)
    state = {
        part: one.clone() for part, one in tuned.state_dict().items() if whole or "lora_" in part or "save" in part
    }
    tuned.save_pretrained(tmp_path)
    path = save_dcp(tmp_path / "pytorch_model_fsdp_0", {"model": state})
    to_hf(path, tmp_path / "out", **({"config": [base]} if whole else {"base": base}))
    want = tuned.merge_and_unload().state_dict()
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == want.keys()
    for part, tensor in want.items():
        torch.testing.assert_close(found[part], tensor)
