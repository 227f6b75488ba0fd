"""Reads files of `torch.save` lazily: the pickle becomes data, a tensor becomes a range of the file.

The zip is checked by every rule of its writer: members stored, both headers equal. Layout (pytorch
`caffe2/serialize/inline_container.cc`): STORED members under one folder: `data.pkl`, `data/KEY` (one per storage),
`byteorder`, `version`. It may lie inside a larger file, as in a distributed checkpoint.

Before torch 1.6 a file is five pickles in a row, then every storage inline. Layout (pytorch `torch/serialization.py`,
`_legacy_save`): magic number, protocol 1001, system facts, the value, the list of storage keys; then per key an int64
with the number of elements, and the elements. A storage may be a view.
"""

from __future__ import annotations

import io
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO, Any

import numpy as np

from llmconv.errors import LlmconvError, MalformedInput, UnsupportedInput
from llmconv.files.packing import CODECS
from llmconv.files.paths import refuse_git_lfs
from llmconv.files.pickle_machine import COPY_AGAIN, NAME_LIMIT, PickleHooks, PickleMachine
from llmconv.files.pickle_reader import HOOKS, Global, StorageRef, TensorRef, interpret, read_pickle, storage_dtype
from llmconv.files.safetensors_file import FileTensor
from llmconv.files.source_file import (
    BytesReader,
    ChecksummedRange,
    FileProblem,
    Version,
    is_mirrored,
    naming,
    open_source,
    version_of,
)
from llmconv.tensors import Array, LazyTensor

# A strided block is read as one span if that is at most this many times larger, or at most this many elements
SPARSE, SPAN_ELEMENTS = 4, 1 << 14


@dataclass(frozen=True)
class TorchFile:
    """An opened torch file: its pickled value, with TensorRef for tensors, and storage key to range of the file."""

    path: Path
    content: Any
    records: Mapping[str, ChecksummedRange] = field(repr=False)

    def tensor(self, name: str, ref: TensorRef) -> LazyTensor:
        """Returns the tensor of `ref`, a TensorRef of `content`, checked against the storage in the file.

        Raises MalformedInput if the view reaches outside its storage, or that has another size than declared;
        UnsupportedInput for an element type that safetensors cannot represent.
        """
        if (dtype := ref.dtype) is None:
            raise UnsupportedInput(
                f"tensor `{name}` in `{self.path.name}` is stored as `{ref.storage.kind}`",
                hint="only plain float, integer and bool tensors can be converted; dequantize it first",
            )
        storage = ref.storage
        if storage.key not in self.records:
            raise self._problem(f"has no data for tensor `{name}`")
        record = self.records[storage.key]
        if record.size != storage.numel * (storage.dtype.itemsize if storage.dtype else 1):
            raise self._problem(
                f"declares {storage.numel} elements for tensor `{name}`, but its record has {record.size} bytes"
            )
        elements = record.size // dtype.itemsize
        if ref.offset + _reach(ref.shape, ref.stride) > elements or prod(ref.shape) > elements:
            raise self._problem(f"declares tensor `{name}` larger than its storage of {elements} elements")
        if _is_contiguous(ref.shape, ref.stride):
            return FileTensor(self.path, record.start + ref.offset * dtype.itemsize, dtype, ref.shape, record)
        # a non-contiguous view, such as a transposed one: each block gathers its elements from the storage
        whole = FileTensor(self.path, record.start, dtype, (elements,))

        def load(start: int, stop: int) -> Array:
            record.was_touched()
            block = np.empty((stop - start, *ref.shape[1:]), dtype.numpy)
            _gather(whole, ref.offset + start * ref.stride[0], ref.stride, block)
            return block

        return LazyTensor(dtype, ref.shape, load)

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
    if not path.is_file():
        return False
    return _is_torch_zip(path, version_of(path.stat())) or is_legacy(path)


