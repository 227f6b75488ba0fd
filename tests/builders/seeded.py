"""Saves a model whose parameters are all random, also those that transformers initializes to zeros or ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

IMAGES, TEXT = "AutoModelForImageTextToText", "AutoModelForCausalLM"


def save_seeded(
    config: Any, folder: Path, kind: str = IMAGES, noise: float = 0.05, change: Callable[[Any], None] | None = None
) -> Path:
    """Saves a float32 model, the same in every run.

    Args:
        config: of transformers.
        folder: to be made.
        kind: name of transformers' auto class.
        noise: standard deviation of what is added to every parameter.
        change: called with the model before it is saved.
    """
    import torch  # noqa: PLC0415 - only the tests that ask for a model pay for it
    import transformers  # noqa: PLC0415

    torch.manual_seed(0)
    model = getattr(transformers, kind).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
        if change:
            change(model)
    model.save_pretrained(folder)
    return folder
