"""nanoGPT checkpoints: genuine ones of three ages give the model's own logits as a GPT-2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmconv.checkpoint import open_checkpoint
from llmconv.convert import to_hf
from llmconv.convert.formats import formats
from llmconv.convert.models.head_and_dtype import settled
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, MalformedInput
from tests.builders.torch_states import FIXTURES

FOLDER = FIXTURES / "nanogpt"
CASES = ["before_bias", "bias_free_compiled", "with_bias"]


@pytest.mark.quick_rows("bias_free_compiled")
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_upstream_model(tmp_path: Path, logits_of: Callable[..., Any], case: str) -> None:
    to_hf(FOLDER / case, tmp_path / "hf")
    with np.load(FOLDER / case / "reference.npz") as reference:
        assert np.abs(logits_of(tmp_path / "hf", reference["input_ids"]) - reference["logits"]).max() < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_only_this_format_claims_folder_and_file(case: str) -> None:
    for path in (FOLDER / case, FOLDER / case / "ckpt.pt"):
        assert [name for name, found in formats().items() if found.detect(path)] == ["nanogpt"]


def stored(case: str) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(FOLDER / case / "ckpt.pt")
    return content


def test_matrices_are_turned_and_the_rest_is_the_same_to_the_bit(tmp_path: Path) -> None:
    to_hf(FOLDER / "with_bias", tmp_path / "hf")
    written = open_checkpoint(tmp_path / "hf")
    state = stored("with_bias")["model"]
    assert set(state) - set(written) == {"lm_head.weight"}
    for name, tensor in written.items():
        is_matrix = ".c_" in name and name.endswith("weight")
        assert np.array_equal(tensor.read(), state[name].t().numpy() if is_matrix else state[name].numpy())


def test_missing_biases_are_zeros_and_reported() -> None:
    found = open_training(FOLDER / "bias_free_compiled")
    assert not found["transformer.h.1.attn.c_attn.bias"].read().any()
    assert any("zero biases" in warning for warning in found.warnings)


@pytest.mark.parametrize(("case", "activation"), [("before_bias", "gelu_new"), ("with_bias", "gelu")])
def test_the_gelu_is_that_of_the_age(case: str, activation: str) -> None:
    found = open_training(FOLDER / case)
    assert found.config["activation_function"] == activation
    assert any("gelu_new" in warning for warning in found.warnings) == (activation == "gelu")


def save(tmp_path: Path, case: str = "with_bias", **changes: Any) -> Path:
    """The checkpoint with other `model_args`, or with other tensors under `model`."""
    content = stored(case)
    content["model"] = content["model"] | changes.pop("tensors", {})
    content["model_args"] = content["model_args"] | changes
    torch.save(content, tmp_path / "ckpt.pt")
    return tmp_path / "ckpt.pt"


def test_gpt2s_vocabulary_has_its_end_of_text(tmp_path: Path) -> None:
    big = torch.zeros(50304, 32)
    tensors = {"transformer.wte.weight": big, "lm_head.weight": big}
    config = open_training(save(tmp_path, vocab_size=50304, tensors=tensors)).config
    assert (config["bos_token_id"], config["eos_token_id"], config["vocab_size"]) == (50256, 50256, 50304)
    assert open_training(FOLDER / "with_bias").config["eos_token_id"] is None


def test_heads_that_were_not_tied_are_both_kept(tmp_path: Path) -> None:
    found = settled(open_training(save(tmp_path, tensors={"lm_head.weight": torch.ones(65, 32)})))
    assert "lm_head.weight" in found and found.config["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    "change",
    [
        {"n_layer": 1},
        {"n_layer": 3},
        {"n_layer": "2"},
        {"n_layer": 1 << 30},
        {"n_head": 3},
        {"n_head": 0},
        {"n_embd": None},
        {"block_size": 25},
        {"vocab_size": 66},
    ],
    ids=str,
)
def test_model_args_of_another_model_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(MalformedInput):
        open_training(save(tmp_path, **change))


@pytest.mark.parametrize("name", ["transformer.h.9.ln_1.weight", "transformer.h.0.mlp.c_gate.weight", "value.weight"])
def test_a_tensor_that_gpt2_lacks_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(MalformedInput):
        open_training(save(tmp_path, tensors={name: torch.ones(32)}))


def test_half_of_the_biases_is_refused(tmp_path: Path) -> None:
    content = stored("with_bias")
    del content["model"]["transformer.h.1.ln_2.bias"]
    torch.save(content, tmp_path / "ckpt.pt")
    with pytest.raises(MalformedInput, match=r"ln_2\.bias"):
        open_training(tmp_path)


def test_an_object_in_place_of_a_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputRefused):
        open_training(save(tmp_path, tensors={"transformer.ln_f.weight": complex(1, 2)}))


@pytest.mark.parametrize("args", [3, None, []], ids=str)
def test_model_args_that_are_no_dict_are_refused(tmp_path: Path, args: Any) -> None:
    torch.save(stored("with_bias") | {"model_args": args}, tmp_path / "ckpt.pt")
    with pytest.raises(InputRefused):
        open_training(tmp_path / "ckpt.pt")
