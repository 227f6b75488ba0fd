"""Torch files (`torch.save`) read lazily: the pickle becomes data, a tensor becomes a range of the file.

Layout since torch 1.6 (pytorch `caffe2/serialize/inline_container.cc`): a zip of STORED members under one folder:
`data.pkl`, `data/KEY` (one per storage), `byteorder`, `version`.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.legacy_torch_file import is_legacy, read_legacy
from llmconv.pickle_data import TensorRef, read_pickle
from llmconv.safetensors_io import FileTensor
from llmconv.tensors import Array, DType, LazyTensor

PICKLE_LIMIT = 256 << 20
MEMBER_LIMIT = 1_000_000
LOCAL_HEADER = struct.Struct("<4s5H3L2H")
HAS_DESCRIPTOR = 0x08
ENCRYPTED = 0x01

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
        records: storage key to (position in the file, bytes).
    """

    path: Path
    content: Any
    records: Mapping[str, tuple[int, int]] = field(repr=False)

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
        start, size = self._record(name, ref)
        elements = size // dtype.itemsize
        if ref.offset + _reach(ref.shape, ref.stride) > elements or prod(ref.shape) > elements:
            _refuse(self.path, f"describes tensor `{name}` as larger than its storage of {elements} elements")
        if _is_contiguous(ref.shape, ref.stride):
            return FileTensor(self.path, start + ref.offset * dtype.itemsize, dtype, ref.shape)
        return _strided(FileTensor(self.path, start, dtype, (elements,)), dtype, ref)

    def _record(self, name: str, ref: TensorRef) -> tuple[int, int]:
        storage = ref.storage
        if storage.key not in self.records:
            _refuse(self.path, f"has no data for tensor `{name}`")
        start, size = self.records[storage.key]
        if size != storage.numel * (storage.dtype.itemsize if storage.dtype else 1):
            _refuse(self.path, f"says that tensor `{name}` has {storage.numel} elements, its record has {size} bytes")
        return start, size


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


def _strided(storage: FileTensor, dtype: DType, ref: TensorRef) -> LazyTensor:
    """A view such as a transposed one: each block reads the span of the storage that it touches."""

    def load(start: int, stop: int) -> Array:
        shape = (stop - start, *ref.shape[1:])
        first = ref.offset + start * ref.stride[0]
        span = storage.rows(first, first + _reach(shape, ref.stride))
        strides = tuple(step * dtype.itemsize for step in ref.stride)
        return np.ascontiguousarray(np.lib.stride_tricks.as_strided(span, shape, strides, writeable=False))

    return LazyTensor(dtype, ref.shape, load)


