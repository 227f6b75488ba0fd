"""MindSpore's `.ckpt` (streamed) and strategy files, written as protobuf messages.

Layouts: `ckpt_file.py`, `strategy.py`, `protobuf.py`. MindSpore writes `dims` unpacked, and omits empty tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from llmconv.convert.formats.mindformers.mindspore.ckpt_file import TYPES
from llmconv.convert.formats.mindformers.mindspore.protobuf import BYTES, VARINT
from llmconv.convert.formats.mindformers.mindspore.strategy import ParallelLayout
from llmconv.errors import UnsupportedInput
from llmconv.tensors import BY_NAME, Array, LazyTensor, Piece

CHUNK_BYTES = 512 << 20
"""Longer content is split into messages with the same tag and dims (`train/serialization.py`, `SLICE_SIZE`)."""

KINDS = {dtype.name: kind for kind, dtype in TYPES.items()}
WHOLE = -1


def ckpt_pieces(tensors: Mapping[str, LazyTensor]) -> Iterator[Piece]:
    """The pieces of a `.ckpt` file of the tensors, in order.

    Raises:
        UnsupportedInput: MindSpore does not have an element type.
    """
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
