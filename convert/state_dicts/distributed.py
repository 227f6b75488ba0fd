"""Opens a distributed checkpoint as a nested dict whose leaves are items; each is read only when it is needed.

Layout (pytorch `torch/distributed/checkpoint/metadata.py`, `filesystem.py`): `__RANK_N.distcp` files of `torch.save`
blobs, and `.metadata`, a pickle of `Metadata`: `state_dict_metadata` {name: tensor (properties, size, chunks) or
bytes}, `storage_data` {index (fqn, offset): (file, offset, length)}, `planner_data` {name: path in the nested dict}.
Torch 1.13 to 2.13 spell the fields the same way.

Torch's `HuggingFaceStorageWriter` (`hf_storage.py`; NeMo Automodel and NeMo RL use it) writes no `.metadata`: each rank
has files `shard-RANK-model-NUMBER-of-COUNT.safetensors` with its boxes of tensors under the tensors' own names. Their
metadata has `DCP_SHARDING_INFO`, JSON `{name: {saved_offsets: [first element]}}`, with `global_shape` if stated.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, NoReturn

import numpy as np

from llmconv.checkpoint import HEADS
from llmconv.convert.algebra import reshaped
from llmconv.convert.models.transformers_source import EMBEDDINGS
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.files.pickle_machine import Stub
from llmconv.files.pickle_reader import RANK_LIMIT, Global, TensorRef, read_pickle
from llmconv.files.safetensors_file import Header
from llmconv.files.source_file import Version, open_source, version_of
from llmconv.files.torch_reader import TorchFile, open_torch_blob
from llmconv.not_a_model_folder import of_olmo_core
from llmconv.tensors import BY_NAME, Array, DType, LazyTensor

FILE = ".metadata"
# Megatron core's subclass of torch's `Metadata` (0.15 and before), with more fields for its optimizer
MEGATRON_METADATA = "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"
SIZE_LIMIT = 512 << 20
# Maximum number of keys from the root of the nested dict to a leaf; a tokenizer's JSON is the deepest in use
DEPTH_LIMIT = 64
KeyPath = tuple[str | int, ...]  # the keys that lead to an item of the nested dict


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


def read_metadata(folder: Path) -> tuple[dict[KeyPath, StoredItem], str]:
    """The items of `.metadata` by their path in the nested dict, in the saved order, and the version of the layout.

    Raises MalformedInput if it is damaged, hostile or contradictory, UnsupportedInput if another library wrote it, or
    it is in torch's safetensors variant.
    """
    stat = (folder / FILE).stat()
    if stat.st_size > SIZE_LIMIT:
        refuse(folder, f"has a `{FILE}` of {stat.st_size} bytes, over the limit of {SIZE_LIMIT}")
    return _read(folder, version_of(stat))


@lru_cache(maxsize=4)
def _read(folder: Path, _version: Version) -> tuple[dict[KeyPath, StoredItem], str]:
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
        path = paths.get(name, (name,))
        if not isinstance(name, str) or not isinstance(path, tuple) or not 0 < len(path) <= DEPTH_LIMIT:
            refuse(folder, f"has no valid key in the nested dict for item {shown(name)}")
        if not all(isinstance(key, str) or (type(key) is int and key >= 0) for key in path):
            refuse(folder, f"has an invalid key for item {shown(name)}")
        if path in items:
            refuse(folder, f"has a duplicate key {shown(name)}")
        items[path] = _item(folder, name, entry, locations)
    if not (version := str(fields.get("version") or "")[:20]):  # of torch before 2.8
        _check_order(folder, {key: item for key, item in items.items() if isinstance(item, TensorItem)})
    return items, version


RANK_FILE = re.compile(r"__(\d{1,9})_\d{1,9}\.distcp")


def _check_order(folder: Path, items: Mapping[KeyPath, TensorItem]) -> None:
    """Refuses tensors that FSDP 2 and tensor parallelism of torch before 2.5 both split along one dim.

    Tensor parallelism splits first, and these torches state the places of parts as if FSDP did (pytorch issue 129627).
    A tensor that both split along two dims shows the mesh: rank r has the column r % columns. A part of another one has
    then the place of its rank, where later torches state r % columns * rows + r // columns. Replicas and stages of a
    pipeline have the same ranks again, plus a multiple of rows * columns.
    """
    grids = {grid for item in items.values() if min(grid := _grid(item)) > 1}
    for keys, item in items.items() if grids else ():
        ranks = _ranks_in_order(item)
        if any([rank % (rows * columns) for rank in ranks] == list(range(rows * columns)) for rows, columns in grids):
            raise UnsupportedInput(
                f"{shown(keys[-1])} in `{folder.name}` is sharded twice along one dim by a torch before 2.5, whose "
                "files state another order of the parts than they have",
                hint="load and save the run with torch 2.5 or later, or save a full state dict where it was trained",
            )


def _ranks_in_order(item: TensorItem) -> list[int]:
    """The ranks that wrote the parts of a tensor, by their place along the only dim that is split; else empty."""
    split = [dim for dim in range(len(item.shape)) if len({chunk.offsets[dim] for chunk in item.chunks}) > 1]
    found = [RANK_FILE.fullmatch(chunk.location.file) for chunk in item.chunks]
    if len(split) != 1 or not all(found):
        return []
    placed = sorted((chunk.offsets, int(match[1])) for chunk, match in zip(item.chunks, found, strict=True) if match)
    return [rank for _, rank in placed]


def _grid(item: TensorItem) -> tuple[int, int]:
    """Rows and columns of the mesh, of a tensor whose parts rank r has at row r // columns, column r % columns."""
    places = [sorted({chunk.offsets[dim] for chunk in item.chunks}) for dim in range(len(item.shape))]
    if len(places) != 2:
        return 1, 1
    rows, columns = len(places[0]), len(places[1])
    for chunk in item.chunks:
        match = RANK_FILE.fullmatch(chunk.location.file)
        place = places[0].index(chunk.offsets[0]) * columns + places[1].index(chunk.offsets[1])
        if not match or int(match[1]) % (rows * columns) != place:
            return 1, 1
    return rows, columns


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


