"""LoRA runs of Composer: merged or kept apart, they give the logits of the trained model; nothing is lost silently."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file

from llmconv.cli import main
from llmconv.convert import inspect, merge_lora, to_hf
from llmconv.convert.opening import open_training
from llmconv.errors import MalformedInput
from tests.builders.peft_models import (
    adapter_config,
    adapter_only,
    loaded_with_peft,
    logits,
    save_run,
    save_state,
    trained,
)
from tools.tiny_models import tiny_config

FILE = "ep0-ba2-rank0.pt"
WHOLE, ALONE, BASE = "llama_peft_full", "llama_peft_adapter_only", "llama_peft_base"


def options_of(composer: Path, case: str) -> dict[str, Any]:
    return {"base": composer / BASE} if case == ALONE else {}


def error_of(composer: Path, case: str, found: Callable[[Any, Any], Any]) -> float:
    """Largest difference between `found(ids, mask)` and the logits of the trained model, padding left out."""
    with np.load(composer / case / "reference.npz") as reference:
        ids, mask = reference["input_ids"], reference["attention_mask"]
        return float(np.abs((found(ids, mask) - reference["logits"]) * mask[..., None]).max())


# Genuine runs


@pytest.mark.parametrize("case", [WHOLE, ALONE])
def test_the_merged_model_gives_the_logits_of_the_trained_one(
    composer: Path, tmp_path: Path, logits_of: Callable[..., Any], case: str
) -> None:
    to_hf(composer / case / FILE, tmp_path / "hf", **options_of(composer, case))
    assert error_of(composer, case, lambda ids, mask: logits_of(tmp_path / "hf", ids, mask)) < 1e-5


@pytest.mark.quick_rows("llama_peft_adapter_only")
@pytest.mark.parametrize("case", [WHOLE, ALONE])
def test_model_and_adapter_apart_give_the_logits_of_the_trained_model(
    composer: Path, tmp_path: Path, case: str
) -> None:
    to_hf(composer / case / FILE, tmp_path / "hf", adapter="split", **options_of(composer, case))
    model = loaded_with_peft(tmp_path / "hf", tmp_path / "hf" / "adapter")

    def run(ids: Any, mask: Any) -> Any:
        with torch.no_grad():
            return model(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).logits.numpy()

    assert error_of(composer, case, run) < 1e-5


def test_the_adapter_alone_is_a_folder_that_peft_puts_on_the_base(composer: Path, tmp_path: Path) -> None:
    to_hf(composer / ALONE / FILE, tmp_path / "adapter", adapter="split")
    merge_lora(composer / BASE, [tmp_path / "adapter"], tmp_path / "merged")
    to_hf(composer / ALONE / FILE, tmp_path / "hf", base=composer / BASE)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "hf"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    loaded_with_peft(composer / BASE, tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "config.json").exists()


def test_the_tensors_of_the_adapter_have_the_bits_of_the_run(composer: Path, tmp_path: Path) -> None:
    to_hf(composer / WHOLE / FILE, tmp_path / "hf", adapter="split")
    state = torch.load(composer / WHOLE / FILE, weights_only=False)["state"]["model"]
    saved = load_file(tmp_path / "hf" / "adapter" / "adapter_model.safetensors")
    trained_names = {
        name.removeprefix("model.").replace(".default", ""): t for name, t in state.items() if "lora_" in name
    }
    assert saved.keys() == trained_names.keys()
    assert all(torch.equal(saved[name], trained_names[name]) for name in saved)


def test_the_manifest_names_the_files_of_the_sub_folder(composer: Path, tmp_path: Path) -> None:
    to_hf(composer / WHOLE / FILE, tmp_path / "hf", adapter="split")
    files = json.loads((tmp_path / "hf" / "llmconv.json").read_text())["files"]
    names = {str(path.relative_to(tmp_path / "hf")) for path in (tmp_path / "hf").rglob("*") if path.is_file()}
    assert set(files) == names - {"llmconv.json"}
    assert {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"} < set(files)


def test_the_handling_of_the_adapter_is_reported(composer: Path) -> None:
    merged = open_training(composer / WHOLE / FILE)
    assert any("the LoRA adapter is merged into 6 weights" in warning for warning in merged.warnings)
    split = open_training(composer / WHOLE / FILE, options={"adapter": "split"})
    assert any("in the sub-folder `adapter`" in warning for warning in split.warnings)


def test_the_command_takes_the_option_and_lists_the_files(composer: Path, tmp_path: Path) -> None:
    arguments = ["to-hf", str(composer / WHOLE / FILE), "-o", str(tmp_path / "hf"), "--adapter", "split", "--json"]
    result = json.loads(CliRunner().invoke(main, arguments).stdout)
    assert result["files"] == ["model.safetensors", "adapter/adapter_model.safetensors"]
    assert result["tensors"] == 33


def test_inspect_shows_the_tensors_of_an_adapter_alone(composer: Path) -> None:
    found = inspect(composer / ALONE / FILE)
    assert (found.format, len(found.tensors)) == ("composer", 12)
    assert any("without its base model" in warning for warning in found.warnings)


def test_the_settings_for_generation_come_from_the_base(composer: Path) -> None:
    base = str(composer / BASE)
    files = open_training(composer / ALONE / FILE, options={"base": base}).side_files
    assert files["generation_config.json"] == (composer / BASE / "generation_config.json").read_bytes()
    assert "tokenizer.json" in files


def test_an_adapter_folder_can_be_overwritten(composer: Path, tmp_path: Path) -> None:
    to_hf(composer / ALONE / FILE, tmp_path / "adapter", adapter="split")
    to_hf(composer / ALONE / FILE, tmp_path / "adapter", adapter="split", overwrite=True)
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


def test_an_interruption_while_the_adapter_is_moved_can_be_resumed(
    composer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(Exception, match="No space left"):
        patched.setattr("llmconv.output.local_folder.sync_folder", full)
        to_hf(composer / WHOLE / FILE, tmp_path / "hf", adapter="split")
    to_hf(composer / WHOLE / FILE, tmp_path / "hf", adapter="split", resume=True)
    assert len(load_file(tmp_path / "hf" / "adapter" / "adapter_model.safetensors")) == 12


@pytest.mark.slow
def test_a_dtype_rounds_the_merged_weights_once(composer: Path, tmp_path: Path) -> None:
    to_hf(composer / WHOLE / FILE, tmp_path / "hf", adapter="split")
    merge_lora(tmp_path / "hf", [tmp_path / "hf" / "adapter"], tmp_path / "merged", dtype="bfloat16")
    to_hf(composer / WHOLE / FILE, tmp_path / "half", dtype="bfloat16")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "half"))
    assert all(torch.equal(one[name], other[name]) for name in one)


# What PEFT can train, against PEFT

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {r"layers.2.*q_proj": 32}},
    "head saved whole": {"modules_to_save": ["lm_head"]},
    "embedding and head saved whole": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "norms saved whole": {"modules_to_save": ["input_layernorm"]},
}
BIASED: dict[str, dict[str, Any]] = {
    "all biases": {"bias": "all"},
    "biases of the adapted layers": {"bias": "lora_only"},
    "bias of the factors": {"lora_bias": True},
}
APART: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "trained tokens": {"trainable_token_indices": [3, 17]},
}


def assert_equal_models(model: Any, folder: Path) -> None:
    expected = logits(model)
    found = logits(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", (KINDS | APART).values(), ids=(KINDS | APART).keys())
def test_merging_gives_the_result_of_peft(
    tiny: Callable[[str], Path], tmp_path: Path, model_type: str, kind: dict[str, Any]
) -> None:
    model = trained(tiny(model_type), **kind)
    to_hf(save_run(tmp_path / "x.pt", model), tmp_path / "hf", adapter="merge")
    assert_equal_models(model, tmp_path / "hf")


BEFORE: dict[str, dict[str, Any]] = {
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "replicated layers": {"layer_replication": [[0, 3], [1, 4]]},
}
"""What changes the base before training: a run holds it as it was then."""


@pytest.mark.quick_rows("pissa-merge")
@pytest.mark.parametrize("adapter", ["merge", "split"])
@pytest.mark.parametrize("kind", BEFORE.values(), ids=BEFORE.keys())
def test_a_base_that_was_changed_before_training_is_not_changed_again(
    tiny: Callable[[str], Path], tmp_path: Path, kind: dict[str, Any], adapter: str
) -> None:
    model = trained(tiny("llama"), **kind)
    to_hf(save_run(tmp_path / "x.pt", model), tmp_path / "hf", adapter=adapter)
    if adapter == "merge":
        assert_equal_models(model, tmp_path / "hf")
    else:
        found = loaded_with_peft(tmp_path / "hf", tmp_path / "hf" / "adapter")
        assert (logits(found) - logits(model)).abs().max() < 1e-5 * logits(model).abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("kind", BIASED.values(), ids=BIASED.keys())
def test_merging_gives_the_result_of_peft_with_biases(
    tiny: Callable[[str], Path], tmp_path: Path, kind: dict[str, Any]
) -> None:
    model = trained(tiny("qwen2"), **kind)
    to_hf(save_run(tmp_path / "x.pt", model), tmp_path / "hf")
    assert_equal_models(model, tmp_path / "hf")


@pytest.mark.slow
@pytest.mark.parametrize("kind", (KINDS | BIASED | APART).values(), ids=(KINDS | BIASED | APART).keys())
def test_peft_loads_the_parts_and_computes_the_same(
    tiny: Callable[[str], Path], tmp_path: Path, kind: dict[str, Any]
) -> None:
    model = trained(tiny("qwen2"), **kind)
    to_hf(save_run(tmp_path / "x.pt", model), tmp_path / "hf", adapter="split")
    found = loaded_with_peft(tmp_path / "hf", tmp_path / "hf" / "adapter")
    assert (logits(found) - logits(model)).abs().max() < 1e-5 * logits(model).abs().max()


@pytest.mark.quick_rows("dora")
@pytest.mark.parametrize("kind", (BIASED | APART).values(), ids=(BIASED | APART).keys())
def test_the_parts_are_named_as_peft_names_them(
    tiny: Callable[[str], Path], tmp_path: Path, kind: dict[str, Any]
) -> None:
    model = trained(tiny("llama" if kind in APART.values() else "qwen2"), **kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path / "peft")
    to_hf(save_run(tmp_path / "x.pt", model), tmp_path / "hf", adapter="split")
    files = (tmp_path / "peft", tmp_path / "hf" / "adapter")
    saved, found = (load_file(folder / "adapter_model.safetensors") for folder in files)
    assert saved.keys() == found.keys()
    assert all(torch.equal(saved[name], found[name]) for name in saved)


def test_all_biases_of_an_adapter_alone_are_merged(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    model = trained(tiny("qwen2"), bias="all")
    to_hf(save_run(tmp_path / "x.pt", model, whole=False), tmp_path / "hf", base=tiny("qwen2"))
    assert_equal_models(model, tmp_path / "hf")


@pytest.mark.slow
def test_names_of_wrappers_are_removed(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    model = trained(tiny("llama"))
    state = {
        f"_orig_mod.{n.replace('layers.0.', 'layers.0._fsdp_wrapped_module.')}": t
        for n, t in model.state_dict().items()
    }
    path = save_state(tmp_path / "x.pt", state, model.config.to_diff_dict(), adapter_config(model))
    to_hf(path, tmp_path / "hf")
    assert_equal_models(model, tmp_path / "hf")


@pytest.mark.slow
def test_a_conv1d_model_is_merged_into_a_base_whose_names_lack_a_prefix(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    model = trained(tiny("gpt2"), target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    to_hf(save_run(tmp_path / "x.pt", model), tmp_path / "hf")
    assert_equal_models(model, tmp_path / "hf")


# Names


TARGETS = {"axk2": ["fc1", "q_gate_proj"], "hrm_text": ["q_proj", "down_proj"]}
"""Types whose modules transformers renames when it loads them, and joins or splits the rows of, and some of these."""


def run_of(kind: str, folder: Path) -> Any:
    """A trained PeftModel over a saved base."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(tiny_config(kind, 2), dtype=torch.float32).save_pretrained(folder)
    return trained(folder, target_modules=TARGETS[kind])


