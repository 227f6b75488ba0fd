"""MindFormers' LoRA over a converted base: upstream's logits, and in every family what adding the pairs first gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from llmconv.convert import merge_lora, to_hf
from llmconv.convert.formats.mindformers.format import open_parameters
from llmconv.convert.formats.mindformers.mindspore import read_ckpt
from llmconv.convert.from_hugging_face import from_hf
from llmconv.errors import InputRefused, MalformedInput, UsageProblem
from tests.builders.tiny_models import save_tiny

Save = Callable[..., Path]
Judge = Callable[..., Any]
Weights = dict[str, Any]

IN_OUT = ("projection.weight", "mapping.weight")
"""What MindFormers' gpt2 and bloom store in×out."""

FAMILIES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "mf102_llama_gqa": (("attention.wq", "attention.wk", "feed_forward.w2", "lm_head"), {}),
    "mf132_llama_qkv_concat": (("attention.w_qkv", "feed_forward.w_gate_hidden"), {"qkv_layout": "plain"}),
    "mf170_llama_qkv_concat": (("attention.w_qkv", "feed_forward.w_gate_hidden"), {"qkv_layout": "interleaved"}),
    "mf132_glm2": (("self_attention.query_key_value", "mlp.dense_h_to_4h", "self_attention.dense"), {}),
    "mf132_glm2, rearranged": (("self_attention.query_key_value",), {"use_rearrange_rope": True}),
    "mf102_gpt2": (("attention.dense1", "attention.dense3", "output.mapping", "attention.projection"), {}),
    "mf132_bloom": (("attention.dense1", "attention.dense2", "output.projection"), {}),
}


