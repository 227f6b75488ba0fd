"""Finds the newest save in a DeepSpeed folder, and the files of each rank.

Layout (deepspeedai/DeepSpeed `runtime/engine.py`, `_get_ckpt_name` and similar functions): `latest` contains the name
of a save's folder (its tag), such as `global_step500`, with model states and, per data-parallel rank, optimizer states.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing

MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
ZERO_MODEL = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
EXPERT = re.compile(r"(?:(?:layer_\d+_)?expert|expp_rank)_\d+_mp_rank_\d+_(?:model|optim)_states\.pt")
PIPELINE = re.compile(r"layer_\d+-.*model_states\.pt")
KINDS = (MODEL, ZERO_MODEL, OPTIMIZER, EXPERT, PIPELINE)

POINTERS = ("latest", "latest_universal")
"""Files that contain the name of the newest save; `ds_to_universal` writes the second."""

POINTER_LIMIT = 1024


@dataclass(frozen=True)
class Save:
    """One save.

    Attributes:
        path: its folder.
        home: the folder that may contain `config.json` and the tokenizer.
        model: the model states of ZeRO stages 0 to 2; None if there are none.
        zero_models: data-parallel rank to model states (stage 3).
        optimizers: data-parallel rank to optimizer states.
        universal: the folder with one folder per parameter; None if `ds_to_universal` did not make one.
    """

    path: Path
    home: Path
    model: Path | None
    zero_models: Mapping[int, Path]
    optimizers: Mapping[int, Path]
    universal: Path | None

    @property
    def name(self) -> str:
        """The folder's name, for messages."""
        return self.path.name


def is_deepspeed(path: Path) -> bool:
    """Whether `path` is the folder of a save, or contains one."""
    return path.is_dir() and (_holds_states(path) or next(_saves(path), None) is not None)


def _holds_states(folder: Path) -> bool:
    try:
        return any(kind.fullmatch(entry.name) for entry in folder.iterdir() for kind in KINDS)
    except PermissionError:  # llmconv looks into every given folder, which may contain anything
        return False


def _saves(folder: Path) -> Iterator[Path]:
    return (entry for entry in sorted(folder.iterdir()) if entry.is_dir() and _holds_states(entry))


def open_save(path: Path) -> Save:
    """The save at `path`, or the newest of those in it.

    Raises:
        InputRefused: there are several saves and no `latest`.
        MalformedInput: `latest` names a save that does not exist, or two files belong to one rank.
        UnsupportedInput: the model is split by tensor, pipeline or expert parallelism.
    """
    folder = path if _holds_states(path) else _newest(path)
    home = next((candidate for candidate in (folder, folder.parent) if _is_home(candidate, folder, path)), path)
    files = {entry.name: entry for entry in sorted(folder.iterdir()) if entry.is_file()}
    _refuse_parallel(folder, files)
    universal = folder / "zero" if (folder / "zero").is_dir() else None
    model = files.get("mp_rank_00_model_states.pt")
    return Save(folder, home, model, _by_rank(files, ZERO_MODEL), _by_rank(files, OPTIMIZER), universal)


def _is_home(candidate: Path, folder: Path, given: Path) -> bool:
    """Whether a folder contains the save's `config.json`; above the given one only if it is DeepSpeed's, too."""
    known = candidate in (folder, given) or any((candidate / pointer).is_file() for pointer in POINTERS)
    return known and (candidate / "config.json").is_file()


def _newest(path: Path) -> Path:
    saves = {save.name: save for save in _saves(path)}
    pointer = next((path / name for name in POINTERS if (path / name).is_file()), None)
    if pointer is None and len(saves) > 1:
        raise InputRefused(
            f"`{path.name}` contains {len(saves)} saves and no `latest`: {listing(list(saves))}",
            hint=f"give one of them, such as `{[*saves.values()][-1]}`",
        )
    tag = _read_tag(pointer) if pointer else next(iter(saves))
    if tag not in saves:
        raise MalformedInput(
            f"`latest` in `{path.name}` names {tag[:80]!r}, which is not a save",
            hint=f"copy that folder too, or give another one: {listing(list(saves))}",
        )
    return saves[tag]


def _read_tag(pointer: Path) -> str:
    with open(pointer, encoding="utf-8", errors="replace") as file:
        return file.read(POINTER_LIMIT).strip()


def _refuse_parallel(folder: Path, files: Mapping[str, Path]) -> None:
    """Refuses checkpoints that are split in another way than by data-parallel rank."""
    kinds = {
        "mixture-of-experts": [name for name in files if EXPERT.fullmatch(name)],
        "pipeline-parallel": [name for name in files if PIPELINE.fullmatch(name)],
        "tensor-parallel": [name for name in files if _model_parallel_rank(name)],
    }
    for kind, found in kinds.items():
        if found:
            raise UnsupportedInput(
                f"`{folder.name}` is a {kind} checkpoint of DeepSpeed (`{found[0]}`), which is unsupported",
                hint="gather the model with the code that trained it, and save it with `save_pretrained`",
            )


def _model_parallel_rank(name: str) -> int:
    match = MODEL.fullmatch(name) or ZERO_MODEL.fullmatch(name) or OPTIMIZER.fullmatch(name)
    return int(match[match.re.groups]) if match else 0


def _by_rank(files: Mapping[str, Path], kind: re.Pattern[str]) -> dict[int, Path]:
    ranks: dict[int, Path] = {}
    for name, file in files.items():
        if match := kind.fullmatch(name):
            rank = int(match[1])
            if rank in ranks:
                raise MalformedInput(
                    f"`{ranks[rank].name}` and `{name}` both belong to rank {rank}",
                    hint="two saves were written into one folder; keep the files of one of them",
                )
            ranks[rank] = file
    return dict(sorted(ranks.items()))
