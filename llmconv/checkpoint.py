"""Checkpoint: a read-only mapping from tensor name to LazyTensor, with its config and side files."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmconv.errors import InputRefused, MalformedInput
from llmconv.safetensors_io import FileTensor, read_header
from llmconv.tensors import LazyTensor

JSON_BYTES = 32 << 20
SMALL_BYTES = 256 << 20
"""Ten times the largest index of shards, and the largest tokenizer; parsed JSON takes up to twenty times as much."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
ADAPTER_FOLDER = "adapter"
"""Where the two files of an adapter lie beside a model; without one they lie in the folder itself."""

SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""Small files that travel with a model, by name: never code, never weights."""


@dataclass(frozen=True, eq=False)
class Checkpoint(Mapping[str, LazyTensor]):
    """Tensors by Hugging Face name, read lazily.

    Attributes:
        path: the file or folder it was opened from.
        format: how it was stored, such as `hf`, `composer`, `meta`.
        tensors: name to LazyTensor, in file order.
        config: the content of `config.json`.
        side_files: tokenizer and generation files, by plain file name.
        warnings: what a user should know, one line each.
        source_type: what the writer calls the kind of model that `config` calls `model_type`, such as `chatglm_v2`.
        version: what the files tell of their writer, such as `composer 0.32.1`; empty where they tell nothing.
        shards: files that the weights lie in.
        adapter: a PEFT adapter of this model that stays apart: its tensors, and as `config` its `adapter_config.json`.
        files: in a Hugging Face folder, the names of tensors to those of the files that they lie in.
        dropped: what is in the files and not in `tensors`, one phrase each, such as `the optimizer's state`.
    """

    path: Path
    format: str
    tensors: Mapping[str, LazyTensor]
    config: dict[str, Any]
    side_files: Mapping[str, bytes] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    version: str = ""
    shards: int = 1
    dropped: tuple[str, ...] = ()
    source_type: str = ""
    adapter: Checkpoint | None = None
    files: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> LazyTensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def kind(self) -> str:
        """The model's type for people: `llama`, or `chatglm_v2 as glm` where the writer calls it otherwise."""
        model_type = str(self.config.get("model_type") or "unknown")
        return f"{self.source_type} as {model_type}" if self.source_type not in ("", model_type) else model_type

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a Hugging Face folder (one safetensors file, or shards with an index).

    Raises:
        InputRefused: no `config.json` or no safetensors weights in `path`.
        MalformedInput: a header or the index does not add up.
    """
    if not (path / "config.json").is_file():
        raise InputRefused(
            f"`{path}` is not a Hugging Face model folder: it has no `config.json`",
            hint="convert a training checkpoint first: `llmconv to-hf SOURCE -o OUT`",
        )
    config = read_json(path / "config.json")
    tensors = open_weights(path)
    files = {name: tensor.path.name for name, tensor in tensors.items() if isinstance(tensor, FileTensor)}
    side_files, version = read_side_files(path), _writer(config)
    return Checkpoint(
        path, "hf", tensors, config, side_files, version=version, shards=len({*files.values()}), files=files
    )


def _writer(config: dict[str, Any]) -> str:
    """What a `config.json` tells of the transformers that wrote it."""
    version = config.get("transformers_version")
    return f"transformers {version}" if isinstance(version, str) else ""


def open_weights(folder: Path) -> dict[str, LazyTensor]:
    """The tensors of a folder with `model.safetensors`, or with shards and an index.

    Raises:
        InputRefused: neither is there.
        MalformedInput: the index and the shards disagree.
    """
    if (folder / INDEX).is_file():
        return _open_shards(folder)
    if (folder / SINGLE).is_file():
        return dict(read_header(folder / SINGLE).tensors)
    raise InputRefused(
        f"`{folder}` holds no safetensors weights",
        hint=f"it needs `{SINGLE}`, or shards with `{INDEX}`; convert a training checkpoint first with `llmconv to-hf`",
    )


def _open_shards(folder: Path) -> dict[str, LazyTensor]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise MalformedInput(f"`{INDEX}` has no `weight_map`", hint="copy the folder again")
    tensors: dict[str, LazyTensor] = {}
    for shard in sorted({str(home) for home in weight_map.values()}):
        header = read_header(_shard_path(folder, shard))
        listed = {name for name, home in weight_map.items() if home == shard}
        if listed != set(header.tensors):
            odd = sorted(listed ^ set(header.tensors))
            raise MalformedInput(
                f"`{INDEX}` and `{shard}` disagree about {len(odd)} tensors, first `{odd[0]}`",
                hint="shards of different models are mixed; copy the folder again",
            )
        tensors.update(header.tensors)
    return tensors


def _shard_path(folder: Path, shard: str) -> Path:
    if Path(shard).name != shard or not shard.endswith(".safetensors"):
        raise MalformedInput(
            f"`{INDEX}` names the shard {shard!r}", hint="shards are plain file names beside the index"
        )
    if not (folder / shard).is_file():
        raise MalformedInput(f"shard `{shard}` is missing from `{folder}`", hint="copy the folder again")
    return folder / shard


def read_side_files(folder: Path) -> dict[str, bytes]:
    """Those of `SIDE_FILES` that lie in `folder`.

    Raises:
        MalformedInput: one is far larger than such files are, or a link that leads out of the folder.
    """
    return {name: read_small(_own_file(folder, name)) for name in SIDE_FILES if (folder / name).is_file()}


def _own_file(folder: Path, name: str) -> Path:
    """A file of `folder`, which is copied unread: a link to somebody's keys would publish them with the model."""
    path, home = folder / name, folder.resolve()
    target = path.resolve()
    in_hub_cache = home.parent.name == "snapshots" and target.is_relative_to(home.parent.parent / "blobs")
    if path.is_symlink() and not target.is_relative_to(home) and not in_hub_cache:
        raise MalformedInput(
            f"`{name}` in `{folder}` is a link that leads out of the folder, to `{target}`",
            hint="put a copy of the file in its place, if it is the one that belongs to the model",
        )
    return path


def read_small(path: Path, limit: int = SMALL_BYTES) -> bytes:
    """The content of a file that cannot be large.

    Raises:
        MalformedInput: it is, or it is no regular file (a pipe would never end).
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
        problem = f"has {found.st_size:,} bytes, too large" if stat.S_ISREG(found.st_mode) else "is no regular file"
        raise MalformedInput(f"`{path.name}` {problem}", hint="it is not what its name says; copy it again")
    return path.read_bytes()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        MalformedInput: not JSON, or not an object.
    """
    try:
        content = json.loads(read_small(path, JSON_BYTES).decode())
    except (ValueError, RecursionError) as error:
        raise MalformedInput(f"`{path.name}` is not valid JSON: {error}", hint="repair or replace the file") from error
    if not isinstance(content, dict):
        raise MalformedInput(f"`{path.name}` is not a JSON object", hint="repair or replace the file")
    return content
