"""A Hugging Face folder of torch files: `pytorch_model.bin`, or shards with or without an index.

Layout (transformers `utils/hub.py`, `modeling_utils.py`): the index maps every name to a plain file name. torchtune's
Hugging Face checkpointer wrote `hf_model_0001_0.pt` (shard, epoch) without one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from llmconv.checkpoint import INDEX, SINGLE, read_json
from llmconv.convert.algebra.operations import listing
from llmconv.convert.state_dicts.files import StateFile, open_state, union
from llmconv.errors import InputRefused, MalformedInput

BINS = ("pytorch_model.bin", "pytorch_model_fsdp.bin")
"""The whole model; the second is what a Trainer with FSDP gathered."""

RANK_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_\d+_mp_rank_\d+_.*\.pt|mp_rank_\d+_model_states\.pt")
"""DeepSpeed's own files, next to or below: its format takes the float32 weights in them."""

SHARD = re.compile(r"(?:pytorch_)?model-(\d+)-of-(\d+)\.bin")
TORCHTUNE_SHARD = re.compile(r"hf_model_(\d+)_(\d+)\.pt")
INDEX_SUFFIX = ".bin.index.json"


def is_bin_folder(folder: Path) -> bool:
    """Whether `folder` holds such torch files, in Hugging Face's names, and no safetensors of a model."""
    names = sorted(entry.name for entry in folder.iterdir())
    if SINGLE in names or INDEX in names or _has_rank_states(folder):
        return False
    return bool(model_files(folder)) or any(name.endswith(INDEX_SUFFIX) for name in names)


def model_files(folder: Path) -> list[Path]:
    """The files whose names are those of a whole model or of a shard, sorted."""
    return sorted(
        entry
        for entry in folder.iterdir()
        if entry.name in BINS or SHARD.fullmatch(entry.name) or TORCHTUNE_SHARD.fullmatch(entry.name)
    )


def _has_rank_states(folder: Path) -> bool:
    return any(RANK_STATES.fullmatch(entry.name) for entry in [*folder.glob("*.pt"), *folder.glob("*/*.pt")])


def is_shard(path: Path) -> bool:
    """Whether a file is named as one shard of several."""
    match = SHARD.fullmatch(path.name)
    return bool(match) and int(match[2]) > 1 if match else bool(TORCHTUNE_SHARD.fullmatch(path.name))


def open_bin_folder(folder: Path) -> StateFile:
    """The state dict of a folder; the index, where there is one, must tell of every tensor and of no other.

    Raises:
        InputRefused: two checkpoints in one folder.
        MalformedInput: a shard is missing, or the index and the shards disagree.
    """
    indices = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(INDEX_SUFFIX))
    if len(indices) > 1:
        raise InputRefused(
            f"`{folder}` holds {len(indices)} indices: {listing(indices)}", hint="keep the one to convert"
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
        raise MalformedInput(f"`{file.name}` holds no state dict", hint="it should hold tensors by name")
    return found


def _open_indexed(folder: Path, index: str) -> StateFile:
    weight_map = read_json(folder / index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise MalformedInput(f"`{index}` has no `weight_map`", hint="copy the folder again")
    shards = []
    for name in dict.fromkeys(_plain(index, shard) for shard in weight_map.values()):
        if not (folder / name).is_file():
            raise MalformedInput(f"shard `{name}` is missing from `{folder}`", hint="copy the folder again")
        shards.append(_checked(_open(folder / name), weight_map, index))
    return union(folder, sorted(shards, key=lambda shard: shard.path.name))


def _plain(index: str, shard: Any) -> str:
    if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".bin"):
        raise MalformedInput(
            f"`{index}` names the shard {str(shard)[:80]!r}", hint="shards are plain file names next to the index"
        )
    return shard


def _checked(shard: StateFile, weight_map: dict[str, Any], index: str) -> StateFile:
    listed = {name for name, home in weight_map.items() if home == shard.path.name}
    if odd := sorted(listed ^ shard.state.keys()):
        raise MalformedInput(
            f"`{index}` and `{shard.path.name}` disagree about {len(odd)} tensors: {listing(odd)}",
            hint="shards of different models are mixed; copy the folder again",
        )
    return shard


def _numbered(folder: Path) -> list[Path]:
    """The shards of a folder without an index, by number; those of torchtune's last epoch.

    Raises:
        MalformedInput: a number is missing.
        InputRefused: torchtune's shards of several epochs.
    """
    entries = sorted(folder.iterdir())
    plain = {int(match[1]): entry for entry in entries if (match := SHARD.fullmatch(entry.name))}
    totals = {int(match[2]) for entry in entries if (match := SHARD.fullmatch(entry.name))}
    tuned = [(match, entry) for entry in entries if (match := TORCHTUNE_SHARD.fullmatch(entry.name))]
    epochs = sorted({match[2] for match, _ in tuned}, key=int)
    if len(epochs) > 1 or len(totals) > 1 or (plain and tuned):
        raise InputRefused(
            f"`{folder}` holds the shards of several checkpoints", hint="put those of one into a folder of their own"
        )
    files = plain or {int(match[1]): entry for match, entry in tuned}
    if not files:
        raise MalformedInput(
            f"`{folder}` has no regular file of weights",
            hint="a link, a pipe or a folder is in its place; copy it again",
        )
    count = max(totals | {max(files)})
    missing = next((number for number in range(1, count + 1) if number not in files), None)
    if missing is not None:
        raise MalformedInput(
            f"`{folder}` has {len(files)} of {count} shards; number {missing} is missing",
            hint="copy the folder again",
        )
    return [files[number] for number in sorted(files)]
