"""Torch files (`torch.save`, zip format) read lazily: the pickle becomes data, a tensor becomes a range of the file.

Layout (pytorch `caffe2/serialize/inline_container.cc`): a zip of STORED members under one folder: `data.pkl`,
`data/KEY` (one per storage), `byteorder`, `version`.
"""

from __future__ import annotations

import stat
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from llmconv.crc import Record
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.pickle_data import TensorRef, read_pickle
from llmconv.safetensors_io import FileTensor
from llmconv.tensors import Array, LazyTensor

PICKLE_LIMIT = 256 << 20
MEMBER_LIMIT = 1_000_000
DIRECTORY_LIMIT = 256 << 20
LOCAL_HEADER = struct.Struct("<4s5H3L2H")
END, END_64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q4sLQL")
"""End of the zip; before it, in large files, the same in 64 bits and where that lies (APPNOTE.TXT, 4.3.14 to 16)."""

HAS_DESCRIPTOR, UTF8_NAME = 0x08, 0x800

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
LEGACY_MAGIC = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"


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
    """Whether `path` is a zip with a `data.pkl`, as `torch.save` writes (content, not name, decides)."""
    if not path.is_file():
        return False
    try:
        with open(path, "rb") as file, _open_zip(file) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error):
        return False


def open_torch_file(path: Path) -> TorchFile:
    """Reads the zip directory and the pickle; no tensor data.

    Raises:
        UnsupportedInput: compressed, tar, TorchScript, or the format before torch 1.6.
        MalformedInput: truncated, or a zip whose parts contradict each other.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise MalformedInput(f"`{path.name}` is no regular file", hint="it should be a file that `torch.save` wrote")
    return _open(path, found.st_size, found.st_mtime_ns)


def _open_zip(file: BinaryIO) -> zipfile.ZipFile:
    """The zip in `file`, once its directory is known to lie at the end and to be of sane size.

    Raises:
        BadZipFile: it is not so.
    """
    size = file.seek(0, 2)
    file.seek(max(0, size - END_64.size - END.size))
    tail = file.read()
    magic, disk, _, _, count, length, start, comment = END.unpack(tail[-END.size :])
    large, end = tail[: -END.size], size - END.size
    if large.endswith(b"\x01\0\0\0") and large[-20:-16] == b"PK\x06\x07":
        found = END_64.unpack(large)
        count, length, start, end = found[7], found[8], found[9], end - END_64.size
        if found[0] != b"PK\x06\x06" or found[12] != end:
            raise zipfile.BadZipFile("the end of its directory is not where it should be")
    if magic != b"PK\x05\x06" or comment or disk:
        raise zipfile.BadZipFile("it does not end as a zip of torch ends")
    if length > DIRECTORY_LIMIT or start + length != end:
        raise zipfile.BadZipFile("bytes in front of it, or its directory is not where it should be")
    archive = zipfile.ZipFile(file)
    if len(archive.filelist) != count:
        raise zipfile.BadZipFile(f"its directory should have {count} members, and has {len(archive.filelist)}")
    return archive


@lru_cache(maxsize=32)
def _open(path: Path, size: int, _changed: int) -> TorchFile:
    """Kept, because a file is first asked what it is and then opened."""
    with open(path, "rb") as file:
        head = file.read(300)
        if not head.startswith(b"PK"):
            raise explain_no_zip(path, head)
        try:
            with _open_zip(file) as archive:
                members = _checked_members(path, archive, size)
        except (zipfile.BadZipFile, EOFError, NotImplementedError, struct.error, ValueError) as error:
            raise MalformedInput(
                f"`{path.name}` is truncated or damaged: {error}", hint="copy it again from where it was saved"
            ) from error
    content = read_pickle(_read_member(path, members, "data.pkl"), path.name)
    if "byteorder" in members and _read_member(path, members, "byteorder") != b"little":
        raise UnsupportedInput(f"`{path.name}` is big-endian", hint="save it again on a little-endian machine")
    records = {name.removeprefix("data/"): record for name, record in members.items() if name.startswith("data/")}
    return TorchFile(path, content, records)


def explain_no_zip(path: Path, head: bytes) -> UnsupportedInput | MalformedInput:
    """The error for a file that is no zip, from its first 300 bytes."""
    for magic, position, what in MAGICS:
        if head[position:].startswith(magic):
            return UnsupportedInput(f"`{path.name}` {what}", hint="unpack it and give the `.pt` file inside")
    if LEGACY_MAGIC in head[:16]:
        return UnsupportedInput(
            f"`{path.name}` is in the format from before torch 1.6",
            hint="load it with a torch you trust it to, and save it again with `torch.save`",
        )
    return MalformedInput(
        f"`{path.name}` is no torch file", hint="it should be a zip as `torch.save` writes; is the download complete?"
    )


def _read_member(path: Path, members: Mapping[str, Record], name: str) -> bytes:
    if name not in members:
        _refuse(path, f"holds no `{name}`")
    record = members[name]
    if record.size > PICKLE_LIMIT:
        _refuse(path, f"has a `{name}` of {record.size} bytes, over the limit of {PICKLE_LIMIT}")
    with open(path, "rb") as file:
        file.seek(record.start)
        content = file.read(record.size)
    if record.crc is not None and zlib.crc32(content) != record.crc:
        _refuse(path, f"is damaged: `{name}` does not have the CRC-32 that it says")
    return content


def _checked_members(path: Path, archive: zipfile.ZipFile, size: int) -> dict[str, Record]:
    """Members by name without the folder; every rule that torch's own writer keeps."""
    infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    prefix = infos[0].filename.partition("/")[0] + "/" if infos else ""
    if len(infos) > MEMBER_LIMIT or not infos or infos[0].header_offset != 0:
        _refuse(path, "is a zip with bytes in front, or without members")
    has_checksums = any(info.CRC for info in infos)
    members: dict[str, Record] = {}
    end = 0
    with open(path, "rb") as file:
        for info in infos:
            name = info.filename.removeprefix(prefix)
            if name == info.filename or name in members or not _is_plain(info):
                _refuse(path, f"has a doubled or misplaced member {info.filename[:80]!r}")
            if name == "constants.pkl" or name.startswith("code/"):
                raise UnsupportedInput(
                    f"`{path.name}` is a TorchScript program, no checkpoint", hint="save the `state_dict()` instead"
                )
            file.seek(info.header_offset)
            start = info.header_offset + _check_local(path, info, file.read(LOCAL_HEADER.size + 4 * 1024))
            if info.header_offset < end or start + info.file_size > archive.start_dir or size < archive.start_dir:
                _refuse(path, f"has a member `{name}` that overlaps another or ends outside the file")
            end = start + info.file_size
            members[name] = Record(
                path, name, start, info.file_size, info.CRC if has_checksums and info.file_size else None
            )
    return members


