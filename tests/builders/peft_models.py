"""Composer checkpoints of PEFT runs, made here from models that PEFT itself builds."""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

IDS = torch.tensor([[5, 17, 3, 40, 8, 9, 2, 61]])


def trained(base: Path, **fields: Any) -> Any:
    """A PeftModel over `base` whose every trained parameter is random."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        peft_model = get_peft_model(
            model, LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **fields})
        )
    with torch.no_grad():
        for parameter in peft_model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return peft_model.eval()


def logits(model: Any) -> torch.Tensor:
    """Of the model for `IDS`, as stored in float32."""
    with torch.no_grad():
        result: torch.Tensor = model(IDS).logits
    return result


def adapter_config(model: Any) -> dict[str, Any]:
    """As Composer stores it."""
    with tempfile.TemporaryDirectory() as folder:
        model.peft_config["default"].save_pretrained(folder)
        content: dict[str, Any] = json.loads(Path(folder, "adapter_config.json").read_text())
    return content


def adapter_only(state: dict[str, torch.Tensor], bias: str = "none") -> dict[str, torch.Tensor]:
    """What Composer's `filter_state_dict_peft` lets through (0.32.1)."""
    return {name: tensor for name, tensor in state.items() if "lora_" in name or (bias == "all" and "bias" in name)}


def save_state(path: Path, state: dict[str, Any], config: Any, peft_config: Any = None) -> Path:
    """A Composer checkpoint of `state`."""
    entry: dict[str, Any] = {"config": {"file_extension": ".json", "content": config, "class": "peft.PeftModel"}}
    if peft_config is not None:
        entry["peft_config"] = {"file_extension": ".json", "content": peft_config}
    integrations = {"huggingface": {"model": entry, "tokenizer": {}}}
    model = {f"model.{name}": tensor for name, tensor in state.items()}
    torch.save({"state": {"model": model, "integrations": integrations}, "rng": []}, path)
    return path


def save_run(path: Path, model: Any, *, whole: bool = True) -> Path:
    """A Composer checkpoint of a PeftModel: with its base (`should_save_peft_only=False`), or the adapter alone."""
    config = adapter_config(model)
    state = model.state_dict() if whole else adapter_only(model.state_dict(), config["bias"])
    return save_state(path, state, model.get_base_model().config.to_diff_dict(), config)


def loaded_with_peft(base: Path, adapter: Path) -> Any:
    """What PEFT makes of a model folder and an adapter folder; every tensor of the adapter finds its place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*missing adapter keys")
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        return PeftModel.from_pretrained(model, adapter).eval()
