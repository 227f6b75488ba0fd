"""LoRA runs of Composer that are incomplete, odd or of another model: refused in one line, nothing half written."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmconv.convert import to_hf
from llmconv.convert.opening import open_training
from llmconv.errors import MalformedInput, UnsupportedInput, UsageProblem
from tests.builders.peft_models import (
    adapter_config,
    adapter_only,
    save_run,
    save_state,
    trained,
)

FILE = "ep0-ba2-rank0.pt"
WHOLE, ALONE, BASE = "llama_peft_full", "llama_peft_adapter_only", "llama_peft_base"


@pytest.fixture
def run(tiny: Callable[[str], Path]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """State dict, model configuration and adapter configuration of a plain run."""
    model = trained(tiny("llama"))
    return dict(model.state_dict()), model.config.to_diff_dict(), adapter_config(model)


Run = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def test_an_adapter_alone_without_its_base_is_refused_and_both_ways_out_are_named(composer: Path) -> None:
    with pytest.raises(UnsupportedInput, match="without its base model") as refusal:
        open_training(composer / ALONE / FILE)
    assert "--base" in refusal.value.hint and "--adapter split" in refusal.value.hint


LOST: dict[str, tuple[dict[str, Any], str]] = {
    "modules": ({"modules_to_save": ["lm_head"]}, "`modules_to_save` (lm_head)"),
    "tokens": ({"trainable_token_indices": [1]}, "`trainable_token_indices`"),
}


@pytest.mark.parametrize("way", [{"adapter": "split"}, {"base": True}])
@pytest.mark.parametrize(("kind", "what"), LOST.values(), ids=LOST.keys())
def test_tensors_that_composer_left_out_of_an_adapter_are_named(
    tiny: Callable[[str], Path], tmp_path: Path, way: dict[str, Any], kind: dict[str, Any], what: str
) -> None:
    path = save_run(tmp_path / "x.pt", trained(tiny("llama"), **kind), whole=False)
    options = {"base": tiny("llama")} if "base" in way else way
    with pytest.raises(UnsupportedInput, match=re.escape(what)) as refusal:
        to_hf(path, tmp_path / "hf", **options)
    assert "should_save_peft_only=False" in refusal.value.hint


def test_biases_that_composer_left_out_are_a_warning(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    path = save_run(tmp_path / "x.pt", trained(tiny("qwen2"), bias="lora_only"), whole=False)
    for options in ({"adapter": "split"}, {"base": str(tiny("qwen2"))}):
        assert any("holds no bias" in warning for warning in open_training(path, options=options).warnings)


def test_a_kind_that_is_not_merged_can_be_kept_apart(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    path = save_run(tmp_path / "x.pt", trained(tiny("llama"), alora_invocation_tokens=[1], task_type="CAUSAL_LM"))
    with pytest.raises(UnsupportedInput, match="`alora_invocation_tokens`") as refusal:
        open_training(path)
    assert "--adapter split" in refusal.value.hint


ODD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "left over": ({"score.weight": torch.ones(2)}, {}, "1 tensors are not of its PeftModel: `score.weight`"),
    "half a pair": ({"base_model.model.x.lora_A.default.weight": torch.ones(4, 4)}, {}, "lacks a factor of `x`"),
    "another method": ({}, {"peft_type": "IA3"}, "`peft_type` 'IA3'"),
    "twice": ({"base_model.model.lm_head.base_layer.weight": torch.ones(2)}, {}, "duplicate key `lm_head.weight`"),
    "rank": ({}, {"r": 8}, "rank 8, its tensors have rank 4"),
    "alpha": ({}, {"lora_alpha": 0}, "0 for `lora_alpha`"),
    "alpha that is a text": ({}, {"lora_alpha": "8"}, "'8' for `lora_alpha`"),
    "saved modules that are a number": (
        {},
        {"modules_to_save": 3},
        "`modules_to_save` in the adapter config is invalid: 3",
    ),
    "bias that is a list": ({}, {"bias": ["all"]}, "`bias` in the adapter config is invalid: ['all']"),
}


@pytest.mark.parametrize(("more", "fields", "reason"), ODD.values(), ids=ODD.keys())
def test_a_run_that_is_inconsistent_is_refused(
    run: Run, tmp_path: Path, more: dict[str, Any], fields: dict[str, Any], reason: str
) -> None:
    state, config, peft_config = run
    path = save_state(tmp_path / "x.pt", state | more, config, peft_config | fields)
    with pytest.raises((MalformedInput, UnsupportedInput), match=re.escape(reason)):
        open_training(path)


MISSHAPED = {
    "ranks that differ": (
        "lora_B",
        torch.ones(64, 5),
        "A of `model.layers.0.self_attn.q_proj` has rank 4, B has rank 5",
    ),
    "of another model": ("lora_B", torch.ones(63, 4), "got [64, 64] in the base"),
    "not gathered": ("lora_A", torch.ones(0), "saved before they were gathered"),
    "not finite": ("lora_A", torch.full((4, 64), torch.nan), "values that are not finite"),
}


@pytest.mark.parametrize("option", ["merge", "split"])
@pytest.mark.parametrize(("factor", "tensor", "reason"), MISSHAPED.values(), ids=MISSHAPED.keys())
def test_a_factor_that_does_not_fit_is_refused_merged_or_apart(
    run: Run, tmp_path: Path, option: str, factor: str, tensor: torch.Tensor, reason: str
) -> None:
    name = f"base_model.model.model.layers.0.self_attn.q_proj.{factor}.default.weight"
    path = save_state(tmp_path / "x.pt", run[0] | {name: tensor}, run[1], run[2])
    with pytest.raises(MalformedInput, match=re.escape(reason)):
        open_training(path, options={"adapter": option})


@pytest.mark.parametrize("option", ["merge", "split"])
def test_a_module_whose_factors_are_missing_is_refused(run: Run, tmp_path: Path, option: str) -> None:
    state = {name: tensor for name, tensor in run[0].items() if ".layers.2.self_attn.q_proj.lora_" not in name}
    with pytest.raises(MalformedInput, match=r"lacks the factors of `model\.layers\.2\.self_attn\.q_proj\.weight`"):
        open_training(save_state(tmp_path / "x.pt", state, run[1], run[2]), options={"adapter": option})


def test_several_adapters_are_refused(run: Run, tmp_path: Path) -> None:
    state, config, peft_config = run
    second = {name.replace(".default.", ".second."): tensor for name, tensor in state.items() if "lora_" in name}
    with pytest.raises(UnsupportedInput, match="several adapters: `default`, `second`"):
        open_training(save_state(tmp_path / "x.pt", state | second, config, peft_config))


def test_lora_tensors_without_their_config_are_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(MalformedInput, match="their scale is unknown"):
        open_training(save_state(tmp_path / "x.pt", run[0], run[1]))


def test_a_config_without_lora_tensors_is_refused(run: Run, tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in run[0].items() if "lora_" not in name}
    with pytest.raises(MalformedInput, match="holds no LoRA tensors"):
        open_training(save_state(tmp_path / "x.pt", state, run[1], run[2]))


def test_a_base_that_lacks_a_layer_is_refused(run: Run, tmp_path: Path) -> None:
    state, config, peft_config = run
    partial = {name: tensor for name, tensor in state.items() if ".layers.3." not in name}
    for option in ("merge", "split"):
        with pytest.raises(MalformedInput, match="has 3 layers, its configuration says 4"):
            path = save_state(tmp_path / "x.pt", partial, config, peft_config)
            open_training(path, options={"adapter": option})


def test_an_adapter_of_another_base_is_refused(tiny: Callable[[str], Path], run: Run, tmp_path: Path) -> None:
    state, config, peft_config = run
    names = {name.replace("q_proj", "x_proj"): tensor for name, tensor in adapter_only(state).items()}
    path = save_state(tmp_path / "x.pt", names, config, peft_config)
    for option in ("merge", "split"):
        with pytest.raises(MalformedInput, match="adapts 4 tensors that the base does not have"):
            open_training(path, options={"adapter": option, "base": str(tiny("llama"))})


def test_a_base_of_another_model_type_is_refused(tiny: Callable[[str], Path], composer: Path) -> None:
    with pytest.raises(MalformedInput, match="the run is of a `llama`, the base folder of a `qwen2`"):
        open_training(composer / ALONE / FILE, options={"base": str(tiny("qwen2"))})


def test_a_base_without_a_model_type_is_refused(tiny: Callable[[str], Path], composer: Path, tmp_path: Path) -> None:
    base = shutil.copytree(tiny("llama"), tmp_path / "base")
    (base / "config.json").write_text("{}")
    with pytest.raises(MalformedInput, match="is not a usable Hugging Face model folder"):
        open_training(composer / ALONE / FILE, options={"base": str(base)})


def test_a_base_with_another_vocabulary_is_refused(tiny: Callable[[str], Path], composer: Path) -> None:
    with pytest.raises(MalformedInput, match="layers, its configuration says 2"):
        open_training(composer / ALONE / FILE, options={"base": str(tiny("llama"))})


def test_a_configuration_that_differs_from_the_base_is_a_warning(
    tiny: Callable[[str], Path], run: Run, tmp_path: Path
) -> None:
    state, config, peft_config = run
    path = save_state(tmp_path / "x.pt", adapter_only(state), config | {"rms_norm_eps": 0.5}, peft_config)
    checkpoint = open_training(path, options={"base": str(tiny("llama"))})
    assert checkpoint.config["rms_norm_eps"] == 0.5
    assert any("differs from the base's in `rms_norm_eps`" in warning for warning in checkpoint.warnings)


def test_a_base_that_is_not_needed_is_a_usage_problem(composer: Path) -> None:
    with pytest.raises(UsageProblem, match="holds the base's weights too"):
        open_training(composer / WHOLE / FILE, options={"base": str(composer / BASE)})


@pytest.mark.parametrize("option", [{"adapter": "split"}, {"base": "x"}])
def test_the_options_mean_nothing_for_a_run_without_adapter(composer: Path, option: dict[str, str]) -> None:
    with pytest.raises(UsageProblem, match="contains no adapter"):
        open_training(composer / "weights_only" / FILE, options=option)


def test_a_truncated_adapter_is_refused_and_leaves_nothing(composer: Path, tmp_path: Path) -> None:
    data = (composer / ALONE / FILE).read_bytes()
    (tmp_path / "x.pt").write_bytes(data[: len(data) // 2])
    with pytest.raises(MalformedInput, match="truncated or damaged"):
        to_hf(tmp_path / "x.pt", tmp_path / "hf", adapter="split")
    assert not (tmp_path / "hf").exists()
