"""A copy of a graph with the codes of plain rounding to nearest, against which a choice of 4-bit codes is judged.

Symmetric, as onnxruntime's `MatMulNBitsQuantizer` by default: the scale is the value of largest magnitude divided by
`-2 ** (bits - 1)`, the zero point `2 ** (bits - 1)`. Bits, blocks and the choice of matrices are those of the graph.
Factors of columns are left out: codes are those of the model's own matrices, and norms are the model's own.
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

from llmconv.files.safetensors_file import read_header
from llmconv.runtime.onnxruntime.guard import external_fields, external_tensors, nodes
from llmconv.tensors import Array, LazyTensor
from llmconv.verify.other_exporters.quantized.dequantized_reference import FILES, StoredSmoothing
from llmconv.verify.other_exporters.quantized.quantized_matrix import attributes, input_name
from llmconv.verify.other_exporters.quantized.rounding_error import original_rows
from llmconv.verify.other_exporters.quantized.tensor_matching import MatchedMatrix

OPERATOR, BITS = "MatMulNBits", 4
"""Matrices that are rounded anew; those of 8 bits are plainly rounded by `llmconv export` already, but for factors."""

MIDDLE = {4: 0x88, 8: 0x80}
"""Bytes of zero points."""


@dataclass(frozen=True)
class _Bytes:
    """The bytes of an initializer in a file: offset of the first, and number of bytes of a row."""

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
    path: Path,
    model: onnx.ModelProto,
    matched: Sequence[MatchedMatrix],
    tensors: Mapping[str, LazyTensor],
    smoothing: StoredSmoothing,
) -> Iterator[Path | None]:
    """Context with a temporary copy of a graph and its external data; None if none of its codes would change.

    A block of rows is in memory at a time. The model's tensors have factors applied.
    """
    found = {one.stored.name: one for one in matched if _is_of_whole_rows(one)}
    with_factors = {key for key, one in found.items() if any(match.name in smoothing.factors for match in one.matches)}
    initializers = {tensor.name: tensor for tensor in external_tensors(model)}
    products = [node for node in nodes(model) if node.op_type == OPERATOR and node.input[1] in found]
    products = [node for node in products if all(name in initializers for name in node.input[1:4] if name)]
    rounded = [node for node in products if _bits(node) == BITS or node.input[1] in with_factors]
    if all(_bits(node) != BITS for node in rounded):
        yield None
        return
    original = smoothing.undone(tensors)
    with TemporaryDirectory(prefix="llmconv-rounded-") as name:
        folder = Path(name)
        for location in {external_fields(tensor)["location"] for tensor in initializers.values()}:
            shutil.copyfile(path.parent / location, folder / location)
        shutil.copyfile(path, folder / path.name)
        for codes, node in {node.input[1]: node for node in rounded}.items():
            inputs = [initializers.get(input_name(node, at)) for at in (1, 2, 3)]
            _round(node, found[codes], inputs, original, folder)
        _restore_norms(folder, smoothing, original)
        yield folder / path.name


def _bits(node: onnx.NodeProto) -> int:
    bits: int = attributes(node).get("bits", BITS)
    return bits


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
    count, size, bits = found.stored.shape[0], attributes(node)["block_size"], _bits(node)
    codes, scales, zeros = (_bytes(tensor, count, folder) if tensor else None for tensor in inputs)
    assert codes and scales and inputs[1]
    dtype = onnx.helper.tensor_dtype_to_np_dtype(inputs[1].data_type)
    for match in found.matches:
        for first, rows in original_rows(match, tensors[match.name]):
            chosen = nearest_scales(rows, size, bits).astype(dtype)
            codes.write(first, nearest_codes(rows, chosen.astype(np.float32), size, bits))
            scales.write(first, chosen)
            if zeros:
                zeros.write(first, np.full((len(rows), zeros.row), MIDDLE[bits], np.uint8))


def _bytes(tensor: onnx.TensorProto, rows: int, folder: Path) -> _Bytes:
    fields = external_fields(tensor)
    itemsize = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    length = int(np.prod(tensor.dims, dtype=np.int64)) * itemsize
    return _Bytes(folder / fields["location"], int(fields.get("offset", 0)), length // rows)


def _restore_norms(folder: Path, smoothing: StoredSmoothing, original: Mapping[str, LazyTensor]) -> None:
    """Overwrites norms that were divided by factors with those of the model."""
    for path in folder.glob(FILES):
        for name, tensor in read_header(path).tensors.items():
            if name in smoothing.factors and len(tensor.shape) == 1:
                values = original[name].read().astype(tensor.dtype.numpy)
                _Bytes(path, tensor.offset, tensor.dtype.itemsize).write(0, values)


def nearest_scales(rows: Array, size: int, bits: int) -> Array:
    """Scales float32 `[N, blocks]` of rows float32 `[N, K]` in blocks of `size`, for 4 or 8 bits."""
    blocks = _blocks(rows, size)
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], -1)[..., 0]
    scales: Array = extreme / np.float32(-(1 << bits - 1))
    return scales


def nearest_codes(rows: Array, scales: Array, size: int, bits: int) -> Array:
    """Codes uint8 `[N, blocks * size]`; of 4 bits two in a byte, the first in the low bits.

    Rows are float32 `[N, K]`, scales float32 `[N, blocks]`.
    """
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    nearest = np.rint(_blocks(rows, size) * inverse[..., None]) + (1 << bits - 1)
    flat: Array = np.clip(nearest, 0, (1 << bits) - 1).astype(np.uint8).reshape(len(rows), -1)
    packed: Array = flat[:, 0::2] | flat[:, 1::2] << 4 if bits == BITS else flat
    return packed


def _blocks(rows: Array, size: int) -> Array:
    """Rows as `[N, blocks, size]`, padded with zeros."""
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % size)))
    return padded.reshape(len(rows), -1, size)
