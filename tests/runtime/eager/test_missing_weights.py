"""A folder that lacks weights is refused: transformers would initialize them at random."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from llmconv.errors import MalformedInput
from llmconv.generation import TextModel
from llmconv.runtime.eager.runner import EagerRunner

NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def without_a_norm(talking: Path, tmp_path: Path) -> Path:
    """A model with a tokenizer whose weights lack one tensor."""
    folder = shutil.copytree(talking, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors[NORM]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_one_missing_tensor_is_named(without_a_norm: Path) -> None:
    with pytest.raises(MalformedInput, match=f"missing keys: 1 tensors of the model are not in .*, first `{NORM}`"):
        EagerRunner(without_a_norm)


def test_generate_on_the_eager_model_is_refused(without_a_norm: Path) -> None:
    with pytest.raises(MalformedInput, match="missing keys"):
        TextModel.open(without_a_norm, backend="torch")


def test_the_weights_of_another_family_are_refused(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    config = json.loads((tiny("gpt2") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(MalformedInput, match="missing keys"):
        EagerRunner(folder)