def open_torch_file(path: Path) -> TorchFile:
    """The directory and pickle of a torch file; UnsupportedInput for tar, TorchScript; MalformedInput for damage."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise MalformedInput(f"`{path.name}` is not a regular file", hint="give a file that `torch.save` wrote")
    opened = _open(path, version_of(found))
    if isinstance(opened, LlmconvError):
        raise type(opened)(opened.message, hint=opened.hint)
    return opened


def open_torch_blob(path: Path, start: int, size: int) -> TorchFile:
    """Opens a torch file at bytes `start:start + size` of a larger one, to which its tensors refer."""
    if not 0 <= start <= start + size <= path.stat().st_size:
        raise MalformedInput(f"`{path.name}` ends before byte {start + size}, the end of an entry", hint=NOT_BY_TORCH)
    return _read(path, start, size)


@lru_cache(maxsize=32)
def _open(path: Path, _version: Version) -> TorchFile | LlmconvError:
    """Cached, with its errors, because every format looks at a file before one opens it."""
    try:
        if is_legacy(path):
            content, places = read_legacy(path)
            return TorchFile(
                path, content, {key: ChecksummedRange(path, key, *place, None) for key, place in places.items()}
            )
        return _read(path, 0, path.stat().st_size)
    except LlmconvError as error:
        return type(error)(error.message, hint=error.hint)  # without its frames, which hold the data read


def _read(path: Path, start: int, size: int) -> TorchFile:
    with open_source(path) as file:
        file.seek(start)
        head = file.read(min(300, size))
    if not head.startswith(b"PK"):
        raise explain_no_zip(path, head)
    pickle, records = read_torch_zip(path, start, size)
    return TorchFile(path, read_pickle(pickle, path.name), records)


def explain_no_zip(path: Path, head: bytes) -> UnsupportedInput | MalformedInput:
    """The error for a file that is not a zip, from its first 300 bytes; raises it for a Git LFS pointer."""
    refuse_git_lfs(head, path.name)
    packings = [f"is compressed with {codec.name}" for codec in CODECS if codec.begins(head)]
    if packings := packings or ["is a tar archive"] * (head[257:262] == b"ustar"):
        problem = f"`{path.name}` {packings[0]}"
        return UnsupportedInput(problem, hint="unpack it first; only a checkpoint of one file may be packed")
    problem = f"`{path.name}` is not a torch file"
    return MalformedInput(problem, hint="give a file that `torch.save` wrote; is the download complete?")


PICKLE_LIMIT = 256 << 20
MEMBER_LIMIT = 1_000_000
DIRECTORY_LIMIT = 256 << 20
BUFFER = 16 << 10  # bytes per read: enough for all of a small torch file
LOCAL_HEADER = struct.Struct("<4s5H3L2H")
# the end record, and the zip64 end record with its locator, which large files have before it (APPNOTE 4.3.14-16)
END, END_64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q4sLQL")
ALIGNMENT = 64  # of the data of each member, in every version of torch
PADDING = b"FB"  # id of the extra field by which torch pads local headers
UINT32_MAX = 0xFFFFFFFF
HAS_DESCRIPTOR, UTF8_NAME = 0x08, 0x800
# exceptions that reading a damaged zip raises
DAMAGE = (zipfile.BadZipFile, EOFError, NotImplementedError, struct.error, ValueError)
NOT_BY_TORCH = "it was not written by `torch.save`, or was changed since"


def _slice(file: IO[bytes], start: int, size: int) -> IO[bytes]:
    """Bytes `start:start + size` of an open file, presented as a file."""
    if size <= BUFFER:
        file.seek(start)
        return io.BytesIO(file.read(size))

    def read(buffer: memoryview, position: int) -> int:
        file.seek(start + position)
        found = file.read(min(len(buffer), max(0, size - position)))
        buffer[: len(found)] = found
        return len(found)

    return io.BufferedReader(BytesReader(read, size), BUFFER)


@lru_cache(maxsize=32)
def _is_torch_zip(path: Path, _version: Version) -> bool:
    """Cached, because every format asks."""
    try:
        with open_source(path) as file, _open_zip(file) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except DAMAGE:
        return False


def read_torch_zip(path: Path, start: int, size: int) -> tuple[bytes, dict[str, ChecksummedRange]]:
    """Returns the pickle of a torch file and its storages by key, with positions in `path`.

    The zip has `size` bytes from byte `start`. Raises UnsupportedInput for TorchScript, or a big-endian machine's file;
    MalformedInput for a damaged zip, or one whose parts contradict each other.
    """
    with naming(f"`{path.name}`", NOT_BY_TORCH), open_source(path) as whole, _slice(whole, start, size) as file:
        try:
            with _open_zip(file) as archive:
                members = _checked_members(path, archive, file, size, far=is_mirrored(path))
        except DAMAGE as error:
            problem = f"`{path.name}` is truncated or damaged: {error}"
            raise MalformedInput(problem, hint="copy it again from where it was saved") from error
        pickle = _read_member(file, members, "data.pkl")
        if "byteorder" in members and _read_member(file, members, "byteorder") != b"little":
            raise UnsupportedInput(f"`{path.name}` is big-endian", hint="save it again on a little-endian machine")
    moved = {name: ChecksummedRange(path, name, start + one.start, one.size, one.crc) for name, one in members.items()}
    return pickle, {name.removeprefix("data/"): one for name, one in moved.items() if name.startswith("data/")}


def _open_zip(file: IO[bytes]) -> zipfile.ZipFile:
    """Opens the zip in `file`; raises BadZipFile unless its directory is at the end and within `DIRECTORY_LIMIT`."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - END_64.size - END.size))
    tail = file.read()
    magic, disk, _, _, count, length, start, comment = END.unpack(tail[-END.size :])
    large, end = tail[: -END.size], size - END.size
    if large.endswith(b"\x01\0\0\0") and large[-20:-16] == b"PK\x06\x07":
        found = END_64.unpack(large)
        count, length, start, end = found[7], found[8], found[9], end - END_64.size
        if found[0] != b"PK\x06\x06" or found[12] != end:
            raise zipfile.BadZipFile("the zip64 end record is misplaced")
    if magic != b"PK\x05\x06" or comment or disk:
        raise zipfile.BadZipFile("its end is not that of a zip file")
    if length > DIRECTORY_LIMIT or start + length != end:
        raise zipfile.BadZipFile("there are bytes before it, or its directory is misplaced")
    archive = zipfile.ZipFile(file)
    if len(archive.filelist) != count:
        raise zipfile.BadZipFile(f"its directory declares {count} members and lists {len(archive.filelist)}")
    return archive


