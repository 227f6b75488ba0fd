"""Reads safetensors files (header validation, then positioned reads) and writes them as a stream.

The safetensors library gives neither the byte offsets that graphs refer to nor streamed writing.

Layout (safetensors format description, huggingface/safetensors README): 8 bytes little-endian header length N,
N bytes of JSON `{name: {dtype, shape, data_offsets: [begin, end]}, "__metadata__": {str: str}}`, then the data.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from llmconv.errors import MalformedInput, UnsupportedInput, short
from llmconv.files.paths import GIT_LFS, refuse_git_lfs
from llmconv.files.source_file import ChecksummedRange, FileProblem, naming, open_source, read_into
from llmconv.tensors import BY_CODE, Array, DType, LazyTensor, Piece

RANGES = "model.ranges.json"  # the index of tensors that lie in files of another format, see `weight_ranges`
HEADER_LIMIT = 100_000_000
NAME_LIMIT = 1024
RANK_LIMIT = 16
ALIGNMENT = 64  # the data section starts at a multiple of this, so that mapped weights are aligned for vector loads
NOT_READ = {"F4", "F6_E2M3", "F6_E3M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "C64"}  # the format's other element types
DAMAGED = "the file is damaged or was not written by a safetensors library; copy or download it again"


class FileTensor(LazyTensor):
    """A tensor that lies contiguously, row-major and little-endian, in a file."""

    path: Path
    offset: int  # position of the first byte in the file
    # the record of the file that contains it; code that reads the file without `rows` must notify it
    record: ChecksummedRange | None
    location: str  # of the file in the model's folder: its name, or `folder/name` for a module after the model

    def __init__(
        self,
        path: Path,
        offset: int,
        dtype: DType,
        shape: tuple[int, ...],
        record: ChecksummedRange | None = None,
        *,
        location: str = "",
    ) -> None:
        super().__init__(dtype, shape, self._read_rows)
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "offset", offset)
        object.__setattr__(self, "record", record)
        object.__setattr__(self, "location", location or path.name)

    def _read_rows(self, start: int, stop: int) -> Array:
        row_bytes = self.nbytes // max(1, self.num_rows)
        array = np.empty((stop - start) * row_bytes, dtype=np.uint8)
        read_into(self.path, array.data, self.offset + start * row_bytes)
        if self.record:
            self.record.was_read(self.offset + start * row_bytes - self.record.start, array.data)
        return array.view(self.dtype.numpy).reshape(stop - start, *self.shape[1:])


def read_exactly(fd: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fills `buffer` from position `offset` of an open file; raises MalformedInput if the file ends before."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            problem = f"`{path.name}` ends at byte {offset + done}, {len(buffer) - done} bytes early"
            raise MalformedInput(problem, hint="the file is truncated, or changed while it was read; copy it again")
        done += count


@dataclass(frozen=True)
class Header:
    """A safetensors header: the tensors in file order, and the metadata."""

    tensors: dict[str, FileTensor]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """The checked header of a safetensors file; MalformedInput for invalid fields, UnsupportedInput for Git LFS."""
    size = path.stat().st_size
    with naming(f"`{path.name}`", DAMAGED), open_source(path) as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise FileProblem(f"has {size} bytes, too few for a header")
        if prefix == GIT_LFS[:8]:
            refuse_git_lfs(prefix + file.read(len(GIT_LFS)), path.name)
        (length,) = struct.unpack("<Q", prefix)
        if length > min(HEADER_LIMIT, size - 8):
            raise FileProblem(f"declares a header of {length} bytes in a file of {size}")
        text = file.read(length)
        try:
            fields = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        except (ValueError, RecursionError):
            raise FileProblem("has a header that is not valid JSON") from None
        if not isinstance(fields, dict):
            raise FileProblem("has a header that is not a JSON object")
        metadata = fields.pop("__metadata__", None)
        metadata = {} if metadata is None else metadata  # mlx writes null
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise FileProblem("has `__metadata__` that is not a map of strings")
        return Header(_place(path, fields, 8 + length, size), metadata)


HEAD = re.compile(r"(?:.*\.)?(?:lm_head|embed_out|output|output_layer)\.weight")
T = TypeVar("T")


def with_second_names(tensors: dict[str, T], metadata: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, T]:
    """Tensors under the names, too, that safetensors' `save_model` left out of the file, since others are the same.

    Of a tied matrix it keeps the name that comes first in the alphabet, often the head's; it gets the embedding's, as
    `save_pretrained` stores it. Source: `safetensors/torch.py`, which notes removed names and theirs in the metadata.
    """
    second = {name: kept for name, kept in metadata.items() if kept in tensors and name not in tensors}
    tied = config.get("tie_word_embeddings", True)
    moved = {kept: name for name, kept in second.items() if tied and HEAD.fullmatch(kept)}
    named = {moved.get(name, name): tensor for name, tensor in tensors.items()}
    return {**named, **{name: tensors[kept] for name, kept in second.items()}} if second else tensors


def _place(path: Path, fields: dict[str, Any], data_start: int, size: int) -> dict[str, FileTensor]:
    """Tensors in file order; together they must cover the data section exactly, without overlap or gap."""
    for name, field in fields.items():
        if isinstance(field, dict) and str(field.get("dtype")) in NOT_READ:
            raise UnsupportedInput(
                f"tensor {name[:NAME_LIMIT]!r} of `{path.name}` is stored as `{field['dtype']}`, which is not read",
                hint="take the model in another element type, such as the one it was made from",
            )
    spans = sorted((_span(name, field), name) for name, field in fields.items())
    tensors: dict[str, FileTensor] = {}
    position = 0
    for (begin, end), name in spans:
        if begin != position:
            raise FileProblem(f"has overlapping or missing bytes before tensor `{name[:NAME_LIMIT]}`")
        tensor = FileTensor(path, data_start + begin, BY_CODE[fields[name]["dtype"]], tuple(fields[name]["shape"]))
        if end - begin != tensor.nbytes:
            raise FileProblem(f"has {end - begin} bytes for tensor `{name}`, its shape needs {tensor.nbytes}")
        tensors[name] = tensor
        position = end
    if data_start + position != size:
        raise FileProblem(f"has {size} bytes, its header describes {data_start + position}")
    return tensors


EMPTY = (
    "a save wrote no values for it; if it is the head of a model whose `config.json` sets `tie_word_embeddings`, it is "
    "not needed: delete its line in the index, and this file, if it has nothing else"
)


def _span(name: str, field: Any) -> tuple[int, int]:
    """The checked `data_offsets` of one entry."""
    if len(name) > NAME_LIMIT or not name.isprintable():
        raise FileProblem(f"has an unprintable or too long tensor name {name[:40]!r}")
    if not isinstance(field, dict) or set(field) != {"dtype", "shape", "data_offsets"}:
        raise FileProblem(f"has fields other than dtype, shape and data_offsets for tensor `{name}`")
    if not isinstance(field["dtype"], str) or field["dtype"] not in BY_CODE:
        problem = f"has the unknown dtype `{short(field['dtype'])}` for tensor `{name}`"
        empty = field == {
            "dtype": "",
            "shape": [],
            "data_offsets": [0, 0],
        }  # torchtitan's, for the head of a tied model
        raise FileProblem(problem, EMPTY if empty else "")
    shape, offsets = field["shape"], field["data_offsets"]
    if not _naturals(shape) or len(shape) > RANK_LIMIT or prod(shape) > 1 << 62:
        raise FileProblem(f"has an invalid shape for tensor `{name}`")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FileProblem(f"has invalid data_offsets for tensor `{name}`")
    return offsets[0], offsets[1]


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise FileProblem("has a duplicate tensor name")
    return fields


def file_of(tensors: Mapping[str, LazyTensor]) -> Path | None:
    """The safetensors file that contains exactly these tensors, unchanged; None if there is none."""
    paths = {tensor.path if isinstance(tensor, FileTensor) else None for tensor in tensors.values()}
    path = paths.pop() if len(paths) == 1 else None
    return path if path and path.suffix == ".safetensors" and holds(path, tensors) else None


def holds(path: Path, tensors: Mapping[str, LazyTensor]) -> bool:
    """Whether a file has these tensors at these offsets, and `format: pt`; MalformedInput for another file."""
    header = read_header(path)
    return header.metadata.get("format") == "pt" and _places(header.tensors) == _places(tensors)


def _places(tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
    return {name: (one.dtype, one.shape, one.offset) for name, one in tensors.items() if isinstance(one, FileTensor)}


def encode_header(tensors: dict[str, tuple[DType, tuple[int, ...]]]) -> bytes:
    """The header of a file with `tensors` in this order, padded with spaces to `ALIGNMENT`."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + prod(shape) * dtype.itemsize
        fields[name] = {"dtype": dtype.code, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def safetensors_pieces(tensors: Mapping[str, LazyTensor]) -> Iterator[Piece]:
    """Yields a safetensors file: the header, then the tensors."""
    yield encode_header({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    yield from tensors.values()
