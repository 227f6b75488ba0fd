"""MindSpore's `.ckpt` files, read lazily and written as a stream, and strategy files: how ranks divide each tensor.

Layout (mindspore `train/checkpoint.proto`, `train/serialization.py`): a stream of `Checkpoint.value` messages, each a
`tag` and a TensorProto of `dims`, `tensor_type` and raw little-endian `tensor_content`. Tensors over 512 MiB are split
into messages of one tag and the same dims. `crc_check` appends `crc_num` and ten bytes, the CRC-32 of all before.
MindSpore writes `dims` unpacked, and omits empty tensors.

A strategy (`node_strategy.proto`, `parallel/_parallel_serialization.py`, `parallel/_tensor.py`) is a map of parameter
name to device matrix, tensor map and optimizer sharding. `tensor_map[i] = k` divides axis i by `dev_matrix[-1 - k]`, -1
does not divide it; ranks count through the matrix row by row.

Both are protocol buffers (`llmconv/files/protobuf.py`).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path

import numpy as np

from llmconv.checkpoint import read_json
from llmconv.convert.algebra import slice_rows
from llmconv.convert.tokenizers import BYTES, VARINT, Field, Protobuf
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput, listing
from llmconv.files.safetensors_file import NAME_LIMIT, RANK_LIMIT, FileTensor
from llmconv.files.source_file import fill, open_data, open_source
from llmconv.quantized_weights.packed_weight import as_bytes
from llmconv.tensors import BY_NAME, Array, LazyTensor, Piece

FOLDER = "strategy"
FILE = re.compile(r".*strategy.*\.(?:ckpt|json)")
STAGE = re.compile(r"^\d+-")
DEVICE_LIMIT = 1 << 20


@dataclass(frozen=True)
class ParallelLayout:
    """How one tensor is divided among ranks."""

    devices: tuple[int, ...]  # the device matrix
    # for each axis of the tensor, the dimensions of the matrix that divide it, counted from the last one
    axes: tuple[tuple[int, ...], ...]
    step: int = 0  # number of ranks among which the model itself is divided, if the optimizer divides axis 0 further
    size: int = 0  # number of parts into which the optimizer divides axis 0; 0 if it does not
    uneven: bool = False  # whether the parts have different sizes, which is unsupported

    @property
    def ranks(self) -> int:
        return prod(self.devices)

    def parts(self) -> tuple[int, ...]:
        """Number of parts of each axis, by the model's parallelism alone."""
        return tuple(prod(self.devices[-1 - k] for k in axis) for axis in self.axes)

    def coordinates_of(self, rank: int) -> tuple[int, ...]:
        """Index, along each axis, of the part that a rank holds, the optimizer's division of axis 0 included."""
        if self.size and self.axes:
            within, parts = rank % self.step, list[int]()  # parts of the model, counted row by row
            for count in reversed(self.parts()):
                within, part = divmod(within, count)
                parts.insert(0, part)
            return (parts[0] * self.size + rank // self.step % self.size, *parts[1:])
        coordinates = []
        for count in reversed(self.devices):
            rank, part = divmod(rank, count)
            coordinates.append(part)
        indices = []
        for axis in self.axes:
            part = 0
            for k in axis:
                part = part * self.devices[-1 - k] + coordinates[k]
            indices.append(part)
        return tuple(indices)

    def grid(self) -> tuple[int, ...]:
        """Number of parts of each axis in total."""
        parts = self.parts()
        return (parts[0] * self.size, *parts[1:]) if self.size and parts else parts

    def is_sound(self) -> bool:
        inside = all(0 <= k < len(self.devices) for axis in self.axes for k in axis)
        counts = all(count > 0 for count in self.devices) and self.ranks <= DEVICE_LIMIT
        if not inside or not counts or not self.axes:
            return inside and counts
        return not self.size or self.step == prod(self.parts())


@dataclass(frozen=True)
class Strategy:
    """Parameter name to layout, from the strategy file or folder `path`."""

    path: Path
    layouts: Mapping[str, ParallelLayout]


def find_strategy(folder: Path, given: Path | None = None) -> Strategy | None:
    """The layouts of all strategy files in or next to a folder of ranks; None if there are none.

    `given` is a strategy file, of one rank or merged from all stages, or a folder of them, to use instead (InputRefused
    if there is none). Raises MalformedInput if files are unreadable or contradict each other.
    """
    if given and given.is_file():
        return Strategy(given, _layouts([given]))
    places = (given, given / FOLDER) if given else (folder, folder / FOLDER, folder.parent / FOLDER, folder.parent)
    for place in places:
        if files := strategy_files(place):
            return Strategy(place, _layouts(files))
    if given:
        raise InputRefused(
            f"`{given}` is not a strategy file, and contains none",
            hint="give a `ckpt_strategy_rank_N.ckpt`, or a folder of them",
        )
    return None


def strategy_files(place: Path) -> list[Path]:
    """The strategy files in a folder, or the one at `place` itself."""
    if place.is_file():
        return [place]
    return sorted(entry for entry in place.iterdir() if FILE.fullmatch(entry.name)) if place.is_dir() else []


def _layouts(files: Sequence[Path]) -> dict[str, ParallelLayout]:
    """The layouts of several files of one run, which must agree."""
    layouts: dict[str, ParallelLayout] = {}
    for file in files:
        for name, layout in read_strategy(file).items():
            if layouts.setdefault(name, layout) != layout:
                raise MalformedInput(
                    f"the strategy files in `{file.parent}` contradict each other for `{name}`",
                    hint="keep those of this run only",
                )
    return layouts


def read_strategy(path: Path) -> dict[str, ParallelLayout]:
    """Parameter name to layout, from a strategy file (`.json` or protobuf); MalformedInput if it is inconsistent."""
    try:
        layouts: dict[str, ParallelLayout] = {}
        if path.suffix == ".json":
            for name, item in read_json(path)["parallel_layout_item"].items():
                maps = [axis if isinstance(axis, list) else [axis] for axis in item["tensor_map"]]
                names = ("field", "opt_weight_shard_step", "opt_weight_shard_size")
                further = [item.get(name, 0) for name in names]
                layouts[name] = _make(item["dev_matrix"], maps, further, bool(item.get("param_split_shape")))
        else:
            with Protobuf.open(path) as source:
                for message in source.fields(0, source.size):
                    if message.number == 3 and message.wire == BYTES:
                        parts = {field.number: field for field in source.fields(message.start, message.stop)}
                        layouts[source.text(parts[1], NAME_LIMIT)] = _layout(source, parts[2])
        invalid = [name for name, layout in layouts.items() if not layout.is_sound()]
    except (AttributeError, KeyError, TypeError, ValueError, LlmconvError) as error:
        raise MalformedInput(
            f"`{path.name}` is not a strategy file", hint="it should be a `ckpt_strategy_rank_N.ckpt` of the run"
        ) from error
    if invalid:
        raise MalformedInput(
            f"`{path.name}` has invalid layouts for {len(invalid)} tensors: {listing(invalid)}",
            hint="copy the file again",
        )
    found: dict[str, ParallelLayout] = {}
    for name, layout in layouts.items():
        if found.setdefault(STAGE.sub("", name, count=1), layout) != layout:
            raise MalformedInput(
                f"the stages in `{path.name}` contradict each other for `{name}`", hint="merge those of one run"
            )
    return found


def _layout(source: Protobuf, message: Field) -> ParallelLayout:
    """Numbers: dev_matrix 1, tensor_map 2, param_split_shape 3, indices_offset 4, field 5, step 6, size 7."""
    fields = list(source.fields(message.start, message.stop))
    lists = {number: [_dims(source, field) for field in fields if field.number == number] for number in (1, 2)}
    single = {field.number: field.signed for field in fields if field.number in (5, 6, 7)}
    split = any(_dims(source, field) for field in fields if field.number == 3)
    devices = [size for dims in lists[1] for size in dims]
    maps = lists[2] if len(lists[2]) > 1 else [[k] for dims in lists[2] for k in dims]
    return _make(devices, maps, (single.get(5, 0), single.get(6, 0), single.get(7, 0)), split)


def _dims(source: Protobuf, field: Field) -> list[int]:
    return [value for dim in source.fields(field.start, field.stop) if dim.number == 1 for value in source.numbers(dim)]


def _make(devices: Sequence[int], maps: Sequence[Sequence[int]], further: Sequence[int], split: bool) -> ParallelLayout:
    field, step, size = further
    axes = tuple(tuple(k for k in axis if k != -1) for axis in maps)
    nested = any(len(axis) > 1 for axis in axes) and size > 1
    sharded = size > 1
    return ParallelLayout(
        tuple(devices), axes, step if sharded else 0, size if sharded else 0, uneven=field > 0 or split or nested
    )


TYPES = {
    **{name: BY_NAME[name.lower()] for name in ("Float16", "Float32", "Float64", "BFloat16", "Bool")},
    **{f"{kind}{bits}": BY_NAME[f"{kind.lower()}{bits}"] for kind in ("Int", "UInt") for bits in (8, 16, 32, 64)},
}
TEXT = "str"
# Maximum number of messages: a constant, and one more for each `BYTES_PER_VALUE` bytes of the file
VALUES, BYTES_PER_VALUE = 20_000, 256
CRC_TAG = b"crc_num"
CRC_TAIL = len(CRC_TAG) + 10
# The checksum of files up to this size is verified; of larger ones not, since that would read them twice
CRC_LIMIT = 64 << 20
# First bytes of an encrypted file (mindspore `utils/crypto.cc`)
ENCRYPTED = {b"\xd8\x5e\x3a\x7f": "AES-GCM", b"\xd9\x5e\x3a\x7f": "AES-CBC or SM4-CBC"}
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
class Parameters:
    """A model in MindFormers' names, the strategy that joined ranks, and phrases about other content (`dropped`)."""

    tensors: dict[str, LazyTensor]
    warnings: tuple[str, ...] = ()
    files: int = 1
    dropped: tuple[str, ...] = ()
    strategy: Path | None = None


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
        with Protobuf.open(path) as source:
            outer = next(source.fields(0, source.size))
            inner = source.fields(outer.start, outer.stop)
            tag, tensor = next(inner), next(inner)
            is_tensor = tensor.number in (2, 3) and tensor.wire == BYTES
            return (outer.number, tag.number) == (1, 1) and is_tensor and bool(source.text(tag, NAME_LIMIT))
    except (MalformedInput, StopIteration):
        return False


def read_ckpt(path: Path) -> Parameters:
    """The tensors of a `.ckpt` in file order, and warnings; reads headers alone, and the checksum up to `CRC_LIMIT`.

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
    with Protobuf.open(path) as source:
        end, warnings = _without_crc(source)
        values: list[TensorMessage] = []
        for outer in source.fields(0, end):
            if outer.number != 1 or outer.wire != BYTES or len(values) == VALUES + source.size // BYTES_PER_VALUE:
                source.refuse(f"has a field at byte {outer.start} that is not a tensor")
            values.append(_value(source, outer))
        tensors: dict[str, LazyTensor] = {}
        # consecutive messages with the same name are parts of one tensor
        for tag, parts in groupby((value for value in values if value.kind != TEXT), lambda value: value.tag):
            if tag in tensors:
                source.refuse(f"has a duplicate tensor name `{tag}`")
            tensors[tag] = _tensor(path, source, list(parts))
        return Parameters(tensors, warnings)


def _without_crc(source: Protobuf) -> tuple[int, tuple[str, ...]]:
    """Position at which the messages end, and a warning if the checksum was not verified."""
    end = source.size - CRC_TAIL
    if end < 0 or not (tail := source.bytes(end, source.size)).startswith(CRC_TAG):
        return source.size, ()
    if end > CRC_LIMIT:
        return end, (f"the checksum of `{source.name}` was not verified, as that would read the file twice",)
    if zlib.crc32(source.bytes(0, end)) != int.from_bytes(tail[len(CRC_TAG) :], "big"):
        source.refuse("has an invalid checksum")
    return end, ()


def _value(source: Protobuf, outer: Field) -> TensorMessage:
    parts = {field.number: field for field in source.fields(outer.start, outer.stop)}
    if 1 not in parts:
        source.refuse(f"has a tensor without a name at byte {outer.start}")
    tag = source.text(parts[1], NAME_LIMIT)
    if 2 not in parts or parts[2].wire != BYTES:
        raise UnsupportedInput(
            f"`{tag}` in `{source.name}` is a hash map, which is unsupported",
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


def _tensor(path: Path, source: Protobuf, parts: Sequence[TensorMessage]) -> LazyTensor:
    first = parts[0]
    if first.kind not in TYPES:
        raise UnsupportedInput(
            f"tensor `{first.tag}` in `{source.name}` has the unsupported type `{first.kind[:40]}`",
            hint="only plain float, integer and bool tensors can be converted; dequantize it first",
        )
    dtype = TYPES[first.kind]
    stored, needed = sum(part.stop - part.start for part in parts), prod(first.dims) * dtype.itemsize
    if stored != needed or any((part.kind, part.dims) != (first.kind, first.dims) for part in parts):
        source.refuse(
            f"has {stored} bytes in {len(parts)} parts for tensor `{first.tag}`, expected {needed} for its shape"
        )
    if len(parts) == 1:
        return FileTensor(path, first.start, dtype, first.dims)
    # A tensor whose bytes lie in several places of the file; a part may end inside a row
    spans = [(part.start, part.stop) for part in parts]
    row_bytes = prod(first.dims[1:]) * dtype.itemsize

    def load(start: int, stop: int) -> Array:
        array = np.empty((stop - start) * row_bytes, dtype=np.uint8)
        done, skip = 0, start * row_bytes
        with open_data(path) as file:
            for begin, end in spans:
                if count := min(max(0, end - begin - skip), len(array) - done):
                    fill(file, array.data[done : done + count], begin + skip, path)
                done, skip = done + count, max(0, skip - (end - begin))
        return array.view(dtype.numpy).reshape(stop - start, *first.dims[1:])

    return LazyTensor(dtype, first.dims, load)


# Longer content is split into messages with the same tag and dims (`train/serialization.py`, `SLICE_SIZE`)
CHUNK_BYTES = 512 << 20
KINDS = {dtype.name: kind for kind, dtype in TYPES.items()}
WHOLE = -1


def ckpt_pieces(tensors: Mapping[str, LazyTensor]) -> Iterator[Piece]:
    """The pieces of a `.ckpt` file of the tensors, in order; UnsupportedInput if MindSpore lacks an element type."""
    for name, tensor in tensors.items():
        if tensor.dtype.name not in KINDS:
            raise UnsupportedInput(
                f"`{name}` is {tensor.dtype.name}, which is unsupported in a `.ckpt`", hint="give `--dtype bfloat16`"
            )
        dims = b"".join(number_field(1, dim) for dim in tensor.shape)
        dims += bytes_field(2, KINDS[tensor.dtype.name].encode())
        for start in range(0, tensor.nbytes, CHUNK_BYTES):
            stop = min(start + CHUNK_BYTES, tensor.nbytes)
            size = stop - start
            # the message up to its last field, the content of `size` bytes
            described = dims + _key(3, BYTES) + varint(size)
            inner = bytes_field(1, name.encode()) + _key(2, BYTES) + varint(len(described) + size) + described
            yield _key(1, BYTES) + varint(len(inner) + size) + inner
            yield tensor if size == tensor.nbytes else slice_rows(as_bytes(tensor), start, stop)


def strategy_bytes(layouts: Mapping[str, ParallelLayout]) -> bytes:
    """The strategy file of the first stage, without layouts of the optimizer, or several dims on one axis."""

    def dims(values: Iterable[int]) -> bytes:
        return b"".join(number_field(1, value) for value in values)

    items = []
    for name, layout in layouts.items():
        axes = [axis[0] if axis else WHOLE for axis in layout.axes]
        rest = bytes_field(3, b"") + bytes_field(4, b"") + b"".join(number_field(number, 0) for number in (5, 6, 7))
        content = bytes_field(1, dims(layout.devices)) + bytes_field(2, dims(axes)) + rest
        items.append(bytes_field(1, name.encode()) + bytes_field(2, content))
    return number_field(1, 1) + b"".join(bytes_field(3, item) for item in items)


def number_field(number: int, value: int) -> bytes:
    return _key(number, VARINT) + varint(value)


def bytes_field(number: int, content: bytes) -> bytes:
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
