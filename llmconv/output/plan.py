"""Plan: what a run would write, every name, shape and byte of it known before the first is written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmconv.checkpoint import ADAPTER_CONFIG, ADAPTER_FOLDER, ADAPTER_WEIGHTS, INDEX, SINGLE, Checkpoint
from llmconv.errors import InputRefused, MalformedInput, UsageProblem
from llmconv.files.safetensors_file import NAME_LIMIT, file_of, safetensors_pieces
from llmconv.output.sharding import KEEP, by_size, by_source
from llmconv.tensors import Container, LazyTensor

DEFAULT_SIZE = "5GB"
"""Of a shard, as in huggingface_hub."""

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class Shard:
    """One file to write.

    Attributes:
        name: of the file.
        tensors: in order.
        container: what a file of this kind has around them.
        copy_of: a file that holds exactly these tensors already, which is copied and not decoded.
    """

    name: str
    tensors: Mapping[str, LazyTensor]
    container: Container = safetensors_pieces
    copy_of: Path | None = None

    def __repr__(self) -> str:
        return f"<Shard {self.name}: {len(self.tensors)} tensors, {self.nbytes:,} bytes>"

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class Plan:
    """What a run would write; printed by `--dry-run`.

    Attributes:
        checkpoint: what the tensors are of.
        shards: the files with tensors.
        small_files: the files beside them, by name, in the order in which they are written.
        warnings: what the output does not hold, one line each.
        found: the output was complete before the run, which wrote nothing.
    """

    checkpoint: Checkpoint
    shards: tuple[Shard, ...]
    small_files: Mapping[str, bytes] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    found: bool = False

    def __repr__(self) -> str:
        count = sum(len(shard.tensors) for shard in self.shards)
        return f"<Plan {self.checkpoint.kind}: {count} tensors, {self.nbytes:,} bytes in {len(self.shards)} file(s)>"

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data in all shards."""
        return sum(shard.nbytes for shard in self.shards)


def plan_checkpoint(checkpoint: Checkpoint, max_shard_size: str | int = DEFAULT_SIZE) -> Plan:
    """A Hugging Face folder: the tensors in order, in shards of at most `max_shard_size` (a larger one gets its own).

    With `keep` the shards are those of the Hugging Face folder that the tensors come from, and of `5GB` where they come
    from elsewhere. A shard whose tensors pass unchanged is a copy of the file that they lie in.

    Raises:
        UsageProblem: `max_shard_size` is not a size such as `5GB`.
        InputRefused: there are no tensors, or one has a name that cannot be written.
    """
    if not checkpoint and not checkpoint.adapter:
        raise InputRefused(f"`{checkpoint.path}` holds no tensors", hint="look at it with `llmconv inspect`")
    kept = _is_kept(max_shard_size)
    limit = parse_size(DEFAULT_SIZE if kept else max_shard_size)
    for name in checkpoint:
        _check_name(checkpoint.path, name)
    groups = by_source(checkpoint, checkpoint.files, limit) if kept else by_size(checkpoint, limit)
    shards = tuple(
        Shard(_shard_name(number, len(groups)), group, copy_of=file_of(group)) for number, group in enumerate(groups, 1)
    )
    small_files = _small_files(checkpoint, shards)
    if checkpoint.adapter:
        place = f"{ADAPTER_FOLDER}/" if shards else ""
        shards = (*shards, Shard(place + ADAPTER_WEIGHTS, checkpoint.adapter.tensors))
        small_files[place + ADAPTER_CONFIG] = json_bytes(checkpoint.adapter.config)
    return Plan(checkpoint, shards, small_files)


def _check_name(path: Path, name: str) -> None:
    """A name that readers of safetensors accept."""
    if not name or name == "__metadata__" or len(name) > NAME_LIMIT or not name.isprintable():
        raise MalformedInput(
            f"`{path.name}` has a tensor of the name {name[:40]!r}, which safetensors cannot hold",
            hint="save the model under its own names; is it damaged or hostile?",
        )


def _shard_name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"


def require_shard_size(max_shard_size: str | int) -> None:
    """Refuses an impossible size before anything is read or traced, whether or not a shard is written.

    Args:
        max_shard_size: `keep`, or a size such as `5GB`, or bytes.

    Raises:
        UsageProblem: not of that form, zero, or negative.
    """
    if not _is_kept(max_shard_size):
        parse_size(max_shard_size)


def _is_kept(max_shard_size: str | int) -> bool:
    return str(max_shard_size).lower() == KEEP


def parse_size(text: str | int) -> int:
    """Bytes from a size such as `5GB`, `500MB` or `1000` (decimal units, as Hugging Face counts).

    Raises:
        UsageProblem: not of that form, zero, or negative.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B?)", str(text).strip().upper())
    size = (
        int(float(match[1]) * UNITS[match[2] if match[2].endswith("B") or not match[2] else match[2] + "B"])
        if match
        else 0
    )
    if size <= 0:
        raise UsageProblem(f"`{text}` is not a size of a file", hint="write it as `5GB` or `500MB`")
    return size


def _small_files(checkpoint: Checkpoint, shards: Sequence[Shard]) -> dict[str, bytes]:
    """Side files, `config.json` where there is a model, and last the index."""
    files = dict(checkpoint.side_files)
    if shards:
        files["config.json"] = json_bytes(checkpoint.config)
    if len(shards) > 1:
        weight_map = {name: shard.name for shard in shards for name in shard.tensors}
        metadata = {"total_size": sum(shard.nbytes for shard in shards)}
        files[INDEX] = json_bytes({"metadata": metadata, "weight_map": weight_map})
    return files


def json_bytes(content: Any) -> bytes:
    """The text of a JSON file."""
    try:
        return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # half a surrogate, which JSON can only escape
        return (json.dumps(content, indent=2) + "\n").encode()