def is_torch_file(path: Path) -> bool:
    """Whether `path` is a zip with a `data.pkl`, or begins as `torch.save` did before 1.6 (content decides)."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        return is_legacy(path)
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return False


def open_torch_file(path: Path) -> TorchFile:
    """Reads the zip directory (before torch 1.6: the sizes of the storages) and the pickle; no tensor data.

    Raises:
        UnsupportedInput: compressed, tar, or TorchScript.
        MalformedInput: truncated, or a zip whose parts contradict each other.
    """
    stat = path.stat()
    return _open(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=32)
def _open(path: Path, size: int, _changed: int) -> TorchFile:
    """Kept, because a file is first asked what it is and then opened."""
    with open(path, "rb") as file:
        head = file.read(300)
    if is_legacy(path):
        return TorchFile(path, *read_legacy(path))
    if not head.startswith(b"PK"):
        raise explain_no_zip(path, head)
    try:
        with zipfile.ZipFile(path) as archive:
            members = _checked_members(path, archive, size)
            content = read_pickle(_read_member(path, archive, members, "data.pkl"), path.name)
            if "byteorder" in members and archive.read(members["byteorder"][0]) != b"little":
                raise UnsupportedInput(f"`{path.name}` is big-endian", hint="save it again on a little-endian machine")
    except (zipfile.BadZipFile, EOFError, NotImplementedError, struct.error, ValueError) as error:
        raise MalformedInput(
            f"`{path.name}` is truncated or damaged: {error}", hint="copy it again from where it was saved"
        ) from error
    return TorchFile(
        path,
        content,
        {
            name.removeprefix("data/"): (start, info.file_size)
            for name, (info, start) in members.items()
            if name.startswith("data/")
        },
    )


def explain_no_zip(path: Path, head: bytes) -> UnsupportedInput | MalformedInput:
    """The error for a file that is no zip, from its first 300 bytes."""
    for magic, position, what in MAGICS:
        if head[position:].startswith(magic):
            return UnsupportedInput(
                f"`{path.name}` {what}", hint="unpack it first; only a checkpoint of one file may be packed"
            )
    return MalformedInput(
        f"`{path.name}` is no torch file", hint="it should be a zip as `torch.save` writes; is the download complete?"
    )


def _read_member(
    path: Path, archive: zipfile.ZipFile, members: Mapping[str, tuple[zipfile.ZipInfo, int]], name: str
) -> bytes:
    if name not in members:
        _refuse(path, f"holds no `{name}`")
    info = members[name][0]
    if info.file_size > PICKLE_LIMIT:
        _refuse(path, f"has a `{name}` of {info.file_size} bytes, over the limit of {PICKLE_LIMIT}")
    return archive.read(info)


def _checked_members(path: Path, archive: zipfile.ZipFile, size: int) -> dict[str, tuple[zipfile.ZipInfo, int]]:
    """Member name without the folder to (entry, position of its data); every rule that torch's own writer keeps."""
    infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    prefix = infos[0].filename.partition("/")[0] + "/" if infos else ""
    if len(infos) > MEMBER_LIMIT or not infos or infos[0].header_offset != 0:
        _refuse(path, "is a zip with bytes in front, or without members")
    members: dict[str, tuple[zipfile.ZipInfo, int]] = {}
    end = 0
    with open(path, "rb") as file:
        for info in infos:
            name = info.filename.removeprefix(prefix)
            if name == info.filename or name in members:
                _refuse(path, f"has a doubled or misplaced member `{info.filename[:80]}`")
            if name == "constants.pkl" or name.startswith("code/"):
                raise UnsupportedInput(
                    f"`{path.name}` is a TorchScript program, no checkpoint", hint="save the `state_dict()` instead"
                )
            file.seek(info.header_offset)
            start = info.header_offset + _check_local(path, info, file.read(LOCAL_HEADER.size + 4 * 1024))
            if info.header_offset < end or start + info.file_size > size:
                _refuse(path, f"has a member `{name}` that overlaps another or ends outside the file")
            end = start + info.file_size
            members[name] = (info, start)
    return members


def _check_local(path: Path, info: zipfile.ZipInfo, header: bytes) -> int:
    """Length of the local header, which must say the same as the central directory."""
    magic, _, flags, method, _, _, crc, packed, unpacked, name_length, extra_length = LOCAL_HEADER.unpack_from(header)
    name = header[LOCAL_HEADER.size : LOCAL_HEADER.size + name_length]
    sizes_agree = (
        flags & HAS_DESCRIPTOR
        or 0xFFFFFFFF in (packed, unpacked)
        or (packed, unpacked, crc)
        == (
            info.compress_size,
            info.file_size,
            info.CRC,
        )
    )
    if magic != b"PK\x03\x04" or name != info.orig_filename.encode() or flags != info.flag_bits or not sizes_agree:
        _refuse(path, f"describes member `{info.filename[:80]}` in two ways")
    if method or info.compress_type or info.file_size != info.compress_size or flags & ENCRYPTED:
        _refuse(path, f"compresses or encrypts member `{info.filename[:80]}`, which torch never does")
    return int(LOCAL_HEADER.size + name_length + extra_length)


def _refuse(path: Path, problem: str) -> NoReturn:
    raise MalformedInput(f"`{path.name}` {problem}", hint="it was not written by `torch.save`, or was changed since")
