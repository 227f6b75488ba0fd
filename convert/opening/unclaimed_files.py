"""Finds the checkpoint files of a folder that no format claims; a single one is taken for the folder."""

from __future__ import annotations

import re
from pathlib import Path

from llmconv.convert.state_dicts.files import SUFFIXES
from llmconv.convert.state_dicts.safetensors_files import weight_files
from llmconv.convert.state_dicts.training_files import training_file_kind
from llmconv.files.torch.reader import is_torch_file

PACKED = re.compile(r"\.(?:(?:pth?|bin|ckpt)\.(?:gz|bz2|xz|lzma|lz4|zst)|tar(?:\.\w+)?|tgz)$")


def checkpoint_files(folder: Path) -> list[Path]:
    """The torch, safetensors and packed files of a folder, in name order; never an optimizer's or a trainer's state."""
    found = {entry for entry in folder.iterdir() if entry.is_file() and not training_file_kind(entry.name)}
    torch = {entry for entry in found if entry.suffix in SUFFIXES and is_torch_file(entry)}
    packed = {entry for entry in found if PACKED.search(entry.name)}
    return sorted(torch | packed | {*weight_files(folder)})


def only_checkpoint_file(path: Path) -> Path | None:
    """The one checkpoint file of a folder (links to it count as one); None where there is none or several."""
    files = checkpoint_files(path) if path.is_dir() else []
    return files[0] if len({file.resolve() for file in files}) == 1 else None
