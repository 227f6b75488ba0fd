"""An adapter of all linear layers and experts of every model type, trained by PEFT, against PEFT's merge in float64.

transformers stores many models under other names than they have in memory, joins experts, splits and permutes rows; the
adapter always has the names of the model in memory.
"""

from __future__ import annotations

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
    **dict.fromkeys(("pp_formulanet",), "it has no input embedding, which PEFT asks for"),
    **dict.fromkeys(("qwen3_omni_moe_thinker",), "PEFT takes layers for linear ones"),
    **dict.fromkeys(
        ("zamba2", "diffusion_gemma"), "layers share weights, which PEFT saves once for each of their names"
    ),
    **dict.fromkeys(("blip",), "its tied head is no `lm_head`, and is not in the files"),
    **dict.fromkeys(
        ("deepseek_ocr2", "dots3_note", "florence2", "gemma4_assistant", "gemma4_unified_assistant", "granite4_vision"),
        "it has no tiny configuration here",
    ),
    **dict.fromkeys(("muse_glimmer", "reformer", "zamba"), "it has no tiny configuration here"),
}
"""Types that are not tried, and why."""


def tiny_model(kind: str) -> Any:
    if kind in UNREACHED:
        pytest.skip(UNREACHED[kind])
    config = AutoConfig.for_model(kind, **CONFIGS[kind]) if kind in CONFIGS else tiny_config(kind, 2)
    maker = AutoModelForImageTextToText if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES else AutoModelForCausalLM
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


def adapt(model: Any, folder: Path) -> State:
    """Saves a base, an adapter of all that PEFT adapts in it, and what it is when PEFT merges the two in float64.

    PEFT merges the model that was trained: it cannot load all adapters of renamed modules again.
    """
    wide = (name for name, value in model.named_parameters() if value.dim() == 3 and "expert" in name)
    experts = sorted({".".join(name.split(".")[-2:]) for name in wide})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder / "base")
        without = ["out_proj", "conv1d"] if model.config.model_type in MAMBA else None
        fields = {"target_modules": "all-linear", "target_parameters": experts or None, "exclude_modules": without}
        peft_model = get_peft_model(model, LoraConfig(r=3, init_lora_weights=False, **fields))
        shake(peft_model)
        peft_model.save_pretrained(folder / "adapter")
        peft_model.double().merge_and_unload().save_pretrained(folder / "exact")
    return load_file(folder / "exact/model.safetensors")


@pytest.mark.parametrize("kind", slow_but(TYPES, *QUICK))
def test_an_adapter_of_everything_merges_as_peft_does(kind: str, tmp_path: Path) -> None:
    exact = adapt(tiny_model(kind), tmp_path)
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
