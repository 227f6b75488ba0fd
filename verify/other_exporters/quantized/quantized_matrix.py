"""QuantizedMatrix: a quantized matrix of a graph, read by rows; QuantizationScheme: how operators store them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from llmconv.errors import UnsupportedInput
from llmconv.tensors import Array
from llmconv.verify.other_exporters.quantized.constants import Constants

TINY = 1e-30
"""Smaller numbers count as zero, as in `llmconv export --quant`: products of scales of such would be denormal."""


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix `[rows, columns]` with the values `(code - zero point) * scale` in float32.

    Attributes:
        name: name of the initializer with the codes.
        kind: description of its format.
        shape: rows and columns in the graph.
        codes: `codes(start, stop)` returns rows of integers.
        scale, zero: grids of floats; element `(i, j)` has those at `(i // repeat[0], j // repeat[1])`.
        scales: name of the initializer with the scales.
        looked_up, multiplied: whether it is an embedding, and whether it is a factor of a product.
        largest: the largest code, if it is known.
        smallest: the smallest code.
        columns: place of every column among those of `scale` and `zero`, if those are in another order.
        symmetric: no zero points are stored: each is the middle of the codes.
    """

    name: str
    kind: str
    shape: tuple[int, int]
    codes: Callable[[int, int], Array]
    scale: Array
    zero: Array
    repeat: tuple[int, int]
    scales: str
    looked_up: bool = False
    multiplied: bool = True
    largest: int | None = None
    smallest: int = 0
    columns: Array | None = None
    symmetric: bool = False

    def rows(self, start: int, stop: int) -> Array:
        """Rows `start:stop` in float32."""
        codes = self.codes(start, stop).astype(np.float32)
        values: Array = (codes - self._spread(self.zero, start, stop)) * self._spread(self.scale, start, stop).astype(
            np.float32
        )
        return values

    def steps(self, start: int, stop: int) -> Array:
        """Absolute scales of rows `start:stop`; the median scale replaces 0."""
        steps = np.abs(self._spread(self.scale, start, stop).astype(np.float32))
        return np.where(steps > 0, steps, max(float(np.median(np.abs(self.scale))), 1e-30)).astype(np.float32)

    def grid(self, start: int, stop: int) -> tuple[Array, Array]:
        """Scale and zero point of every element of rows `start:stop`."""
        return self._spread(self.scale, start, stop), self._spread(self.zero, start, stop)

    def read(self) -> Array:
        """The whole matrix in float32."""
        return self.rows(0, self.shape[0])

    def _spread(self, grid: Array, start: int, stop: int) -> Array:
        rows = grid[np.minimum(np.arange(start, stop) // self.repeat[0], len(grid) - 1)]
        places = np.arange(self.shape[1]) if self.columns is None else self.columns
        return rows[:, np.minimum(places // self.repeat[1], grid.shape[1] - 1)]


@dataclass(frozen=True)
class QuantizationScheme:
    """How some operators store quantized weights; one file in `schemes` each.

    Attributes:
        operators: the operators with quantized weights.
        matrix: returns the matrix of a node; None if it has no constant one.
        unrounded: functions by operator that return nodes without the rounding of activations at run time.
    """

    operators: frozenset[str]
    matrix: Callable[[onnx.NodeProto, Constants], QuantizedMatrix | None]
    unrounded: Mapping[str, Callable[[onnx.NodeProto, Constants], Sequence[onnx.NodeProto] | None]]


def is_zero(values: Array) -> bool:
    """Whether all values are zero, or so small that they are stored as zero."""
    return not values.size or bool(max(float(values.max()), -float(values.min())) < TINY)


def attributes(node: onnx.NodeProto) -> dict[str, int]:
    """The integers among a node's attributes."""
    return {found.name: found.i for found in node.attribute if found.type == onnx.AttributeProto.INT}


def input_name(node: onnx.NodeProto, index: int) -> str:
    """The name of an input; empty if it is omitted."""
    return node.input[index] if index < len(node.input) else ""


def rows_of(codes: Array, shape: Sequence[int]) -> Callable[[int, int], Array]:
    """`QuantizedMatrix.codes` of an array with one element per code."""
    matrix = codes.reshape(shape)
    return lambda start, stop: matrix[start:stop]


def unreadable(node: onnx.NodeProto, what: str) -> UnsupportedInput:
    """The error for a matrix in an unknown format."""
    return UnsupportedInput(f"`{node.op_type}` {what}", hint="verify the graph without quantization")


def grids(
    node: onnx.NodeProto,
    constants: Constants,
    scale: str,
    zero: str,
    shape: tuple[int, ...],
    axis: int,
    block: int,
) -> tuple[Array, Array, tuple[int, int]]:
    """Scale and zero point as grids over a matrix, and the repetition of their elements along both axes.

    Args:
        scale, zero: names of the scales and of the zero points; the latter may be empty.
        shape: shape of the matrix.
        axis: axis of a vector of scales, or axis along which blocks are cut.
        block: size of a block; 0 without blocks.
    """
    scales, zeros = constants.array(scale), constants.array(zero) if zero else None
    if scales is None or (zero and zeros is None) or len(shape) != 2:
        raise unreadable(node, "has scales that are not constant, or weights that are not a matrix")
    rows, columns = shape
    axis %= 2
    if scales.size == 1:
        size, repeat = (1, 1), (rows, columns)
    elif block:
        count = -(-shape[axis] // block)
        size, repeat = ((rows, count), (1, block)) if axis else ((count, columns), (block, 1))
    else:
        size, repeat = ((1, columns), (rows, 1)) if axis else ((rows, 1), (1, columns))
    if scales.size != size[0] * size[1] or (zeros is not None and zeros.size != scales.size):
        raise unreadable(node, f"has {scales.size} scales for a matrix of {rows} x {columns}")
    zeros = np.zeros(size) if zeros is None else zeros
    return scales.reshape(size), zeros.astype(np.float32).reshape(size), repeat
