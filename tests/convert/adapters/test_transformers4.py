"""Adapters and bases that transformers 4.47 and PEFT 0.14 wrote, against their own merge in float64."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from llmconv.convert import merge_lora
from tests.builders.lora_models import State, assert_equal
from tests.convert.conftest import FIXTURES

MODELS = sorted(path for path in (FIXTURES / "adapters/transformers4").iterdir() if path.is_dir())
WEIGHTS = "model.safetensors"


@pytest.fixture(params=MODELS, ids=[path.name for path in MODELS])
def model(request: pytest.FixtureRequest) -> Path:
    """A folder with `base`, `adapter`, and in `merged.safetensors` the weights that the adapter changes."""
    path: Path = request.param
    return path


def exact(model: Path) -> State:
    """The whole merge in float64."""
    base = {name: value.double() for name, value in load_file(model / "base" / WEIGHTS).items()}
    return base | load_file(model / "merged.safetensors")


def load(folder: Path) -> Any:
    """The model as the installed transformers loads it, in float32."""
    kind = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded, loading = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(loading.values()), loading
    return loaded


def load_exact(model: Path, folder: Path) -> State:
    """The merge in the names that the installed transformers has in memory, rounded to float32."""
    shutil.copytree(model / "base", folder)
    save_file(exact(model), folder / WEIGHTS, metadata={"format": "pt"})
    return dict(load(folder).state_dict())


def test_on_its_own_base_it_gives_the_merge_of_that_version(model: Path, tmp_path: Path) -> None:
    merge = merge_lora(model / "base", [model / "adapter"], tmp_path / "out")
    assert {*merge.merged, *merge.replaced} == load_file(model / "merged.safetensors").keys()
    assert_equal(tmp_path / "out", exact(model))


@pytest.mark.quick_rows("mixtral")
def test_on_the_base_as_transformers_5_saves_it_the_same_model_comes_out(model: Path, tmp_path: Path) -> None:
    load(model / "base").save_pretrained(tmp_path / "base")
    merge_lora(tmp_path / "base", [model / "adapter"], tmp_path / "out")
    found, expected = load(tmp_path / "out").state_dict(), load_exact(model, tmp_path / "exact")
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


@pytest.mark.quick_rows("mixtral")
def test_the_base_in_the_names_that_transformers_5_has_in_memory_is_told_too(model: Path, tmp_path: Path) -> None:
    loaded = load(model / "base")
    (tmp_path / "base").mkdir()
    loaded.config.save_pretrained(tmp_path / "base")
    save_file({name: value.clone() for name, value in loaded.state_dict().items()}, tmp_path / "base" / WEIGHTS)
    merge_lora(tmp_path / "base", [model / "adapter"], tmp_path / "out")
    assert_equal(tmp_path / "out", load_exact(model, tmp_path / "exact"))
