"""LoRA runs whose checkpoint holds the whole PeftModel next to its config, against PEFT's merge in float64."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from llmconv.checkpoint import open_checkpoint
from llmconv.convert import merge_lora, to_hf
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, MalformedInput
from tests.builders.dcp_folders import save as save_dcp
from tests.builders.lora_models import State, assert_equal, causal_lm, shake, train
from tests.builders.zero_saves import save_zero_2

CONFIG = "adapter_config.json"
FIELDS: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def zero(state: State, folder: Path) -> Path:
    save_zero_2(folder, [state], 2)
    return folder


def torch_file(state: State, folder: Path) -> Path:
    torch.save(state, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def safetensors_file(state: State, folder: Path) -> Path:
    save_file(state, folder / "model.safetensors")
    return folder / "model.safetensors"


def fsdp(state: State, folder: Path) -> Path:
    return save_dcp(folder / "pytorch_model_fsdp_0", {"model": state})


def under_a_key(state: State, folder: Path) -> Path:
    torch.save({"model_state_dict": state, "epoch": 3}, folder / "checkpoint.pt")
    return folder / "checkpoint.pt"


def compiled_in_lightning(state: State, folder: Path) -> Path:
    named = {f"net._orig_mod.{name}": tensor for name, tensor in state.items()}
    torch.save({"pytorch-lightning_version": "2.6.6", "state_dict": named}, folder / "last.ckpt")
    return folder / "last.ckpt"


SAVES: dict[str, Callable[[State, Path], Path]] = {
    "zero_to_fp32": torch_file,
    "torch.save": under_a_key,
    "safetensors": safetensors_file,
    "fsdp": fsdp,
    "deepspeed": zero,
    "lightning": compiled_in_lightning,
}


@pytest.fixture(params=SAVES)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint of a run next to `base` and `exact`; also the norms were trained."""
    model = causal_lm("llama", **FIELDS)
    model.save_pretrained(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["norm"])
        peft_model = get_peft_model(model, config)
    shake(peft_model)
    folder = tmp_path / "run/checkpoint-20"
    folder.mkdir(parents=True)
    saved = SAVES[request.param]({name: value.clone() for name, value in peft_model.state_dict().items()}, folder)
    peft_model.peft_config["default"].save_pretrained(folder)
    peft_model.double().merge_and_unload().save_pretrained(tmp_path / "exact")
    return saved


def test_the_adapter_is_merged_into_the_base_that_is_saved_with_it(run: Path, tmp_path: Path) -> None:
    to_hf(run, tmp_path / "out", config=[tmp_path / "base/config.json"])
    assert_equal(tmp_path / "out", load_file(tmp_path / "exact/model.safetensors"))


def test_a_merge_with_another_scale_is_not_resumed(run: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"config": [tmp_path / "base/config.json"], "resume": True}
    to_hf(run, tmp_path / "out", **given)
    to_hf(run, tmp_path / "out", **given)
    settings = next(one for one in (run / CONFIG, run.parent / CONFIG, run.parent.parent / CONFIG) if one.is_file())
    settings.write_text(settings.read_text().replace('"lora_alpha": ', '"lora_alpha": 1'))
    with pytest.raises(InputRefused, match="would differ"):
        to_hf(run, tmp_path / "out", **given)


def test_the_run_is_no_second_model_next_to_itself(run: Path, tmp_path: Path) -> None:
    found = open_training(run, config=(tmp_path / "base/config.json",))
    assert [line for line in found.warnings if "the model again" in line] == []


def test_the_adapter_can_be_kept_apart(run: Path, tmp_path: Path) -> None:
    to_hf(run, tmp_path / "out", config=[tmp_path / "base/config.json"], adapter="split")
    merge_lora(tmp_path / "out", [tmp_path / "out/adapter"], tmp_path / "merged")
    assert_equal(tmp_path / "merged", load_file(tmp_path / "exact/model.safetensors"))
    stored, base = open_checkpoint(tmp_path / "out"), open_checkpoint(tmp_path / "base")
    assert [name for name in base if (stored[name].read() != base[name].read()).any()] == []


def test_as_an_adapter_it_is_refused_with_the_command_that_merges_it(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputRefused) as caught:
        merge_lora(tmp_path / "base", [run], tmp_path / "out")
    assert f"llmconv to-hf {run} --config {tmp_path / 'base/config.json'}" in caught.value.hint


@pytest.mark.parametrize("kind", ["fsdp", "lightning"])
def test_a_run_without_its_base_keeps_its_own_positions(kind: str, tmp_path: Path) -> None:
    case = train(causal_lm("llama", **FIELDS), tmp_path, merge=False, target_modules=["q_proj", "v_proj"])
    folder = case.adapter.rename(tmp_path / "run")
    factors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    config = json.loads((tmp_path / "base/config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    path = SAVES[kind]({name.replace(".weight", ".default.weight"): one for name, one in factors.items()}, folder)
    found = open_training(path, options={"base": tmp_path / "base"})
    assert found.config["rope_parameters"] == rope
    assert any("differs from the base's in `rope_parameters`" in line for line in found.warnings)
    given = tmp_path / "given.json"
    given.write_text('{"rope_theta": 7e5}')
    found = open_training(path, config=(given,), options={"base": tmp_path / "base"})
    assert found.config["rope_parameters"] == {**rope, "rope_theta": 7e5}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mistral"}))
    with pytest.raises(MalformedInput, match="the run is of a `mistral`, the base folder of a `llama`"):
        open_training(path, options={"base": tmp_path / "base"})
