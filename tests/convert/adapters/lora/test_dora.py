"""DoRA against PEFT's merge in float64: linear layers, Conv1D, embeddings, convolutions; every element equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from llmconv.convert import merge_lora
from llmconv.convert.adapters.low_rank_sum import LoraProduct
from llmconv.convert.adapters.targets import DoraUpdate, add_changes
from llmconv.tensors import BY_NAME, in_memory
from tests.builders.lora_models import assert_equal, train

TARGETS = {
    "llama": ["q_proj", "down_proj"],
    "mistral": "all-linear",
    "qwen2": ["k_proj", "o_proj"],
    "gemma2": ["gate_proj"],
    "gpt2": ["c_attn", "attn.c_proj", "c_fc"],
    "bloom": ["query_key_value"],
}


@pytest.fixture
def loaded(tiny: Callable[[str], Path]) -> Callable[..., Any]:
    """`loaded(model_type, dtype)` is a tiny model."""

    def load(model_type: str, dtype: torch.dtype = torch.float32) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(tiny(model_type), dtype=dtype)

    return load


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", TARGETS)
def test_every_family_equals_peft(
    model_type: str, dtype: torch.dtype, loaded: Callable[..., Any], tmp_path: Path
) -> None:
    case = train(loaded(model_type, dtype), tmp_path, use_dora=True, target_modules=TARGETS[model_type], lora_alpha=3)
    merge_lora(case.base, [case.adapter], tmp_path / "out")
    assert_equal(tmp_path / "out", case.exact)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"use_rslora": True}, {"bias": "all"}, {"bias": "lora_only"}])
def test_it_goes_with_the_other_fields(fields: dict[str, Any], loaded: Callable[..., Any], tmp_path: Path) -> None:
    case = train(loaded("qwen2"), tmp_path, use_dora=True, target_modules=["q_proj"], **fields)
    merge_lora(case.base, [case.adapter], tmp_path / "out")
    assert_equal(tmp_path / "out", case.exact)


def test_an_embedding_equals_peft(loaded: Callable[..., Any], tmp_path: Path) -> None:
    case = train(loaded("llama"), tmp_path, use_dora=True, target_modules=["embed_tokens"])
    merge_lora(case.base, [case.adapter], tmp_path / "out")
    assert_equal(tmp_path / "out", case.exact)


@pytest.mark.slow
def test_old_names_of_the_magnitude_are_known(loaded: Callable[..., Any], tmp_path: Path) -> None:
    case = train(loaded("llama"), tmp_path, use_dora=True, target_modules=["q_proj"])
    file = case.adapter / "adapter_model.safetensors"
    ending = "lora_magnitude_vector"
    save_file({f"{name}.weight" if name.endswith(ending) else name: one for name, one in load_file(file).items()}, file)
    merge_lora(case.base, [case.adapter], tmp_path / "out")
    assert_equal(tmp_path / "out", case.exact)


@pytest.mark.slow
def test_a_weight_scales_the_whole_change(loaded: Callable[..., Any], tmp_path: Path) -> None:
    case = train(loaded("llama"), tmp_path, use_dora=True, target_modules=["q_proj"])
    merge_lora(case.base, [case.adapter, case.adapter], tmp_path / "out", weights=[0.75, -0.5])
    before, after = load_file(case.base / "model.safetensors"), case.exact
    exact = {name: before[name].double() + 0.25 * (after[name] - before[name].double()) for name in after}
    assert_equal(tmp_path / "out", exact)


def test_outputs_of_zeros_stay_zero_and_blocks_make_no_difference() -> None:
    f32, f64 = BY_NAME["float32"], BY_NAME["float64"]
    generator = np.random.default_rng(0)
    base, a = generator.standard_normal((6, 5)), generator.standard_normal((2, 5))
    b = generator.standard_normal((6, 2))
    base[3] = b[3] = 0
    pair = LoraProduct(in_memory(a, f64), in_memory(b, f64), 0.5)
    result = add_changes(in_memory(base, f64), [DoraUpdate([pair], in_memory(np.ones(6), f64), 1.0)], f32)
    assert not result.read()[3].any()
    assert np.array_equal(np.concatenate([result.rows(0, 1), result.rows(1, 6)]), result.read())
    assert np.allclose(np.linalg.norm(result.read()[[0, 1, 2, 4, 5]], axis=1), 1)