def _locations(folder: Path, stored: Any) -> dict[tuple[str, str], BlobLocation]:
    """Chunks' locations by name and first element, no byte shared; UnsupportedInput: safetensors inside."""
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
        if isinstance(entry, Stub) and str(entry.function).startswith("olmo_core."):
            raise of_olmo_core(folder.parent)
        fields = _fields(folder, entry, "_StorageInfo")
        file: Any = fields.get("relative_path")
        span: Any = (fields.get("offset"), fields.get("length"))
        if not isinstance(file, str) or PurePosixPath(file).name != file or "\\" in file or not file.isprintable():
            refuse(folder, f"has the file {file!r:.80} for {shown(name)}, outside the folder")
        if not _are_sizes(span):
            refuse(folder, f"has {shown(name)} at invalid bytes of `{file}`")
        transforms = fields.get("transform_descriptors") or ()
        if not isinstance(transforms, list | tuple) or not all(isinstance(item, str) for item in transforms):
            refuse(folder, f"has invalid transforms of {shown(name)}")
        locations[name, key_of(offset)] = BlobLocation(file, span[0], span[1], tuple(transforms))
    _check_apart(folder, locations.values())
    return locations


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
    # torch's dtype is the first field of `TensorProperties`
    properties: Any = fields.get("properties")
    state = properties.state if is_kind(properties, "TensorProperties") else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, Global) or dtype.module != "torch":
        refuse(folder, f"has no element type for {shown(name)}")
    placed = tuple(Chunk(start, sizes, _stored(folder, locations, name, start)) for start, sizes in pairs)
    return TensorItem(BY_NAME.get(dtype.name), dtype.name, shape, placed)


def _stored(
    folder: Path, locations: Mapping[tuple[str, str], BlobLocation], name: str, offset: tuple[int, ...] | None
) -> BlobLocation:
    if (name, key_of(offset)) not in locations:
        refuse(folder, f"has no storage location for {shown(name)}")
    return locations[name, key_of(offset)]


