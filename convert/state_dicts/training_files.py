"""Files that training leaves next to the weights, recognized by their names; conversions ignore them."""

from __future__ import annotations

import re
from pathlib import Path

from llmconv.errors import listing

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
"""Description to file names: torch's, PaddleNLP's (`utils/env.py`), LLaMA2-Accessory's (`util/misc.py`),
accelerate's (`utils/constants.py`)."""


def training_file_kind(name: str) -> str | None:
    """Description of a training file with this name, such as `the optimizer's state`; None for other files."""
    return next((kind for kind, pattern in KINDS.items() if pattern.fullmatch(name)), None)


def training_files_in(path: Path) -> tuple[str, ...]:
    """One phrase for each kind of training file in the folder `path`; empty for a single file."""
    names = sorted(entry.name for entry in path.iterdir() if entry.is_file()) if path.is_dir() else []
    kinds = {kind: [name for name in names if pattern.fullmatch(name)] for kind, pattern in KINDS.items()}
    return tuple(f"{kind} ({listing(found)})" for kind, found in kinds.items() if found)
