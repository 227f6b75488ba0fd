"""Hugging Face folders of torch files: `pytorch_model.bin`, or shards with or without an index.

Layout (transformers `utils/hub.py`, `modeling_utils.py`): the index maps every name to a plain file name. torchtune's
Hugging Face checkpointer wrote `hf_model_0001_0.pt` (shard, epoch) without one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from llmconv.checkpoint import INDEX, SINGLE, read_json
from llmconv.convert.state_dicts.files import StateFile, open_state, union
from llmconv.errors import InputRefused, MalformedInput, listing

BINS = ("pytorch_model.bin", "pytorch_model_fsdp.bin")
"""The whole model; a Trainer with FSDP writes the second."""

RANK_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_\d+_mp_rank_\d+_.*\.pt|mp_rank_\d+_model_states\.pt")
"""DeepSpeed's own files, in the folder or one level below: the format `deepspeed` reads their float32 weights."""

SHARD = re.compile(r"(?:pytorch_)?model-(\d+)-of-(\d+)\.bin")
TORCHTUNE_SHARD = re.compile(r"hf_model_(\d+)_(\d+)\.pt")
INDEX_SUFFIX = ".bin.index.json"


def is_bin_folder(folder: Path) -> bool:
    """Whether `folder` contains torch files with Hugging Face's file names, and no safetensors model."""
    names = sorted(entry.name for entry in folder.iterdir())
    if SINGLE in names or INDEX in names or _has_rank_states(folder):
        return False
    return bool(model_files(folder)) or any(name.endswith(INDEX_SUFFIX) for name in names)


def model_files(folder: Path) -> list[Path]:
    """The files with the name of a whole model or of a shard, sorted."""
    return sorted(
        entry
        for entry in folder.iterdir()
        if entry.name in BINS or SHARD.fullmatch(entry.name) or TORCHTUNE_SHARD.fullmatch(entry.name)
    )


def _has_rank_states(folder: Path) -> bool:
    return any(RANK_STATES.fullmatch(entry.name) for entry in [*folder.glob("*.pt"), *folder.glob("*/*.pt")])


def is_shard(path: Path) -> bool:
    """Whether a file has the name of one shard of several."""
    match = SHARD.fullmatch(path.name)
    return bool(match) and int(match[2]) > 1 if match else bool(TORCHTUNE_SHARD.fullmatch(path.name))


def open_bin_folder(folder: Path) -> StateFile:
    """The state dict of a folder; an index must list exactly the tensors in the shards (else MalformedInput).

    Raises InputRefused if the folder contains several checkpoints.
    """
    indices = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(INDEX_SUFFIX))
    if len(indices) > 1:
        raise InputRefused(
            f"`{folder}` contains {len(indices)} indices: {listing(indices)}", hint="keep the one to convert"
        )
    if indices:
        return _open_indexed(folder, indices[0])
    for name in BINS:
        if (folder / name).is_file():
            return union(folder, [_open(folder / name)])
    return union(folder, [_open(file) for file in _numbered(folder)])


def _open(file: Path) -> StateFile:
    found = open_state(file)
    if found is None:
        raise MalformedInput(f"`{file.name}` contains no state dict", hint="it should contain tensors by name")
    return found


def _open_indexed(folder: Path, index: str) -> StateFile:
    shards = []
    for name, listed in indexed_shards(folder, index, lambda name: name.endswith(".bin")).items():
        shards.append(_open(folder / name))
        require_listed(name, shards[-1].state, listed, index)
    return union(folder, shards)


def _numbered(folder: Path) -> list[Path]:
    """The shards of a folder without an index, in order; MalformedInput if a number is missing.

    Raises InputRefused if the shards belong to several checkpoints, or to several epochs of torchtune.
    """
    entries = sorted(folder.iterdir())
    plain = {int(match[1]): entry for entry in entries if (match := SHARD.fullmatch(entry.name))}
    totals = {int(match[2]) for entry in entries if (match := SHARD.fullmatch(entry.name))}
    tuned = [(match, entry) for entry in entries if (match := TORCHTUNE_SHARD.fullmatch(entry.name))]
    epochs = sorted({match[2] for match, _ in tuned}, key=int)
    if len(epochs) > 1 or len(totals) > 1 or (plain and tuned):
        raise InputRefused(
            f"`{folder}` contains the shards of several checkpoints", hint="move those of one into a separate folder"
        )
    files = plain or {int(match[1]): entry for match, entry in tuned}
    if not files:
        raise MalformedInput(
            f"`{folder}` contains no regular file with weights",
            hint="a link, a pipe or a folder has its name; copy it again",
        )
    count = max(totals | {max(files)})
    missing = next((number for number in range(1, count + 1) if number not in files), None)
    if missing is not None:
        raise MalformedInput(
            f"`{folder}` has {len(files)} of {count} shards; number {missing} is missing",
            hint="copy the folder again",
        )
    return [files[number] for number in sorted(files)]


def indexed_shards(folder: Path, index: str, is_shard_name: Callable[[str], bool]) -> dict[str, set[str]]:
    """Shard file to the names of its tensors, from the `weight_map` of an index.

    Raises MalformedInput if there is none, or a shard is missing or has an invalid name.
    """
    weight_map = read_json(folder / index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise MalformedInput(f"`{index}` has no `weight_map`", hint="copy the folder again")
    shards: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not is_shard_name(shard):
            raise MalformedInput(
                f"`{index}` has the invalid shard name {str(shard)[:80]!r}",
                hint="shards are plain file names next to the index",
            )
        shards.setdefault(shard, set()).add(name)
    for shard in shards:
        if not (folder / shard).is_file():
            raise MalformedInput(f"shard `{shard}` is missing from `{folder.name}`", hint="copy the folder again")
    return dict(sorted(shards.items()))


def require_listed(shard: str, found: Iterable[str], listed: set[str], index: str) -> None:
    """Raises MalformedInput if the names in a shard are not those that the index lists for it."""
    if different := sorted(listed ^ set(found)):
        raise MalformedInput(
            f"`{index}` and `{shard}` differ in {len(different)} tensors: {listing(different)}",
            hint="shards of different models are mixed; copy the folder again",
        )
