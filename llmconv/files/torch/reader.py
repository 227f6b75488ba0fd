"""Torch files (`torch.save`) read lazily: the pickle becomes data, a tensor becomes a range of the file."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from llmconv.errors import LlmconvError, MalformedInput, UnsupportedInput
from llmconv.files.checksums import Record
from llmconv.files.pickles.reader import TensorRef, read_pickle
from llmconv.files.pointer_files import refuse_git_lfs
from llmconv.files.safetensors_file import FileTensor
from llmconv.files.torch.legacy_reader import is_legacy, read_legacy
from llmconv.files.torch.zip_container import is_torch_zip, read_torch_zip
from llmconv.tensors import Array, LazyTensor

SPARSE, SPAN_ELEMENTS = 4, 1 << 14
"""A block of a strided view is cut out of one span if that is at most so many times as large, or so small."""

MAGICS: tuple[tuple[bytes, int, str], ...] = (
    (b"\x1f\x8b", 0, "is compressed with gzip"),
    (b"BZh", 0, "is compressed with bzip2"),
    (b"\xfd7zXZ\x00", 0, "is compressed with xz"),
    (b"\x28\xb5\x2f\xfd", 0, "is compressed with zstd"),
    (b"\x04\x22\x4d\x18", 0, "is compressed with lz4"),
    (b"\x5d\x00\x00", 0, "is compressed with lzma"),
    (b"ustar", 257, "is a tar archive"),
)


@dataclass(frozen=True)
class TorchFile:
    """An opened torch file.

    Attributes:
        path: the file.
        content: the pickled value; tensors in it are TensorRef.
        records: storage key to where its bytes lie.
    """

    path: Path
    content: Any
    records: Mapping[str, Record] = field(repr=False)

    def tensor(self, name: str, ref: TensorRef) -> LazyTensor:
        """The tensor of `ref`, checked against the storage that is really there.

        Args:
            name: for error messages.
            ref: a TensorRef of `content`.

        Raises:
            MalformedInput: the view reaches outside its storage, or the storage has another size than it says.
            UnsupportedInput: an element type that safetensors cannot hold.
        """
        dtype = ref.dtype
        if dtype is None:
            raise UnsupportedInput(
                f"tensor `{name}` in `{self.path.name}` is stored as `{ref.storage.kind}`",
                hint="only plain float, integer and bool tensors can be converted; dequantize it first",
            )
        record = self._record(name, ref)
        elements = record.size // dtype.itemsize
        if ref.offset + _reach(ref.shape, ref.stride) > elements or prod(ref.shape) > elements:
            _refuse(self.path, f"describes tensor `{name}` as larger than its storage of {elements} elements")
        if _is_contiguous(ref.shape, ref.stride):
            return FileTensor(self.path, record.start + ref.offset * dtype.itemsize, dtype, ref.shape, record)
        return _strided(FileTensor(self.path, record.start, dtype, (elements,)), ref, record)

    def _record(self, name: str, ref: TensorRef) -> Record:
        storage = ref.storage
        if storage.key not in self.records:
            _refuse(self.path, f"has no data for tensor `{name}`")
        record = self.records[storage.key]
        if record.size != storage.numel * (storage.dtype.itemsize if storage.dtype else 1):
            _refuse(
                self.path, f"says that tensor `{name}` has {storage.numel} elements, its record has {record.size} bytes"
            )
        return record


def _reach(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements between the first and the last that a view touches, both included."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if prod(shape) else 0


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return prod(shape) == 0
        expected *= size
    return True


def _strided(storage: FileTensor, ref: TensorRef, record: Record) -> LazyTensor:
    """A view such as a transposed one: each block gathers what it needs of the storage."""

    def load(start: int, stop: int) -> Array:
        record.was_touched()
        block = np.empty((stop - start, *ref.shape[1:]), storage.dtype.numpy)
        _gather(storage, ref.offset + start * ref.stride[0], ref.stride, block)
        return block

    return LazyTensor(storage.dtype, ref.shape, load)


def _gather(storage: FileTensor, offset: int, stride: tuple[int, ...], block: Array) -> None:
    """Fills `block` with the view at `offset`: from one span where that is dense, else piece by piece."""
    if not block.size:
        return
    span = _reach(block.shape, stride)
    if span <= max(SPARSE * block.size, SPAN_ELEMENTS):
        strides = tuple(step * block.itemsize for step in stride)
        elements = storage.rows(offset, offset + span)
        block[...] = np.lib.stride_tricks.as_strided(elements, block.shape, strides, writeable=False)
        return
    axis = max(range(block.ndim), key=lambda number: (block.shape[number] - 1) * stride[number])
    rest = (*stride[:axis], *stride[axis + 1 :])
    for number, piece in enumerate(np.moveaxis(block, axis, 0)):
        _gather(storage, offset + number * stride[axis], rest, piece)


def is_torch_file(path: Path) -> bool:
    """Whether `path` is a zip with a `data.pkl`, or begins as `torch.save` did before 1.6 (content decides)."""
    return path.is_file() and (is_torch_zip(path) or is_legacy(path))


def open_torch_file(path: Path) -> TorchFile:
    """Reads the zip directory (before torch 1.6: the sizes of the storages) and the pickle; no tensor data.

    Raises:
        UnsupportedInput: compressed, tar, or TorchScript.
        MalformedInput: truncated, or a zip whose parts contradict each other.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise MalformedInput(f"`{path.name}` is no regular file", hint="it should be a file that `torch.save` wrote")
    opened = _open(path, found.st_size, found.st_mtime_ns)
    if isinstance(opened, LlmconvError):
        raise type(opened)(opened.message, hint=opened.hint)
    return opened