def _read_member(file: IO[bytes], members: Mapping[str, ChecksummedRange], name: str) -> bytes:
    if name not in members:
        raise FileProblem(f"contains no `{name}`")
    record = members[name]
    if record.size > PICKLE_LIMIT:
        raise FileProblem(f"has a `{name}` of {record.size} bytes, over the limit of {PICKLE_LIMIT}")
    file.seek(record.start)
    content = file.read(record.size)
    if record.crc is not None and zlib.crc32(content) != record.crc:
        raise FileProblem(f"is damaged: CRC-32 mismatch in `{name}`")
    return content


def _checked_members(
    path: Path, archive: zipfile.ZipFile, file: IO[bytes], size: int, *, far: bool
) -> dict[str, ChecksummedRange]:
    """Members by name without the folder, with positions in `file`.

    With `far`, each local header of a storage would be a request: if the first was padded as torch does it, so are the
    others, which their CRC-32 confirms when they are read.
    """
    infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    prefix = infos[0].filename.partition("/")[0] + "/" if infos else ""
    if len(infos) > MEMBER_LIMIT or not infos or infos[0].header_offset != 0:
        raise FileProblem("is a zip with bytes before its first member, or without members")
    has_checksums = any(info.CRC for info in infos)
    members: dict[str, ChecksummedRange] = {}
    end, usual = 0, None if far else False
    for info in infos:
        name = info.filename.removeprefix(prefix)
        same_size = info.file_size == info.compress_size
        if not (same_size and not info.compress_type and not info.flag_bits & ~(HAS_DESCRIPTOR | UTF8_NAME)):
            raise _not_stored(info)
        if name == info.filename or name in members or not _is_plain(info):
            raise FileProblem(f"has a duplicate or misplaced member {info.filename[:80]!r}")
        if name == "constants.pkl" or name.startswith("code/"):
            problem = f"`{path.name}` is a TorchScript program, not a checkpoint"
            raise UnsupportedInput(problem, hint="save the `state_dict()` instead")
        start, is_storage = usual_start(info), name.startswith("data/")
        if not usual or not is_storage or (info.file_size and not info.CRC):
            file.seek(info.header_offset)
            header = file.read(LOCAL_HEADER.size + 4 * 1024)
            start = info.header_offset + _check_local(info, header)
            if usual is None and is_storage:
                usual = start == usual_start(info) and PADDING in header[: start - info.header_offset]
        if info.header_offset < end or start + info.file_size > archive.start_dir or size < archive.start_dir:
            raise FileProblem(f"has a member `{name}` that overlaps another or ends outside the file")
        end = start + info.file_size
        crc = info.CRC if has_checksums and info.file_size else None
        members[name] = ChecksummedRange(path, name, start, info.file_size, crc)
    return members


