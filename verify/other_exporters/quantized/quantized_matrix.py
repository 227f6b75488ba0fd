"""QuantizedMatrix: a matrix of codes in a graph, read by rows; Constants: the constant values of a graph.

Integers of less than a byte are unpacked. Nothing of the size of the model is held: codes are read a block of rows at a
time, scales and zero points of four matrices at a time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from llmconv.errors import UnsupportedInput
from llmconv.files.safetensors_file import read_exactly
from llmconv.runtime.onnxruntime.guard import external_fields, nodes
from llmconv.tensors import Array
from llmconv.verify.audit.weights import initializer_values

SUB_BYTE = {  # element types of less than a byte: number of bits, and whether they are signed
    name: (bits, name.startswith("INT"))
    for name, bits in (("UINT4", 4), ("INT4", 4), ("UINT2", 2), ("INT2", 2))
    if hasattr(TensorProto, name)
}

RESHAPING = {"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten"}  # operators that keep the order of elements
HALF = {TensorProto.FLOAT16, TensorProto.BFLOAT16}
DEPTH = 8
FILLED_LIMIT = 1 << 28  # elements of a constant that a graph has as one number


class Constants:
    """Initializers and `Constant` nodes of a graph, possibly reshaped; makers and users of each value."""

    def __init__(self, model: onnx.ModelProto, folder: Path) -> None:
        self._folder = folder
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self.makers: dict[str, onnx.NodeProto] = {}
        self.users: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in nodes(model):
            self.makers.update((name, node) for name in node.output)
            for name in node.input:
                self.users[name].append(node)

    def initializer(self, name: str) -> str:
        """The initializer of a value, possibly in another shape, or half precision that is widened; empty for none."""
        for _ in range(DEPTH):
            if name in self._tensors:
                return name
            maker = self.makers.get(name)
            if maker is None or not (maker.op_type in RESHAPING or self._is_widened(maker)):
                return ""
            name = maker.input[0]
        return ""

    def _is_widened(self, node: onnx.NodeProto) -> bool:
        """Whether a node casts an initializer of half precision to float32, which changes no value."""
        stored = self._tensors.get(node.input[0]) if node.op_type == "Cast" else None
        return stored is not None and stored.data_type in HALF and node.attribute[0].i == TensorProto.FLOAT

    def array(self, name: str) -> Array | None:
        """A constant in its stored shape, integers of 4 or 2 bits as int8 or uint8; None if it is not constant."""
        if initializer := self.initializer(name):
            return self._read(self._tensors[initializer])
        maker = self.makers.get(name)
        if maker is not None and maker.op_type == "Constant":
            value = next((attribute.t for attribute in maker.attribute if attribute.name == "value"), None)
            return None if value is None else numpy_helper.to_array(value)
        shape, number = self.filled(name)
        return np.full(shape, number) if 0 < prod(shape) < FILLED_LIMIT else None

    def filled(self, name: str) -> tuple[tuple[int, ...], Array]:
        """The shape of a `ConstantOfShape` of a constant shape, and its value; shape (0,) for another node."""
        maker = self.makers.get(name)
        shape = self.array(maker.input[0]) if maker is not None and maker.op_type == "ConstantOfShape" else None
        if maker is None or shape is None:
            return (0,), np.zeros(1, np.float32)
        value = next((numpy_helper.to_array(one.t) for one in maker.attribute if one.name == "value"), None)
        return tuple(map(int, shape)), np.zeros(1, np.float32) if value is None else value

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[self.initializer(name)].dims)

    def kind(self, name: str) -> tuple[np.dtype, int] | None:
        """The numpy dtype and the number of elements of what `array` returns, without reading it."""
        tensor = self._tensors.get(self.initializer(name))
        if tensor is None:
            found = self.array(name)
            return None if found is None else (found.dtype, found.size)
        bits, signed = SUB_BYTE.get(TensorProto.DataType.Name(tensor.data_type), (0, False))
        small = np.dtype(np.int8 if signed else np.uint8)
        return (small if bits else helper.tensor_dtype_to_np_dtype(tensor.data_type)), prod(tensor.dims)

    def place(self, name: str) -> tuple[Path, int, int] | None:
        """The file of an initializer, with offset and length of its bytes; None for one in the graph itself."""
        tensor = self._tensors.get(self.initializer(name))
        fields = external_fields(tensor) if tensor is not None else {}
        at, length = int(fields.get("offset", 0)), int(fields.get("length", 0))
        return (self._folder / fields["location"], at, length) if fields else None

    def rows(self, name: str, count: int) -> Callable[[int, int], Array]:
        """Reads rows `start:stop` of a constant in `count` equal rows, each flattened: [rows, elements]."""
        kind, place = self.kind(name), self.place(name)
        assert kind is not None
        dtype, size = kind
        if place is None or place[2] not in (0, size * dtype.itemsize):  # inline, or codes of less than a byte
            array = self.array(name)
            assert array is not None
            return weight_rows(array, (count, -1))
        width, (path, offset, _) = size // count, place

        def read(start: int, stop: int) -> Array:
            found: Array = np.empty((stop - start, width), dtype)
            with open(path, "rb", buffering=0) as file:
                at = offset + start * width * dtype.itemsize
                read_exactly(file.fileno(), found.reshape(-1).view(np.uint8).data, at, path)
            return found

        return read

    def after(self, name: str) -> Iterator[onnx.NodeProto]:
        """The nodes that use a value, directly or after it was reshaped, transposed or cast."""
        waiting, seen = [name], set()
        while waiting:
            for node in self.users.get(waiting.pop(), []):
                if node.op_type in {*RESHAPING, "Transpose", "Cast"} and node.output[0] not in seen:
                    seen.add(node.output[0])
                    waiting.append(node.output[0])
                else:
                    yield node

    def _read(self, tensor: onnx.TensorProto) -> Array | None:
        bits, signed = SUB_BYTE.get(TensorProto.DataType.Name(tensor.data_type), (0, False))
        if not bits:
            return initializer_values(tensor, self._folder)
        dtype, fields = np.int8 if signed else np.uint8, external_fields(tensor)
        if not fields:
            return numpy_helper.to_array(tensor).astype(dtype)
        count = int(np.prod(tensor.dims, dtype=np.int64))
        raw = np.empty(-(-count * bits // 8), dtype=np.uint8)
        path = self._folder / fields["location"]
        with open(path, "rb", buffering=0) as file:
            read_exactly(file.fileno(), raw.data, int(fields.get("offset", 0)), path)
        codes = unpacked(raw, bits)[:count].reshape(tuple(tensor.dims))
        return (codes.astype(np.int8) ^ (1 << bits - 1)) - np.int8(1 << bits - 1) if signed else codes


def unpacked(raw: Array, bits: int) -> Array:
    """Codes of `bits` bits from bytes, along the last axis, low bits first (onnx.proto, `UINT4`)."""
    if bits == 8:
        return raw
    codes = np.empty((*raw.shape, 8 // bits), dtype=np.uint8)
    for at in range(codes.shape[-1]):  # ten times as fast as an axis of the shifts
        np.right_shift(raw, np.uint8(at * bits), out=codes[..., at])
    codes &= np.uint8((1 << bits) - 1)
    return codes.reshape(*raw.shape[:-1], -1)


TINY = 1e-30
"""Smaller numbers count as zero, as in `llmconv export --quant`: products of scales of such would be denormal."""


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A matrix `[rows, columns]` with the values `(code - zero point) * scale + offset` in float32."""

    name: str  # name of the initializer with the codes
    kind: str  # description of its format
    shape: tuple[int, int]  # rows and columns in the graph
    codes: Callable[[int, int], Array]  # `codes(start, stop)` returns rows of integers
    # reads scales and zero points, grids of floats: element `(i, j)` has those at `(i // repeat[0], j // repeat[1])`
    grids: Callable[[], tuple[Array, Array]]
    repeat: tuple[int, int]
    scales: str  # name of the initializer with the scales
    # looked_up, multiplied: whether it is an embedding, and whether it is a factor of a product
    looked_up: bool = False
    multiplied: bool = True
    largest: int | None = None  # the largest code, if it is known
    smallest: int = 0  # the smallest code
    # place of every column among those of `scale` and `zero`, if those are in another order
    columns: Array | None = None
    symmetric: bool = False  # no zero points are stored: each is the middle of the codes
    # where codes, scales and zero points are in files, and how they are read; None if one is in the graph itself
    origin: tuple[object, ...] | None = None
    # initializers with the offsets of the rows, in order, and what reads those [rows, blocks]; empty and None for none
    offsets: tuple[str, ...] = ()
    read_offsets: Callable[[], Array] | None = None

    @property
    def scale(self) -> Array:
        return _grids(self)[0]

    @property
    def zero(self) -> Array:
        return _grids(self)[1]

    @np.errstate(over="ignore", invalid="ignore")  # a scale may be too large for its codes
    def rows(self, start: int, stop: int) -> Array:
        codes, size = self.codes(start, stop).astype(np.float32), self.repeat[1]
        if self.read_offsets:
            scale, zero, offset = (self._spread(grid, start, stop) for grid in (self.scale, self.zero, _offsets(self)))
            return (codes - zero) * scale.astype(np.float32) + offset
        if self.repeat[0] == 1 and self.columns is None and self.shape[1] == size * self.scale.shape[1]:
            blocks = codes.reshape(len(codes), -1, size)  # the same products, without a scale for every element
            blocks -= self.zero[start:stop, :, None]
            blocks *= self.scale[start:stop, :, None].astype(np.float32)
            return codes
        if self.repeat[1] == 1 and self.columns is None and self.scale.shape == (1, self.shape[1]):
            codes -= self.zero  # a scale per column
            codes *= self.scale.astype(np.float32)
            return codes
        scale = self._spread(self.scale, start, stop).astype(np.float32)
        return (codes - self._spread(self.zero, start, stop)) * scale

    def steps(self, start: int, stop: int) -> Array:
        """Absolute scales of rows `start:stop`; the median scale replaces 0."""
        steps = np.abs(self._spread(self.scale, start, stop).astype(np.float32))
        return np.where(steps > 0, steps, max(float(np.median(np.abs(self.scale))), 1e-30)).astype(np.float32)

    def grid(self, start: int, stop: int) -> tuple[Array, Array]:
        """Scale and zero point of every element of rows `start:stop`."""
        return self._spread(self.scale, start, stop), self._spread(self.zero, start, stop)

    def read(self) -> Array:
        return self.rows(0, self.shape[0])

    def _spread(self, grid: Array, start: int, stop: int) -> Array:
        rows = grid[np.minimum(np.arange(start, stop) // self.repeat[0], len(grid) - 1)]
        places = np.arange(self.shape[1]) if self.columns is None else self.columns
        return rows[:, np.minimum(places // self.repeat[1], grid.shape[1] - 1)]


@lru_cache(maxsize=4)
def _grids(stored: QuantizedMatrix) -> tuple[Array, Array]:
    return stored.grids()


@lru_cache(maxsize=4)
def _offsets(stored: QuantizedMatrix) -> Array:
    assert stored.read_offsets
    return stored.read_offsets()


CODES, OFFSETS, JOINED = ".codes", ".offsets", "+"
"""Suffixes of the names of codes and offsets in folders of llmconv, and what is between those of joined products."""


def name_in_file(name: str) -> str:
    """The name of an initializer without the shape of a view of it, `X.codes:131x64`, as the file of codes has it."""
    return re.sub(r":\d+(x\d+)*$", "", name)


def with_offsets(stored: QuantizedMatrix, constants: Constants) -> QuantizedMatrix:
    """A matrix with the offsets that llmconv stores with its codes: `X.offsets` [blocks, N] for `X.codes`.

    Whether the graph adds them shows in its outputs: the reference has them.
    """
    parts = [part.removesuffix(CODES) for part in name_in_file(stored.name).split(JOINED)]
    names = tuple(name for part in parts if (name := constants.initializer(part + OFFSETS)))
    if not names or not stored.symmetric:
        return stored

    def read() -> Array:
        found = [array for name in names if (array := constants.array(name)) is not None]
        grid: Array = np.concatenate(found, axis=1).T.astype(np.float32)
        return grid

    sizes = [constants.shape(name) for name in names]
    blocks = -(-stored.shape[1] // stored.repeat[1])
    if sum(size[-1] for size in sizes) != stored.shape[0] or any(size[0] != blocks or len(size) != 2 for size in sizes):
        problem = f"`{names[0]}` is no matrix of one offset for each block of `{stored.name}`"
        raise UnsupportedInput(problem, hint="export the graphs again")
    places = [constants.place(name) for name in names]
    origin = (*stored.origin, *places) if stored.origin and None not in places else None
    return replace(
        stored,
        kind=f"{stored.kind}, offsets",
        symmetric=False,
        origin=origin,
        offsets=names,
        read_offsets=read,
    )


@dataclass(frozen=True)
class QuantizationScheme:
    """How some operators store quantized weights."""

    operators: frozenset[str]  # the operators with quantized weights
    # returns the matrix of a node; None if it has no constant one
    matrix: Callable[[onnx.NodeProto, Constants], QuantizedMatrix | None]
    # functions by operator that return nodes without the rounding of activations at run time
    unrounded: Mapping[str, Callable[[onnx.NodeProto, Constants], Sequence[onnx.NodeProto] | None]]


def is_zero(values: Array) -> bool:
    """Whether all values are zero, or so small that they are stored as zero."""
    return not values.size or bool(max(float(values.max()), -float(values.min())) < TINY)


def input_name(node: onnx.NodeProto, index: int) -> str:
    return node.input[index] if index < len(node.input) else ""


def weight_rows(codes: Array, shape: Sequence[int]) -> Callable[[int, int], Array]:
    """`QuantizedMatrix.codes` of an array with one element per code."""
    matrix = codes.reshape(shape)
    return lambda start, stop: matrix[start:stop]


def unreadable(node: onnx.NodeProto, what: str) -> UnsupportedInput:
    return UnsupportedInput(f"`{node.op_type}` {what}", hint="verify the graph without quantization")


def grids(
    node: onnx.NodeProto, constants: Constants, scale: str, zero: str, shape: tuple[int, ...], axis: int, block: int
) -> tuple[Callable[[], tuple[Array, Array]], tuple[int, int]]:
    """Reads scale and zero point as grids over a matrix; and the repetition of their elements along both axes.

    `scale` and `zero` (may be empty) are names, `shape` is that of the matrix; `axis` is that of a vector of scales, or
    along which blocks of the size `block` (0: none) are cut.
    """
    scales, zeros = constants.kind(scale), constants.kind(zero) if zero else None
    if scales is None or (zero and zeros is None) or len(shape) != 2:
        raise unreadable(node, "has scales that are not constant, or weights that are not a matrix")
    count = scales[1]
    rows, columns = shape
    axis %= 2
    if count == 1:
        size, repeat = (1, 1), (rows, columns)
    elif block:
        blocks = -(-shape[axis] // block)
        size, repeat = ((rows, blocks), (1, block)) if axis else ((blocks, columns), (block, 1))
    else:
        size, repeat = ((1, columns), (rows, 1)) if axis else ((rows, 1), (1, columns))
    if count != size[0] * size[1] or (zeros is not None and zeros[1] != count):
        raise unreadable(node, f"has {count} scales for a matrix of {rows} x {columns}")

    def read() -> tuple[Array, Array]:
        found, points = constants.array(scale), constants.array(zero) if zero else np.zeros(size)
        assert found is not None and points is not None
        return found.reshape(size), points.astype(np.float32).reshape(size)

    return read, repeat
