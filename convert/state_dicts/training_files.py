"""What training leaves next to the weights, told by the names of files; no conversion needs it."""

from __future__ import annotations

import re
from pathlib import Path

from llmconv.convert.algebra.operations import listing

KINDS = {
    "the optimizer's state": re.compile(
        r"(?:.*[-_.])?optim(?:izers?)?(?:[-_.].*)?\.(?:pth?|bin|pdopt|ckpt|safetensors)|.*\.pdopt|.*master_weights.*"
    ),
    "the learning-rate schedule": re.compile(r"(?:lr_)?scheduler.*"),
    "the loss scale": re.compile(r"(?:grad_)?scaler.*"),
    "random number states": re.compile(r"(?:rng|random)_state.*|rank-specific.*"),
    "the trainer's state": re.compile(r"trainer_state\.json|training_args\.bin|.*\.other\.pth"),
    "the data loader's state": re.compile(r"(?:sampler|dl_state_dict)(?:_\d+)?\.bin"),
    "objects registered for checkpointing": re.compile(r"custom_checkpoint_\d+\.pkl"),
}
"""Phrase to the names of its files: torch's, PaddleNLP's (`utils/env.py`), LLaMA2-Accessory's (`util/misc.py`),
accelerate's (`utils/constants.py`)."""


def what_is_left(name: str) -> str | None:
    """What a file of this name holds, if training leaves it next to the weights: `the optimizer's state`."""
    return next((what for what, pattern in KINDS.items() if pattern.fullmatch(name)), None)


def left_beside(path: Path) -> tuple[str, ...]:
    """One phrase for each kind of file in the folder `path` that a conversion leaves; nothing for a single file."""
    names = sorted(entry.name for entry in path.iterdir() if entry.is_file()) if path.is_dir() else []
    kinds = {what: [name for name in names if pattern.fullmatch(name)] for what, pattern in KINDS.items()}
    return tuple(f"{what} ({listing(found)})" for what, found in kinds.items() if found)
