"""`com.microsoft.MatMulNBits`: codes packed along K, in blocks with a scale and possibly a zero point each.

Layout (onnxruntime, docs/ContribOperators.md, com.microsoft.MatMulNBits): B is `[N, blocks, block_size * bits / 8]`,
the first code in the low bits; scales `[N, blocks]`; zero points packed alike, `[N, ceil(blocks * bits / 8)]`, or of
the scales' dtype; default `2 ** (bits - 1)`. With accuracy level 4 the other factor is rounded to int8.
"""

from __future__ import annotations

import numpy as np
import onnx

from llmconv.tensors import Array
from llmconv.verify.other_exporters.quantized.constants import Constants, unpacked
from llmconv.verify.other_exporters.quantized.quantized_matrix import (
    QuantizationScheme,
    QuantizedMatrix,
    attributes,
    input_name,
    unreadable,
)

LEVEL, FLOAT32 = "accuracy_level", 1
CODES, SCALES, ZEROS, GROUPS = 1, 2, 3, 4
"""Indices of inputs."""


def _read_matrix(node: onnx.NodeProto, constants: Constants) -> QuantizedMatrix | None:
    fields = {"bits": 4, **attributes(node)}
    rows, columns, block, bits = (fields[name] for name in ("N", "K", "block_size", "bits"))
    if input_name(node, GROUPS) or fields.get("weight_prepacked"):
        raise unreadable(node, "has reordered groups, or weights packed for one device")
    raw, scales = constants.array(node.input[CODES]), constants.array(node.input[SCALES])
    blocks = -(-columns // block)
    if raw is None or scales is None or raw.size * 8 != rows * blocks * block * bits or scales.size != rows * blocks:
        raise unreadable(node, f"has weights that are not {rows} x {columns} codes of {bits} bits")
    raw = raw.view(np.uint8).reshape(rows, -1)
    places = _places(node, constants, columns)

    def codes(start: int, stop: int) -> Array:
        found = unpacked(raw[start:stop], bits)[:, :columns]
        return found if places is None else found[:, places]

    return QuantizedMatrix(
        name=constants.initializer(node.input[CODES]),
        kind=f"MatMulNBits, {bits} bits, blocks of {block}",
        shape=(rows, columns),
        codes=codes,
        scale=scales.reshape(rows, blocks),
        zero=_zeros(node, constants, bits, (rows, blocks)),
        repeat=(1, block),
        scales=constants.initializer(node.input[SCALES]),
        largest=(1 << bits) - 1,
        columns=places,
    )


def _places(node: onnx.NodeProto, constants: Constants, columns: int) -> Array | None:
    """The place of each column among the codes, where the node multiplies with reordered columns (GPTQ's act-order)."""
    maker = constants.makers.get(node.input[0])
    order = constants.array(maker.input[1]) if maker is not None and maker.op_type == "Gather" else None
    if maker is None or order is None or attributes(maker).get("axis", 0) != -1:
        return None
    is_order = order.shape == (columns,) and np.array_equal(np.sort(order), np.arange(columns))
    return np.argsort(order) if is_order else None


def _zeros(node: onnx.NodeProto, constants: Constants, bits: int, shape: tuple[int, int]) -> Array:
    name = input_name(node, ZEROS)
    zeros = constants.array(name) if name else None
    if zeros is None:
        return np.full(shape, 1 << (bits - 1), dtype=np.float32)
    if zeros.dtype == np.uint8:
        zeros = unpacked(zeros.reshape(shape[0], -1), bits)[:, : shape[1]]
    return zeros.astype(np.float32).reshape(shape)


def _unrounded(node: onnx.NodeProto, constants: Constants) -> list[onnx.NodeProto] | None:
    if attributes(node).get(LEVEL, 0) <= FLOAT32:
        return None
    made = onnx.NodeProto()
    made.CopyFrom(node)
    next(found for found in made.attribute if found.name == LEVEL).i = FLOAT32
    return [made]


SCHEME = QuantizationScheme(frozenset({"MatMulNBits"}), _read_matrix, {"MatMulNBits": _unrounded})
