"""An adapter with a head for classes: OUT is the class that was trained, and computes what it computes under PEFT."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from llmconv.convert import merge_lora
from llmconv.errors import MalformedInput
from tests.builders.lora_models import causal_lm, shake

SMALL: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
LLAMA: dict[str, Any] = {**SMALL, "intermediate_size": 24, "num_key_value_heads": 1, "pad_token_id": 0}
IDS = torch.tensor([[5, 17, 3, 20, 8]])


def classifier(task: str, kind: str, fields: dict[str, Any], labels: int, folder: Path) -> torch.Tensor:
    """Saves a causal base and an adapter of its class for `task`; returns what PEFT's model computes."""
    auto = {
        "SEQ_CLS": transformers.AutoModelForSequenceClassification,
        "TOKEN_CLS": transformers.AutoModelForTokenClassification,
    }[task]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        causal_lm(kind, **fields).save_pretrained(folder / "base")
        model = auto.from_pretrained(folder / "base", num_labels=labels)
        peft_model = get_peft_model(model, LoraConfig(task_type=task, r=4, init_lora_weights=False))
        shake(peft_model)
        peft_model.save_pretrained(folder / "adapter")
    with torch.no_grad():
        result: torch.Tensor = peft_model.eval()(input_ids=IDS).logits
    return result


@pytest.mark.quick_rows("TOKEN_CLS-llama-fields1-1")
@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize(
    ("task", "kind", "fields"),
    [
        ("SEQ_CLS", "llama", LLAMA),
        ("TOKEN_CLS", "llama", LLAMA),
        ("SEQ_CLS", "gpt2", {"vocab_size": 32, "n_embd": 16, "n_head": 2, "n_layer": 2, "pad_token_id": 0}),
    ],
)
def test_the_merged_folder_is_the_model_that_was_trained(
    task: str, kind: str, fields: dict[str, Any], labels: int, tmp_path: Path
) -> None:
    expected = classifier(task, kind, fields, labels, tmp_path)
    merge = merge_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert not any("its configuration" in warning for warning in merge.warnings)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert len(config["id2label"]) == labels
    name = config["architectures"][0]
    merged, loading = getattr(transformers, name).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values()), loading
    with torch.no_grad():
        torch.testing.assert_close(merged.eval()(input_ids=IDS).logits, expected)


def test_an_adapter_that_lost_its_head_is_refused(tmp_path: Path) -> None:
    classifier("SEQ_CLS", "llama", LLAMA, 1, tmp_path)
    file = tmp_path / "adapter/adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "score" not in name}, file)
    with pytest.raises(MalformedInput, match="contains the head"):
        merge_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")


ENCODER: dict[str, Any] = {**SMALL, "intermediate_size": 24, "max_position_embeddings": 32}


@pytest.mark.parametrize("task", ["SEQ_CLS", None])
def test_factors_of_a_head_that_nobody_saved_are_refused(tmp_path: Path, task: str | None) -> None:
    """Reward models with `score` among the targets: PEFT saves its factors, and not the new head."""
    causal_lm("llama", **LLAMA).save_pretrained(tmp_path / "base")
    fields = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["score"], "task_type": task}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(fields))
    factors = {"A": torch.ones(1, LLAMA["hidden_size"]), "B": torch.ones(1, 1)}
    file = tmp_path / "adapter/adapter_model.safetensors"
    save_file({f"base_model.model.score.lora_{one}.weight": tensor for one, tensor in factors.items()}, file)
    with pytest.raises(MalformedInput, match=r"`score.weight`, a head for classes or rewards that neither"):
        merge_lora(tmp_path / "base", [tmp_path / "adapter"], tmp_path / "out")


def encoder_classifier(kind: str, targets: list[str], folder: Path) -> Any:
    """Saves a model for masked words and a classifier's adapter of it; returns PEFT's merge."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.for_model(kind, **ENCODER)
        transformers.AutoModelForMaskedLM.from_config(config).save_pretrained(folder / "base")
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=3)
        made = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", init_lora_weights=False, target_modules=targets))
        shake(made)
        made.save_pretrained(folder / "adapter")
        return made.merge_and_unload()


@pytest.mark.slow
def test_a_head_of_several_layers_is_saved_whole(tmp_path: Path) -> None:
    exact = encoder_classifier("roberta", ["query", "value"], tmp_path).state_dict()
    merge_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").state_dict()
    assert merged.keys() == exact.keys()
    for name, tensor in exact.items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-6, atol=1e-6)


def test_an_encoder_that_lacks_what_its_classifier_needs_is_refused(tmp_path: Path) -> None:
    encoder_classifier("deberta-v2", ["query_proj", "value_proj"], tmp_path)
    with pytest.raises(MalformedInput, match=r"missing keys: `pooler\.dense\.weight`"):
        merge_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()
