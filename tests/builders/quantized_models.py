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


def without_indices(size: int) -> dict[str, torch.Tensor | None]:
    """The changes that give `gptq_4bit_sym` groups of another size, which are in order and have no `g_idx`."""
    made: dict[str, torch.Tensor | None] = {}
    random = torch.Generator().manual_seed(0)
    for name, words in stored(FOLDER / "gptq_4bit_sym").items():
        if name.endswith(".qweight"):
            stem, count = name.removesuffix(".qweight"), -(-words.shape[0] * 8 // size)
            made[f"{stem}.scales"] = (torch.rand(count, words.shape[1], generator=random) * 0.02 + 0.002).half()
            made[f"{stem}.qzeros"] = torch.full((count, words.shape[1] // 8), 0x77777777, dtype=torch.int32)
            made[f"{stem}.g_idx"] = None
    return made


def groups(**weights: Any) -> dict[str, Any]:
    """The `config_groups` of `ct_pack_4bit` with other fields of `weights`."""
    config = json.loads((FOLDER / "ct_pack_4bit" / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    return {"group_0": {**group, "weights": {**group["weights"], **weights}}}


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
