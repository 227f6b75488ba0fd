"""Integer products as written by `onnxruntime.quantization.quantize_dynamic`.

`DynamicQuantizeLinear` rounds an activation to uint8, `MatMulInteger` multiplies it by constant integers, `Mul` applies
the scales of both (ONNX, docs/Operators.md); `MatMulIntegerToFloat` and `DynamicQuantizeMatMul` combine these nodes
(onnxruntime, docs/ContribOperators.md). Without rounding, `DynamicQuantizeLinear` returns the activation with the scale
1 and the zero point 0, and the product is one of floats; the graph's scales remain.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from llmconv.verify.other_exporters.quantized.constants import Constants
from llmconv.verify.other_exporters.quantized.quantized_matrix import (
    QuantizationScheme,
    QuantizedMatrix,
    grids,
    input_name,
    rows_of,
    unreadable,
)

ROUNDING, INTEGER = "DynamicQuantizeLinear", "MatMulInteger"
TO_FLOAT, DYNAMIC = "MatMulIntegerToFloat", "DynamicQuantizeMatMul"
SCALE_AT = {TO_FLOAT: 3, DYNAMIC: 2}
ZERO_AT = {INTEGER: 3, TO_FLOAT: 5, DYNAMIC: 3}
BIAS_AT = {TO_FLOAT: 6, DYNAMIC: 4}
PRODUCTS = {INTEGER, TO_FLOAT}


def _read_matrix(node: onnx.NodeProto, constants: Constants) -> QuantizedMatrix | None:
    data = constants.array(node.input[1])
    if data is None:
        return None
    scale = _scale_after(node, constants) if node.op_type == INTEGER else node.input[SCALE_AT[node.op_type]]
    shape = constants.shape(node.input[1])
    zero = input_name(node, ZERO_AT[node.op_type])
    scales, zeros, repeat = grids(node, constants, scale, zero, shape, 1, 0)
    scales_text = "one scale" if scales.size == 1 else "a scale per column"
    return QuantizedMatrix(
        name=constants.initializer(node.input[1]),
        kind=f"{node.op_type}, {scales_text}",
        shape=(shape[0], shape[1]),
        codes=rows_of(data, shape),
        scale=scales,
        zero=zeros,
        repeat=repeat,
        scales=constants.initializer(scale),
        largest=int(np.iinfo(data.dtype).max),
        smallest=int(np.iinfo(data.dtype).min),
    )


def _scale_after(node: onnx.NodeProto, constants: Constants) -> str:
    """The constant factor of the scale by which the product is multiplied."""
    for product in constants.after(node.output[0]):
        for factor in product.input if product.op_type == "Mul" else ():
            maker = constants.makers.get(factor)
            if maker is not None and maker.op_type == "Mul":
                constant: list[str] = [name for name in maker.input if constants.initializer(name)]
                if len(constant) == 1:
                    return constant[0]
    raise unreadable(node, "is not followed by a multiplication with its scale")


def _unrounded_activation(node: onnx.NodeProto, constants: Constants) -> list[onnx.NodeProto] | None:
    values, scale, zero = node.output
    if any(user.op_type not in PRODUCTS for name in (values, zero) for user in constants.users.get(name, [])):
        raise unreadable(node, "rounds an activation for an unsupported operator")
    one = helper.make_tensor(scale, TensorProto.FLOAT, [], [1.0])
    zero_point = helper.make_tensor(zero, TensorProto.UINT8, [], [0])
    return [
        helper.make_node("Identity", [node.input[0]], [values], name=node.name),
        helper.make_node("Constant", [], [scale], value=one),
        helper.make_node("Constant", [], [zero], value=zero_point),
    ]


def _float_product(node: onnx.NodeProto, constants: Constants) -> list[onnx.NodeProto] | None:
    kind, out = node.op_type, node.output[0]
    maker = constants.makers.get(node.input[0])
    if kind in PRODUCTS and (maker is None or maker.op_type != ROUNDING):
        raise unreadable(node, f"multiplies integers that are not from {ROUNDING}")
    nodes = [helper.make_node("Cast", [node.input[1]], [f"{out}:weight"], to=TensorProto.FLOAT)]
    weight = f"{out}:weight"
    if zero := input_name(node, ZERO_AT[kind]):
        nodes.append(helper.make_node("Cast", [zero], [f"{out}:zero"], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Sub", [weight, f"{out}:zero"], [f"{out}:shifted"]))
        weight = f"{out}:shifted"
    if kind in SCALE_AT:
        nodes.append(helper.make_node("Mul", [weight, node.input[SCALE_AT[kind]]], [f"{out}:scaled"]))
        weight = f"{out}:scaled"
    bias = input_name(node, BIAS_AT.get(kind, len(node.input)))
    product = f"{out}:product" if bias else out
    nodes.append(helper.make_node("MatMul", [node.input[0], weight], [product], name=node.name))
    return [*nodes, helper.make_node("Add", [product, bias], [out])] if bias else nodes


SCHEME = QuantizationScheme(
    frozenset({INTEGER, TO_FLOAT, DYNAMIC}),
    _read_matrix,
    {ROUNDING: _unrounded_activation, **dict.fromkeys((INTEGER, TO_FLOAT, DYNAMIC), _float_product)},
)
