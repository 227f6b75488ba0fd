"""Writes values as a pickle, with the opcodes that checkpoint files need; no Python object is pickled.

Opcodes: Python's `Lib/pickletools.py`. Protocol 2 is what torch writes; arrays inside the pickle need protocol 4.

Writes torch files (zip format) as a stream: the same result as `torch.save` of a dict of tensors.

Layout (pytorch `caffe2/serialize/inline_container.cc`, `torch/serialization.py`): a zip of STORED members, each with
its data at a multiple of 64 bytes (an extra field `FB` pads the local header). The CRC, known only after the data was
written, is in a data descriptor after it. Zip records: PKWARE APPNOTE 4.3.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from llmconv.errors import UnsupportedInput
from llmconv.files.pickle_reader import STORAGES
from llmconv.tensors import LazyTensor, Piece


@dataclass(frozen=True)
class PickledName:
    """A class or function, by name."""

    module: str
    name: str


@dataclass(frozen=True)
class PickledCall:
    """The result of `function(*args)`, followed by BUILD with `state` if there is one."""

    function: PickledName
    args: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True)
class PersistentId:
    """A reference to something outside the pickle, by its persistent id."""

    id: tuple[Any, ...]


def pickle_pieces(value: Any, protocol: int = 2) -> Iterator[Piece]:
    """Yields the pickle of dicts, tuples, text, numbers, None and records here; LazyTensors as streamed bytes."""
    text = bytearray(b"\x80" + bytes([protocol]))
    for part in _parts(value):
        if isinstance(part, LazyTensor):
            assert protocol >= 4
            yield bytes(text + b"\x8e" + struct.pack("<Q", part.nbytes))
            yield part
            text.clear()
        else:
            text += part
    yield bytes(text + b".")


def _parts(value: Any) -> Iterator[bytes | LazyTensor]:
    if isinstance(value, LazyTensor):
        yield value
    elif isinstance(value, Mapping):
        yield b"}("
        for key, item in value.items():
            yield from _parts(key)
            yield from _parts(item)
        yield b"u"
    elif isinstance(value, tuple):
        yield b"(" if value else b")"
        for item in value:
            yield from _parts(item)
        yield b"t" if value else b""
    elif isinstance(value, PersistentId):
        yield from _parts(value.id)
        yield b"Q"
    elif isinstance(value, PickledCall):
        yield from _parts(value.function)
        yield from _parts(value.args)
        yield b"R"
        if value.state is not None:
            yield from _parts(value.state)
            yield b"b"
    else:
        yield _scalar(value)


def _scalar(value: Any) -> bytes:
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        if -(1 << 31) <= value < 1 << 31:
            return b"J" + struct.pack("<i", value)
        return b"\x8a\x08" + struct.pack("<q", value)
    if isinstance(value, str):
        encoded = value.encode()
        return b"X" + struct.pack("<I", len(encoded)) + encoded
    if isinstance(value, bytes):
        return b"B" + struct.pack("<I", len(value)) + value
    if isinstance(value, PickledName):
        return f"c{value.module}\n{value.name}\n".encode()
    raise TypeError(f"no opcode for {type(value).__name__}")


ALIGNMENT = 64
FLAGS = 0x0808  # a data descriptor follows; names are UTF-8
VERSION, VERSION_ZIP64 = 20, 45
FULL, FULL_COUNT = 0xFFFFFFFF, 0xFFFF  # placeholders of numbers that only a zip64 record can represent
LOCAL = struct.Struct("<4s5H3L2H")
CENTRAL = struct.Struct("<4s6H3L5H2L")
END64 = struct.Struct("<4sQ2H2L4Q4sLQL")
END = struct.Struct("<4s4H2LH")
STORAGE_OF = {dtype: storage for storage, dtype in STORAGES.items()}


def torch_pieces(tensors: Mapping[str, LazyTensor], *, inside: tuple[str, ...] = ()) -> Iterator[Piece]:
    """Yields a torch file that contains a dict of the tensors, in order, each with a storage of its own.

    `inside` are keys of the enclosing dicts, outermost first: `("model",)` gives `{"model": {name: tensor}}`. Raises
    UnsupportedInput for an element type for which torch has no storage class.
    """
    # in the order of `torch.save`
    value: Any = {name: _view(name, tensor, key) for key, (name, tensor) in enumerate(tensors.items())}
    for name in reversed(inside):
        value = {name: value}
    pickle = b"".join(piece for piece in pickle_pieces(value) if isinstance(piece, bytes))
    contents: list[tuple[str, bytes | LazyTensor]] = [("data.pkl", pickle), ("byteorder", b"little")]
    contents += [(f"data/{number}", tensor) for number, tensor in enumerate(tensors.values())]
    contents += [("version", b"3\n")]
    members: list[_Member] = []
    for place, (name, content) in enumerate(contents):
        position = members[-1].end if members else 0
        number = place - 2 if isinstance(content, LazyTensor) else None
        members.append(_Member(b"archive/" + name.encode(), content, position, number))
    for member in members:
        yield _local_header(member)
        yield member.content
        yield partial(_descriptor, member)
    yield partial(_directory, members)


@dataclass(frozen=True)
class _Member:
    """One member of the zip; `position` is that of the local header, `number` the index of a tensor, else None."""

    name: bytes
    content: bytes | LazyTensor
    position: int
    number: int | None

    @property
    def size(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.nbytes

    @property
    def is_large(self) -> bool:
        """Whether its size needs 64 bits."""
        return self.size >= FULL

    @property
    def end(self) -> int:
        """Position after header, content and descriptor."""
        return self.position + len(_local_header(self)) + self.size + (24 if self.is_large else 16)

    def crc(self, crcs: Sequence[int]) -> int:
        """CRC-32 of the content, given those of the tensors."""
        return zlib.crc32(self.content) if isinstance(self.content, bytes) else crcs[self.number or 0]


def _view(name: str, tensor: LazyTensor, key: int) -> PickledCall:
    """A tensor that covers all of storage `key` (`torch/_utils.py`, `_rebuild_tensor_v2`)."""
    if tensor.dtype.name not in STORAGE_OF:
        problem = f"`{name}` is {tensor.dtype.name}, which torch files of this kind do not support"
        raise UnsupportedInput(problem, hint="give `--dtype bfloat16`, or a checkpoint that is not quantized")
    strides = [1]
    for size in reversed(tensor.shape[1:]):
        strides.append(strides[-1] * max(1, size))
    stride = tuple(reversed(strides)) if tensor.shape else ()
    elements = tensor.nbytes // tensor.dtype.itemsize
    storage = PersistentId(("storage", PickledName("torch", STORAGE_OF[tensor.dtype.name]), str(key), "cpu", elements))
    no_hooks = PickledCall(PickledName("collections", "OrderedDict"), ())
    return PickledCall(
        PickledName("torch._utils", "_rebuild_tensor_v2"), (storage, 0, tensor.shape, stride, False, no_hooks)
    )


def _local_header(member: _Member) -> bytes:
    extra = struct.pack("<2H2Q", 1, 16, member.size, member.size) if member.is_large else b""
    size = FULL if member.is_large else 0
    padding = -(member.position + LOCAL.size + len(member.name) + len(extra) + 4) % ALIGNMENT
    extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
    version = VERSION_ZIP64 if member.is_large else VERSION
    fields = (b"PK\3\4", version, FLAGS, 0, 0, 0, 0, size, size, len(member.name), len(extra))
    return LOCAL.pack(*fields) + member.name + extra


def _descriptor(member: _Member, crcs: Sequence[int]) -> bytes:
    layout = "<4sL2Q" if member.is_large else "<4s3L"
    return struct.pack(layout, b"PK\7\x08", member.crc(crcs), member.size, member.size)


def _directory(members: Sequence[_Member], crcs: Sequence[int]) -> bytes:
    """The central directory and the end records."""
    start, count = members[-1].end, len(members)
    entries = b"".join(_entry(member, member.crc(crcs)) for member in members)
    sizes = (len(entries), start)
    end = b""
    if max(sizes) >= FULL or count >= FULL_COUNT:
        fields = (b"PK\6\6", 44, VERSION_ZIP64, VERSION_ZIP64, 0, 0, count, count, *sizes)
        end = END64.pack(*fields, b"PK\6\7", 0, start + len(entries), 1)
    counts = (min(count, FULL_COUNT),) * 2
    return entries + end + END.pack(b"PK\5\6", 0, 0, *counts, *(min(size, FULL) for size in sizes), 0)


def _entry(member: _Member, crc: int) -> bytes:
    """The member's entry in the central directory; numbers over 32 bits go to the zip64 extra field."""
    wide = [*([member.size] * 2 if member.is_large else []), *([member.position] if member.position >= FULL else [])]
    extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    version = VERSION_ZIP64 if wide else VERSION
    sizes = (min(member.size, FULL),) * 2
    fields = (b"PK\1\2", version, version, FLAGS, 0, 0, 0, crc, *sizes, len(member.name), len(extra), 0, 0, 0, 0)
    return CENTRAL.pack(*fields, min(member.position, FULL)) + member.name + extra