def _not_stored(info: zipfile.ZipInfo) -> FileProblem:
    return FileProblem(f"has a compressed or encrypted member `{info.filename[:80]}`, which torch never writes")


def _is_plain(info: zipfile.ZipInfo) -> bool:
    """Whether a member is a regular file below the folder, on the first disk, with a printable name."""
    kind = stat.S_IFMT(info.external_attr >> 16)
    parts = info.filename.split("/")
    is_file = kind in (0, stat.S_IFREG) and not info.is_dir() and info.volume == 0
    return is_file and info.filename.isprintable() and not {"", ".", ".."} & {*parts} and "\\" not in info.filename


def usual_start(info: zipfile.ZipInfo) -> int:
    """The position of a member's data as torch places it (`inline_container.cc`, `getPadding`)."""
    start = info.header_offset + LOCAL_HEADER.size + len(info.orig_filename.encode()) + 4
    large = info.file_size >= UINT32_MAX, info.header_offset >= UINT32_MAX
    start += 4 * any(large) + 16 * large[0] + 8 * large[1]
    return start + -start % ALIGNMENT


def _check_local(info: zipfile.ZipInfo, header: bytes) -> int:
    """The length of the local header, which must agree with the central directory."""
    magic, _, flags, method, _, _, crc, packed, unpacked, name_length, extra_length = LOCAL_HEADER.unpack_from(header)
    name = header[LOCAL_HEADER.size : LOCAL_HEADER.size + name_length]
    local = (packed, unpacked, crc)
    left_open = (0, 0xFFFFFFFF) if flags & HAS_DESCRIPTOR else (0xFFFFFFFF,)
    central = (info.compress_size, info.file_size, info.CRC)
    sizes_agree = all(one == other or one in left_open for one, other in zip(local, central, strict=True))
    if magic != b"PK\x03\x04" or name != info.orig_filename.encode() or flags != info.flag_bits or not sizes_agree:
        raise FileProblem(f"has contradictory headers of member `{info.filename[:80]}`")
    if method:
        raise _not_stored(info)
    return int(LOCAL_HEADER.size + name_length + extra_length)


# the first pickle, the number 0x1950a86a20f9469cfc6c, without its two protocol bytes
MAGIC = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
PROTOCOL = 1001
SIZE = struct.Struct("<q")
HEAD = 16
STORAGE_LIMIT = 1 << 62
StoragePositions = dict[str, tuple[int, int]]  # storage key to (position in the file, bytes)


def is_legacy(path: Path) -> bool:
    """Whether `path` is a file with the magic number that `torch.save` wrote before torch 1.6."""
    if not path.is_file():
        return False
    with open_source(path) as file:
        return MAGIC in file.read(HEAD)


