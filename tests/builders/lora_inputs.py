"""Random LoRA adapters of PEFT for graphs with inputs for factors, and the tokens of PEFT's own generate."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def save_lora(base: Path, folder: Path, seed: int = 3, **settings: Any) -> Path:
    """Saves a random LoRA of rank 4 on `q_proj` and `down_proj`; `settings` are other fields of `LoraConfig`."""
    import peft  # noqa: PLC0415 - slow to import
    import torch  # noqa: PLC0415

    given = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **settings}
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(_opened(base), peft.LoraConfig(**given))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0, 0.3)
        model.save_pretrained(folder)
    return folder


def peft_tokens(base: Path, adapter: Path, prompts: Sequence[Sequence[int]], new: int = 12) -> list[list[int]]:
    """New tokens of each prompt, by PEFT's greedy search."""
    import peft  # noqa: PLC0415
    import torch  # noqa: PLC0415

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(_opened(base), adapter).eval()
        found = []
        for prompt in prompts:
            ids = torch.tensor([list(prompt)])
            given = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
            row = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **given)[0]
            found.append([int(token) for token in row[len(prompt) :]])
    return found


def _opened(folder: Path) -> Any:
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