def _is_plain(info: zipfile.ZipInfo) -> bool:
    """Whether a member is a file below its folder, on the first disk, no link, and its name can be shown."""
    kind = stat.S_IFMT(info.external_attr >> 16)
    parts = info.filename.split("/")
    is_file = kind in (0, stat.S_IFREG) and not info.is_dir() and info.volume == 0
    return is_file and info.filename.isprintable() and not {"", ".", ".."} & {*parts} and "\\" not in info.filename


def _check_local(path: Path, info: zipfile.ZipInfo, header: bytes) -> int:
    """Length of the local header, which must say the same as the central directory."""
    magic, _, flags, method, _, _, crc, packed, unpacked, name_length, extra_length = LOCAL_HEADER.unpack_from(header)
    name = header[LOCAL_HEADER.size : LOCAL_HEADER.size + name_length]
    said = (packed, unpacked, crc)
    left_open = (0, 0xFFFFFFFF) if flags & HAS_DESCRIPTOR else (0xFFFFFFFF,)
    known = (info.compress_size, info.file_size, info.CRC)
    sizes_agree = all(one == other or one in left_open for one, other in zip(said, known, strict=True))
    if magic != b"PK\x03\x04" or name != info.orig_filename.encode() or flags != info.flag_bits or not sizes_agree:
        _refuse(path, f"describes member `{info.filename[:80]}` in two ways")
    if method or info.compress_type or info.file_size != info.compress_size or flags & ~(HAS_DESCRIPTOR | UTF8_NAME):
        _refuse(path, f"compresses or encrypts member `{info.filename[:80]}`, which torch never does")
    return int(LOCAL_HEADER.size + name_length + extra_length)


def _refuse(path: Path, problem: str) -> NoReturn:
    raise MalformedInput(f"`{path.name}` {problem}", hint="it was not written by `torch.save`, or was changed since")
