"""Opens the weight files of a PaddleNLP folder: one file, shards with an index, or one file per parallel rank.

Names from paddlenlp `utils/env.py` and `transformers/model_utils.py`: `model_state.pdparams`,
`model_state-00001-of-00005.pdparams` with an index, `model_state.tp00_pp00.pdparams`, and the safetensors ones:
`model.safetensors`, shards with an index, `model.tp00_pp00.safetensors`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmconv.checkpoint import INDEX, SINGLE
from llmconv.convert.algebra.operations import replicated
from llmconv.convert.formats.paddle.names import FAMILIES
from llmconv.convert.formats.paddle.pdparams import as_bfloat16, is_pdparams, open_pdparams
from llmconv.convert.state_dicts.folders import indexed_shards, require_listed
from llmconv.convert.state_dicts.raw_tensors import joined
from llmconv.convert.state_dicts.safetensors_files import header_of, numbered, open_safetensors
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput, listing
from llmconv.files.safetensors_file import read_header
from llmconv.tensors import LazyTensor

WHOLE = "model_state.pdparams"
PADDLE_INDEX = "model_state.pdparams.index.json"
RANK = re.compile(
    r"(?:model_state\.(?=.*\.pdparams)|model\.(?=.*\.safetensors))"
    r"(?:tp(\d{2,3}))?_?(?:pp(\d{2,3}))?\.(?:pdparams|safetensors)"
)
SHARD = re.compile(r"model_state-\d+-of-\d+\.pdparams")
ADAPTER_FILES = re.compile(
    r"(lora|prefix)_model_state(?:\.[tp\d_]+|-\d+-of-\d+)?\.pdparams|peft_model(?:-\d+-of-\d+)?\.safetensors"
)

SAFETENSORS = re.compile(r"model(?:-\d+-of-\d+)?\.safetensors")

PREFIXES = tuple(family.prefix for family in FAMILIES.values())
OTHERS = ("model.", "transformer.")


def has_pdparams(folder: Path) -> bool:
    """Whether a folder contains weights, or an adapter, under PaddleNLP's file names."""
    return any(_is_paddle_name(entry.name) for entry in folder.iterdir())


def _is_paddle_name(name: str) -> bool:
    return name in (WHOLE, PADDLE_INDEX) or any(pattern.fullmatch(name) for pattern in (RANK, SHARD, ADAPTER_FILES))


def weight_files(path: Path) -> list[Path]:
    """The files with the weights (or an adapter): `path` itself, or those in the folder `path`."""
    if path.is_file():
        return [path]
    patterns = (RANK, SHARD, ADAPTER_FILES, SAFETENSORS)
    return [entry for entry in sorted(path.iterdir()) if any(pattern.fullmatch(entry.name) for pattern in patterns)]


def peek(path: Path) -> Mapping[str, LazyTensor]:
    """The tensors of every file under their own names; InputRefused if a file is malformed."""
    files = weight_files(path)
    read = {file.name: read_header(file).tensors for file in files if file.suffix == ".safetensors"}
    return joined({**read, **{file.name: open_pdparams(file).tensors for file in files if file.name not in read}})


def names_paddle(path: Path) -> bool:
    """Whether a safetensors file, or the first in a folder, has Paddle's names, or the metadata `np` and its config.

    PaddleFormers, PaddleNLP's successor, writes Hugging Face's own names and layout: False.
    """
    metadata, names = first_names(path)
    if any(name.startswith(PREFIXES) for name in names):
        return True
    if any(name.startswith(OTHERS) for name in names):
        return False
    config = (path if path.is_dir() else path.parent) / "config.json"
    return metadata.get("format") == "np" and config.is_file() and b'"paddlenlp_version"' in config.read_bytes()


def first_names(path: Path) -> tuple[dict[str, str], list[str]]:
    """Metadata and tensor names of a safetensors file, or the first in a folder; empty if none is readable."""
    files = sorted(path.glob("model*.safetensors")) if path.is_dir() else [path]
    file = next((entry for entry in files if entry.is_file()), None)
    try:
        header = header_of(file) if file else None
    except (LlmconvError, OSError):
        header = None
    return (header.metadata, list(header.tensors)) if header else ({}, [])


def open_ranks(path: Path, config: Mapping[str, Any]) -> list[Mapping[str, LazyTensor]]:
    """Name to tensor of each tensor-parallel rank, with pipeline stages joined; one mapping if nothing is split.

    `path` is a folder, or one `.pdparams` or safetensors file. Raises InputRefused if there are no weights, or more
    than one kind of weight files, MalformedInput as `open_rank_files`.
    """
    if path.is_file():
        if RANK.fullmatch(path.name) or SHARD.fullmatch(path.name):
            raise InputRefused(f"`{path.name}` is one of several files", hint="give the folder that contains all")
        return [_state(path)]
    ranks, safe_ranks = _rank_files(path, ".pdparams"), _rank_files(path, ".safetensors")
    kinds = {
        WHOLE: (path / WHOLE).is_file(),
        PADDLE_INDEX: (path / PADDLE_INDEX).is_file(),
        "files of ranks": bool(ranks),
        "safetensors files of ranks": bool(safe_ranks),
        "safetensors": (path / SINGLE).is_file() or (path / INDEX).is_file() or bool(numbered(path)),
    }
    present = [kind for kind, found in kinds.items() if found]
    if len(present) > 1:
        raise InputRefused(
            f"`{path.name}` contains its weights more than once: {', '.join(present)}",
            hint="move the files that you do not want to another folder",
        )
    if not present:
        raise _no_weights(path)
    if ranks or safe_ranks:
        return open_rank_files(path, ranks or safe_ranks, config)
    if kinds["safetensors"]:
        return [as_bfloat16(open_safetensors(path))]
    return [_state(path / WHOLE) if kinds[WHOLE] else _sharded(path)]


