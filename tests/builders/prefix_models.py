"""Adapters of prefix and prompt tuning, made by PEFT itself, and what PEFT says with them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LENGTH = 5
"""Virtual tokens of every adapter."""


def save_adapter(base: Path, folder: Path, kind: str, **settings: Any) -> Path:
    """Saves a random adapter of `kind`: `PrefixTuning`, `PromptTuning` or `PromptEncoder` (p-tuning)."""
    import peft  # noqa: PLC0415 - slow to import
    import torch  # noqa: PLC0415

    config = getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", **{"num_virtual_tokens": LENGTH, **settings})
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(_base(base), config)
        with torch.no_grad():
            for parameter in model.prompt_encoder.parameters():
                parameter.normal_(0, 0.5)
        model.save_pretrained(folder)
    return folder


def peft_logits(base: Path, adapter: Path, ids: NDArray[Any]) -> NDArray[Any]:
    """Logits of PEFT's own model for whole prompts without padding, `[batch, tokens, vocab]`."""
    import peft  # noqa: PLC0415
    import torch  # noqa: PLC0415

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(_base(base), adapter).eval()
        logits: NDArray[Any] = model(input_ids=torch.from_numpy(ids)).logits.numpy()
    return logits[:, -ids.shape[1] :]  # soft prompts have logits too


def _base(folder: Path) -> Any:
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()


def random_ids(batch: int, length: int) -> NDArray[Any]:
    """Seeded prompts."""
    return np.random.default_rng(3).integers(3, 96, (batch, length))