def key_of(offset: tuple[int, ...] | None) -> str:
    """An offset as text, so that a hostile file cannot choose its hash."""
    return "" if offset is None else repr(offset)


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


SUFFIX = ".distcp"
GAP_LIMIT = 64  # maximum number of missing elements of a list: torch does not store empty dicts


PARTS = {
    **dict.fromkeys(("optimizers", "optimizer", "optim", "optimizer_states"), "the optimizer's state"),
    **dict.fromkeys(("schedulers", "lr_scheduler", "lr_schedulers", "scheduler"), "the learning rate schedule"),
    **dict.fromkeys(("rng", "rng_state"), "the random number generators"),
    **dict.fromkeys(("dataloader", "dataset_state"), "the data loader's position"),
}


@dataclass(frozen=True)
class DistributedFolder:
    """An opened checkpoint of layout `version`; `tree`: the nested dict, lists as dicts by number, leaves items."""

    path: Path
    tree: Mapping[Any, Any]
    version: str

    @property
    def shards(self) -> int:
        """Number of files with data."""
        return sum(1 for entry in self.path.iterdir() if entry.name.endswith(SUFFIX))

    def tensor(self, name: str, item: TensorItem) -> LazyTensor:
        """The whole tensor of `item`; its chunks are opened when they are read.

        Raises MalformedInput if the chunks do not tile the tensor, or a file is missing or too short, UnsupportedInput
        for an element type that safetensors does not have, or compressed blobs.
        """
        if item.dtype is None:
            raise UnsupportedInput(
                f"tensor {shown(name)} in `{self.path.name}` has the unsupported element type `{item.kind}`",
                hint="only plain float, integer and bool tensors can be converted; dequantize it first",
            )
        if not is_tiled(item.shape, item.chunks):
            refuse(self.path, f"has chunks of {shown(name)} that overlap, leave a gap or lie outside of it")
        for chunk in item.chunks:
            self._check(chunk.location)
        return assemble(item.dtype, item.shape, item.chunks, lambda chunk: self._chunk(name, item, chunk))

    def elements(self, name: str, item: TensorItem, axes: int) -> dict[tuple[int, ...], LazyTensor]:
        """The tensors that are stacked in `item`, by their index along its first `axes` axes.

        Each chunk must be within one of them, else MalformedInput. Other errors as in `tensor`.
        """
        self.tensor(name, item)
        if item.dtype is None or any(chunk.sizes[:axes] != (1,) * axes for chunk in item.chunks):
            refuse(self.path, f"has chunks of {shown(name)} that span several of the tensors stacked in it")
        parts: dict[tuple[int, ...], dict[Chunk, Chunk]] = {}
        for chunk in item.chunks:
            flat = Chunk(chunk.offsets[axes:], chunk.sizes[axes:], chunk.location)
            parts.setdefault(chunk.offsets[:axes], {})[flat] = chunk

        def opened(whole: Mapping[Chunk, Chunk], flat: Chunk) -> LazyTensor:
            return reshaped(self._chunk(name, item, whole[flat]), flat.sizes)  # without leading axes of size 1

        return {
            index: assemble(item.dtype, item.shape[axes:], list(own), partial(opened, own))
            for index, own in sorted(parts.items())
        }

    def values(self, tree: Any) -> Any:
        """The part `tree` of the nested dict with its values read (InputRefused if unreadable); tensors stay items."""
        if isinstance(tree, BytesItem):
            return self._blob(tree.location).content
        if not isinstance(tree, dict):
            return tree
        read = {key: self.values(value) for key, value in tree.items()}
        if not read or not all(type(key) is int for key in read):
            return read
        if max(read) >= len(read) + GAP_LIMIT:
            refuse(self.path, f"has a list with an element {max(read)}, but only {len(read)} elements")
        return [read.get(index, {}) for index in range(max(read) + 1)]  # torch does not store empty dicts

    def _chunk(self, name: str, item: TensorItem, chunk: Chunk) -> LazyTensor:
        blob = self._blob(chunk.location)
        if not isinstance(blob.content, TensorRef):
            refuse(self.path, f"has no tensor in `{chunk.location.file}` for a chunk of {shown(name)}")
        tensor = blob.tensor(name, blob.content)
        if (tensor.shape, tensor.dtype) != (chunk.sizes, item.dtype):
            refuse(
                self.path,
                f"has a shape mismatch for a chunk of {shown(name)}: expected {list(chunk.sizes)} {item.kind}, "
                f"got {list(tensor.shape)} {tensor.dtype.name} in `{chunk.location.file}`",
            )
        return tensor

    def _blob(self, location: BlobLocation) -> TorchFile:
        return _opened(self.path / location.file, location.start, location.length, self._check(location))

    def _check(self, location: BlobLocation) -> Version:
        """Refuses, as `tensor`, a compressed blob or one outside its file; returns the file's version."""
        if location.transforms:
            raise UnsupportedInput(
                f"`{self.path.name}` was saved with the extension {shown(location.transforms[0])}",
                hint="compressed distributed checkpoints are unsupported; save it without extensions",
            )
        file = self.path / location.file
        if not file.is_file():
            raise MalformedInput(
                f"`{location.file}` is missing from `{self.path.name}`", hint="copy the whole folder, all ranks' files"
            )
        stat = file.stat()
        if location.start + location.length > stat.st_size:
            raise MalformedInput(
                f"`{location.file}` ends at byte {stat.st_size}, an item in it at {location.start + location.length}",
                hint="the file is truncated or belongs to another save; copy the folder again",
            )
        return version_of(stat)


