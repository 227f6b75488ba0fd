"""An adapter of all linear layers and experts of every model type, trained by PEFT, against PEFT's merge in float64.

transformers stores many models under other names than they have in memory, joins experts, splits and permutes rows; the
adapter always has the names of the model in memory.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from llmconv.convert import merge_lora
from llmconv.convert.adapters.edits import SHARING
from llmconv.errors import UnsupportedInput
from tests.builders.lora_models import State, shake
from tests.builders.slow_rows import slow_but
from tests.builders.tiny_configs import CONFIGS
from tools.tiny_models import tiny_config

QUICK = ("mllama", "hrm_text", "axk2", "molmo2", "ernie4_5_vl_moe", "inkling2", "step3p7", "aria_text")
"""One for each way to the files: two towers; rows joined; modules renamed; rows split by size; two kinds of experts;
rows interleaved; stacks joined; experts stored in×out."""

TYPES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})
MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Types with layers whose output PEFT does not adapt, since their code reads that weight itself."""

LIMIT = 130_000_000
"""Most parameters of a model that is built; some have sizes that no field of their configuration makes small."""


UNREACHED: dict[str, str] = {
    **dict.fromkeys(("fast_vlm", "gemma3n", "perception_lm"), "its vision tower needs timm"),
    **dict.fromkeys(("inkling_mm_model",), "it needs scipy"),
    **dict.fromkeys(("chameleon", "emu3"), "it needs the table of its image tokens"),
    **dict.fromkeys(("evolla", "musicgen", "musicgen_melody"), "no auto class makes it from its configuration"),
    **dict.fromkeys(("shieldgemma2",), "transformers 5.23 does not load what it saves of it"),
    **dict.fromkeys(("pp_formulanet",), "it has no input embedding, which PEFT asks for"),
    **dict.fromkeys(("qwen3_omni_moe_thinker",), "PEFT takes layers for linear ones"),
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "transformers cannot build it: it lacks layers that make a cache",
    ),
    **dict.fromkeys(("zamba", "zamba2", "diffusion_gemma", "blip"), "modules share weights: see the tests below"),
}
"""Types that are not tried, and why."""

SHARED = {
    "zamba": r".*shared_transf.*|.*out_proj|.*conv1d",
    "zamba2": r".*shared_transformer.*",
    "diffusion_gemma": r".*(language_model|decoder)\.layers.*",
    "blip": r".*predictions\.decoder",
}
"""Types of which modules share weights, and these modules."""


def config_of(kind: str) -> Any:
    return AutoConfig.for_model(kind, **CONFIGS[kind]) if kind in CONFIGS else tiny_config(kind, 2)


def maker_of(kind: str) -> Any:
    return AutoModelForImageTextToText if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES else AutoModelForCausalLM


def tiny_model(kind: str) -> Any:
    config, maker = config_of(kind), maker_of(kind)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in maker.from_config(config).parameters())
    if count > LIMIT:
        pytest.skip(f"{count:,} parameters")
    torch.manual_seed(0)
    model = maker.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def adapt(model: Any, folder: Path, without: Any = None) -> State:
    """Saves a base, an adapter of all that PEFT adapts in it, and what it is when PEFT merges the two in float64.

    PEFT merges the model that was trained: it cannot load all adapters of renamed modules again.
    """
    wide = (name for name, value in model.named_parameters() if value.dim() == 3 and "expert" in name)
    experts = sorted({".".join(name.split(".")[-2:]) for name in wide})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder / "base")
        experts = [] if without else experts
        without = without or (["out_proj", "conv1d"] if model.config.model_type in MAMBA else None)
        fields = {"target_modules": "all-linear", "target_parameters": experts or None, "exclude_modules": without}
        peft_model = get_peft_model(model, LoraConfig(r=3, init_lora_weights=False, **fields))
        shake(peft_model)
        peft_model.save_pretrained(folder / "adapter")
        peft_model.double().merge_and_unload().save_pretrained(folder / "exact")
    return load_file(folder / "exact/model.safetensors")


@pytest.mark.one_row_in(6)
@pytest.mark.quick_rows("step3p7")
@pytest.mark.parametrize("kind", slow_but(TYPES, *QUICK))
def test_an_adapter_of_everything_merges_as_peft_does(kind: str, tmp_path: Path) -> None:
    if kind in UNREACHED:
        pytest.skip(UNREACHED[kind])
    check_merge(adapt(tiny_model(kind), tmp_path), tmp_path)


def check_merge(exact: State, tmp_path: Path) -> None:
    merge = merge_lora(tmp_path / "base", [tmp_path / "adapter"], tmp_path / "out", check=True)
    assert merge.check and not merge.check.differing
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == exact.keys()
    assert [name for name, value in found.items() if not is_nearest(value, exact[name])] == []


def is_nearest(value: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether all elements are nearest to the exact ones; sums in float64 in another order differ where two are."""
    if value.dtype != torch.float32:
        return torch.equal(value, exact.to(value.dtype))
    away = (value.double() - exact.double()).abs()
    return value.shape == exact.shape and bool((away <= exact.double().abs() * 2**-24 * (1 + 1e-6) + 1e-45).all())


@pytest.mark.parametrize("kind", slow_but(SHARED, "zamba2"))
def test_adapters_of_weights_that_modules_share_are_refused_and_of_the_others_merge_as_peft_does(
    kind: str, tmp_path: Path
) -> None:
    adapt(tiny_model(kind), tmp_path / "all")
    with pytest.raises(UnsupportedInput, match="weights that several modules share: `.*` is also `.*`"):
        merge_lora(tmp_path / "all/base", [tmp_path / "all/adapter"], tmp_path / "out")
    check_merge(adapt(tiny_model(kind), tmp_path, SHARED[kind]), tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_one_name_of_a_shared_weight_is_refused_where_merges_of_peft_are_another_model(tmp_path: Path) -> None:
    """All names that the adapter has are in the files."""
    model, tokens = tiny_model("zamba2").eval(), torch.arange(5, 17)[None]
    model.save_pretrained(tmp_path / "base")
    fields = {"target_modules": r"model\.layers\.1\.shared_transformer\.self_attn\.q_proj"}
    peft_model = get_peft_model(model, LoraConfig(r=3, init_lora_weights=False, **fields)).eval()
    peft_model.save_pretrained(tmp_path / "adapter")
    trained = peft_model(input_ids=tokens).logits
    assert not torch.allclose(peft_model.merge_and_unload()(input_ids=tokens).logits, trained, atol=1e-3)
    with pytest.raises(UnsupportedInput, match=r"layers\.1.*q_proj.* is also .*layers\.5"):
        merge_lora(tmp_path / "base", [tmp_path / "adapter"], tmp_path / "out")


@pytest.mark.slow
def test_the_types_whose_layers_share_weights_are_those_of_transformers() -> None:
    assert {kind for kind in TYPES if kind not in UNREACHED.keys() - SHARED.keys() and shares_layers(kind)} == {
        *SHARING
    }


def shares_layers(kind: str) -> bool:
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tied = maker_of(kind).from_config(config_of(kind)).all_tied_weights_keys
    return any(re.search(r"\.\d+\.", name) for name in tied)
