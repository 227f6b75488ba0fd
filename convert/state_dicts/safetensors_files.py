"""State dicts in safetensors files: one file, or the shards of a folder, with or without an index.

accelerate's `save_model` and `save_state` write `model.safetensors` or `model-00001-of-00003.safetensors` with
`model.safetensors.index.json` (`accelerator.py`, `checkpointing.py`). `safetensors.torch.save_model` stores a tensor
that several parameters share once, and lists the others in the metadata: `{left out: kept}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from llmconv.checkpoint import INDEX, SINGLE, open_shards
from llmconv.convert.state_dicts.files import StateFile, without_duplicates
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, listing
from llmconv.files.safetensors_file import FileTensor, Header, read_header
from llmconv.tensors import LazyTensor

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
SHARD = re.compile(r"(.+)-(\d{1,6})-of-(\d{1,6})\.safetensors")
ADAPTER = re.compile(r"(?:adapter_model|adapters|peft_model.*|.*lora.*)\.safetensors")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in name order, except those of optimizers and adapters."""
    return [
        entry
        for entry in sorted(folder.iterdir())
        if entry.suffix == SUFFIX
        and entry.is_file()
        and not training_file_kind(entry.name)
        and not ADAPTER.fullmatch(entry.name)
    ]


def is_model_folder(folder: Path) -> bool:
    """Whether a folder has the file names of a Hugging Face model: a config and safetensors weights."""
    return (folder / "config.json").is_file() and any((folder / name).is_file() for name in (SINGLE, INDEX))


def is_shard(path: Path) -> bool:
    """Whether a file has the name of one shard of several."""
    match = SHARD.fullmatch(path.name)
    return bool(match) and int(match[3]) > 1 if match else False


def one_checkpoint(folder: Path) -> list[Path]:
    """The files of the only checkpoint in a folder; empty if there is none, or several."""
    files = weight_files(folder)
    stems = {match[1] if (match := SHARD.fullmatch(file.name)) else file.name for file in files}
    return files if len(stems) == 1 or _indices(folder) else []


def numbered(folder: Path) -> list[Path]:
    """Unindexed shards in order, or none; MalformedInput: one is missing, InputRefused: of several checkpoints."""
    found = [(match, file) for file in weight_files(folder) if (match := SHARD.fullmatch(file.name))]
    if len({(match[1], int(match[3])) for match, _ in found}) > 1:
        raise InputRefused(
            f"`{folder}` contains the shards of several checkpoints", hint="move those of one into a separate folder"
        )
    shards = {int(match[2]): file for match, file in found}
    count = int(found[0][0][3]) if found else 0
    if len(shards) != count or not all(1 <= number <= count for number in shards):
        present = ", ".join(f"{number}" for number in sorted(shards)[:8])
        raise MalformedInput(
            f"`{folder}` contains {len(shards)} of {count} shards (numbers {present})",
            hint="copy the missing shards; all shards are needed",
        )
    return [shards[number] for number in sorted(shards)]


def open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a file, or the only checkpoint in a folder (else InputRefused); MalformedInput: damaged."""
    if path.is_file():
        return dict(header_of(path).tensors)
    if index := _index(path):
        return open_shards(path, index)
    files = numbered(path) or one_checkpoint(path)
    if len(files) == 1:
        return dict(header_of(files[0]).tensors)
    if not files:
        raise several_files(path)
    return without_duplicates(path.name, [header_of(file).tensors for file in files])


def several_files(folder: Path) -> InputRefused:
    """The error for a folder whose safetensors files are not one checkpoint."""
    files = [file.name for file in weight_files(folder)]
    if not files:
        return InputRefused(f"`{folder}` contains no safetensors weights", hint="is the copy complete?")
    return InputRefused(
        f"`{folder}` contains {len(files)} safetensors files that are not shards of one checkpoint: {listing(files)}",
        hint=f"give the file, such as `{folder / files[0]}`",
    )


def header_of(path: Path) -> Header:
    """The header of a file, with a cache, since several formats read it; errors as in `read_header`."""
    found = path.stat()
    return _header(path, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=2)
def _header(path: Path, _size: int, _changed: int) -> Header:
    return read_header(path)


def open_state(path: Path) -> StateFile:
    """The state dict of a file or folder, including names that share a tensor; errors as in `open_safetensors`."""
    tensors = open_safetensors(path)
    files = [path] if path.is_file() else sorted({tensor.path for tensor in _in_files(tensors)})
    shared = {name: kept for file in files for name, kept in header_of(file).metadata.items() if kept in tensors}
    state = {**{name: tensors[kept] for name, kept in shared.items() if name not in tensors}, **tensors}
    return StateFile(path, state, lambda name, leaf: leaf, shards=len(files))


def peek_state(path: Path) -> StateFile | None:
    """As `open_state`, but with the names of all files of a folder together; None if a file is unreadable."""
    try:
        files = [path] if path.is_file() else one_checkpoint(path)
        states = [open_state(file) for file in files]
    except (LlmconvError, OSError):
        return None
    merged: dict[str, LazyTensor] = {}
    for found in states:
        merged |= found.state
    return StateFile(path, merged, lambda name, leaf: leaf) if merged else None


def _in_files(tensors: Mapping[str, LazyTensor]) -> list[FileTensor]:
    return [tensor for tensor in tensors.values() if isinstance(tensor, FileTensor)]


def _indices(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(INDEX_SUFFIX))


def _index(folder: Path) -> str | None:
    """The name of the index of the model's shards."""
    bases = {name: name.removesuffix(".index.json") for name in _indices(folder)}
    found = [name for name, base in bases.items() if not training_file_kind(base) and not ADAPTER.fullmatch(base)]
    if len(found) > 1:
        raise InputRefused(
            f"`{folder}` contains {len(found)} indices: {listing(found)}", hint="keep the one to convert"
        )
    return found[0] if found else None


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