@lru_cache(maxsize=1024)
def _opened(path: Path, start: int, length: int, _version: Version) -> TorchFile:
    """Cached, because rows of a chunk are read block by block."""
    return open_torch_blob(path, start, length)


def is_folder(path: Path) -> bool:
    """Whether `path` is the folder of a distributed checkpoint, complete or not."""
    return path.is_dir() and (_has_metadata(path) or any(entry.name.endswith(SUFFIX) for entry in path.iterdir()))


def _has_metadata(path: Path) -> bool:
    if not (path / FILE).is_file():
        return False
    with open_source(path / FILE) as file:
        head = file.read(200)
    return head.startswith(b"\x80") and b"torch.distributed." in head


def open_folder(path: Path) -> DistributedFolder:
    """Reads `.metadata` and opens no other file; MalformedInput if it is missing; errors as in `read_metadata`."""
    if not (path / FILE).is_file():
        if any(path.glob(f"__*{FILE}")):
            raise UnsupportedInput(
                f"each rank of `{path.name}` wrote its own `{FILE}` (`use_collectives=False`), which is unsupported",
                hint="load it with the torch that wrote it, and save it with `use_collectives=True`",
            )
        raise MalformedInput(
            f"`{path.name}` has {SUFFIX} files but no `{FILE}`, which describes them",
            hint="copy the hidden file too (`cp *` leaves it out); without it, the save was never finished",
        )
    items, version = read_metadata(path)
    root: dict[Any, Any] = {}  # by the paths stored with the items, not by the dots in names
    for keys, item in items.items():
        node = root
        for key in keys[:-1]:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                refuse(path, f"has an item nested in the item {shown(key)}")
        if keys[-1] in node:
            refuse(path, f"has an item {shown(keys[-1])} that also contains items")
        node[keys[-1]] = item
    return DistributedFolder(path, root, version)


