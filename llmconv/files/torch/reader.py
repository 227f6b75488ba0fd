"""Reads files of `torch.save` lazily: the pickle becomes data, a tensor becomes a range of the file."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.errors import LlmconvError, MalformedInput, UnsupportedInput
from llmconv.files.checksums import ChecksummedRange
from llmconv.files.packing.codecs import CODECS
from llmconv.files.pickles.reader import TensorRef, read_pickle
from llmconv.files.pointer_files import refuse_git_lfs
from llmconv.files.safetensors_file import FileTensor
from llmconv.files.source_file import open_source
from llmconv.files.torch.legacy_reader import is_legacy, read_legacy
from llmconv.files.torch.zip_container import NOT_BY_TORCH, is_torch_zip, read_torch_zip
from llmconv.tensors import Array, LazyTensor

SPARSE, SPAN_ELEMENTS = 4, 1 << 14
"""A strided block is read as one span if that is at most this many times larger, or at most this many elements."""


@dataclass(frozen=True)
class TorchFile:
    """An opened torch file.

    Attributes:
        path: the file.
        content: the pickled value, with TensorRef in place of tensors.
        records: storage key to its range of the file.
    """

    path: Path
    content: Any
    records: Mapping[str, ChecksummedRange] = field(repr=False)

    def tensor(self, name: str, ref: TensorRef) -> LazyTensor:
        """Returns the tensor of `ref`, checked against the storage in the file.

        Args:
            name: for error messages.
            ref: a TensorRef of `content`.

        Raises:
            MalformedInput: the view reaches outside its storage, or the storage has another size than declared.
            UnsupportedInput: an element type that safetensors cannot represent.
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
            raise self._problem(f"declares tensor `{name}` larger than its storage of {elements} elements")
        if _is_contiguous(ref.shape, ref.stride):
            return FileTensor(self.path, record.start + ref.offset * dtype.itemsize, dtype, ref.shape, record)
        return _strided(FileTensor(self.path, record.start, dtype, (elements,)), ref, record)

    def _record(self, name: str, ref: TensorRef) -> ChecksummedRange:
        storage = ref.storage
        if storage.key not in self.records:
            raise self._problem(f"has no data for tensor `{name}`")
        record = self.records[storage.key]
        if record.size != storage.numel * (storage.dtype.itemsize if storage.dtype else 1):
            raise self._problem(
                f"declares {storage.numel} elements for tensor `{name}`, but its record has {record.size} bytes"
            )
        return record

    def _problem(self, problem: str) -> MalformedInput:
        return MalformedInput(f"`{self.path.name}` {problem}", hint=NOT_BY_TORCH)


def _reach(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first to the last of a view, both included."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if prod(shape) else 0


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return prod(shape) == 0
        expected *= size
    return True


def _strided(storage: FileTensor, ref: TensorRef, record: ChecksummedRange) -> LazyTensor:
    """A non-contiguous view, such as a transposed one: each block gathers its elements from the storage."""

    def load(start: int, stop: int) -> Array:
        record.was_touched()
        block = np.empty((stop - start, *ref.shape[1:]), storage.dtype.numpy)
        _gather(storage, ref.offset + start * ref.stride[0], ref.stride, block)
        return block

    return LazyTensor(storage.dtype, ref.shape, load)


def _gather(storage: FileTensor, offset: int, stride: tuple[int, ...], block: Array) -> None:
    """Fills `block` with the view at `offset`: from one span where that is dense, else slice by slice."""
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
    for number, part in enumerate(np.moveaxis(block, axis, 0)):
        _gather(storage, offset + number * stride[axis], rest, part)


def is_torch_file(path: Path) -> bool:
    """Whether `path` is a zip with a `data.pkl`, or a file of `torch.save` before 1.6; content decides."""
    return path.is_file() and (is_torch_zip(path) or is_legacy(path))


def open_torch_file(path: Path) -> TorchFile:
    """Reads the directory and the pickle of a torch file; no tensor data.

    Raises:
        UnsupportedInput: compressed, tar, or TorchScript.
        MalformedInput: not a torch file, truncated, or with contradictory headers.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise MalformedInput(f"`{path.name}` is not a regular file", hint="give a file that `torch.save` wrote")
    opened = _open(path, found.st_size, found.st_mtime_ns)
    if isinstance(opened, LlmconvError):
        raise type(opened)(opened.message, hint=opened.hint)
    return opened


def open_torch_blob(path: Path, start: int, size: int) -> TorchFile:
    """Opens the torch file at bytes `start:start + size` of a larger file.

    Args:
        path: the larger file, to which the tensors refer.
        start: position of the torch file in it.
        size: bytes of the torch file; nothing outside of them is read.

    Raises:
        UnsupportedInput, MalformedInput: as for `open_torch_file`.
    """
    if not 0 <= start <= start + size <= path.stat().st_size:
        raise MalformedInput(f"`{path.name}` ends before byte {start + size}, the end of an entry", hint=NOT_BY_TORCH)
    return _read(path, start, size)


@lru_cache(maxsize=32)
def _open(path: Path, size: int, _changed: int) -> TorchFile | LlmconvError:
    """Cached, with its errors, because every format looks at a file before one opens it."""
    try:
        return _read_any(path, size)
    except LlmconvError as error:
        return type(error)(error.message, hint=error.hint)  # without its frames, which hold the data read


def _read_any(path: Path, size: int) -> TorchFile:
    if is_legacy(path):
        content, places = read_legacy(path)
        return TorchFile(
            path, content, {key: ChecksummedRange(path, key, *place, None) for key, place in places.items()}
        )
    return _read(path, 0, size)


def _read(path: Path, start: int, size: int) -> TorchFile:
    with open_source(path) as file:
        file.seek(start)
        head = file.read(min(300, size))
    if not head.startswith(b"PK"):
        raise explain_no_zip(path, head)
    pickle, records = read_torch_zip(path, start, size)
    return TorchFile(path, read_pickle(pickle, path.name), records)


def explain_no_zip(path: Path, head: bytes) -> UnsupportedInput | MalformedInput:
    """The error for a file that is not a zip, from its first 300 bytes.

    Raises:
        UnsupportedInput: it is a Git LFS pointer.
    """
    refuse_git_lfs(head, path.name)
    packings = [f"is compressed with {codec.name}" for codec in CODECS if codec.begins(head)]
    if packings := packings or ["is a tar archive"] * (head[257:262] == b"ustar"):
        return UnsupportedInput(
            f"`{path.name}` {packings[0]}", hint="unpack it first; only a checkpoint of one file may be packed"
        )
    return MalformedInput(
        f"`{path.name}` is not a torch file", hint="give a file that `torch.save` wrote; is the download complete?"
    )
