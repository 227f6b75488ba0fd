"""Weights of a model folder that lie in files of another format: an index of byte ranges, which graphs map.

`model.ranges.json`:

    {"files":   {"x.gguf": {"bytes": 2200119864, "header_bytes": 1709440, "header_sha256": "…", "sample_sha256": "…"}},
     "tensors": {"model.norm.weight": {"file": "x.gguf", "offset": 1709440, "dtype": "F32", "shape": [2048]}, …}}

`header_bytes` are those before the first tensor, and the sample is 256 blocks of 4096 bytes, evenly over the rest: a
file where these are others was replaced, as by another training of the same model. Ranges do not overlap. A tensor may
also have `pairs`, the number of rows of a head whose two halves alternate in the file (as llama.cpp and Meta store
queries and keys), and `add`, a number that is added to its values (norms of Gemma).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from math import isfinite, prod
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.errors import InputRefused, MalformedInput
from llmconv.files.safetensors_file import RANGES, FileTensor
from llmconv.tensors import BY_CODE, FLOATS, Array, LazyTensor

MOST_BYTES = 64 << 20  # of the index; one of 20,000 tensors has 3 MB
RANK_LIMIT = 4
SAMPLES, SAMPLE = 256, 4096  # number of hashed blocks of a file, and their bytes
HINT = "export the model again, or copy the folder again"


class AdjustedTensor(LazyTensor):
    """A tensor of a file with its rows in another order, or with a number added to float32 values.

    Row `j * pairs / 2 + i` of every `pairs` rows is row `2 * i + j` of the file (0: rows keep their order). Raises
    ValueError: rows do not divide into such groups, or `added` to another dtype than float32.
    """

    source: FileTensor
    pairs: int
    added: float

    def __init__(self, source: FileTensor, *, pairs: int = 0, added: float = 0.0) -> None:
        if pairs and (pairs % 2 or not source.shape or source.shape[0] % pairs):
            raise ValueError(f"{source.num_rows} rows do not divide into groups of {pairs}")
        if added and source.dtype.name != "float32":
            raise ValueError(f"{added} is added to {source.dtype.name}")
        super().__init__(source.dtype, source.shape, self._read_rows)
        object.__setattr__(self, "source", source)
        object.__setattr__(self, "pairs", pairs)
        object.__setattr__(self, "added", added)

    @property
    def path(self) -> Path:
        return self.source.path

    @property
    def offset(self) -> int:
        return self.source.offset

    @property
    def location(self) -> str:
        return self.source.location

    def _read_rows(self, start: int, stop: int) -> Array:
        if not self.pairs:
            rows = self.source.rows(start, stop)
        else:
            low, high = start // self.pairs * self.pairs, -(-stop // self.pairs) * self.pairs
            stored = self.source.rows(low, high)
            halves = stored.reshape(-1, self.pairs // 2, 2, *stored.shape[1:]).swapaxes(1, 2)
            rows = np.ascontiguousarray(halves).reshape(stored.shape)[start - low : stop - low]
        return rows + np.float32(self.added) if self.added else rows


Mapped = FileTensor | AdjustedTensor
"""A tensor whose values are in a file, from `offset` of `path` on."""


def placed(tensor: Mapped, path: Path, location: str = "") -> Mapped:
    """The same tensor at the same offset of another file."""
    if isinstance(tensor, AdjustedTensor):
        source = FileTensor(path, tensor.offset, tensor.dtype, tensor.shape, location=location)
        return AdjustedTensor(source, pairs=tensor.pairs, added=tensor.added)
    return FileTensor(path, tensor.offset, tensor.dtype, tensor.shape, location=location)


def require_mapped(tensors: Mapping[str, LazyTensor]) -> None:
    """Raises InputRefused for a tensor whose values are not in a file."""
    if computed := sorted(name for name, tensor in tensors.items() if not isinstance(tensor, Mapped)):
        raise InputRefused(
            f"graphs cannot map `{computed[0].removesuffix('.codes')}` as the model's file stores it",
            hint="give `-o OUT`: the weights and codes are written there once, as graphs read them",
        )


def encode_ranges(tensors: Mapping[str, Mapped]) -> bytes:
    """The index of tensors that lie in files of one folder."""
    starts: dict[Path, int] = {}
    entries: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        starts[tensor.path] = min(tensor.offset, starts.get(tensor.path, tensor.offset))
        place = {"file": tensor.path.name, "offset": tensor.offset}
        entries[name] = {**place, "dtype": tensor.dtype.code, "shape": [*tensor.shape]}
        if isinstance(tensor, AdjustedTensor):
            entries[name] |= {"pairs": tensor.pairs} if tensor.pairs else {}
            entries[name] |= {"add": tensor.added} if tensor.added else {}
    files = {path.name: _file_entry(path, start) for path, start in sorted(starts.items())}
    return json.dumps({"files": files, "tensors": entries}, indent=1).encode() + b"\n"


def _file_entry(path: Path, header: int) -> dict[str, Any]:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for start in range(0, header, 1 << 20):
            digest.update(file.read(min(1 << 20, header - start)))
    size = path.stat().st_size
    sample = sampled_sha256(path, header)
    return {"bytes": size, "header_bytes": header, "header_sha256": digest.hexdigest(), "sample_sha256": sample}


def sampled_sha256(path: Path, start: int = 0) -> str:
    """The sha256 of blocks of a file that lie evenly between `start` and its end."""
    digest, step = hashlib.sha256(), max(SAMPLE, (path.stat().st_size - start) // SAMPLES)
    with open(path, "rb", buffering=0) as file:
        for place in range(start, path.stat().st_size, step):
            file.seek(place)
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def read_ranges(folder: Path, index: Mapping[str, Any]) -> dict[str, Mapped]:
    """The tensors of an index, `index` being its content, in files of `folder`.

    Raises MalformedInput: a field of another type, a file that is missing or was replaced, a range outside of its file.
    """
    files, entries = index.get("files"), index.get("tensors")
    if not isinstance(files, dict) or not isinstance(entries, dict) or not entries:
        raise MalformedInput(f"`{RANGES}` has no `files` or no `tensors`", hint=HINT)
    sizes = {name: _checked_file(folder, name, entry) for name, entry in files.items()}
    tensors = {name: _tensor(folder, name, entry, sizes) for name, entry in entries.items()}
    ends = {name: files[name]["header_bytes"] for name in sizes}  # of the last tensor of each file
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].path.name, item[1].offset)):
        if tensor.offset < ends[tensor.path.name]:
            raise MalformedInput(f"`{RANGES}` places `{name[:80]}` over the header or another tensor", hint=HINT)
        ends[tensor.path.name] = tensor.offset + tensor.nbytes
    return tensors


def _checked_file(folder: Path, name: str, entry: Any) -> int:
    """The number of bytes of a file that is as it was."""
    path = folder / name
    if name != path.name or not name.isprintable() or name in (".", "..") or not isinstance(entry, dict):
        raise MalformedInput(f"`{RANGES}` names the invalid file {name[:80]!r}", hint=HINT)
    if not path.is_file() or path.is_symlink():
        raise MalformedInput(f"`{name}` is missing, and `{RANGES}` says that it has the weights", hint=HINT)
    header = _count(name, "header_bytes", entry.get("header_bytes"))
    if path.stat().st_size != entry.get("bytes") or header > path.stat().st_size or _file_entry(path, header) != entry:
        raise MalformedInput(f"`{name}` is not the file that `{RANGES}` was made of", hint=HINT)
    return path.stat().st_size


def _tensor(folder: Path, name: str, entry: Any, sizes: Mapping[str, int]) -> Mapped:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, file = BY_CODE.get(str(fields.get("dtype"))), fields.get("shape"), str(fields.get("file"))
    if dtype is None or dtype.name not in FLOATS or file not in sizes:
        raise MalformedInput(f"`{RANGES}` has an invalid dtype or file of `{name[:80]}`", hint=HINT)
    if not isinstance(shape, list) or len(shape) > RANK_LIMIT or 0 in shape or fields.get("pairs") == 0:
        raise MalformedInput(f"`{RANGES}` has an invalid shape or order of `{name[:80]}`", hint=HINT)
    counts = tuple(_count(name, "shape", size) for size in shape)
    offset = _count(name, "offset", fields.get("offset"))
    if offset + prod(counts) * dtype.itemsize > sizes[file]:
        raise MalformedInput(f"`{RANGES}` places `{name[:80]}` beyond the end of `{file}`", hint=HINT)
    found = FileTensor(folder / file, offset, dtype, counts)
    pairs, added = _count(name, "pairs", fields.get("pairs", 0)), fields.get("add", 0.0)
    if isinstance(added, bool) or not isinstance(added, int | float) or not isfinite(added):
        raise MalformedInput(f"`{RANGES}` adds no number to `{name[:80]}`", hint=HINT)
    try:
        return AdjustedTensor(found, pairs=pairs, added=added) if pairs or added else found
    except ValueError as error:
        raise MalformedInput(f"`{RANGES}` has an invalid entry of `{name[:80]}`: {error}", hint=HINT) from error


def _count(name: str, what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise MalformedInput(f"`{RANGES}` has an invalid `{what}` of `{name[:80]}`", hint=HINT)
    return value
