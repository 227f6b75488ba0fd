"""Plan: all files that a run will write, with every name, shape and size known before the first is written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmconv.checkpoint import ADAPTER_CONFIG, ADAPTER_FOLDER, ADAPTER_WEIGHTS, INDEX, Checkpoint
from llmconv.errors import InputRefused, MalformedInput, UsageProblem
from llmconv.files.safetensors_file import NAME_LIMIT, file_of, safetensors_pieces
from llmconv.tensors import Container, LazyTensor

MODEL = "model"  # beginning of the names of weight files in a Hugging Face folder
DEFAULT_SIZE = "5GB"  # default size of a shard, as in huggingface_hub

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class Shard:
    """One file to write."""

    name: str
    tensors: Mapping[str, LazyTensor]  # in order
    container: Container = safetensors_pieces  # the format of the file
    copy_of: Path | None = None  # an existing file with exactly these tensors, which is copied instead
    prefix: str = ""  # of the names of its tensors outside of the file, such as `2_Dense.` for a module after the model

    def __repr__(self) -> str:
        return f"<Shard {self.name}: {len(self.tensors)} tensors, {self.nbytes:,} bytes>"

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class Plan:
    """The files that a run will write; printed by `--dry-run`.

    Attributes:
        checkpoint: the source of the tensors.
        shards: the files with tensors.
        small_files: other files, name to content, in the order of writing.
        warnings: parts of the source that the output lacks, one line each.
        found: the output was complete before the run, which wrote nothing.
        part: the part of the output, such as `3/16`, whose shards these are; nothing was published.
    """

    checkpoint: Checkpoint
    shards: tuple[Shard, ...]
    small_files: Mapping[str, bytes] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    found: bool = False
    part: str = ""

    def __repr__(self) -> str:
        count = sum(len(shard.tensors) for shard in self.shards)
        return f"<Plan {self.checkpoint.kind}: {count} tensors, {self.nbytes:,} bytes in {len(self.shards)} file(s)>"

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data in all shards."""
        return sum(shard.nbytes for shard in self.shards)


def plan_checkpoint(
    checkpoint: Checkpoint,
    max_shard_size: str | int = DEFAULT_SIZE,
    stem: str = MODEL,
    parts: Mapping[str, int] | None = None,
) -> Plan:
    """Plans a Hugging Face folder.

    A shard whose tensors are unchanged is planned as a copy of their file.

    Args:
        checkpoint: the tensors, in order.
        max_shard_size: maximum size of a shard (a larger tensor gets its own), in bytes or as `5GB`. `keep` keeps the
            shards of a Hugging Face folder, and means `5GB` for other sources.
        stem: beginning of the names of the files.
        parts: numbers by name of a tensor (0 if it has none); tensors of different numbers are not in one file.

    Raises:
        UsageProblem: `max_shard_size` is not a size such as `5GB`.
        InputRefused: there are no tensors, or one has a name that cannot be written.
    """
    if not checkpoint and not checkpoint.adapter:
        raise InputRefused(f"`{checkpoint.path}` contains no tensors", hint="look at it with `llmconv inspect`")
    kept = _is_kept(max_shard_size)
    limit = parse_size(DEFAULT_SIZE if kept else max_shard_size)
    for name in checkpoint:
        _check_name(checkpoint.path, name)
    modules = {name: home for name, home in checkpoint.files.items() if "/" in home and name in checkpoint}
    groups = []
    for part in _divided({n: t for n, t in checkpoint.items() if n not in modules}, parts or {}):
        groups += by_source(part, checkpoint.files, limit) if kept else by_size(part, limit)
    shards = tuple(
        Shard(_shard_name(stem, number, len(groups)), group, copy_of=file_of(group))
        for number, group in enumerate(groups, 1)
    )
    small_files = _small_files(checkpoint, shards, stem)
    shards += tuple(_module(checkpoint, home) for home in dict.fromkeys(modules.values()))
    if checkpoint.adapter:
        place = f"{ADAPTER_FOLDER}/" if shards else ""
        shards = (*shards, Shard(place + ADAPTER_WEIGHTS, checkpoint.adapter.tensors))
        small_files[place + ADAPTER_CONFIG] = json_bytes(checkpoint.adapter.config)
    return Plan(checkpoint, shards, small_files)


