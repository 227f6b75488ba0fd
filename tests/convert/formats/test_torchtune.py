"""torchtune checkpoints: genuine ones give the recipe's logits; others are refused by what is wrong with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmconv.checkpoint import read_json
from llmconv.convert import to_hf
from llmconv.convert.formats import formats
from llmconv.convert.inspection import inspect
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from tests.builders.torch_states import FIXTURES, prefixed, save

FOLDER = FIXTURES / "torchtune"
CASES = ["llama2", "llama3_2_tied", "qwen2", "gemma", "phi3"]
FILE = "model-00001-of-00001.bin"


@pytest.mark.parametrize("case", [*CASES, "llama3_hf_shards"])
def test_logits_are_those_of_the_upstream_model(tmp_path: Path, logits_of: Callable[..., Any], case: str) -> None:
    to_hf(FOLDER / case, tmp_path / "hf")
    with np.load(FOLDER / case / "reference.npz") as reference:
        assert np.abs(logits_of(tmp_path / "hf", reference["input_ids"]) - reference["logits"]).max() < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_only_this_format_claims_folder_and_file(case: str) -> None:
    for path in (FOLDER / case, FOLDER / case / FILE):
        assert [name for name, found in formats().items() if found.detect(path)] == ["torchtune"]


def test_torchtunes_files_in_hugging_face_names_are_plain_torch() -> None:
    assert open_training(FOLDER / "llama3_hf_shards").format == "torch"


def test_old_shards_of_an_epoch_are_joined_and_two_epochs_refused(tmp_path: Path) -> None:
    state = torch.load(next((FOLDER / "llama3_hf_shards").glob("*.bin")))
    names, config = list(state), read_json(FOLDER / "llama3_hf_shards" / "config.json")
    for number, part in enumerate((names[:9], names[9:]), 1):
        save(tmp_path / f"hf_model_000{number}_0.pt", {name: state[name] for name in part}, config)
    assert set(open_training(tmp_path)) == set(names)
    shutil.copy(tmp_path / "hf_model_0001_0.pt", tmp_path / "hf_model_0001_1.pt")
    with pytest.raises(InputRefused, match="several checkpoints"):
        open_training(tmp_path)


def state_of(case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return torch.load(FOLDER / case / FILE), read_json(FOLDER / case / "config.json")


@pytest.mark.parametrize("key", [None, "model"])
def test_compiled_and_wrapped_states_are_the_same(tmp_path: Path, key: str | None) -> None:
    state, config = state_of("llama2")
    compiled = prefixed(state, "_orig_mod.")
    found = open_training(save(tmp_path / "x.pt", {key: compiled, "epochs_run": 1} if key else compiled, config))
    assert set(found) == set(open_training(FOLDER / "llama2"))


def test_without_a_configuration_it_is_refused_and_inspected(tmp_path: Path) -> None:
    state, config = state_of("llama2")
    path = save(tmp_path / "x.pt", state, None)
    with pytest.raises(InputRefused, match="not contain a model configuration"):
        open_training(path)
    assert inspect(path).format == "torchtune"
    (tmp_path / "given.json").write_text(json.dumps(config))
    assert len(open_training(path, config=(tmp_path / "given.json",))) == len(state)


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 3},
        {"num_key_value_heads": 4},
        {"num_hidden_layers": 3},
        {"vocab_size": 95},
        {"model_type": "gpt2"},
        {"model_type": "gemma2"},
        {"head_dim": 7},
        {"model_type": "phi3", "num_attention_heads": 8},
    ],
    ids=str,
)
def test_a_configuration_of_another_model_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    state, config = state_of("llama2")
    with pytest.raises(InputRefused):
        open_training(save(tmp_path / "x.pt", state, config | change))


@pytest.mark.parametrize("name", ["layers.1.attn.k_proj.weight", "norm.scale", "tok_embeddings.weight"])
def test_a_missing_tensor_is_refused(tmp_path: Path, name: str) -> None:
    state, config = state_of("llama2")
    del state[name]
    with pytest.raises(InputRefused):
        open_training(save(tmp_path / "x.pt", state, config))


def test_unknown_tensors_and_adapters_are_refused(tmp_path: Path) -> None:
    state, config = state_of("llama2")
    with pytest.raises(MalformedInput, match="no rule places"):
        open_training(save(tmp_path / "x.pt", state | {"layers.0.attn.extra.weight": torch.ones(2)}, config))
    with pytest.raises(UnsupportedInput, match="not merged"):
        open_training(save(tmp_path / "y.pt", state | {"layers.0.attn.q_proj.lora_a.weight": torch.ones(2)}, config))


def test_two_epochs_in_one_folder_ask_for_one(tmp_path: Path) -> None:
    state, config = state_of("llama2")
    for epoch in (0, 1):
        save(tmp_path / f"torchtune_model_{epoch}.pt", state, config)
    with pytest.raises(InputRefused, match="2 checkpoint file"):
        open_training(tmp_path)
