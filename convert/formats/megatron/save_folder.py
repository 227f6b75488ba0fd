"""Finds the save in a Megatron or NeMo folder: the iteration, the files of its ranks, or the distributed checkpoint.

Layout (Megatron-LM `training/checkpointing.py`, `get_checkpoint_name`): `iter_0000100/mp_rank_TT[_PPP][_EEE]/` with
`model_optim_rng.pt`, and `latest_checkpointed_iteration.txt` above; NeMo `nlp_overrides.py` and `lightning/io/pl.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmconv.convert.state_dicts.distributed import is_folder
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput, listing
from llmconv.files.torch_reader import is_torch_file, open_torch_file
from llmconv.tensors import LazyTensor

TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"
ITERATION = re.compile(r"iter_(\d{7,12})")
RANK = re.compile(r"mp_rank_(\d{2,5})(?:_(\d{3,5}))?(?:_(\d{3,5}))?|tp_rank_(\d{2,5})_pp_rank_(\d{3,5})")
RANK_FILES = ("model_optim_rng.pt", "model_rng.pt", "model_weights.ckpt")
"""A rank's file; the second if the distributed optimizer of 2022 kept its part elsewhere, the third in NeMo 1."""

BACKEND_FILE, COMMON = "metadata.json", "common.pt"
NEMO_CONFIG, NEMO_WEIGHTS, NEMO2_WEIGHTS, NEMO2_CONTEXT = "model_config.yaml", "model_weights", "weights", "context"
SMALL = 4096
VERSION_KEY = "checkpoint_version"
"""A key of a rank's file that no other system has."""


@dataclass(frozen=True)
class Save:
    """One save in the folder `path`."""

    path: Path
    # the numbers in a rank's folder name (two or three; one where neither pipeline nor expert parallelism is used) to
    # its file; empty for a distributed checkpoint
    rank_files: Mapping[tuple[int, ...], Path]
    distributed: Path | None = None  # the folder of a distributed checkpoint; None where there are files of ranks
    nemo: Path | None = None  # the folder with NeMo's config; None for Megatron-LM


def is_save(path: Path) -> bool:
    """Whether `path` is a folder of Megatron or NeMo, the file of a rank, or its folder, which `find_save` refuses."""
    if not path.is_dir():
        return _is_rank_file(path)
    try:
        return (
            _is_rank_folder(path)
            or _is_place(path)
            or (path / TRACKER).is_file()
            or any(map(_is_place, _iterations(path)))
        )
    except PermissionError:  # llmconv looks into every given folder, which may contain anything
        return False


def _is_rank_file(path: Path) -> bool:
    try:
        content = open_torch_file(path).content if is_torch_file(path) else None
    except LlmconvError:
        return False
    return isinstance(content, dict) and VERSION_KEY in content and any(key in content for key in ("model", "model0"))


def _is_rank_folder(folder: Path) -> bool:
    is_named = RANK.fullmatch(folder.absolute().name) and not (folder / NEMO_CONFIG).is_file()
    return bool(is_named) and any((folder / name).is_file() for name in RANK_FILES)


def _is_place(folder: Path) -> bool:
    """Whether a folder is one save."""
    return bool(_ranks(folder)) or is_megatron_distributed(folder) or _nemo_weights(folder) is not None


def is_megatron_distributed(folder: Path) -> bool:
    """Whether `folder` is a distributed checkpoint that Megatron wrote, which torch's format leaves to this one."""
    return _backend(folder) is not None or (is_folder(folder) and (folder / COMMON).is_file())


def _backend(folder: Path) -> str | None:
    """`sharded_backend` of `metadata.json`; None without `metadata.json`."""
    file = folder / BACKEND_FILE
    if not file.is_file() or file.stat().st_size > SMALL:
        return None
    try:
        content: Any = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return None
    backend = content.get("sharded_backend") if isinstance(content, dict) else None
    return backend if isinstance(backend, str) else None


def _ranks(folder: Path) -> dict[tuple[int, ...], Path]:
    """The numbers of each rank to its file."""
    found = {}
    for entry in sorted(folder.iterdir()):
        if match := RANK.fullmatch(entry.name):
            file = next((entry / name for name in RANK_FILES if (entry / name).is_file()), None)
            if file:
                found[tuple(int(number) for number in match.groups() if number is not None)] = file
    return found


def _iterations(path: Path) -> list[Path]:
    return [
        entry
        for entry in sorted(path.iterdir())
        if entry.is_dir() and (ITERATION.fullmatch(entry.name) or entry.name == RELEASE)
    ]