def _module(checkpoint: Checkpoint, home: str) -> Shard:
    """The file of a module after the model, such as `2_Dense/model.safetensors`, with names as in the source."""
    prefix = f"{home.rpartition('/')[0]}."
    names = [name for name, place in checkpoint.files.items() if place == home]
    tensors = {name.removeprefix(prefix): checkpoint[name] for name in names}
    return Shard(home, tensors, copy_of=file_of(tensors), prefix=prefix)


def _divided(tensors: Mapping[str, LazyTensor], parts: Mapping[str, int]) -> list[Group]:
    """The tensors of each number in `parts`."""
    numbers = sorted({parts.get(name, 0) for name in tensors})
    return [{name: t for name, t in tensors.items() if parts.get(name, 0) == number} for number in numbers]


def _check_name(path: Path, name: str) -> None:
    """Refuses a name that safetensors readers do not accept."""
    if not name or name == "__metadata__" or len(name) > NAME_LIMIT or not name.isprintable():
        raise MalformedInput(
            f"`{path.name}` has a tensor named {name[:40]!r}, which is invalid in safetensors",
            hint="save the model with its own names; is the file damaged or hostile?",
        )


def _shard_name(stem: str, number: int, count: int) -> str:
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{number:05}-of-{count:05}.safetensors"


def require_shard_size(max_shard_size: str | int) -> None:
    """Raises UsageProblem for anything but `keep`, a size such as `5GB`, or positive bytes; before anything is read."""
    if not _is_kept(max_shard_size):
        parse_size(max_shard_size)


def _is_kept(max_shard_size: str | int) -> bool:
    return str(max_shard_size).lower() == KEEP


def parse_size(text: str | int) -> int:
    """Bytes of a size such as `5GB`, `500MB` or `1000` in decimal units; raises UsageProblem for another, or zero."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B?)", str(text).strip().upper())
    size = (
        int(float(match[1]) * UNITS[match[2] if match[2].endswith("B") or not match[2] else match[2] + "B"])
        if match
        else 0
    )
    if size <= 0:
        raise UsageProblem(f"invalid size `{text}`", hint="write it as `5GB` or `500MB`")
    return size


def _small_files(checkpoint: Checkpoint, shards: Sequence[Shard], stem: str) -> dict[str, bytes]:
    """Side files, `config.json` if there is a model, and last the index."""
    files = dict(checkpoint.side_files)
    if shards:
        files["config.json"] = json_bytes(checkpoint.config)
    if len(shards) > 1:
        weight_map = {name: shard.name for shard in shards for name in shard.tensors}
        metadata = {"total_size": sum(shard.nbytes for shard in shards)}
        files[INDEX.replace(MODEL, stem, 1)] = json_bytes({"metadata": metadata, "weight_map": weight_map})
    return files


def json_bytes(content: Any) -> bytes:
    try:
        return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON has to escape
        return (json.dumps(content, indent=2) + "\n").encode()


KEEP = "keep"  # instead of a size: keep the files of the source

Group = dict[str, LazyTensor]


def by_size(tensors: Mapping[str, LazyTensor], limit: int) -> list[Group]:
    """Groups tensors in order into files of at most `limit` bytes; a larger tensor gets its own."""
    groups: list[Group] = []
    size = 0
    for name, tensor in tensors.items():
        if not groups or size + tensor.nbytes > limit:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor.nbytes
    return groups


def by_source(tensors: Mapping[str, LazyTensor], files: Mapping[str, str], limit: int) -> list[Group]:
    """Groups tensors in order by their source files; a new tensor joins the previous one's file if it fits.

    `files` maps tensors to their file in the source; `limit`, in bytes, is at least the size of the largest source
    file.
    """
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        if name in files:
            sizes[files[name]] = sizes.get(files[name], 0) + tensor.nbytes
    room = max([limit, *sizes.values()])
    groups: dict[str, Group] = {}
    home = next(iter(sizes), "")
    for name, tensor in tensors.items():
        home = files.get(name, home)
        if name not in files:
            while sizes.get(home) and sizes[home] + tensor.nbytes > room:
                home += "+"
            sizes[home] = sizes.get(home, 0) + tensor.nbytes
        groups.setdefault(home, {})[name] = tensor
    return list(groups.values())
