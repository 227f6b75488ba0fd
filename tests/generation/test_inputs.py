"""Position ids by the family's row, and adapters on the eager model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from llmconv.errors import InputRefused
from llmconv.export import INPUT_MAPS, InputMap, register_input_map
from llmconv.generation import TextModel, generate
from llmconv.tensors import Array


@dataclass(frozen=True)
class Late(InputMap):
    """A family whose positions begin at 5."""

    def positions(self, attention_mask: Array, new_tokens: int) -> Array:
        return super().positions(attention_mask, new_tokens) + 5


@pytest.mark.slow
def test_position_ids_follow_the_registered_row(talking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmconv.export.families.INPUT_MAPS", dict(INPUT_MAPS))
    register_input_map("llama", Late())
    ids = [20, 30, 40]
    model = TextModel.open(talking)
    found = [piece.token for piece in model.stream([ids], model.defaults.but(max_new_tokens=1))]
    eager = AutoModelForCausalLM.from_pretrained(talking).eval()
    with torch.no_grad():
        logits = eager(torch.tensor([ids]), position_ids=torch.tensor([[5, 6, 7]])).logits
    assert model.positions.__self__ == Late()  # type: ignore[attr-defined]
    assert found == [int(logits[0, -1].argmax())]


quiet = pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft about its own use of transformers


@pytest.fixture
def adapter(talking: Path, tmp_path: Path) -> Path:
    """A random PEFT LoRA adapter."""
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(talking), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@quiet
@pytest.mark.slow
def test_an_adapter_is_applied_to_the_eager_model(talking: Path, adapter: Path) -> None:
    tuned = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(talking), adapter).eval()
    ids = torch.tensor([[20, 30, 40]])
    expected = tuned.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    model = TextModel.open(talking, backend="torch", adapter=adapter)
    found = [piece.token for piece in model.stream([[20, 30, 40]], model.defaults.but(max_new_tokens=8))]
    assert found == expected[0, 3:].tolist()
    assert generate(model, ["abc"]).completions != generate(talking, ["abc"], backend="torch").completions


def test_a_folder_that_is_not_an_adapter_is_refused(talking: Path, tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="is an empty folder"):
        TextModel.open(talking, backend="torch", adapter=tmp_path)
