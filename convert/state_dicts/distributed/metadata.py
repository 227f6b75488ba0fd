"""Reads the `.metadata` of a distributed checkpoint: its items and their location in files.

Layout (pytorch `torch/distributed/checkpoint/metadata.py`, `filesystem.py`): a pickle of `Metadata`:
`state_dict_metadata` {name: tensor (properties, size, chunks) or bytes}, `storage_data` {index (fqn, offset): (file,
offset, length)}, `planner_data` {name: path in the nested dict}. Torch 1.13 to 2.13 spell the fields the same way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, NoReturn

from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.files.pickle_machine import Stub
from llmconv.files.pickle_reader import RANK_LIMIT, Global, read_pickle
from llmconv.files.source_file import open_source
from llmconv.tensors import BY_NAME, DType

FILE = ".metadata"
MEGATRON_METADATA = "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"
"""Megatron core's subclass of torch's `Metadata` (0.15 and before), with more fields for its optimizer."""

SIZE_LIMIT = 512 << 20
DEPTH_LIMIT = 64
"""Maximum number of keys from the root of the nested dict to a leaf; a tokenizer's JSON is the deepest in use."""

KeyPath = tuple[str | int, ...]
"""The keys that lead to an item of the nested dict."""


class BlobLocation(NamedTuple):
    """Bytes `start:start + length` of one file of the folder; `transforms` names their compression or encryption."""

    file: str
    start: int
    length: int
    transforms: tuple[str, ...] = ()


class Chunk(NamedTuple):
    """A box of a tensor: its first element, its sizes, and the location of its blob."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    location: BlobLocation


@dataclass(frozen=True, eq=False)
class TensorItem:
    """A tensor in chunks; `dtype` is None if safetensors does not have `kind`, torch's name of the dtype."""

    dtype: DType | None
    kind: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, eq=False)
class BytesItem:
    """A value that is not a tensor, saved separately."""

    location: BlobLocation


StoredItem = TensorItem | BytesItem


@dataclass(frozen=True)
class Metadata:
    """The items by their path in the nested dict, in the saved order, and the `version` of the layout."""

    items: dict[KeyPath, StoredItem] = field(repr=False)
    version: str


def read_metadata(folder: Path) -> Metadata:
    """The checked `.metadata` of `folder`; no other file is opened.

    Raises MalformedInput if it is damaged, hostile or contradictory, UnsupportedInput if another library wrote it, or
    it is in torch's safetensors variant.
    """
    stat = (folder / FILE).stat()
    if stat.st_size > SIZE_LIMIT:
        refuse(folder, f"has a `{FILE}` of {stat.st_size} bytes, over the limit of {SIZE_LIMIT}")
    return _read(folder, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4)
def _read(folder: Path, _size: int, _changed: int) -> Metadata:
    """Cached, because a folder is read for detection and again when it is opened."""
    whole = read_pickle((folder / FILE).read_bytes(), FILE)
    if isinstance(whole, Stub) and str(whole.function) == MEGATRON_METADATA:
        whole = Stub(Global("torch.distributed.checkpoint.metadata", "Metadata"), whole.args, whole.state)
    fields = _fields(folder, whole, "Metadata")
    described, paths = fields.get("state_dict_metadata"), fields.get("planner_data") or {}
    if not isinstance(described, dict) or not isinstance(paths, dict):
        refuse(folder, f"has a `{FILE}` that lists no items")
    locations = _locations(folder, fields.get("storage_data"))
    items: dict[KeyPath, StoredItem] = {}
    for name, entry in described.items():
        path = _path(folder, name, paths.get(name, (name,)))
        if path in items:
            refuse(folder, f"has a duplicate key {shown(name)}")
        items[path] = _item(folder, name, entry, locations)
    return Metadata(items, str(fields.get("version") or "")[:20])


def _fields(folder: Path, value: Any, kind: str) -> dict[Any, Any]:
    """The fields of an object of torch's class `kind`, whatever its module is in this version of torch."""
    fields = value.state if is_kind(value, kind) else None
    if not isinstance(fields, dict):
        refuse(folder, f"has a `{FILE}` with an invalid `{kind}`")
    return fields


def is_kind(value: Any, kind: str) -> bool:
    """Whether `value` is the inert stub of an object of torch's distributed class `kind`."""
    known = isinstance(value, Stub) and isinstance(value.function, Global) and value.function.name == kind
    return known and value.function.module.startswith("torch.distributed.")


def _path(folder: Path, name: Any, path: Any) -> KeyPath:
    if not isinstance(name, str) or not isinstance(path, tuple) or not 0 < len(path) <= DEPTH_LIMIT:
        refuse(folder, f"has no valid key in the nested dict for item {shown(name)}")
    if not all(isinstance(key, str) or (type(key) is int and key >= 0) for key in path):
        refuse(folder, f"has an invalid key for item {shown(name)}")
    return path