def open_torch_blob(path: Path, start: int, size: int) -> TorchFile:
    """The torch file that lies at bytes `start:start + size` of a larger file; its tensors know their place in that.

    Raises:
        UnsupportedInput, MalformedInput: as for `open_torch_file`; nothing outside the range counts as its own.
    """
    if not 0 <= start <= start + size <= path.stat().st_size:
        _refuse(path, f"ends before byte {start + size}, where a part of it should end")
    return _read(path, start, size)


@lru_cache(maxsize=32)
def _open(path: Path, size: int, _changed: int) -> TorchFile | LlmconvError:
    """Kept, because a file is asked by every format what it is, and then opened; so is what is wrong with it."""
    try:
        return _read_any(path, size)
    except LlmconvError as error:
        return type(error)(error.message, hint=error.hint)  # without the frames, which hold what was read


def _read_any(path: Path, size: int) -> TorchFile:
    if is_legacy(path):
        content, places = read_legacy(path)
        return TorchFile(path, content, {key: Record(path, key, *place, None) for key, place in places.items()})
    return _read(path, 0, size)


def _read(path: Path, start: int, size: int) -> TorchFile:
    with open(path, "rb") as file:
        file.seek(start)
        head = file.read(min(300, size))
    if not head.startswith(b"PK"):
        raise explain_no_zip(path, head)
    pickle, records = read_torch_zip(path, start, size)
    return TorchFile(path, read_pickle(pickle, path.name), records)


def explain_no_zip(path: Path, head: bytes) -> UnsupportedInput | MalformedInput:
    """The error for a file that is no zip, from its first 300 bytes."""
    refuse_git_lfs(head, path.name)
    for magic, position, what in MAGICS:
        if head[position:].startswith(magic):
            return UnsupportedInput(
                f"`{path.name}` {what}", hint="unpack it first; only a checkpoint of one file may be packed"
            )
    return MalformedInput(
        f"`{path.name}` is no torch file", hint="it should be a zip as `torch.save` writes; is the download complete?"
    )


def _refuse(path: Path, problem: str) -> NoReturn:
    raise MalformedInput(f"`{path.name}` {problem}", hint="it was not written by `torch.save`, or was changed since")