def named_leaves(tree: Any, above: KeyPath = ()) -> Iterator[tuple[KeyPath, StoredItem]]:
    """The items of a part of the nested dict, each with its keys from there on."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from named_leaves(value, (*above, key))
    else:
        yield above, tree


def sizes_of(parts: Mapping[Any, Any]) -> dict[str, int]:
    """Description to bytes, from `.metadata`, of the parts of a nested dict; nothing is read."""
    sizes: Counter[str] = Counter()
    for name, tree in parts.items():
        for _, item in named_leaves(tree):
            places = [item.location] if isinstance(item, BytesItem) else [chunk.location for chunk in item.chunks]
            sizes[PARTS.get(name, shown(name))] += sum(place.length for place in places)
    return dict(sizes)


CELL_LIMIT = 1 << 22  # maximum number of cells between all boundaries of all chunks; a regular grid has one per chunk


def is_tiled(shape: Sequence[int], chunks: Sequence[Chunk]) -> bool:
    """Whether the chunks cover a tensor of `shape` exactly, without gap or overlap.

    Boundaries are numbered along each dim, so that a chunk is a box of whole cells; each cell must be in one box.
    """
    boxes = [chunk for chunk in chunks if prod(chunk.sizes)]
    if not prod(shape) or not boxes:
        return not boxes and not prod(shape)
    if sum(prod(chunk.sizes) for chunk in boxes) != prod(shape):
        return False
    spans: list[list[tuple[int, int]]] = []
    counts: list[int] = []
    for dim, size in enumerate(shape):
        edges = [(chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]) for chunk in boxes]
        number = {edge: index for index, edge in enumerate(sorted({edge for pair in edges for edge in pair}))}
        if max(number) > size:
            return False
        spans.append([(number[low], number[high]) for low, high in edges])
        counts.append(len(number) - 1)
    areas = [prod(span[index][1] - span[index][0] for span in spans) for index in range(len(boxes))]
    if prod(counts) > CELL_LIMIT or sum(areas) != prod(counts):
        return False
    cells = np.zeros(counts, dtype=bool)
    for index in range(len(boxes)):
        cells[tuple(slice(*span[index]) for span in spans)] = True
    return bool(cells.all())


def assemble(
    dtype: DType, shape: tuple[int, ...], chunks: Sequence[Chunk], opened: Callable[[Chunk], LazyTensor]
) -> LazyTensor:
    """One tensor of chunks that tile it (`is_tiled`); `opened(chunk)` returns its tensor, only for chunks read."""
    boxes = [chunk for chunk in chunks if prod(chunk.sizes)]
    if not shape:
        return LazyTensor(dtype, shape, lambda start, stop: opened(boxes[0]).rows(start, stop))

    def load(start: int, stop: int) -> Array:
        needed = [box for box in boxes if box.offsets[0] < stop and box.offsets[0] + box.sizes[0] > start]
        if len(needed) == 1 and needed[0].sizes[1:] == shape[1:]:
            return opened(needed[0]).rows(start - needed[0].offsets[0], stop - needed[0].offsets[0])
        rows = np.empty((stop - start, *shape[1:]), dtype=dtype.numpy)
        for box in needed:
            low, high = max(start, box.offsets[0]), min(stop, box.offsets[0] + box.sizes[0])
            columns = (slice(at, at + size) for at, size in zip(box.offsets[1:], box.sizes[1:], strict=True))
            rows[(slice(low - start, high - start), *columns)] = opened(box).rows(
                low - box.offsets[0], high - box.offsets[0]
            )
        return rows

    return LazyTensor(dtype, shape, load)


SHARDING = "DCP_SHARDING_INFO"


def join_boxes(folder: Path, headers: Mapping[str, Header]) -> dict[str, LazyTensor]:
    """Whole tensors of the boxes in safetensors files of ranks, by file name; MalformedInput if they do not tile them.

    Without `global_shape` a tensor ends where its last box does, so files of the last rank that are missing make it
    shorter than the configuration says.
    """
    boxes: defaultdict[str, dict[Chunk, LazyTensor]] = defaultdict(dict)
    shapes: dict[str, tuple[int, ...]] = {}
    for file, header in headers.items():
        places = _places(folder, file, header)
        for name, tensor in header.tensors.items():
            start, shape = places[name]
            box = Chunk(start, tensor.shape, BlobLocation(file, len(boxes[name]), 0))
            boxes[name][box] = tensor
            ends = tuple(at + size for at, size in zip(start, tensor.shape, strict=True))
            shapes[name] = shape or tuple(map(max, shapes.get(name, ends), ends))
    for name, parts in boxes.items():
        kinds = {tensor.dtype for tensor in parts.values()}
        if len(kinds) > 1 or not is_tiled(shapes[name], [*parts]):
            raise MalformedInput(
                f"the files of `{folder.name}` have parts of {shown(name)} that overlap or leave a gap",
                hint="the files of a rank are missing, or those of two saves are mixed; copy the folder again",
            )
    return {
        name: assemble(next(iter(parts.values())).dtype, shapes[name], [*parts], parts.__getitem__)
        for name, parts in boxes.items()
    }


def _places(folder: Path, file: str, header: Header) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """First element of each box in a file, and the shape of its tensor; empty where the file does not say it."""
    try:
        stated = json.loads(header.metadata.get(SHARDING, ""))
    except (ValueError, RecursionError):
        stated = None
    places = {}
    for name, tensor in header.tensors.items():
        own: Any = stated.get(name) if isinstance(stated, dict) else None
        own = own if isinstance(own, dict) else {}
        start, shape = own.get("saved_offsets"), own.get("global_shape") or []
        for values, ranks in ((start, {len(tensor.shape)}), (shape, {0, len(tensor.shape)})):
            if not isinstance(values, list) or not _are_sizes(tuple(values)) or len(values) not in ranks:
                raise MalformedInput(
                    f"`{file}` in `{folder.name}` does not say in `{SHARDING}` which part of {shown(name)} it has",
                    hint="the file was written again by another program; copy the folder again",
                )
        places[name] = tuple(start), tuple(shape)
    return places


META_EMBEDDING = "tok_embeddings.weight"
FOLDER_DEPTH = 4
BASE = re.compile(
    r"^((?:.*?\.)?)(?:model|transformer|gpt_neox)\.(?:decoder\.|language_model\.)?"
    r"(?:embed_tokens|wte|word_embeddings|embed_in)\.weight$"
)
"""Names of the embedding in Hugging Face models; the first group is the prefix that a trainer's module added."""


