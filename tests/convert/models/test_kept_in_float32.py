"""Half precision keeps in float32 what transformers keeps in it when it loads a model, in every type that it has."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from llmconv.checkpoint import open_checkpoint
from llmconv.convert import apply_delta, merge_lora, to_hf
from llmconv.convert.models.head_and_dtype import stored_types
from llmconv.convert.models.transformers_source import causal_lm_classes, model_folder
from tests.builders.lora_models import causal_lm, train
from tools.tiny_models import tiny_config

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
DEEPSEEK: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_shared_experts": 1,
}


def kinds() -> list[str]:
    """The types whose source mentions tensors in float32."""
    folders = {kind: folder for kind in sorted(causal_lm_classes()) if (folder := model_folder(kind))}
    files = {kind: folder / f"modeling_{folder.name}.py" for kind, folder in folders.items()}
    return [
        kind
        for kind, file in files.items()
        if file.is_file() and ("_keep_in_fp32_modules" in (text := file.read_text()) or "FloatTensor(" in text)
    ]


def types_in(folder: Path) -> dict[str, str]:
    return {name: tensor.dtype.name for name, tensor in open_checkpoint(folder).items()}


def planned(folder: Path, dtype: str) -> Mapping[str, str]:
    checkpoint = open_checkpoint(folder)
    return {name: kind.name for name, kind in stored_types(checkpoint.tensors, checkpoint.config, dtype).items()}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", kinds())
def test_every_type_keeps_what_transformers_keeps(kind: str, dtype: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            AutoModelForCausalLM.from_config(tiny_config(kind, 2)).save_pretrained(tmp_path / "base")
        except Exception as error:
            pytest.skip(f"transformers builds no tiny model of it: {type(error).__name__}")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=getattr(torch, dtype))
        loaded.save_pretrained(tmp_path / "loaded")
    assert planned(tmp_path / "base", dtype) == types_in(tmp_path / "loaded")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["to-hf", "merge-lora", "delta"])
def test_the_bias_that_chooses_experts_is_not_rounded(command: str, tmp_path: Path) -> None:
    model = causal_lm("deepseek_v3", **DEEPSEEK)
    bias = 6.8 + torch.rand(16) * 0.2
    dict(model.named_buffers())[BIAS].copy_(bias)
    case = train(model, tmp_path, merge=False, target_modules=["o_proj"])
    if command == "to-hf":
        to_hf(case.base, tmp_path / "out", dtype="bfloat16")
    elif command == "merge-lora":
        merge_lora(case.base, case.adapter, tmp_path / "out", dtype="bfloat16")
    else:  # tuned - base, of which only the last matrix is not zero
        change = {name: torch.zeros_like(one) for name, one in load_file(case.base / "model.safetensors").items()}
        change["lm_head.weight"] += 0.5
        shutil.copytree(case.base, tmp_path / "delta")
        save_file(change, tmp_path / "delta/model.safetensors", {"format": "pt"})
        apply_delta(case.base, tmp_path / "delta", tmp_path / "out", dtype="bfloat16")
    found = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(found[BIAS], bias)
    assert {str(tensor.dtype) for name, tensor in found.items() if name != BIAS} == {"torch.bfloat16"}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