def _nemo_weights(folder: Path) -> Path | None:
    """The folder of weights in an unpacked NeMo checkpoint; None if it is none."""
    if (folder / NEMO2_CONTEXT).is_dir() and is_folder(folder / NEMO2_WEIGHTS):
        return folder / NEMO2_WEIGHTS
    if not (folder / NEMO_CONFIG).is_file():
        return None
    single = next((folder for name in RANK_FILES if (folder / name).is_file()), None)
    return folder / NEMO_WEIGHTS if (folder / NEMO_WEIGHTS).is_dir() else single


def find_save(path: Path) -> Save:
    """The save at `path`: the newest of a run, or the one in the tracker file.

    Raises InputRefused for several saves without it or the folder of one rank, MalformedInput if there is none, or not
    the tracked one, UnsupportedInput for a container that is not read.
    """
    if path.is_file():
        return Save(path.parent, {_numbers(path.parent) or (0,): path})
    if _is_rank_folder(path):
        above = path.parent if path.name else path.absolute().parent  # `.` has no name
        raise InputRefused(
            f"`{path.absolute().name}` is the folder of one rank of a Megatron save",
            hint=f"give the folder above it: `{above}`",
        )
    folder = path if _is_place(path) else _chosen(path)
    weights = _nemo_weights(folder)
    if weights and weights != folder:
        _refuse_other_backends(weights)
        return Save(folder, {}, weights, folder)
    if is_megatron_distributed(folder):
        _refuse_other_backends(folder)
        return Save(folder, {}, folder)
    if weights == folder and not _ranks(folder):
        file = next(folder / name for name in RANK_FILES if (folder / name).is_file())
        return Save(folder, {(0,): file}, nemo=folder)
    return _save(folder, _ranks(folder))


def _save(folder: Path, ranks: Mapping[tuple[int, ...], Path]) -> Save:
    lengths = {len(numbers) for numbers in ranks}
    if len(lengths) > 1:
        raise MalformedInput(
            f"`{folder.name}` contains ranks of two runs: {listing([file.parent.name for file in ranks.values()])}",
            hint="two saves were written into one folder; keep the folders of one of them",
        )
    return Save(folder, ranks, nemo=folder if (folder / NEMO_CONFIG).is_file() else None)


def _numbers(folder: Path) -> tuple[int, ...]:
    match = RANK.fullmatch(folder.name)
    return tuple(int(number) for number in (match.groups() if match else ()) if number is not None)


def _refuse_other_backends(folder: Path) -> None:
    backend = _backend(folder)
    if backend not in (None, "torch_dist"):
        raise UnsupportedInput(
            f"`{folder.name}` is a distributed checkpoint in the format `{backend[:40] if backend else backend}`",
            hint="load it with a Megatron core that has it (zarr: up to 0.12), and save it as `torch_dist`",
        )


def _chosen(path: Path) -> Path:
    saves = {entry.name: entry for entry in _iterations(path) if _is_place(entry)}
    tracker = path / TRACKER
    if not tracker.is_file():
        if len(saves) > 1:
            raise InputRefused(
                f"`{path.name}` contains {len(saves)} saves and no `{TRACKER}`: {listing(list(saves))}",
                hint=f"give one of them, such as `{[*saves.values()][-1]}`",
            )
        if saves:
            return next(iter(saves.values()))
    word = _word(tracker) if tracker.is_file() else ""
    name = f"iter_{int(word):07d}" if word.isdecimal() and len(word) < 13 else word
    if name not in saves:
        raise MalformedInput(
            f"`{TRACKER}` of `{path.name}` names `{name[:40]}`, which is not a save in it",
            hint=f"copy that folder too, or give another one: {listing(list(saves))}" if saves else "copy it again",
        )
    return saves[name]


def _word(tracker: Path) -> str:
    with open(tracker, encoding="utf-8", errors="replace") as file:
        return file.read(SMALL).strip()


@dataclass(frozen=True)
class RunState:
    """The model of an opened checkpoint."""

    # Megatron core's name, with the layer's number in the whole model, to the whole tensor; gate and up rows of a gated
    # feed-forward follow each other, rows of queries, keys and values alternate by group
    tensors: Mapping[str, LazyTensor]
    shards: int  # number of files with weights
    version: str  # of the layout, for `inspect`
    dropped: tuple[str, ...] = ()  # as in Checkpoint