@pytest.fixture
def genuine(mindformers: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The folder of the genuine LoRA run, and its base as a Hugging Face folder."""
    folder = mindformers / "mf132_llama_lora"
    to_hf(folder / "base.ckpt", tmp_path / "base", config=[folder / "run.yaml"])
    return folder, tmp_path / "base"


@pytest.mark.parametrize("file", ["trainable_params.ckpt", "full_with_lora.ckpt"])
def test_the_merged_model_has_upstreams_logits(
    genuine: tuple[Path, Path], tmp_path: Path, logits_of: Judge, file: str
) -> None:
    folder, base = genuine
    merge = merge_lora(base, [folder / file], tmp_path / "merged", alpha=8.0)
    assert len(merge.merged) == 8
    assert ("left out 21 tensors" in "".join(merge.warnings)) == file.startswith("full")
    with np.load(folder / "reference.npz") as reference:
        logits = logits_of(tmp_path / "merged", reference["input_ids"])
        assert np.abs(logits - reference["logits"]).max() < 1e-5 * np.abs(reference["logits"]).max()


def test_the_whole_file_gives_the_result_of_to_hf(genuine: tuple[Path, Path], tmp_path: Path) -> None:
    folder, base = genuine
    (tmp_path / "lora.json").write_text('{"lora_alpha": 8}')
    to_hf(folder / "full_with_lora.ckpt", tmp_path / "hf", config=[folder / "run.yaml", tmp_path / "lora.json"])
    merge_lora(base, [folder / "full_with_lora.ckpt"], tmp_path / "merged", alpha=8.0)
    assert (tmp_path / "hf/model.safetensors").read_bytes() == (tmp_path / "merged/model.safetensors").read_bytes()


def test_without_alpha_the_way_out_is_named(genuine: tuple[Path, Path], tmp_path: Path) -> None:
    folder, base = genuine
    with pytest.raises(InputRefused, match="8 LoRA pairs of rank `4`") as refused:
        merge_lora(base, [folder / "trainable_params.ckpt"], tmp_path / "merged")
    assert "--alpha" in refused.value.hint
    assert not (tmp_path / "merged").exists()


def test_the_yaml_of_the_run_declares_alpha(genuine: tuple[Path, Path], tmp_path: Path) -> None:
    folder, base = genuine
    run = yaml.safe_load((folder / "run.yaml").read_text())
    run["model"]["model_config"]["pet_config"] = {"pet_type": "lora", "lora_rank": 4, "lora_alpha": 8}
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "run.yaml").write_text(yaml.dump(run))
    shutil.copy(folder / "trainable_params.ckpt", tmp_path / "lora")
    merge_lora(base, [tmp_path / "lora"], tmp_path / "one")
    merge_lora(base, [folder / "trainable_params.ckpt"], tmp_path / "two", alpha=8.0)
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()
    with pytest.raises(UsageProblem, match="contradicts"):
        merge_lora(base, [tmp_path / "lora"], tmp_path / "three", alpha=4.0)


def test_a_file_whose_own_weights_are_not_the_bases_is_refused(genuine: tuple[Path, Path], tmp_path: Path) -> None:
    folder, base = genuine
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"][3] += 0.5
    save_file(tensors, base / "model.safetensors")
    with pytest.raises(InputRefused, match=r"`model\.norm_out\.weight` differs from the base's") as refused:
        merge_lora(base, [folder / "full_with_lora.ckpt"], tmp_path / "merged", alpha=8.0)
    assert "llmconv to-hf" in refused.value.hint


def test_a_checkpoint_without_pairs_is_refused(genuine: tuple[Path, Path], tmp_path: Path) -> None:
    folder, base = genuine
    with pytest.raises(InputRefused, match="no LoRA pair"):
        merge_lora(base, [folder / "base.ckpt"], tmp_path / "merged", alpha=8.0)


def pairs_of(weights: Mapping[str, Any], modules: tuple[str, ...], prefix: str = "mindpet_delta_lora") -> Weights:
    """Random factors of rank 3 for the modules of all layers, in MindFormers' names."""
    random, pairs = np.random.default_rng(2), Weights()
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module.endswith(modules):
            rows, columns = weight.shape[::-1] if name.endswith(IN_OUT) else weight.shape
            pairs[f"{module}.{prefix}_a"] = random.standard_normal((3, columns)).astype("f4") / 8
            pairs[f"{module}.{prefix}_b"] = random.standard_normal((rows, 3)).astype("f4") / 8
    return pairs


def added(weights: Mapping[str, Any], pairs: Weights, scale: float) -> Weights:
    """The weights with the product of each pair added."""
    result = dict(weights)
    for name in [name for name in pairs if name.endswith("_a")]:
        module = name.rpartition(".")[0]
        change = scale * pairs[name[:-1] + "b"].astype("f8") @ pairs[name].astype("f8")
        weight = f"{module}.weight"
        result[weight] = (result[weight] + (change.T if weight.endswith(IN_OUT) else change)).astype("f4")
    return result


@pytest.mark.parametrize("case", FAMILIES)
def test_in_every_family_it_is_as_if_the_pairs_were_added_first(
    mindformers: Path, tmp_path: Path, save_ckpt: Save, case: str
) -> None:
    modules, fields = FAMILIES[case]
    folder = mindformers / case.partition(",")[0]
    weights = {name: tensor.read().astype("f4") for name, tensor in read_ckpt(folder / "model.ckpt").tensors.items()}
    pairs = pairs_of(weights, modules)
    assert all(any(f"{module}." in name for name in pairs) for module in modules)
    run = yaml.safe_load((folder / "run.yaml").read_text())
    run["model"]["model_config"] |= fields
    assert_as_if_added_first(tmp_path, save_ckpt, weights, pairs, run)


def assert_as_if_added_first(folder: Path, save: Save, weights: Weights, pairs: Weights, run: dict[str, Any]) -> None:
    """Merging into the converted weights gives what converting the weights with the products added gives."""
    (folder / "lora").mkdir()
    (folder / "lora" / "run.yaml").write_text(yaml.dump(run))
    for name, tensors in (("base", weights), ("added", added(weights, pairs, 2.0))):
        to_hf(save(folder / f"{name}.ckpt", tensors), folder / name, config=[folder / "lora" / "run.yaml"])
    merge_lora(folder / "base", [save(folder / "lora" / "x.ckpt", pairs)], folder / "merged", alpha=6.0)
    mine, theirs = (load_file(folder / name / "model.safetensors") for name in ("merged", "added"))
    assert mine.keys() == theirs.keys()
    assert max(np.abs(mine[name] - theirs[name]).max() for name in mine) < 1e-6


def test_gate_and_up_apart_are_joined_as_in_glm(mindformers: Path, tmp_path: Path, save_ckpt: Save) -> None:
    folder, weights = mindformers / "mf132_glm2", Weights()
    for name, tensor in read_ckpt(folder / "model.ckpt").tensors.items():
        sides = np.split(tensor.read(), 2) if name.endswith("dense_h_to_4h.weight") else []
        weights |= {name.replace("h_to_4h", side): one for side, one in zip(("left", "right"), sides, strict=False)}
        weights |= {} if sides else {name: tensor.read()}
    pairs = pairs_of(weights, ("mlp.dense_right",))
    assert_as_if_added_first(tmp_path, save_ckpt, weights, pairs, yaml.safe_load((folder / "run.yaml").read_text()))


def test_megatrons_names_are_fused_by_group(tmp_path: Path, save_ckpt: Save) -> None:
    from_hf(save_tiny(tmp_path / "hf", "qwen3"), tmp_path / "stored", to="mindformers")
    (run,) = [file for file in (tmp_path / "stored").iterdir() if file.suffix in (".yaml", ".yml")]
    weights = {name: tensor.read() for name, tensor in open_parameters(tmp_path / "stored").tensors.items()}
    pairs = pairs_of(weights, ("linear_qkv", "linear_fc1", "linear_proj"))
    assert len(pairs) == 2 * 3 * 2
    to_hf(save_ckpt(tmp_path / "added.ckpt", added(weights, pairs, 2.0)), tmp_path / "added", config=[run])
    merge_lora(tmp_path / "hf", [save_ckpt(tmp_path / "x.ckpt", pairs)], tmp_path / "merged", alpha=6.0)
    mine, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "added"))
    assert max(np.abs(mine[name] - theirs[name]).max() for name in mine) < 1e-5


