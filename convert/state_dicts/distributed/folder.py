"""Opens a distributed checkpoint as a nested dict whose leaves are items; each is read only when it is needed.

Layout (pytorch `torch/distributed/checkpoint`): `.metadata`, and `__RANK_N.distcp` files of `torch.save` blobs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.convert.models.blueprint.names import EMBEDDINGS, HEADS
from llmconv.convert.state_dicts.distributed.metadata import (
    FILE,
    BlobLocation,
    BytesItem,
    Chunk,
    KeyPath,
    StoredItem,
    TensorItem,
    read_metadata,
    refuse,
    shown,
)
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.files.pickle_reader import TensorRef
from llmconv.files.safetensors_file import FileTensor
from llmconv.files.source_file import open_source
from llmconv.files.torch_reader import TorchFile, open_torch_blob
from llmconv.tensors import Array, DType, LazyTensor

SUFFIX = ".distcp"
GAP_LIMIT = 64
"""Maximum number of missing elements of a list: torch does not store empty dicts."""


OPTIMIZER, SCHEDULER, GENERATORS = "the optimizer's state", "the learning rate schedule", "the random number generators"
PARTS = {
    "optimizers": OPTIMIZER,
    "optimizer": OPTIMIZER,
    "optim": OPTIMIZER,
    "optimizer_states": OPTIMIZER,
    "schedulers": SCHEDULER,
    "lr_scheduler": SCHEDULER,
    "lr_schedulers": SCHEDULER,
    "scheduler": SCHEDULER,
    "rng": GENERATORS,
    "rng_state": GENERATORS,
    "dataloader": "the data loader's position",
    "dataset_state": "the data loader's position",
}


@dataclass(frozen=True)
class DistributedFolder:
    """An opened distributed checkpoint; `version` is that of the layout.

    In `tree`, the saved nested dict, lists are dicts with integer keys, leaves are items.
    """

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
        return {
            index: assemble(item.dtype, item.shape[axes:], list(own), self._opener(name, item, own))
            for index, own in sorted(parts.items())
        }

    def _opener(self, name: str, item: TensorItem, whole: Mapping[Chunk, Chunk]) -> Callable[[Chunk], LazyTensor]:
        """Opens a chunk without its leading axes, all of size 1."""
        return lambda flat: reshaped(self._chunk(name, item, whole[flat]), flat.sizes)

    def values(self, tree: Any) -> Any:
        """The part `tree` of the nested dict with its values read (InputRefused if unreadable); tensors stay items."""
        if isinstance(tree, BytesItem):
            return self._blob(tree.location).content
        if not isinstance(tree, dict):
            return tree
        read = {key: self.values(value) for key, value in tree.items()}
        return self._list(read) if read and all(type(key) is int for key in read) else read

    def _list(self, read: dict[int, Any]) -> list[Any]:
        """The list with these elements; missing ones are empty dicts, which torch does not store."""
        if max(read) >= len(read) + GAP_LIMIT:
            refuse(self.path, f"has a list with an element {max(read)}, but only {len(read)} elements")
        return [read.get(index, {}) for index in range(max(read) + 1)]

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

    def _check(self, location: BlobLocation) -> int:
        """Refuses, as `tensor`, a compressed blob or one outside its file; returns the file's modification time."""
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
        return stat.st_mtime_ns


@lru_cache(maxsize=1024)
def _opened(path: Path, start: int, length: int, _changed: int) -> TorchFile:
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
    metadata = read_metadata(path)
    return DistributedFolder(path, _nested(path, metadata.items), metadata.version)


def _nested(folder: Path, items: Mapping[tuple[Any, ...], StoredItem]) -> dict[Any, Any]:
    """The nested dict, by the paths stored with the items, not by the dots in names."""
    root: dict[Any, Any] = {}
    for path, item in items.items():
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                refuse(folder, f"has an item nested in the item {shown(key)}")
        if path[-1] in node:
            refuse(folder, f"has an item {shown(path[-1])} that also contains items")
        node[path[-1]] = item
    return root


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
        sizes[PARTS.get(name, shown(name))] += sum(_nbytes(item) for _, item in named_leaves(tree))
    return dict(sizes)


