"""Genuine quantized models, and copies of them with some of their tensors changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).parents[1] / "fixtures" / "quantized"
BASES = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))

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
