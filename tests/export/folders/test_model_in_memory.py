"""Export of a model of transformers in memory: what `save_pretrained` would store, written once."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig

from llmconv.errors import UsageProblem
from llmconv.export import export
from llmconv.verify import verify

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL),
    "tied bfloat16 mixture": Qwen3MoeConfig(**SMALL, **MIXTURE, tie_word_embeddings=True, dtype="bfloat16"),
}


def built(name: str = "llama") -> Any:
    """A random model in training mode."""
    torch.manual_seed(0)
    config = CONFIGS[name]
    return AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32).train()


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_folder_is_that_of_save_pretrained_with_graphs(tmp_path: Path, name: str) -> None:
    model = built(name)
    model.save_pretrained(tmp_path / "saved")
    export(model, tmp_path / "out")
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "saved"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("out", "saved")]
    assert configs[0] == configs[1] and model.training
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"prefill.onnx", "decode.onnx", "llmconv.json"}


@pytest.mark.slow
def test_its_graphs_are_verified_like_others(tmp_path: Path) -> None:
    assert verify(export(built(), tmp_path / "out", dtype="float16").folder).verdict == "pass"


def meta() -> Any:
    """A model without weights."""
    with torch.device("meta"):
        return built()


def adapted() -> Any:
    """A model with a LoRA adapter around it."""
    return peft.get_peft_model(built(), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))


def quantized() -> Any:
    """A model whose config declares quantized weights."""
    model = built()
    model.config.quantization_config = {"quant_method": "gptq"}
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "meta": (meta, "on the meta device", "device_map"),
    "adapter": (adapted, "an adapter that is not merged", "merge_and_unload"),
    "quantized": (quantized, "are quantized", "save_pretrained"),
    "wrapped": (lambda: torch.nn.DataParallel(built()), "DataParallel around a Llama", "model.module"),
    "other module": (lambda: torch.nn.Linear(2, 2), "not a causal language model", "AutoModelForCausalLM"),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft about its own use of transformers
@pytest.mark.parametrize(("make", "problem", "hint"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_a_plain_model_is_refused(tmp_path: Path, make: Callable[[], Any], problem: str, hint: str) -> None:
    with pytest.raises(UsageProblem, match=problem) as caught:
        export(make(), tmp_path / "out")
    assert hint in caught.value.hint and not [*tmp_path.iterdir()]


class Doubled(LlamaForCausalLM):  # type: ignore[misc]
    """A class of the user's own, which computes something else."""

    def forward(self, *args: Any, **options: Any) -> Any:
        found = super().forward(*args, **options)
        found.logits = 2 * found.logits
        return found


def own_head() -> Any:
    """A model whose config ties the head that it has of its own."""
    model = built("llama")
    model.config = copy.deepcopy(model.config)
    model.config.tie_word_embeddings = True
    return model


def test_a_model_that_its_config_does_not_describe_is_refused(tmp_path: Path) -> None:
    for model, problem in (
        (Doubled(CONFIGS["llama"]), "`Doubled` is not of transformers"),
        (own_head(), "head differs"),
    ):
        with pytest.raises(UsageProblem, match=problem):
            export(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_in_memory_needs_a_folder_for_its_weights() -> None:
    with pytest.raises(UsageProblem, match="needs `output`"):
        export(built())
