"""Adapters trained by PEFT on tiny models, and PEFT's own merge of them in float64."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A base, an adapter, and what PEFT makes of them in float64: a state dict, or a folder in names of files.

    Attributes:
        base: folder of the base.
        adapter: folder of the adapter.
        merged: folder of PEFT's merge, saved in float64 by transformers.
    """

    base: Path
    adapter: Path
    merged: Path

    @property
    def exact(self) -> State:
        """PEFT's merge, in the names that transformers writes to files."""
        return load_file(self.merged / "model.safetensors")


def train(model: Any, folder: Path, *, name: str = "adapter", merge: bool = True, **fields: Any) -> Case:
    """Saves `model`, an adapter of it with random factors, and PEFT's merge of the two.

    Args:
        model: a transformers model, changed.
        folder: where to put the three.
        name: of the adapter's folder.
        merge: let PEFT merge them too.
        fields: of the LoraConfig.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = type(model)
        model.save_pretrained(folder / "base")
        peft_model = get_peft_model(model, LoraConfig(**{"r": 4, "init_lora_weights": False, **fields}))
        shake(peft_model)
        peft_model.save_pretrained(folder / name)
        if not merge:
            return Case(folder / "base", folder / name, folder / "exact")
        exact = kind.from_pretrained(folder / "base", dtype=torch.float32)
        merged = PeftModel.from_pretrained(exact, folder / name).double().merge_and_unload()
        merged.save_pretrained(folder / "exact")
    return Case(folder / "base", folder / name, folder / "exact")


def shake(peft_model: Any) -> None:
    """Adds seeded noise to all that is trained."""
    torch.manual_seed(7)
    with torch.no_grad():
        for key, parameter in peft_model.named_parameters():
            if parameter.requires_grad or "lora_" in key or "modules_to_save" in key:
                parameter.add_(0.1 * torch.randn_like(parameter))


def assert_equal(output: Path, exact: State) -> None:
    """Every tensor is the exact one rounded to its element type, in every element; none is missing or left over."""
    found = load_file(output / "model.safetensors")
    assert found.keys() == exact.keys()
    for name, value in found.items():
        assert torch.equal(value, exact[name].to(value.dtype)), name


def causal_lm(model_type: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    """A seeded model with random weights."""
    config = transformers.AutoConfig.for_model(model_type, **fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model
