"""LLaMA2-Accessory's trained parameters over a Hugging Face base: what to-hf makes of them over Accessory's own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from llmconv.convert import merge_lora, to_hf
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, UsageProblem

FIXTURES = Path(__file__).parents[2] / "fixtures" / "accessory"
LEGACY = FIXTURES / "legacy_llama_peft_mp2_trainable"
PARAMS: dict[str, Any] = {"config": [LEGACY / "params.json"], "dtype": "float32"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What training started from, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("accessory") / "base"
    to_hf(LEGACY / "base", folder, **PARAMS)
    return folder


def test_it_equals_to_hf_with_the_base_bit_for_bit(base: Path, tmp_path: Path) -> None:
    merge = merge_lora(base, [LEGACY / "epoch0"], tmp_path / "merged")
    to_hf(LEGACY / "epoch0", tmp_path / "tuned", base=LEGACY / "base", **PARAMS)
    mine, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "tuned"))
    assert (len(merge.merged), len(merge.replaced), len(merge.added)) == (14, 5, 14)
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.slow
def test_the_merged_model_has_upstreams_logits(base: Path, tmp_path: Path, logits_of: Callable[..., Any]) -> None:
    merge_lora(base, [LEGACY / "epoch0"], tmp_path / "merged")
    with np.load(LEGACY / "reference.npz") as reference:
        logits = logits_of(tmp_path / "merged", reference["tokens"])
        assert np.abs(logits - reference["logits"]).max() < 1e-5 * np.abs(reference["logits"]).max()


def test_biases_that_the_base_does_not_have_are_switched_on(base: Path, tmp_path: Path) -> None:
    merge_lora(base, [LEGACY / "epoch0"], tmp_path / "merged")
    before, after = (json.loads((path / "config.json").read_text()) for path in (base, tmp_path / "merged"))
    assert (before["attention_bias"], before["mlp_bias"]) == (False, False)
    assert (after["attention_bias"], after["mlp_bias"]) == (True, True)


def changed(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """The trained parameters with something done to those of every shard."""
    shutil.copytree(LEGACY / "epoch0", folder)
    for file in folder.glob("*.model.pth"):
        torch.save({"model": change(torch.load(file)["model"])}, file)
    return folder


def without(*parts: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {name: one for name, one in state.items() if not any(part in name for part in parts)}


def test_a_switch_whose_layers_are_partly_trained_gets_zeros(base: Path, tmp_path: Path) -> None:
    adapter = changed(tmp_path / "x", without("wq.bias", "wk.bias", "wv.bias", "w1.bias", "w2.bias", "w3.bias"))
    merge_lora(base, [adapter], tmp_path / "merged")
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert not merged["model.layers.0.self_attn.q_proj.bias"].any()
    assert merged["model.layers.0.self_attn.o_proj.bias"].any()
    assert not any("mlp" in name and name.endswith(".bias") for name in merged)


def test_only_norms_and_biases_are_an_adapter_too(base: Path, tmp_path: Path) -> None:
    merge = merge_lora(base, [changed(tmp_path / "x", without("lora_"))], tmp_path / "merged")
    assert not merge.merged
    assert len(merge.replaced) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("layers.1.attention.wo.lora_b"), r"lacks B of `layers\.1\.attention\.wo`"),
        (lambda state: {name.replace("wq.lora", "wz.lora"): one for name, one in state.items()}, r"\.wz` \(close: .*w"),
        (lambda state: {**state, "clip_proj.weight": torch.ones(2)}, "clip_proj"),
        (lambda state: {**state, "norm.weight": torch.full((64,), float("nan"))}, "not finite"),
        (lambda state: {name: one[..., :3] if "lora_a" in name else one for name, one in state.items()}, "shape"),
    ],
)
def test_mismatching_tensors_are_refused(base: Path, tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(MalformedInput, match=message):
        merge_lora(base, [changed(tmp_path / "x", change)], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_alpha_is_refused_as_there_is_none(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="contradicts"):
        merge_lora(base, [LEGACY / "epoch0"], tmp_path / "merged", alpha=3.0)


def test_a_whole_model_is_sent_to_to_hf(base: Path, tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="holds a whole model") as refused:
        merge_lora(base, [FIXTURES / "llama_peft_normBiasLora_mp2"], tmp_path / "merged")
    assert "llmconv to-hf" in refused.value.hint


def test_a_delta_is_sent_to_delta_apply(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedInput, match="is a delta") as refused:
        merge_lora(base, [FIXTURES / "delta_full_mp2" / "delta"], tmp_path / "merged")
    assert "delta apply" in refused.value.hint


def test_parameters_of_another_plugin_than_the_bases_kind_are_refused(base: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(LEGACY / "epoch0", tmp_path / "x")
    (folder / "meta.json").write_text('{"llama_type": "falcon"}')
    with pytest.raises(UnsupportedInput, match="of a falcon, the base is a llama"):
        merge_lora(base, [folder], tmp_path / "merged")


def test_trained_biases_have_no_place_in_a_mistral(base: Path, tmp_path: Path) -> None:
    mistral = shutil.copytree(base, tmp_path / "mistral")
    config = json.loads((mistral / "config.json").read_text()) | {"model_type": "mistral"}
    (mistral / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedInput, match=r"14 trained biases, .* unsupported in a mistral"):
        merge_lora(mistral, [LEGACY / "epoch0"], tmp_path / "merged")
    assert merge_lora(mistral, [changed(tmp_path / "x", without(".bias"))], tmp_path / "merged").merged


def test_to_hf_declares_that_it_merged_the_pairs() -> None:
    warnings = open_training(FIXTURES / "llama_peft_normBiasLora_mp2").warnings
    assert any("merged 14 LoRA pairs" in warning for warning in warnings)
    assert not any("LoRA" in warning for warning in open_training(FIXTURES / "llama_mp2_bf16").warnings)
