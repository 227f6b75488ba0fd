"""`--method awq` of mixtures and of gate and up in one matrix: the same function with factors, and smaller errors."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmconv.checkpoint import SINGLE, open_checkpoint
from llmconv.export.calibration import text_run
from llmconv.export.export_options import DEFAULTS
from llmconv.export.language_model import open_language_model
from llmconv.export.quantization.activation_aware import measure_activation_aware
from llmconv.export.quantization.selection import select
from llmconv.export.quantization.settings import QuantizationSettings
from llmconv.export.quantization.smoothing import Smoothing
from llmconv.runtime.tokenizer import TOKENS, CalibrationText
from llmconv.tensors import Array
from tests.builders.safetensors import change_tensor
from tests.export.quantization.test_smoothing import tiny_talking

FITTING = {
    "mixtral": ("block_sparse_moe.gate", "experts.3.w1", "experts.0.w3"),
    "qwen3_moe": ("mlp.gate", "experts.3.gate_proj", "experts.0.up_proj"),
    "qwen2_moe": ("mlp.shared_expert_gate", "shared_expert.up_proj", "shared_expert.up_proj"),
    "deepseek_v3": ("mlp.gate", "experts.3.up_proj", "experts.0.up_proj"),
    "gpt_oss": ("mlp.router", "experts.gate_up_proj", ""),
    "qwen3_5_moe_text": ("", "experts.0.down_proj", "experts.0.up_proj"),  # its norms add 1
    "phi3": ("", "mlp.gate_up_proj", "mlp.gate_up_proj"),
    "glm": ("", "mlp.gate_up_proj", "mlp.gate_up_proj"),
}
"""Parts of the names of a router, of a matrix behind a norm, and of one whose outputs are divided, by model type."""


def measured(model: Path, **options: Any) -> Smoothing:
    """The factors that an export in int4 has."""
    source, language_model = open_checkpoint(model), open_language_model(open_checkpoint(model))
    run = text_run(language_model, source, {}, CalibrationText.shipped(), TOKENS)
    given = {**DEFAULTS, "quant": "int4", "quant_block": 32, "method": "awq", "calibrate": "default", **options}
    settings = QuantizationSettings.parse(given)
    assert settings
    graphs = [(run.traced, run.matches)]
    return measure_activation_aware(graphs, select(graphs, settings), {}, run)


def multiply(factors: Array, values: Array) -> Array:
    changed: Array = (values * factors).astype(values.dtype)
    return changed


def with_factors(model: Path, found: Smoothing, folder: Path) -> Path:
    """A copy of a model with its factors, not rounded."""
    shutil.copytree(model, folder)
    for name in {*found.norms, *found.matrices, *found.outputs}:
        factors: Any = found.matrices.get(name, 1) * found.outputs.get(name, 1) / found.norms.get(name, 1)
        change_tensor(folder / SINGLE, name, partial(multiply, factors))
    return folder


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(3, 80)[None]).logits
    return found


@pytest.mark.slow_rows(*(kind for kind in FITTING if kind != "qwen3_moe"))
@pytest.mark.parametrize("kind", FITTING)
def test_a_model_with_factors_is_the_same_function(kind: str, tmp_path: Path) -> None:
    source = tiny_talking(kind, tmp_path)
    found = measured(source)
    router, behind, gated = FITTING[kind]
    assert any(router in name for name in found.matrices) and any(behind in name for name in found.matrices)
    assert any(gated in name for name in found.outputs) if gated else not found.outputs
    changed = with_factors(source, found, tmp_path / "scaled")
    assert any((factors != 1).any() for name, factors in found.matrices.items() if behind in name)
    assert torch.equal(logits(changed), logits(source))
