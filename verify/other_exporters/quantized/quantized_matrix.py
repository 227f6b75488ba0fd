"""Stored: a matrix as a graph keeps it quantised, read by rows; Kind: how some operators keep one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from llmconv.errors import UnsupportedInput
from llmconv.tensors import Array
from llmconv.verify.other_exporters.quantized.constants import Constants


@dataclass(frozen=True)
class Stored:
    """`(code - zero point) * scale`, in float32, of a matrix `[rows, columns]`.

    Attributes:
        name: of the initializer with the codes.
        kind: how it is kept, for people.
        shape: rows and columns, as the graph has them.
        codes: `codes(start, stop)` gives rows of integers.
        scale, zero: grids of floats; element `(i, j)` has those at `(i // repeat[0], j // repeat[1])`.
        scales: name of the initializer with the scales.
        looked_up, multiplied: it is an embedding; it is a factor of a product.
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

    def rows(self, start: int, stop: int) -> Array:
        """Rows in float32."""
        codes = self.codes(start, stop).astype(np.float32)
        values: Array = (codes - self._spread(self.zero, start, stop)) * self._spread(self.scale, start, stop).astype(
            np.float32
        )
        return values

    def steps(self, start: int, stop: int) -> Array:
        """By how much neighbouring codes of those rows differ; the usual step where it is 0."""
        steps = np.abs(self._spread(self.scale, start, stop).astype(np.float32))
        return np.where(steps > 0, steps, max(float(np.median(np.abs(self.scale))), 1e-30)).astype(np.float32)

    def read(self) -> Array:
        """The whole matrix in float32."""
        return self.rows(0, self.shape[0])

    def _spread(self, grid: Array, start: int, stop: int) -> Array:
        rows = grid[np.minimum(np.arange(start, stop) // self.repeat[0], len(grid) - 1)]
        return rows[:, np.minimum(np.arange(self.shape[1]) // self.repeat[1], grid.shape[1] - 1)]


@dataclass(frozen=True)
class Kind:
    """How some operators keep their weights: a row of the table in `kinds`.

    Attributes:
        operators: that have quantised weights.
        stored: reads the matrix of a node; None where the node has no constant one.
        plain: by operator, what stands in the place of a node that rounds activations at run time: the same without.
    """

    operators: frozenset[str]
    stored: Callable[[onnx.NodeProto, Constants], Stored | None]
    plain: Mapping[str, Callable[[onnx.NodeProto, Constants], Sequence[onnx.NodeProto] | None]]


def attributes(node: onnx.NodeProto) -> dict[str, int]:
    """The integers among a node's attributes."""
    return {found.name: found.i for found in node.attribute if found.type == onnx.AttributeProto.INT}


def given(node: onnx.NodeProto, index: int) -> str:
    """The name of an input; empty where it is left out."""
    return node.input[index] if index < len(node.input) else ""


def rows_of(codes: Array, shape: Sequence[int]) -> Callable[[int, int], Array]:
    """`Stored.codes` of a matrix that is there, one element per code."""
    matrix = codes.reshape(shape)
    return lambda start, stop: matrix[start:stop]


def unknown(node: onnx.NodeProto, what: str) -> UnsupportedInput:
    """A matrix that nobody here can read."""
    return UnsupportedInput(f"`{node.op_type}` {what}", hint="verify the graph from before it was quantised")


def grids(
    node: onnx.NodeProto,
    constants: Constants,
    scale: str,
    zero: str,
    shape: tuple[int, ...],
    axis: int,
    block: int,
) -> tuple[Array, Array, tuple[int, int]]:
    """Scale and zero point as grids over a matrix, and how often each of their elements is repeated.

    Args:
        shape: of the matrix.
        axis: that a vector of scales runs along, or that blocks are cut along.
        block: elements of a block; 0 without blocks.
    """
    scales, zeros = constants.array(scale), constants.array(zero) if zero else None
    if scales is None or (zero and zeros is None) or len(shape) != 2:
        raise unknown(node, "has scales that are no constants, or weights that are no matrix")
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
        raise unknown(node, f"has {scales.size} scales for a matrix of {rows} x {columns}")
    zeros = np.zeros(size) if zeros is None else zeros
    return scales.reshape(size), zeros.astype(np.float32).reshape(size), repeat
