"""`com.microsoft.MatMulNBits`: codes packed along K, in blocks with a scale and possibly a zero point each.

Layout (onnxruntime, docs/ContribOperators.md, com.microsoft.MatMulNBits): B is `[N, blocks, block_size * bits / 8]`,
the first code in the low bits; scales `[N, blocks]`; zero points packed alike, `[N, ceil(blocks * bits / 8)]`, or of
the scales' dtype; default `2 ** (bits - 1)`. With accuracy level 4 the other factor is rounded to int8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper

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
CODES, SCALES, ZEROS, GROUPS, BIAS = 1, 2, 3, 4, 5
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
        symmetric=not input_name(node, ZEROS),
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
    if _has_inexact_kernel(node, constants):
        return _float_product(node)
    made = onnx.NodeProto()
    made.CopyFrom(node)
    next(found for found in made.attribute if found.name == LEVEL).i = FLOAT32
    return [made]


def _has_inexact_kernel(node: onnx.NodeProto, constants: Constants) -> bool:
    """Whether the float32 kernel is noisier than a product of floats, which adds up over the layers of a model.

    With packed zero points it rounds `scale * zero point`: 2 to 3 times the noise for two rows or more (4 bits, K = 576
    to 1536). With 8 bits onnxruntime has no kernel of float32 activations, and dequantizes the whole matrix.
    """
    zeros = constants.array(input_name(node, ZEROS)) if input_name(node, ZEROS) else None
    is_eight = attributes(node).get("bits", 4) == 8
    is_packed = zeros.dtype == np.uint8 if zeros is not None else is_eight
    return is_packed and _is_float32(node.input[SCALES], constants)


def _is_float32(name: str, constants: Constants) -> bool:
    """Whether a constant is float32, or widened to it."""
    if (maker := constants.makers.get(name)) is not None and maker.op_type == "Cast":
        return bool(maker.attribute[0].i == onnx.TensorProto.FLOAT)
    found = constants.array(name)
    return found is not None and bool(found.dtype == np.float32)


def _float_product(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The product with weights that onnxruntime computes once: `(code - zero point) * scale`."""
    fields, out, nodes = attributes(node), node.output[0], list[onnx.NodeProto]()
    rows, columns, block = (fields[name] for name in ("N", "K", "block_size"))
    blocks, bits = -(-columns // block), fields.get("bits", 4)

    def add(operator: str, *inputs: str | list[int] | float, **options: Any) -> str:
        names = []
        for given in inputs:
            if isinstance(given, list | float):
                kind = np.float32 if isinstance(given, float) else np.int64
                value = onnx.numpy_helper.from_array(np.array(given, dtype=kind))
                nodes.append(helper.make_node("Constant", [], [f"{out}:{len(nodes)}"], value=value))
                given = nodes[-1].output[0]
            names.append(given)
        nodes.append(helper.make_node(operator, names, [f"{out}:{len(nodes)}"], **options))
        return str(nodes[-1].output[0])

    def unpack(packed: str, width: int) -> str:
        raw = add("Reshape", add("Cast", packed, to=onnx.TensorProto.FLOAT), [rows, -1, 1])
        if bits == 8:
            return add("Reshape", raw, [rows, width])
        high = add("Floor", add("Mul", raw, 1 / 16))
        pairs = add("Concat", add("Sub", raw, add("Mul", high, 16.0)), high, axis=2)
        return add("Slice", add("Reshape", pairs, [rows, -1]), [0], [width], [1])

    codes = add("Reshape", unpack(node.input[CODES], blocks * block), [rows, blocks, block])
    packed, scales = input_name(node, ZEROS), add("Reshape", node.input[SCALES], [rows, blocks, 1])
    zeros = add("Reshape", unpack(packed, blocks), [rows, blocks, 1]) if packed else float(1 << (bits - 1))
    weights = add("Reshape", add("Mul", add("Sub", codes, zeros), scales), [rows, blocks * block])
    weights = add("Transpose", add("Slice", weights, [0], [columns], [1]), perm=[1, 0])
    bias = input_name(node, BIAS)
    product = helper.make_node("MatMul", [node.input[0], weights], [f"{out}:product" if bias else out], name=node.name)
    end = [helper.make_node("Add", [product.output[0], bias], [out])] if bias else []
    return [*nodes, product, *end]


SCHEME = QuantizationScheme(frozenset({"MatMulNBits"}), _read_matrix, {"MatMulNBits": _unrounded})
