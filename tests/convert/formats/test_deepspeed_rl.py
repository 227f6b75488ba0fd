"""DeepSpeed checkpoints of reinforcement learning, after what TRL and open-instruct train: value models and heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from llmconv.convert import to_hf
from llmconv.convert.opening import open_training
from llmconv.errors import UnsupportedInput
from tests.builders.rank_saves import SIZES


def saved(folder: Path, module: dict[str, torch.Tensor], config: LlamaConfig) -> Path:
    """What an engine of stage 0 saves, and `config.json` above it."""
    step = folder / "global_step5"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step5")
    content: dict[str, Any] = {
        "module": module,
        "ds_version": "0.16.9",
        "ds_config": {},
        "buffer_names": [],
        "param_shapes": None,
    }
    torch.save(content, step / "mp_rank_00_model_states.pt")
    config.save_pretrained(folder)
    return folder


@pytest.fixture
def policy() -> Any:
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


@pytest.fixture
def value() -> Any:
    torch.manual_seed(4)
    return LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1, pad_token_id=0))


def test_a_value_model_is_the_classifier_that_it_was(value: Any, tmp_path: Path) -> None:
    value.config.architectures = ["LlamaForSequenceClassification"]
    to_hf(saved(tmp_path / "value", value.state_dict(), value.config), tmp_path / "out")
    found, info = LlamaForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    ids = torch.tensor([[3, 4, 5, 6]])
    assert torch.equal(found(ids).logits, value(ids).logits)


def test_a_policy_and_a_value_model_are_refused_by_their_names(policy: Any, value: Any, tmp_path: Path) -> None:
    both = {f"policy.{name}": one for name, one in policy.state_dict().items()}
    both |= {f"value_model.{name}": one for name, one in value.state_dict().items()}
    with pytest.raises(UnsupportedInput, match=r"contains 2 models, with the prefixes `policy\.`, `value_model\.`"):
        open_training(saved(tmp_path / "run", both, policy.config))


def test_a_value_head_is_dropped_where_that_is_asked(policy: Any, tmp_path: Path) -> None:
    state = {f"pretrained_model.{name}": one for name, one in policy.state_dict().items()}
    head = {"v_head.summary.weight": torch.ones(1, 8), "v_head.summary.bias": torch.ones(1)}
    run = saved(tmp_path / "run", {**state, **head}, policy.config)
    with pytest.raises(UnsupportedInput, match=r"2 unexpected keys outside the model: `v_head\.summary\.weight`"):
        open_training(run)
    found = open_training(run, options={"drop": True})
    assert {*found} == {*policy.state_dict()} and "2 tensors outside the model" in found.dropped[-1]
