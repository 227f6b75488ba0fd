"""Genuine quantized models, adapters for them, and folders with one of their tensors changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).parents[2] / "fixtures" / "quantized"
BASES = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))
MODULES = ("self_attn.q_proj", "mlp.down_proj")

State = dict[str, torch.Tensor]


def stored(folder: Path) -> State:
    """The tensors of a model folder."""
    return {
        name: tensor for file in sorted(folder.glob("model*.safetensors")) for name, tensor in load_file(file).items()
    }


def reference(base: str) -> State:
    """What the library that wrote the base makes of some of its weights."""
    return load_file(FOLDER / base / "reference.safetensors")


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


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """`changed(base, {name: tensor or None}, config fields…)` is a copy of a genuine base with that changed."""

    def make(base: str, tensors: dict[str, torch.Tensor | None] | None = None, **fields: Any) -> Path:
        folder = tmp_path / "base"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        state = {**stored(FOLDER / base), **(tensors or {})}
        kept = {name: tensor for name, tensor in state.items() if tensor is not None}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((FOLDER / base / "config.json").read_text())
        config["quantization_config"] |= fields
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make