def _rank_files(folder: Path, suffix: str) -> dict[tuple[int, int], Path]:
    """Files with this suffix by tensor-parallel rank and pipeline stage."""
    return {
        (int(match[1] or 0), int(match[2] or 0)): entry
        for entry in folder.iterdir()
        if (match := RANK.fullmatch(entry.name)) and (match[1] or match[2]) and entry.suffix == suffix
    }


def _no_weights(folder: Path) -> InputRefused:
    if any(SHARD.fullmatch(entry.name) for entry in folder.iterdir()):
        return MalformedInput(f"`{folder.name}` has shards, but no `{PADDLE_INDEX}`", hint="copy the index too")
    if list(folder.glob("master_weights*.safetensors")):
        return UnsupportedInput(
            f"`{folder.name}` contains only the optimizer's copies of the weights (`master_weights`)",
            hint="save the model without `skip_save_model_weight`",
        )
    return InputRefused(f"`{folder.name}` contains no weights of PaddleNLP", hint=f"it needs `{WHOLE}` or its shards")


def _state(file: Path) -> Mapping[str, LazyTensor]:
    """The tensors of one `.pdparams` or safetensors file."""
    if not file.is_file():
        raise MalformedInput(f"`{file.name}` is missing from `{file.parent.name}`", hint="copy the folder again")
    if file.suffix == ".safetensors":
        return as_bfloat16(read_header(file).tensors)
    if not is_pdparams(file):
        raise MalformedInput(
            f"`{file.name}` contains no arrays as `paddle.save` writes them",
            hint="copy it again from where it was saved",
        )
    tensors = open_pdparams(file).tensors
    if any(name.endswith(("_moment1_0", "_moment2_0", "_pow_acc_0")) for name in tensors):
        raise UnsupportedInput(f"`{file.name}` is the state of an optimizer", hint=f"give the model's `{WHOLE}`")
    return tensors


def _sharded(folder: Path) -> Mapping[str, LazyTensor]:
    tensors: dict[str, LazyTensor] = {}
    for shard, listed in indexed_shards(folder, PADDLE_INDEX, lambda name: bool(SHARD.fullmatch(name))).items():
        found = _state(folder / shard)
        require_listed(shard, found, listed, PADDLE_INDEX)
        tensors.update(found)
    return tensors


def open_rank_files(
    folder: Path, files: Mapping[tuple[int, int], Path], config: Mapping[str, Any]
) -> list[Mapping[str, LazyTensor]]:
    """Name to tensor of each tensor-parallel rank, the same names in all, with pipeline stages joined.

    `files` is by tensor-parallel rank and pipeline stage; `config` is Paddle's, whose `tensor_parallel_degree` shows
    whether the last ranks are missing. Raises MalformedInput if one is, or the files belong to different runs.
    """
    degree = config.get("tensor_parallel_degree")
    count = max(max(tp for tp, _ in files) + 1, min(degree, 1000) if type(degree) is int else 1)
    stages = max(pp for _, pp in files) + 1
    missing = [(tp, pp) for tp in range(count) for pp in range(stages) if (tp, pp) not in files]
    if missing:
        tp, pp = missing[0]
        raise MalformedInput(
            f"`{folder.name}` lacks the files of {len(missing)} of {count * stages} ranks, the first is tensor-parallel"
            f" {tp}, pipeline {pp}",
            hint="copy the missing files; all ranks are needed",
        )
    ranks = [_stages([files[tp, pp] for pp in range(stages)]) for tp in range(count)]
    for tp, rank in enumerate(ranks):
        different = sorted(set(rank) ^ set(ranks[0]))
        if different:
            raise MalformedInput(
                f"`{files[tp, 0].name}` and `{files[0, 0].name}` differ in {len(different)} tensors: "
                + listing(different),
                hint="the files belong to different runs; copy the folder again",
            )
    return ranks


def _stages(files: list[Path]) -> Mapping[str, LazyTensor]:
    """The tensors of all pipeline stages; a tensor in two stages (a tied embedding) must be equal in both."""
    tensors: dict[str, LazyTensor] = {}
    for file in files:
        for name, tensor in _state(file).items():
            difference = MalformedInput(
                f"`{name}` of `{file.name}` differs from that of an earlier stage",
                hint="the files belong to different runs; copy the folder again",
            )
            first = tensors.setdefault(name, tensor)
            if (first.dtype, first.shape) != (tensor.dtype, tensor.shape):
                raise difference
            if first is not tensor:
                tensors[name] = replicated([first, tensor], difference)
    return tensors