def _nbytes(item: StoredItem) -> int:
    """Bytes of an item in its files."""
    locations = [item.location] if isinstance(item, BytesItem) else [chunk.location for chunk in item.chunks]
    return sum(location.length for location in locations)


CELL_LIMIT = 1 << 22
"""Maximum number of cells between all boundaries of all chunks; a regular grid has one per chunk."""


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
    """One tensor of `dtype` and `shape` from chunks that tile it (see `is_tiled`).

    `opened` returns the tensor of a chunk, of `dtype` and the chunk's sizes; called only for chunks that are read.
    """
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


def reshaped(tensor: LazyTensor, shape: tuple[int, ...]) -> LazyTensor:
    """`tensor` with another shape of as many elements; one that lies contiguously in a file is read row by row."""
    if isinstance(tensor, FileTensor):
        return FileTensor(tensor.path, tensor.offset, tensor.dtype, shape, tensor.record)
    return LazyTensor(
        tensor.dtype,
        shape,
        lambda start, stop: np.ascontiguousarray(tensor.read().reshape(shape or (1,))[start:stop]),
    )


META_EMBEDDING = "tok_embeddings.weight"
DEPTH_LIMIT = 4
BASE = re.compile(
    r"^((?:.*?\.)?)(?:model|transformer|gpt_neox)\.(?:decoder\.|language_model\.)?"
    r"(?:embed_tokens|wte|word_embeddings|embed_in)\.weight$"
)
"""Names of the embedding in Hugging Face models; the first group is the prefix that a trainer's module added."""


def roots(
    tree: Mapping[Any, Any], above: tuple[str, ...] = (), *, own_names: bool = False
) -> dict[tuple[str, ...], Mapping[Any, Any]]:
    """The state dicts of language models in the nested dict `tree`, by their keys from the root on; skips optimizers.

    `above` are the keys that lead to `tree`. With `own_names` (of the model's own code) any state dict counts.
    """
    is_part = _is_tensor if own_names else _is_embedding
    found = {above: tree} if any(map(is_part, tree.items())) else {}
    if len(above) < DEPTH_LIMIT:
        for key, inner in tree.items():
            if isinstance(inner, dict) and key not in PARTS:
                found |= roots(inner, (*above, str(key)), own_names=own_names)
    return found


def _is_tensor(entry: tuple[Any, Any]) -> bool:
    return isinstance(entry[1], TensorItem)


def _is_embedding(entry: tuple[Any, Any]) -> bool:
    key, value = entry
    return isinstance(value, TensorItem) and str(key).endswith((*EMBEDDINGS, META_EMBEDDING))


def is_meta_named(state: Mapping[Any, Any]) -> bool:
    """Whether the model has Meta's own names (torchtitan's Llama), not Hugging Face's."""
    return any(str(key).endswith(META_EMBEDDING) for key in state)


def prefix_of(names: Collection[str]) -> str:
    """The prefix that a trainer's module gave the model's names, such as `model.` of a LightningModule."""
    for end in (*HEADS, META_EMBEDDING):
        for name in names:
            if f".{name}".endswith(f".{end}"):
                return name.removesuffix(end)
    return next((match[1] for name in names if (match := BASE.match(name))), "")


def outside(names: Collection[str], prefix: str) -> list[str]:
    """Names outside the model: those that do not begin as the embedding or the head does."""
    ends = tuple(f".{end}" for end in (*EMBEDDINGS, *HEADS))
    own = {name.removeprefix(prefix).partition(".")[0] for name in names if f".{name}".endswith(ends)}
    return [
        name for name in names if not name.startswith(prefix) or name.removeprefix(prefix).partition(".")[0] not in own
    ]
