"""Adapters for genuine quantized models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.builders.quantized_models import changed as changed

MODULES = ("self_attn.q_proj", "mlp.down_proj")


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[..., Path]:
    """`adapter(size)` is a LoRA of two modules of the genuine models, whose update has about that size."""

    def make(size: float, inputs: int = 96) -> Path:
        folder = tmp_path / "adapter"
        folder.mkdir(exist_ok=True)
        torch.manual_seed(3)
        tensors = {}
        for module, width in zip(MODULES, (64, inputs), strict=True):
            prefix = f"base_model.model.model.layers.0.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(4, width) / 2
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(64, 4) * size
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4}))
        return folder

    return make


def update(folder: Path, module: str) -> torch.Tensor:
    """What the adapter adds, in float64."""
    tensors = load_file(folder / "adapter_model.safetensors")
    prefix = f"base_model.model.model.layers.0.{module}"
    return tensors[f"{prefix}.lora_B.weight"].double() @ tensors[f"{prefix}.lora_A.weight"].double()
