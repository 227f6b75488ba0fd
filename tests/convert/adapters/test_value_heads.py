"""Value heads of reinforcement learning, as TRL saves them: in the model's folder, or next to an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
)

from llmconv.convert import from_hf, inspect, merge_lora, to_hf
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, UnsupportedInput, UsageProblem
from llmconv.export import export
from tests.builders.lora_models import train
from tests.builders.rank_saves import SIZES

HEAD = {"v_head.summary.weight": torch.ones(1, 8), "v_head.summary.bias": torch.ones(1)}


@pytest.fixture
def with_head(tmp_path: Path) -> Path:
    """What `AutoModelForCausalLMWithValueHead.save_pretrained` writes (TRL 1.5)."""
    torch.manual_seed(2)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "ppo")
    file = tmp_path / "ppo/model.safetensors"
    save_file(load_file(file) | HEAD, file, {"format": "pt"})
    return tmp_path / "ppo"


@pytest.mark.slow
def test_an_export_says_how_a_value_head_is_dropped(with_head: Path, tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match=r"unexpected keys: `v_head\.summary\.bias`") as refused:
        export(with_head, tmp_path / "graphs")
    assert "`llmconv to-hf MODEL --drop -o OUT`" in refused.value.hint


def test_a_value_head_in_a_model_folder_is_dropped_when_asked(with_head: Path, tmp_path: Path) -> None:
    made = to_hf(with_head, tmp_path / "out", drop=True)
    assert "2 tensors outside the model: `v_head.summary.bias`" in made.checkpoint.dropped[-1]
    found, stored = (load_file(path / "model.safetensors") for path in (tmp_path / "out", with_head))
    assert found.keys() == stored.keys() - HEAD.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in found.items())
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)[1]["unexpected_keys"] == set()
    )


def test_every_command_says_that_a_value_head_beside_a_model_is_left_out(tmp_path: Path) -> None:
    """`value_head.safetensors` of LLaMA-Factory's reward models."""
    case = train(LlamaForCausalLM(LlamaConfig(**SIZES | {"head_dim": None})), tmp_path, target_modules=["q_proj"])
    save_file(HEAD, case.base / "value_head.safetensors")
    said = "`value_head.safetensors` is left out: a language model has no value head"
    assert said in open_training(case.base, rewrite=True).warnings
    assert said in from_hf(case.base, tmp_path / "meta", to="meta", dry_run=True).checkpoint.warnings
    assert said in inspect(case.base).warnings
    assert said in merge_lora(case.base, [case.adapter], tmp_path / "out").warnings


def test_only_language_models_have_something_to_drop(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "reward")
    with pytest.raises(UsageProblem, match="`reward` is a LlamaForSequenceClassification"):
        to_hf(tmp_path / "reward", tmp_path / "out", drop=True)


def test_a_value_head_next_to_an_adapter_is_left_out(tmp_path: Path) -> None:
    torch.manual_seed(3)
    case = train(LlamaForCausalLM(LlamaConfig(**SIZES)), tmp_path, merge=False, target_modules=["q_proj"])
    merge_lora(case.base, [case.adapter], tmp_path / "wanted")
    torch.save(HEAD, case.adapter / "pytorch_model.bin")
    made = merge_lora(case.base, [case.adapter], tmp_path / "out")
    assert any("`pytorch_model.bin` is left out: a language model has no value head" in one for one in made.warnings)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "wanted"))
    assert one == two
    with pytest.raises(UnsupportedInput, match="is an adapter") as refused:
        open_training(case.adapter)
    assert "llmconv merge-lora" in refused.value.hint
    torch.save({"extra.weight": torch.ones(2)}, case.adapter / "pytorch_model.bin")
    with pytest.raises(UnsupportedInput, match="contains other weights"):
        merge_lora(case.base, [case.adapter], tmp_path / "again")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_training_checkpoint_is_no_adapter(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "step_5/policy/weights/model").mkdir(parents=True)
    save: Any = torch.distributed.checkpoint.save  # type: ignore[attr-defined]
    save(model.state_dict(), checkpoint_id=tmp_path / "step_5/policy/weights/model", no_dist=True)
    with pytest.raises(InputRefused, match=r"is a training checkpoint \(`dcp`\), not an adapter"):
        merge_lora(tmp_path / "base", [tmp_path / "step_5/policy/weights/model"], tmp_path / "out")
    with pytest.raises(InputRefused, match="`policy/weights/model` in it is a distributed one"):
        open_training(tmp_path / "step_5")


def reward_model(head: str, config: LlamaConfig, *, rows: int = 1, kind: str = "RewardModel") -> Any:
    """OpenRLHF's class, whose name `save_pretrained` writes into `architectures`; that of value models is alike."""

    class RewardModel(LlamaPreTrainedModel):  # type: ignore[misc]
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.model = LlamaModel(config)
            setattr(self, head, torch.nn.Linear(config.hidden_size // rows, rows, bias=False))
            self.post_init()

    RewardModel.__name__ = kind
    return RewardModel(config)


@pytest.mark.parametrize("kind", ["RewardModel", "CriticModel"])
@pytest.mark.parametrize("head", ["score", "value_head", "own_head"])
def test_a_reward_model_of_openrlhf_becomes_the_classifier_that_computes_the_same(
    head: str, kind: str, tmp_path: Path
) -> None:
    """A value model has a value for each token, the classifier that of the last one."""
    torch.manual_seed(5)
    config = LlamaConfig(**SIZES, pad_token_id=0, value_head_prefix=head, normalize_reward=True, mean=0.5, std=2.0)
    model = reward_model(head, config, kind=kind)
    model.save_pretrained(tmp_path / "reward")
    made = to_hf(tmp_path / "reward", tmp_path / "out")
    notes = made.checkpoint.warnings
    assert f"`{kind}` is written as the LlamaForSequenceClassification" in notes[0] and "(r - 0.5) / 2.0" in notes[-1]
    assert ("the classifier has the value of the last token alone" in notes) == (kind == "CriticModel")
    classifier, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert classifier.config.num_labels == 1 and not any(info.values())
    ids = torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0]])
    mask = (ids != 0).long()
    hidden = model.model(ids, attention_mask=mask).last_hidden_state
    wanted = getattr(model, head)(hidden)[torch.arange(2), mask.sum(-1) - 1]
    assert torch.equal(classifier(ids, attention_mask=mask).logits, wanted)


def test_a_value_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    reward_model("value_head", LlamaConfig(**SIZES), rows=2, kind="CriticModel").save_pretrained(tmp_path / "critic")
    with pytest.raises(UnsupportedInput, match=r"value model of OpenRLHF .*has the shape \[2, \d+\], not \[1, \d+\]"):
        to_hf(tmp_path / "critic", tmp_path / "out")


def test_a_reward_model_without_a_classifier_is_refused(tmp_path: Path) -> None:
    reward_model("other", LlamaConfig(**SIZES)).save_pretrained(tmp_path / "reward")
    with pytest.raises(UnsupportedInput, match="reward model of OpenRLHF"):
        to_hf(tmp_path / "reward", tmp_path / "out")
