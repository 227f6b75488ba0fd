"""Adapters of other programs than PEFT on the eager model: its weights are those that `merge-lora` writes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from llmconv.checkpoint import open_checkpoint
from llmconv.convert import merge_lora, to_hf
from llmconv.errors import InputRefused, LlmconvError, UnsupportedInput
from llmconv.generation import TextModel
from llmconv.generation.runners import merged_weights
from llmconv.runtime.eager.torch_runner import TorchRunner
from tests.builders.talking import save_letters
from tests.convert.adapters.test_other_tools import FIXTURES, base_of

MINDFORMERS = FIXTURES.parent / "mindformers" / "mf132_llama_lora"
PADDLE = FIXTURES.parent / "paddle" / "lora_llama"
CASES = ["mlx/llama_lora", "mlx/llama_dora", "torchtune/llama_lora", "litgpt/llama_lora", "mlx/llama_full"]


def assert_same_weights(base: Path, adapter: Path, merged: Path) -> None:
    """The model with the adapter has the weights of a merged folder, bit for bit."""
    model = TorchRunner(base, "auto", tensors=merged_weights(base, adapter)).model
    expected = AutoModelForCausalLM.from_pretrained(merged).state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert model.dtype == next(iter(expected.values())).dtype


@pytest.mark.slow_rows("mlx/llama_lora")
@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_those_that_merge_lora_writes(case: str, tmp_path: Path) -> None:
    merge_lora(base_of(case), [FIXTURES / case], tmp_path / "merged")
    assert_same_weights(base_of(case), FIXTURES / case, tmp_path / "merged")


@pytest.mark.parametrize(
    ("source", "adapter"),
    [(PADDLE / "base", PADDLE / "lora"), (MINDFORMERS / "base.ckpt", MINDFORMERS / "trainable_params.ckpt")],
)
def test_adapters_of_converted_models_are_merged_in_memory(source: Path, adapter: Path, tmp_path: Path) -> None:
    if source.parent == MINDFORMERS:
        (tmp_path / "run").mkdir()
        (tmp_path / "lora").mkdir()
        source, adapter = Path(shutil.copy(source, tmp_path / "run")), Path(shutil.copy(adapter, tmp_path / "lora"))
        run = yaml.safe_load((MINDFORMERS / "run.yaml").read_text())
        run["model"]["model_config"]["pet_config"] = {"pet_type": "lora", "lora_rank": 4, "lora_alpha": 8}
        for file in (source, adapter):
            file.with_name("run.yaml").write_text(yaml.safe_dump(run))
    to_hf(source, tmp_path / "base")
    merge_lora(tmp_path / "base", [adapter], tmp_path / "merged")
    assert_same_weights(tmp_path / "base", adapter, tmp_path / "merged")


@pytest.mark.slow
def test_half_precision_is_rounded_once_as_by_merge_lora(tmp_path: Path) -> None:
    case = "litgpt/llama_lora"
    model = AutoModelForCausalLM.from_pretrained(base_of(case)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    merge_lora(tmp_path / "base", [FIXTURES / case], tmp_path / "merged")
    assert open_checkpoint(tmp_path / "merged")["lm_head.weight"].dtype.name == "bfloat16"
    assert_same_weights(tmp_path / "base", FIXTURES / case, tmp_path / "merged")


@pytest.mark.slow
def test_texts_continue_as_with_the_merged_model(tmp_path: Path) -> None:
    case = "torchtune/llama_lora"
    merge_lora(base_of(case), [FIXTURES / case], tmp_path / "merged")
    base = save_letters(Path(shutil.copytree(base_of(case), tmp_path / "base")))
    opened = TextModel.open(base, backend="torch", adapter=FIXTURES / case)
    expected = TextModel.open(save_letters(tmp_path / "merged"), backend="torch")
    tokens = [[piece.token for piece in one.stream([[5, 6, 7]])] for one in (opened, expected)]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("base", "adapter", "error", "hint"),
    [
        ("phi3", "torchtune/phi3_lora", InputRefused, "merge-lora BASE ADAPTER"),
        ("gpt2", "torchtune/llama_lora", LlmconvError, ""),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_refused(
    base: str, adapter: str, error: type[LlmconvError], hint: str
) -> None:
    with pytest.raises(error) as refusal:
        merged_weights(FIXTURES / "bases" / base, FIXTURES / adapter)
    assert hint in (refusal.value.hint or "")


def test_an_adapter_that_changes_the_configuration_is_refused(save_tensors: Callable[..., Path]) -> None:
    base = FIXTURES / "bases" / "llama_tied"
    vocabulary, hidden = open_checkpoint(base)["model.embed_tokens.weight"].shape
    factors = {"lora_A": torch.ones(2, hidden), "lora_B": torch.ones(vocabulary, 2)}
    tensors = {f"base_model.model.lm_head.{name}.weight": factor for name, factor in factors.items()}
    config = {"adapter_config.json": {"peft_type": "LORA", "r": 2, "lora_alpha": 2}}
    untying = save_tensors("untying", tensors, config, weights="adapter_model.safetensors")
    with pytest.raises(UnsupportedInput, match=r"changes `config\.json`"):
        merged_weights(base, untying)