def _locations(folder: Path, stored: Any) -> dict[tuple[str, str], BlobLocation]:
    """The location of each chunk, by name and first element; no two share a byte.

    Raises UnsupportedInput if the files are safetensors inside.
    """
    if not isinstance(stored, dict):
        refuse(folder, f"has a `{FILE}` without `storage_data`")
    locations: dict[tuple[str, str], BlobLocation] = {}
    for index, entry in stored.items():
        key = _fields(folder, index, "MetadataIndex")
        name, offset = key.get("fqn"), key.get("offset")
        if not isinstance(name, str) or not (offset is None or _is_shape(offset)):
            refuse(folder, f"has a `{FILE}` with an invalid index")
        if (name, key_of(offset)) in locations:
            refuse(folder, f"has two locations for {shown(name)}")
        locations[name, key_of(offset)] = _location(folder, name, _fields(folder, entry, "_StorageInfo"))
    _check_apart(folder, locations.values())
    return locations


def _location(folder: Path, name: str, fields: Mapping[Any, Any]) -> BlobLocation:
    file: Any = fields.get("relative_path")
    span: Any = (fields.get("offset"), fields.get("length"))
    if not isinstance(file, str) or PurePosixPath(file).name != file or "\\" in file or not file.isprintable():
        refuse(folder, f"has the file {file!r:.80} for {shown(name)}, outside the folder")
    if not _are_sizes(span):
        refuse(folder, f"has {shown(name)} at invalid bytes of `{file}`")
    transforms = fields.get("transform_descriptors") or ()
    if not isinstance(transforms, list | tuple) or not all(isinstance(item, str) for item in transforms):
        refuse(folder, f"has invalid transforms of {shown(name)}")
    return BlobLocation(file, span[0], span[1], tuple(transforms))


def _check_apart(folder: Path, locations: Any) -> None:
    """Refuses overlapping items. Only torch's safetensors variant gives all tensors the same position."""
    spans: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for location in locations:
        spans[location.file].append((location.start, location.length))
    for file, found in spans.items():
        found.sort()
        for (start, length), (following, _) in zip(found, found[1:], strict=False):
            if start == following and length and _is_safetensors(folder / file, start):
                raise UnsupportedInput(
                    f"`{folder.name}` was saved with `SerializationFormat.SAFETENSORS`, which torch cannot read back",
                    hint="save it with torch's default format, or with its `HuggingFaceStorageWriter`",
                )
            if start + length > following:
                refuse(folder, f"has items that overlap at byte {following} of `{file}`")


def _is_safetensors(path: Path, start: int) -> bool:
    if not path.is_file():
        return False
    with open_source(path) as file:
        file.seek(start)
        return file.read(9)[8:] == b"{"


def _item(
    folder: Path, name: str, entry: Any, locations: Mapping[tuple[str, str], BlobLocation]
) -> TensorItem | BytesItem:
    if is_kind(entry, "BytesStorageMetadata"):
        return BytesItem(_stored(folder, locations, name, None))
    fields = _fields(folder, entry, "TensorStorageMetadata")
    shape: Any = fields.get("size")
    chunks: Any = fields.get("chunks")
    if not _is_shape(shape) or not isinstance(chunks, list):
        refuse(folder, f"has an invalid shape for {shown(name)}")
    if len({*map(id, chunks)}) < len(chunks):
        refuse(folder, f"has a duplicate chunk of {shown(name)}")
    boxes = [_fields(folder, chunk, "ChunkStorageMetadata") for chunk in chunks]
    pairs: list[Any] = [(box.get("offsets"), box.get("sizes")) for box in boxes]
    if not all(_is_shape(part) and len(part) == len(shape) for pair in pairs for part in pair):
        refuse(folder, f"has chunks of {shown(name)} with an invalid shape")
    kind = _dtype(folder, name, fields.get("properties"))
    placed = tuple(Chunk(start, sizes, _stored(folder, locations, name, start)) for start, sizes in pairs)
    return TensorItem(BY_NAME.get(kind), kind, shape, placed)


def _stored(
    folder: Path, locations: Mapping[tuple[str, str], BlobLocation], name: str, offset: tuple[int, ...] | None
) -> BlobLocation:
    if (name, key_of(offset)) not in locations:
        refuse(folder, f"has no storage location for {shown(name)}")
    return locations[name, key_of(offset)]


def key_of(offset: tuple[int, ...] | None) -> str:
    """An offset as text, so that a hostile file cannot choose its hash."""
    return "" if offset is None else repr(offset)


def _dtype(folder: Path, name: str, properties: Any) -> str:
    """Torch's name of the dtype: the first field of `TensorProperties`."""
    state = properties.state if is_kind(properties, "TensorProperties") else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, Global) or dtype.module != "torch":
        refuse(folder, f"has no element type for {shown(name)}")
    return dtype.name


def _are_sizes(values: Any) -> bool:
    return isinstance(values, tuple) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def _is_shape(values: Any) -> bool:
    return _are_sizes(values) and len(values) <= RANK_LIMIT


def shown(name: Any) -> str:
    """A name from the file, shortened and escaped for a message of one line."""
    text = str(name) if isinstance(name, str | int) else "without a name"
    return f"`{text[:120]}`" if text.isprintable() else f"{text[:120]!r}"


def refuse(folder: Path, problem: str) -> NoReturn:
    """Raises the error for an inconsistent folder."""
    raise MalformedInput(
        f"`{folder.name}` {problem}", hint="it was not written by torch's distributed checkpoint, or was changed since"
    )