@pytest.mark.parametrize("prefix", ["tk_delta_lora", "lora", "MindPet_Delta_LoRA"])
def test_the_older_names_of_the_factors_mean_the_same(
    genuine: tuple[Path, Path], tmp_path: Path, save_ckpt: Save, prefix: str
) -> None:
    folder, base = genuine
    tensors = read_ckpt(folder / "trainable_params.ckpt").tensors
    other = {name.replace("mindpet_delta_lora", prefix): tensor.read() for name, tensor in tensors.items()}
    merge_lora(base, [save_ckpt(tmp_path / "x.ckpt", other)], tmp_path / "one", alpha=8.0)
    merge_lora(base, [folder / "trainable_params.ckpt"], tmp_path / "two", alpha=8.0)
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()


def test_safetensors_of_mindspore_hold_pairs_too(genuine: tuple[Path, Path], tmp_path: Path) -> None:
    folder, base = genuine
    tensors = {name: tensor.read() for name, tensor in read_ckpt(folder / "trainable_params.ckpt").tensors.items()}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "ms"})
    assert len(merge_lora(base, [tmp_path / "x.safetensors"], tmp_path / "merged", alpha=8.0).merged) == 8


def test_a_fused_matrix_needs_the_order_of_its_rows(mindformers: Path, tmp_path: Path, save_ckpt: Save) -> None:
    folder = mindformers / "mf132_llama_qkv_concat"
    to_hf(folder / "model.ckpt", tmp_path / "base", config=[folder / "run.yaml"], qkv_layout="plain")
    weights = {name: tensor.read() for name, tensor in read_ckpt(folder / "model.ckpt").tensors.items()}
    pairs = save_ckpt(tmp_path / "x.ckpt", pairs_of(weights, ("attention.w_qkv",)))
    with pytest.raises(InputRefused, match="does not contain the order") as refused:
        merge_lora(tmp_path / "base", [pairs], tmp_path / "merged", alpha=8.0)
    assert "qkv_layout: plain" in refused.value.hint


def test_tensors_trained_next_to_the_pairs_replace_the_bases(
    genuine: tuple[Path, Path], tmp_path: Path, save_ckpt: Save
) -> None:
    folder, base = genuine
    tensors = {name: tensor.read() for name, tensor in read_ckpt(folder / "trainable_params.ckpt").tensors.items()}
    norm = np.full(32, 1.5, "f4")
    pairs = save_ckpt(tmp_path / "x.ckpt", {**tensors, "model.layers.1.ffn_norm.weight": norm})
    merge = merge_lora(base, [pairs], tmp_path / "merged", alpha=8.0)
    name = "model.layers.1.post_attention_layernorm.weight"
    assert merge.replaced == (name,)
    assert np.array_equal(load_file(tmp_path / "merged/model.safetensors")[name], norm)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name: name.replace("attention.wq", "attention.query"), r"attention\.query` \(close: `.*attention\.w"),
        (lambda name: name.replace("attention.wq.mindpet_delta_lora_a", "attention.wq.x"), r"lacks A of .*\.wq"),
        (lambda name: name.replace("layers.1.", "layers.7."), r"layers\.7\."),
    ],
)
def test_names_without_a_place_are_listed_with_the_closest(
    genuine: tuple[Path, Path], tmp_path: Path, save_ckpt: Save, change: Callable[[str], str], message: str
) -> None:
    folder, base = genuine
    tensors = read_ckpt(folder / "trainable_params.ckpt").tensors
    pairs = save_ckpt(tmp_path / "x.ckpt", {change(name): tensor.read() for name, tensor in tensors.items()})
    with pytest.raises(MalformedInput, match=message):
        merge_lora(base, [pairs], tmp_path / "merged", alpha=8.0)
    assert not (tmp_path / "merged").exists()


def test_pairs_of_another_family_are_refused(mindformers: Path, tmp_path: Path) -> None:
    folder = mindformers / "mf132_bloom"
    to_hf(folder / "model.ckpt", tmp_path / "base", config=[folder / "run.yaml"])
    with pytest.raises(MalformedInput, match="does not have|of shape"):
        pairs = mindformers / "mf132_llama_lora" / "trainable_params.ckpt"
        merge_lora(tmp_path / "base", [pairs], tmp_path / "merged", alpha=8.0)


def test_a_base_without_sizes_is_refused(genuine: tuple[Path, Path], tmp_path: Path) -> None:
    folder, base = genuine
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"num_attention_heads": 0}))
    with pytest.raises(InputRefused, match="sizes of its heads"):
        merge_lora(base, [folder / "trainable_params.ckpt"], tmp_path / "merged", alpha=8.0)