@pytest.mark.parametrize("kind", TARGETS)
def test_an_adapter_of_modules_that_the_files_call_otherwise_merges_as_peft_does(kind: str, tmp_path: Path) -> None:
    run = run_of(kind, tmp_path / "base")
    save_run(tmp_path / FILE, run, whole=False)
    to_hf(tmp_path / FILE, tmp_path / "hf", base=tmp_path / "base")
    run.double().merge_and_unload().save_pretrained(tmp_path / "exact")
    found, exact = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "exact"))
    assert found.keys() == exact.keys()
    assert all(torch.equal(found[name], exact[name].to(found[name].dtype)) for name in found)


@pytest.mark.quick_rows("hrm_text")
@pytest.mark.parametrize("kind", TARGETS)
def test_missing_factors_of_such_modules_are_named(kind: str, tmp_path: Path) -> None:
    run, target = run_of(kind, tmp_path / "base"), TARGETS[kind][-1]
    state = adapter_only(run.state_dict())
    lost = next(name for name in state if target in name).partition(".lora_")[0]
    rest = {name: value for name, value in state.items() if not name.startswith(lost)}
    save_state(tmp_path / FILE, rest, run.get_base_model().config.to_diff_dict(), adapter_config(run))
    with pytest.raises(MalformedInput, match=f"lacks the factors of `{lost.removeprefix('base_model.model.')}.weight`"):
        to_hf(tmp_path / FILE, tmp_path / "hf", base=tmp_path / "base")