def read_legacy(path: Path) -> tuple[Any, StoragePositions]:
    """Returns the pickled value, its tensors as TensorRef, and the position of each storage; reads no tensor data.

    Raises UnsupportedInput for another protocol, or a big-endian machine's file; MalformedInput for a truncated or
    hostile file, or a storage that no tensor uses.
    """
    with (
        naming(f"`{path.name}`", COPY_AGAIN),
        open(path, "rb") as file,
        mmap(file.fileno(), 0, access=ACCESS_READ) as data,
    ):
        storages = _Storages()
        _, position = _pickle(data, 0, path)
        protocol, position = _pickle(data, position, path)
        system, position = _pickle(data, position, path)
        if protocol != PROTOCOL:
            shown = str(protocol)[:20] if isinstance(protocol, int) else type(protocol).__name__
            raise UnsupportedInput(
                f"`{path.name}` has protocol {shown} of old torch files; only {PROTOCOL} is supported",
                hint="if you trust the file, load it with torch and save it again with `torch.save`",
            )
        if not isinstance(system, dict) or system.get("little_endian") is not True:
            raise UnsupportedInput(f"`{path.name}` is big-endian", hint="save it again on a little-endian machine")
        content, position = _pickle(data, position, path, PickleHooks(HOOKS.name, HOOKS.call, storages.refer))
        keys, position = _pickle(data, position, path)
        records = _records(data, position, keys, storages.roots)
        return content, records | storages.views(records)


def _pickle(data: mmap, start: int, path: Path, hooks: PickleHooks = HOOKS) -> tuple[Any, int]:
    """The value of the pickle at `start`, and the position of its end."""
    machine = PickleMachine(data, hooks, alone=False)
    machine.position = start
    return interpret(machine, path.name), machine.position


class _Storages:
    """Collects the storages that the value refers to: those with data of their own, and views of them."""

    def __init__(self) -> None:
        self.roots: dict[str, StorageRef] = {}
        self.parts: dict[str, tuple[str, int, int, int]] = {}

    def refer(self, reference: Any) -> StorageRef:
        """The storage of a persistent id `("storage", type, key, location, numel, None or (key, offset, numel))`."""
        match reference:
            case ("storage", Global() as kind, str() as key, str(), int() as numel, *view) if (
                0 <= numel < STORAGE_LIMIT and len(key) <= NAME_LIMIT
            ):
                root = StorageRef(storage_dtype(kind), kind.name, key, numel)
            case _:
                raise FileProblem("has a persistent id that is not a storage")
        known = self.roots.setdefault(key, root)
        if (known.kind, known.numel) != (root.kind, root.numel):
            raise FileProblem(f"has contradictory descriptions of storage `{key[:40]}`")
        match view:
            case [] | [None]:
                return root
            case [(str() as name, int() as offset, int() as size)] if (
                0 <= offset <= numel - size <= numel and len(name) <= NAME_LIMIT
            ):
                part, place = f"{key}:{name}", (key, offset, size, root.dtype.itemsize if root.dtype else 1)
                if self.parts.setdefault(part, place) != place:
                    raise FileProblem(f"has contradictory descriptions of view `{name[:40]}`")
                return StorageRef(root.dtype, root.kind, part, size)
            case _:
                raise FileProblem("has a view that reaches outside its storage")

    def views(self, records: StoragePositions) -> StoragePositions:
        for key, _, _, _ in self.parts.values():
            if key not in records:
                raise FileProblem("has a view of a storage that it does not contain")
        return {
            part: (records[key][0] + offset * itemsize, size * itemsize)
            for part, (key, offset, size, itemsize) in self.parts.items()
        }


def _records(data: mmap, position: int, keys: Any, roots: Mapping[str, StorageRef]) -> StoragePositions:
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise FileProblem("has no list of storage keys")
    records: StoragePositions = {}
    for key in keys:
        if key not in roots or key in records:
            raise FileProblem(f"has a duplicate or unused storage key `{key[:40]}`")
        if position + SIZE.size > len(data):
            raise FileProblem(f"is truncated: it ends at byte {len(data)}, before the end of its storages")
        (count,) = SIZE.unpack_from(data, position)
        dtype = roots[key].dtype
        if count != roots[key].numel or dtype is None:
            raise FileProblem(f"declares both {roots[key].numel} and {count} elements for storage `{key[:40]}`")
        start, size = position + SIZE.size, count * dtype.itemsize
        if start + size > len(data):
            raise FileProblem(f"is truncated: it ends at byte {len(data)}, before the end of its storages")
        records[key] = (start, size)
        position = start + size
    if position != len(data):
        raise FileProblem(f"continues after its last storage, at byte {position}")
    return records
