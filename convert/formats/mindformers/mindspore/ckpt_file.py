"""MindSpore `.ckpt` files, read lazily (headers first, then each tensor by its position) and written as a stream.

Layout (mindspore `train/checkpoint.proto`, `train/serialization.py`): a stream of `Checkpoint.value` messages, each a
`tag` and a TensorProto of `dims`, `tensor_type` and raw little-endian `tensor_content`. Tensors over 512 MiB are split
into messages of one tag and the same dims. `crc_check` appends `crc_num` and ten bytes, the CRC-32 of all before.
MindSpore writes `dims` unpacked, and omits empty tensors. Strategy files (`strategy.py`) are written here, too.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from llmconv.convert.formats.mindformers.mindspore.protobuf import BYTES, VARINT, Field, ProtobufFile
from llmconv.convert.formats.mindformers.mindspore.strategy import ParallelLayout
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.files.safetensors_file import NAME_LIMIT, RANK_LIMIT, FileTensor
from llmconv.files.source_file import fill, open_data, open_source
from llmconv.tensors import BY_NAME, Array, DType, LazyTensor, Piece

TYPES = {
    **{name: BY_NAME[name.lower()] for name in ("Float16", "Float32", "Float64", "BFloat16", "Bool")},
    **{f"{kind}{bits}": BY_NAME[f"{kind.lower()}{bits}"] for kind in ("Int", "UInt") for bits in (8, 16, 32, 64)},
}
TEXT = "str"
VALUES, BYTES_PER_VALUE = 20_000, 256
"""Maximum number of messages: a constant, and one more for each `BYTES_PER_VALUE` bytes of the file."""

CRC_TAG = b"crc_num"
CRC_TAIL = len(CRC_TAG) + 10
CRC_LIMIT = 64 << 20
"""The checksum of files up to this size is verified; of larger ones not, since that would read them twice."""

ENCRYPTED = {b"\xd8\x5e\x3a\x7f": "AES-GCM", b"\xd9\x5e\x3a\x7f": "AES-CBC or SM4-CBC"}
"""First bytes of an encrypted file (mindspore `utils/crypto.cc`)."""

HEAD = 64


@dataclass(frozen=True)
class TensorMessage:
    """One message: name, dtype and shape of a tensor, and the position of its content (or a part of it)."""

    tag: str
    kind: str
    dims: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class MindSporeFile:
    """The tensors of a `.ckpt` in file order, and warnings for the user, one line each."""

    tensors: dict[str, LazyTensor]
    warnings: tuple[str, ...] = ()


def is_mindspore_ckpt(path: Path) -> bool:
    """Whether a file begins as `save_checkpoint` writes: a message with a tag and a tensor, or an encrypted block."""
    if not path.is_file():
        return False
    with open_source(path) as file:
        head = file.read(HEAD)
    if head[:4] in ENCRYPTED:
        return True
    if not head.startswith(b"\x0a"):
        return False
    try:
        with ProtobufFile(path) as source:
            outer = next(source.fields(0, source.size))
            tag, tensor = _first_two(source, outer)
            is_tensor = tensor.number in (2, 3) and tensor.wire == BYTES
            return (outer.number, tag.number) == (1, 1) and is_tensor and bool(source.text(tag, NAME_LIMIT))
    except (MalformedInput, StopIteration):
        return False


def _first_two(source: ProtobufFile, outer: Field) -> tuple[Field, Field]:
    inner = source.fields(outer.start, outer.stop)
    return next(inner), next(inner)


def read_ckpt(path: Path) -> MindSporeFile:
    """Reads the headers of a `.ckpt`, but no tensor data (except for the checksum, see `CRC_LIMIT`).

    Raises UnsupportedInput if it is encrypted, or safetensors lacks an element type, MalformedInput if it is truncated,
    or lengths, shapes or the checksum contradict each other.
    """
    with open_source(path) as file:
        head = file.read(4)
    if head in ENCRYPTED:
        raise UnsupportedInput(
            f"`{path.name}` is encrypted ({ENCRYPTED[head]})",
            hint="load it with `mindspore.load_checkpoint(..., dec_key=...)` and save it again without `enc_key`",
        )
    with ProtobufFile(path) as source:
        end, warnings = _without_crc(source)
        values = _values(source, end)
        return MindSporeFile(_tensors(source, values), warnings)


def _without_crc(source: ProtobufFile) -> tuple[int, tuple[str, ...]]:
    """Position at which the messages end, and a warning if the checksum was not verified."""
    end = source.size - CRC_TAIL
    if end < 0 or not (tail := source.bytes(end, source.size)).startswith(CRC_TAG):
        return source.size, ()
    if end > CRC_LIMIT:
        return end, (f"the checksum of `{source.path.name}` was not verified, as that would read the file twice",)
    if zlib.crc32(source.bytes(0, end)) != int.from_bytes(tail[len(CRC_TAG) :], "big"):
        source.refuse("has an invalid checksum")
    return end, ()


def _values(source: ProtobufFile, end: int) -> list[TensorMessage]:
    values: list[TensorMessage] = []
    for outer in source.fields(0, end):
        if outer.number != 1 or outer.wire != BYTES or len(values) == VALUES + source.size // BYTES_PER_VALUE:
            source.refuse(f"has a field at byte {outer.start} that is not a tensor")
        values.append(_value(source, outer))
    return values


def _value(source: ProtobufFile, outer: Field) -> TensorMessage:
    parts = {field.number: field for field in source.fields(outer.start, outer.stop)}
    if 1 not in parts:
        source.refuse(f"has a tensor without a name at byte {outer.start}")
    tag = source.text(parts[1], NAME_LIMIT)
    if 2 not in parts or parts[2].wire != BYTES:
        raise UnsupportedInput(
            f"`{tag}` in `{source.path.name}` is a hash map, which is unsupported",
            hint="only models made of plain tensors can be converted",
        )
    dims: list[int] = []
    kind, content = "", None
    for field in source.fields(parts[2].start, parts[2].stop):
        if field.number == 1:
            dims += source.numbers(field)
            if len(dims) > RANK_LIMIT:
                source.refuse(f"has tensor `{tag}` with more than {RANK_LIMIT} axes")
        elif field.number == 2:
            kind = source.text(field, NAME_LIMIT)
        elif field.number == 3 and field.wire == BYTES:
            content = field
    if content is None or not all(0 <= size < 1 << 62 for size in dims):
        source.refuse(f"has tensor `{tag}` without content, or with an invalid shape")
    # older writers store a scalar with the dims [0]; an empty tensor is not written at all
    shape = () if dims == [0] and kind != TEXT else tuple(dims)
    return TensorMessage(tag, kind, shape, content.start, content.stop)


def _tensors(source: ProtobufFile, values: Sequence[TensorMessage]) -> dict[str, LazyTensor]:
    """Name to tensor; consecutive messages with the same name are parts of one tensor."""
    groups: list[list[TensorMessage]] = []
    for value in values:
        if value.kind == TEXT:
            continue
        if groups and groups[-1][0].tag == value.tag:
            groups[-1].append(value)
        else:
            groups.append([value])
    tensors: dict[str, LazyTensor] = {}
    for group in groups:
        if group[0].tag in tensors:
            source.refuse(f"has a duplicate tensor name `{group[0].tag}`")
        tensors[group[0].tag] = _tensor(source, group)
    return tensors


def _tensor(source: ProtobufFile, parts: Sequence[TensorMessage]) -> LazyTensor:
    first = parts[0]
    if first.kind not in TYPES:
        raise UnsupportedInput(
            f"tensor `{first.tag}` in `{source.path.name}` has the unsupported type `{first.kind[:40]}`",
            hint="only plain float, integer and bool tensors can be converted; dequantize it first",
        )
    dtype = TYPES[first.kind]
    stored, needed = sum(part.stop - part.start for part in parts), prod(first.dims) * dtype.itemsize
    if stored != needed or any((part.kind, part.dims) != (first.kind, first.dims) for part in parts):
        source.refuse(
            f"has {stored} bytes in {len(parts)} parts for tensor `{first.tag}`, expected {needed} for its shape"
        )
    if len(parts) == 1:
        return FileTensor(source.path, first.start, dtype, first.dims)
    return _chunked(source.path, dtype, first.dims, [(part.start, part.stop) for part in parts])


def _chunked(path: Path, dtype: DType, shape: tuple[int, ...], spans: Sequence[tuple[int, int]]) -> LazyTensor:
    """A tensor whose bytes lie in several places of the file; a part may end inside a row."""
    row_bytes = prod(shape[1:]) * dtype.itemsize

    def load(start: int, stop: int) -> Array:
        array = np.empty((stop - start) * row_bytes, dtype=np.uint8)
        done, skip = 0, start * row_bytes
        with open_data(path) as file:
            for begin, end in spans:
                count = min(max(0, end - begin - skip), len(array) - done)
                if count:
                    fill(file, array.data[done : done + count], begin + skip, path)
                done, skip = done + count, max(0, skip - (end - begin))
        return array.view(dtype.numpy).reshape(stop - start, *shape[1:])

    return LazyTensor(dtype, shape, load)


CHUNK_BYTES = 512 << 20
"""Longer content is split into messages with the same tag and dims (`train/serialization.py`, `SLICE_SIZE`)."""

KINDS = {dtype.name: kind for kind, dtype in TYPES.items()}
WHOLE = -1


def ckpt_pieces(tensors: Mapping[str, LazyTensor]) -> Iterator[Piece]:
    """The pieces of a `.ckpt` file of the tensors, in order; UnsupportedInput if MindSpore lacks an element type."""
    for name, tensor in tensors.items():
        if tensor.dtype.name not in KINDS:
            raise UnsupportedInput(
                f"`{name}` is {tensor.dtype.name}, which is unsupported in a `.ckpt`", hint="give `--dtype bfloat16`"
            )
        for start in range(0, tensor.nbytes, CHUNK_BYTES):
            stop = min(start + CHUNK_BYTES, tensor.nbytes)
            yield _head(name, tensor, stop - start)
            yield tensor if stop - start == tensor.nbytes else _bytes_of(tensor, start, stop)


def _head(name: str, tensor: LazyTensor, size: int) -> bytes:
    """A message up to its last field, the content of `size` bytes."""
    dims = b"".join(number_field(1, dim) for dim in tensor.shape)
    described = dims + bytes_field(2, KINDS[tensor.dtype.name].encode()) + _key(3, BYTES) + varint(size)
    tag = bytes_field(1, name.encode())
    inner = tag + _key(2, BYTES) + varint(len(described) + size) + described
    return _key(1, BYTES) + varint(len(inner) + size) + inner


def _bytes_of(tensor: LazyTensor, start: int, stop: int) -> LazyTensor:
    """Bytes `start:stop` of a tensor's data, which may begin and end inside a row, as a uint8 tensor."""
    row = tensor.nbytes // tensor.num_rows

    def load(first: int, last: int) -> Array:
        low, high = start + first, start + last
        data = np.ascontiguousarray(tensor.rows(low // row, -(-high // row))).reshape(-1).view(np.uint8)
        return data[low - low // row * row :][: high - low]

    return LazyTensor(BY_NAME["uint8"], (stop - start,), load)


def strategy_bytes(layouts: Mapping[str, ParallelLayout]) -> bytes:
    """A strategy file (`ParallelStrategyMap`) of the first pipeline stage; the reverse of `strategy.read_strategy`.

    Not supported: layouts that the optimizer divides further, or with several dimensions of the matrix on one axis.
    """
    items = (bytes_field(1, name.encode()) + bytes_field(2, _layout(layout)) for name, layout in layouts.items())
    return number_field(1, 1) + b"".join(bytes_field(3, item) for item in items)


def _layout(layout: ParallelLayout) -> bytes:
    axes = [axis[0] if axis else WHOLE for axis in layout.axes]
    rest = bytes_field(3, b"") + bytes_field(4, b"") + b"".join(number_field(number, 0) for number in (5, 6, 7))
    return bytes_field(1, _dims(layout.devices)) + bytes_field(2, _dims(axes)) + rest


def _dims(values: Iterable[int]) -> bytes:
    return b"".join(number_field(1, value) for value in values)


def number_field(number: int, value: int) -> bytes:
    """An encoded integer field."""
    return _key(number, VARINT) + varint(value)


def bytes_field(number: int, content: bytes) -> bytes:
    """An encoded text or message field."""
    return _key(number, BYTES) + varint(len(content)) + content


def _key(number: int, wire: int) -> bytes:
    return varint(number << 3 | wire)


def varint(value: int) -> bytes:
    """An encoded number in as few bytes as possible; negative int32 and int64 take ten."""
    value &= (1 << 64) - 1
    text = bytearray()
    while value > 0x7F:
        text.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*text, value])
