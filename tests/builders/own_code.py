"""Models with code of their own: that of the example family magpie, with seeded weights and no training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

CODE = Path(__file__).parents[2] / "examples/custom-family/magpie"
AUTO_MAP = {
    "AutoConfig": "configuration_magpie.MagpieConfig",
    "AutoModelForCausalLM": "modeling_magpie.MagpieForCausalLM",
}
CONFIG: dict[str, Any] = {
    "model_type": "magpie",
    "auto_map": AUTO_MAP,
    "vocab_size": 96,
    "d_model": 16,
    "n_blocks": 4,
    "n_heads": 2,
}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [27, 18, 28, 18, 28, 4, 5, 9]])


def save_code(folder: Path, **fields: Any) -> Path:
    """The Python files and the `config.json`, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("configuration_magpie.py", "modeling_magpie.py"):
        shutil.copyfile(CODE / name, folder / name)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **fields}))
    return folder


def random_model(folder: Path) -> Any:
    """The seeded model that transformers builds of a folder's code, every weight random."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def logits_of(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    """The logits of a model for tokens without padding."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return logits


def loaded(folder: Path) -> Any:
    """The model of a converted folder, as transformers loads it with its code."""
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)


def composer(path: Path, model: Any, config: dict[str, Any]) -> Path:
    """A Composer checkpoint of a model, in the layout of composer `models/huggingface.py`."""
    stored = {"file_extension": ".json", "content": config, "class": "module.Class"}
    content = {
        "state": {
            "model": {f"model.{name}": tensor for name, tensor in model.state_dict().items()},
            "integrations": {"huggingface": {"model": {"config": stored}, "tokenizer": {}}},
            "metadata": {},
        },
        "rng": [],
    }
    torch.save(content, path)
    return path
