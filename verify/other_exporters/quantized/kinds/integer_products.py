"""Products of integers, as `onnxruntime.quantization.quantize_dynamic` makes them.

`DynamicQuantizeLinear` rounds an activation to uint8, `MatMulInteger` multiplies it by constant integers, `Mul` brings
the scales of both back (ONNX, docs/Operators.md); `MatMulIntegerToFloat` and `DynamicQuantizeMatMul` are those in one
(onnxruntime, docs/ContribOperators.md). Without its rounding `DynamicQuantizeLinear` gives the activation itself with
the scale 1 and the zero point 0, and the product is one of floats; the graph's own scales stay where they are.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from llmconv.verify.other_exporters.quantized.constants import Constants
from llmconv.verify.other_exporters.quantized.quantized_matrix import Kind, Stored, given, grids, rows_of, unknown

ROUNDING, INTEGER = "DynamicQuantizeLinear", "MatMulInteger"
TO_FLOAT, DYNAMIC = "MatMulIntegerToFloat", "DynamicQuantizeMatMul"
SCALE_AT = {TO_FLOAT: 3, DYNAMIC: 2}
ZERO_AT = {INTEGER: 3, TO_FLOAT: 5, DYNAMIC: 3}
BIAS_AT = {TO_FLOAT: 6, DYNAMIC: 4}
PRODUCTS = {INTEGER, TO_FLOAT}


def _stored(node: onnx.NodeProto, constants: Constants) -> Stored | None:
    data = constants.array(node.input[1])
    if data is None:
        return None
    scale = _scale_behind(node, constants) if node.op_type == INTEGER else node.input[SCALE_AT[node.op_type]]
    shape = constants.shape(node.input[1])
    zero = given(node, ZERO_AT[node.op_type])
    scales, zeros, repeat = grids(node, constants, scale, zero, shape, 1, 0)
    said = "one scale" if scales.size == 1 else "a scale per column"
    return Stored(
        name=constants.home(node.input[1]),
        kind=f"{node.op_type}, {said}",
        shape=(shape[0], shape[1]),
        codes=rows_of(data, shape),
        scale=scales,
        zero=zeros,
        repeat=repeat,
        scales=constants.home(scale),
    )


def _scale_behind(node: onnx.NodeProto, constants: Constants) -> str:
    """The constant factor of the scale that the product is multiplied by."""
    for product in constants.after(node.output[0]):
        for factor in product.input if product.op_type == "Mul" else ():
            maker = constants.makers.get(factor)
            if maker is not None and maker.op_type == "Mul":
                constant: list[str] = [name for name in maker.input if constants.home(name)]
                if len(constant) == 1:
                    return constant[0]
    raise unknown(node, "is not followed by a product with its scale")


def _plain_rounding(node: onnx.NodeProto, constants: Constants) -> list[onnx.NodeProto] | None:
    values, scale, zero = node.output
    if any(user.op_type not in PRODUCTS for name in (values, zero) for user in constants.users.get(name, [])):
        raise unknown(node, "rounds an activation for an operator that is not known here")
    one = helper.make_tensor(scale, TensorProto.FLOAT, [], [1.0])
    nothing = helper.make_tensor(zero, TensorProto.UINT8, [], [0])
    return [
        helper.make_node("Identity", [node.input[0]], [values], name=node.name),
        helper.make_node("Constant", [], [scale], value=one),
        helper.make_node("Constant", [], [zero], value=nothing),
    ]


def _plain_product(node: onnx.NodeProto, constants: Constants) -> list[onnx.NodeProto] | None:
    kind, out = node.op_type, node.output[0]
    maker = constants.makers.get(node.input[0])
    if kind in PRODUCTS and (maker is None or maker.op_type != ROUNDING):
        raise unknown(node, f"multiplies integers that no {ROUNDING} made")
    made = [helper.make_node("Cast", [node.input[1]], [f"{out}:weight"], to=TensorProto.FLOAT)]
    weight = f"{out}:weight"
    if zero := given(node, ZERO_AT[kind]):
        made.append(helper.make_node("Cast", [zero], [f"{out}:zero"], to=TensorProto.FLOAT))
        made.append(helper.make_node("Sub", [weight, f"{out}:zero"], [f"{out}:moved"]))
        weight = f"{out}:moved"
    if kind in SCALE_AT:
        made.append(helper.make_node("Mul", [weight, node.input[SCALE_AT[kind]]], [f"{out}:scaled"]))
        weight = f"{out}:scaled"
    bias = given(node, BIAS_AT.get(kind, len(node.input)))
    product = f"{out}:product" if bias else out
    made.append(helper.make_node("MatMul", [node.input[0], weight], [product], name=node.name))
    return [*made, helper.make_node("Add", [product, bias], [out])] if bias else made


KIND = Kind(
    frozenset({INTEGER, TO_FLOAT, DYNAMIC}),
    _stored,
    {ROUNDING: _plain_rounding, **dict.fromkeys((INTEGER, TO_FLOAT, DYNAMIC), _plain_product)},
)
