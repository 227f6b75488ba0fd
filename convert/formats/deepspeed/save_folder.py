"""Finds the newest save in a DeepSpeed folder and the files of each rank, and reads the model states.

Layout (deepspeedai/DeepSpeed `runtime/engine.py`, `_get_ckpt_name`, `_save_checkpoint`; `checkpoint/constants.py`):
`latest` contains the name of a save's folder (its tag), such as `global_step500`, with model states and, per
data-parallel rank, optimizer states. Model states are one dict per file: names and shapes of parameters, frozen and
tied ones, and the module's tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing
from llmconv.files.pickle_machine import Stub
from llmconv.files.pickle_reader import TensorRef
from llmconv.files.torch_reader import open_torch_file
from llmconv.tensors import BY_NAME, LazyTensor, cast

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
    """One save."""

    path: Path
    home: Path  # the folder that may contain `config.json` and the tokenizer
    model: Path | None  # the model states of ZeRO stages 0 to 2; None if there are none
    zero_models: Mapping[int, Path]  # data-parallel rank to model states (stage 3)
    optimizers: Mapping[int, Path]  # data-parallel rank to optimizer states
    universal: Path | None  # the folder with one folder per parameter; None if `ds_to_universal` did not make one

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
    """The save at `path`, or the newest of those in it; InputRefused for several without `latest`.

    Raises MalformedInput for a wrong `latest` or two files of one rank, UnsupportedInput for tensor, pipeline or expert
    parallelism.
    """
    folder = path if _holds_states(path) else _newest(path)
    home = next((candidate for candidate in (folder, folder.parent) if _is_home(candidate, folder, path)), path)
    files = {entry.name: entry for entry in sorted(folder.iterdir()) if entry.is_file()}
    # refuses checkpoints that are split in another way than by data-parallel rank
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


NUMEL_LIMIT = 1 << 48
RANK_LIMIT = 16


class ModelStates:
    """One opened file of model states; the tensors in `content`, the saved dict, are TensorRef."""

    def __init__(self, path: Path) -> None:
        self._file = open_torch_file(path)
        self.path = path
        if not isinstance(self._file.content, dict):
            refuse(path, "does not contain a dict")
        self.content: Mapping[Any, Any] = self._file.content

    def tensors(self, field: str) -> dict[str, LazyTensor]:
        """Name to tensor of a dict in the file; empty if there is no such dict."""
        return {name: self._file.tensor(name, ref) for name, ref in self._refs(field)}

    def _refs(self, field: str) -> Iterator[tuple[str, TensorRef]]:
        for name, ref in self._dict(field).items():
            if isinstance(name, str) and isinstance(ref, TensorRef):
                yield name, ref

    def _dict(self, field: str) -> Mapping[Any, Any]:
        value = self.content.get(field)
        return value if isinstance(value, dict) else {}

    def objects(self, field: str) -> list[str]:
        """Names of the values of a dict in the file that are unknown objects, such as distributed tensors."""
        return [str(name) for name, value in self._dict(field).items() if isinstance(value, Stub)]

    def buffers(self) -> dict[str, LazyTensor]:
        """The module's persistent buffers; those of 16 bits become float32, as in `zero_to_fp32`."""
        names = self.content.get("buffer_names")
        persistent = {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()
        module = self.tensors("module")
        return {name: cast(module[name], BY_NAME["float32"]) for name in module if name in persistent}

    def param_shapes(self) -> list[dict[str, tuple[int, ...]]] | None:
        """Shapes of trained parameters per group, in order (else MalformedInput); None in stage 0."""
        value = self.content.get("param_shapes")
        if value is None:
            return None
        groups = [value] if isinstance(value, dict) else value
        if not isinstance(groups, list):
            refuse(self.path, "has `param_shapes` that are not a list")
        checked = [self._shapes(group, "param_shapes") for group in groups]
        names = [name for group in checked for name in group]
        if len(set(names)) != len(names):
            refuse(self.path, "has a duplicate parameter name in two groups")
        return checked

    def frozen_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the frozen parameters; stage 1 does not store them."""
        return self._shapes(self.content.get("frozen_param_shapes") or {}, "frozen_param_shapes")

    def _shapes(self, value: Any, field: str) -> dict[str, tuple[int, ...]]:
        if not isinstance(value, dict):
            refuse(self.path, f"has `{field}` that are not a dict")
        for name, shape in value.items():
            if not isinstance(name, str) or not _is_shape(shape):
                refuse(self.path, f"has an invalid shape for `{str(name)[:80]}` in `{field}`")
        return dict(value)

    def shared(self) -> dict[str, str]:
        """Name of a tied parameter to the name under which it is stored."""
        pairs = self._dict("shared_params").items()
        return {name: stored for name, stored in pairs if isinstance(name, str) and isinstance(stored, str)}

    @property
    def version(self) -> str:
        """The version of DeepSpeed; empty if unknown."""
        version = self.content.get("ds_version")
        return version[:40] if isinstance(version, str) and version.isprintable() else ""


def _is_shape(value: Any) -> bool:
    if not isinstance(value, tuple) or len(value) > RANK_LIMIT:
        return False
    return all(type(size) is int and size >= 0 for size in value) and prod(filter(None, value)) < NUMEL_LIMIT


def refuse(path: Path, problem: str) -> NoReturn:
    """Raises MalformedInput with the message "`path` `problem`"."""
    raise MalformedInput(
        f"`{path.name}` {problem}", hint="the file is damaged or was changed; copy it again from where it was saved"
    )
