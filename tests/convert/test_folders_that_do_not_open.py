"""A Hugging Face folder is refused as a file is: what transformers cannot open is never made from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from llmconv.cli import main
from llmconv.convert import to_hf
from llmconv.errors import MalformedInput
from tests.builders.lora_models import Case, causal_lm, train

WEIGHTS = "model.safetensors"
SMALL: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
Q = "model.layers.0.self_attn.q_proj"
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A llama and an adapter of it."""
    model = causal_lm("llama", num_hidden_layers=2, num_key_value_heads=1, **SMALL)
    return train(model, tmp_path_factory.mktemp("trained"), merge=False, target_modules=["q_proj"])


def changed(base: Path, folder: Path, change: Callable[[State], State]) -> Path:
    shutil.copytree(base, folder)
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})
    return folder


def wrapped(prefix: str, weight: str) -> Callable[[State], State]:
    """The tensors of a PEFT model that was not merged, in names that differ from one trainer to the next."""

    def change(state: State) -> State:
        factors = {f"{Q}.lora_A.default.weight": torch.ones(4, 16), f"{Q}.lora_B.default.weight": torch.ones(16, 4)}
        own = {name.replace(f"{Q}.weight", f"{Q}.{weight}"): tensor for name, tensor in state.items()}
        return {prefix + name: tensor for name, tensor in (own | factors).items()}

    return change


@pytest.mark.parametrize("command", ["to-hf", "merge-lora"])
@pytest.mark.parametrize(
    ("prefix", "weight"),
    [("base_model.model.", "base_layer.weight"), ("", "base_layer.weight"), ("", "weight")],
)
def test_an_adapter_that_is_not_merged_is_refused_by_name(
    prefix: str, weight: str, command: str, trained: Case, tmp_path: Path
) -> None:
    folder = changed(trained.base, tmp_path / "unmerged", wrapped(prefix, weight))
    words = {"to-hf": [str(folder), "--dtype", "bfloat16"], "merge-lora": [str(folder), str(trained.adapter)]}
    result = CliRunner().invoke(main, [command, *words[command], "-o", str(tmp_path / "out")])
    assert result.exit_code == 3
    assert "lora_A" in result.stderr or "base_layer" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda state: {name: tensor for name, tensor in state.items() if ".layers.1." not in name}, "1 layers"),
        (lambda state: {**state, f"{Q}.weight": state[f"{Q}.weight"][:8].clone()}, "shape mismatch"),
        (lambda state: {**state, f"{Q}.weight": torch.zeros(0)}, "shape mismatch"),
        (lambda state: {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}, "no output head"),
    ],
)
def test_a_damaged_folder_is_refused(
    change: Callable[[State], State], named: str, trained: Case, tmp_path: Path
) -> None:
    folder = changed(trained.base, tmp_path / "damaged", change)
    with pytest.raises(MalformedInput, match=named):
        to_hf(folder, tmp_path / "out", dtype="bfloat16")
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_no_class_has_is_kept_and_named(trained: Case, tmp_path: Path) -> None:
    folder = changed(trained.base, tmp_path / "more", lambda state: {**state, "value_head.weight": torch.ones(1, 16)})
    (warning,) = to_hf(folder, tmp_path / "out", dtype="bfloat16").checkpoint.warnings
    assert "LlamaForCausalLM does not have, which are kept: `value_head.weight`" in warning
    assert "value_head.weight" in load_file(tmp_path / "out" / WEIGHTS)


def test_a_folder_of_another_class_is_compared_with_that_class(trained: Case, tmp_path: Path) -> None:
    def as_classifier(state: State) -> State:
        own = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
        return {**own, "score.weight": torch.ones(3, 16)}

    folder = changed(trained.base, tmp_path / "classifier", as_classifier)
    fields = json.loads((folder / "config.json").read_text())
    labels = {str(label): f"L{label}" for label in range(3)}
    fields |= {"architectures": ["LlamaForSequenceClassification"], "id2label": labels}
    (folder / "config.json").write_text(json.dumps(fields))
    assert to_hf(folder, tmp_path / "out", dtype="bfloat16").checkpoint.warnings == ()
    (folder / "config.json").write_text(json.dumps(fields | {"id2label": {"0": "L0"}}))
    with pytest.raises(MalformedInput, match=r"shape mismatch for `score\.weight`"):
        to_hf(folder, tmp_path / "other", dtype="bfloat16")
