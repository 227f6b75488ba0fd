"""A copy of a graph with the codes of plain rounding to nearest, against which a choice of 4-bit codes is judged.

Symmetric, as onnxruntime's `MatMulNBitsQuantizer` by default: the scale is the value of largest magnitude divided by
`-2 ** (bits - 1)`, the zero point `2 ** (bits - 1)`. Bits, blocks and the choice of matrices are those of the graph.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx

from llmconv.runtime.onnxruntime.guard import external_fields, external_tensors, nodes
from llmconv.tensors import Array, LazyTensor
from llmconv.verify.other_exporters.quantized.quantized_matrix import attributes, input_name
from llmconv.verify.other_exporters.quantized.rounding_error import original_rows
from llmconv.verify.other_exporters.quantized.tensor_matching import MatchedMatrix

OPERATOR, BITS = "MatMulNBits", 4
"""Matrices that are rounded anew; those of 8 bits are plainly rounded by `llmconv export` already."""


@dataclass(frozen=True)
class _Bytes:
    """The bytes of an initializer.

    Attributes:
        path: the file.
        offset: of its first byte.
        row: number of bytes of a row.
    """

    path: Path
    offset: int
    row: int

    def write(self, first: int, rows: Array) -> None:
        """Overwrites rows from `first` on."""
        with open(self.path, "r+b", buffering=0) as file:
            raw, at = np.ascontiguousarray(rows).tobytes(), self.offset + first * self.row
            while raw:
                written = os.pwrite(file.fileno(), raw, at)
                raw, at = raw[written:], at + written


@contextmanager
def plainly_rounded(
    path: Path, model: onnx.ModelProto, matched: Sequence[MatchedMatrix], tensors: Mapping[str, LazyTensor]
) -> Iterator[Path | None]:
    """Context with a temporary copy of a graph and its external data; None if no code of it would change.

    A block of rows is in memory at a time.

    Args:
        path: the graph.
        model: the graph without its weights.
        matched: its quantized matrices and the matching tensors.
        tensors: the model's tensors by name.
    """
    found = {one.stored.name: one for one in matched if _is_of_whole_rows(one)}
    rounded = [node for node in nodes(model) if _bits(node) == BITS and node.input[1] in found]
    initializers = {tensor.name: tensor for tensor in external_tensors(model)}
    rounded = [node for node in rounded if all(name in initializers for name in node.input[1:4] if name)]
    if not rounded:
        yield None
        return
    with TemporaryDirectory(prefix="llmconv-rounded-") as name:
        folder = Path(name)
        for location in {external_fields(tensor)["location"] for tensor in initializers.values()}:
            shutil.copyfile(path.parent / location, folder / location)
        shutil.copyfile(path, folder / path.name)
        for codes, node in {node.input[1]: node for node in rounded}.items():
            inputs = [initializers.get(input_name(node, at)) for at in (1, 2, 3)]
            _round(node, found[codes], inputs, tensors, folder)
        yield folder / path.name


def _bits(node: onnx.NodeProto) -> int:
    return attributes(node).get("bits", 4) if node.op_type == OPERATOR else 0


def _is_of_whole_rows(one: MatchedMatrix) -> bool:
    return one.whole and all(len(match.columns) == one.stored.shape[1] for match in one.matches)


def _round(
    node: onnx.NodeProto,
    found: MatchedMatrix,
    inputs: list[onnx.TensorProto | None],
    tensors: Mapping[str, LazyTensor],
    folder: Path,
) -> None:
    """Overwrites codes, scales and zero points of a matrix."""
    count, size = found.stored.shape[0], attributes(node)["block_size"]
    codes, scales, zeros = (_bytes(tensor, count, folder) if tensor else None for tensor in inputs)
    assert codes and scales and inputs[1]
    dtype = onnx.helper.tensor_dtype_to_np_dtype(inputs[1].data_type)
    for match in found.matches:
        for first, rows in original_rows(match, tensors[match.name]):
            chosen = nearest_scales(rows, size).astype(dtype)
            codes.write(first, nearest_codes(rows, chosen.astype(np.float32), size))
            scales.write(first, chosen)
            if zeros:
                zeros.write(first, np.full((len(rows), zeros.row), 0x88, np.uint8))


def _bytes(tensor: onnx.TensorProto, rows: int, folder: Path) -> _Bytes:
    fields = external_fields(tensor)
    itemsize = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    length = int(np.prod(tensor.dims, dtype=np.int64)) * itemsize
    return _Bytes(folder / fields["location"], int(fields.get("offset", 0)), length // rows)


def nearest_scales(rows: Array, size: int) -> Array:
    """Scales of 4 bits, float32 `[N, blocks]`, of rows `[N, K]` in blocks of `size`."""
    blocks = _blocks(rows, size)
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], -1)[..., 0]
    scales: Array = extreme / np.float32(-8)
    return scales


def nearest_codes(rows: Array, scales: Array, size: int) -> Array:
    """Codes of 4 bits, two in a byte, the first in the low bits: uint8 `[N, blocks * size / 2]`.

    Args:
        rows: float32 `[N, K]`.
        scales: float32 `[N, blocks]`.
        size: of a block.
    """
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    codes = np.clip(np.rint(_blocks(rows, size) * inverse[..., None]) + 8, 0, 15).astype(np.uint8)
    flat = codes.reshape(len(rows), -1)
    packed: Array = flat[:, 0::2] | flat[:, 1::2] << 4
    return packed


def _blocks(rows: Array, size: int) -> Array:
    """Rows as `[N, blocks, size]`, padded with zeros."""
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % size)))
    return padded.reshape(len(rows), -1, size)