def roots(
    tree: Mapping[Any, Any], above: tuple[str, ...] = (), *, own_names: bool = False
) -> dict[tuple[str, ...], Mapping[Any, Any]]:
    """Language models' state dicts by keys in `tree` (below `above`); `own_names`: any but an optimizer's."""
    tensors = [str(key) for key, item in tree.items() if isinstance(item, TensorItem)]
    named = [name for name in tensors if own_names or name.endswith((*EMBEDDINGS, META_EMBEDDING))]
    found = {above: tree} if named else {}
    if len(above) < FOLDER_DEPTH:
        for key, inner in tree.items():
            if isinstance(inner, dict) and key not in PARTS:
                found |= roots(inner, (*above, str(key)), own_names=own_names)
    return found


def is_meta_named(state: Mapping[Any, Any]) -> bool:
    """Whether the model has Meta's own names (torchtitan's models), not Hugging Face's."""
    return any(str(key).endswith(META_EMBEDDING) for key in state)


def prefix_of(names: Collection[str]) -> str:
    """The prefix that a trainer's module gave the model's names, such as `model.` of a LightningModule."""
    for end in (*HEADS, META_EMBEDDING):
        for name in names:
            if f".{name}".endswith(f".{end}"):
                return name.removesuffix(end)
    return next((match[1] for name in names if (match := BASE.match(name))), "")


def outside(names: Collection[str], prefix: str) -> list[str]:
    """Names outside the model: those that do not begin as the embedding, the head or an MTP head does."""
    ends = tuple(f".{end}" for end in (*EMBEDDINGS, *HEADS))
    own = {"mtp", *(name.removeprefix(prefix).partition(".")[0] for name in names if f".{name}".endswith(ends))}
    return [
        name for name in names if not name.startswith(prefix) or name.removeprefix(prefix).partition(".")[0] not in own
    ]
