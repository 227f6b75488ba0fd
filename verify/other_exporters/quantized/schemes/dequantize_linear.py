"""`DequantizeLinear` on constants: one scale for the matrix, for every row or column, or for every block.

`y = (x - zero point) * scale` (ONNX, docs/Operators.md, DequantizeLinear; `block_size` since opset 21). The constant
may be the table of a `Gather`, whose rows are dequantized. After a `QuantizeLinear` it restores a rounded activation.
"""

from __future__ import annotations

import numpy as np
import onnx

from llmconv.tensors import Array
from llmconv.verify.other_exporters.quantized.constants import Constants
from llmconv.verify.other_exporters.quantized.quantized_matrix import (
    QuantizationScheme,
    QuantizedMatrix,
    attributes,
    grids,
    input_name,
    rows_of,
    unreadable,
)

LOOKUPS = {"Gather"}


def _read_matrix(node: onnx.NodeProto, constants: Constants) -> QuantizedMatrix | None:
    maker = constants.makers.get(node.input[0])
    lookup = maker is not None and maker.op_type in LOOKUPS
    source = maker.input[0] if maker is not None and lookup else node.input[0]
    data = constants.array(source)
    if data is None or data.ndim < 2:
        return None  # an activation, or a bias, which the audit of floats ignores, too
    fields = {"axis": 1, "block_size": 0, **attributes(node)}
    name, scale, zero = constants.initializer(source), node.input[1], input_name(node, 2)
    shape = constants.shape(source)
    scales, zeros, repeat = grids(node, constants, scale, zero, shape, fields["axis"], fields["block_size"])
    if lookup and (scales.size > 1 or attributes(maker).get("axis", 0)):  # type: ignore[arg-type]
        raise unreadable(node, "dequantizes looked-up rows with more than one scale")
    used = {other.op_type for other in constants.after(node.output[0])}
    return QuantizedMatrix(
        name=name,
        kind=f"DequantizeLinear, {_scales_description(scales, fields['block_size'])}",
        shape=(shape[0], shape[1]),
        codes=rows_of(data, shape),
        scale=scales,
        zero=zeros,
        repeat=repeat,
        scales=constants.initializer(scale),
        looked_up=lookup or bool(used & LOOKUPS),
        multiplied=not lookup and bool(used - LOOKUPS),
        largest=int(np.iinfo(data.dtype).max),
        smallest=int(np.iinfo(data.dtype).min),
    )


def _scales_description(scales: Array, block: int) -> str:
    return "one scale" if scales.size == 1 else f"blocks of {block}" if block else "a scale per row or column"


def _unrounded(node: onnx.NodeProto, constants: Constants) -> list[onnx.NodeProto] | None:
    """Replaces a rounded activation by the activation."""
    maker = constants.makers.get(node.input[0])
    if maker is None or maker.op_type != "QuantizeLinear" or constants.array(maker.input[0]) is not None:
        return None
    return [onnx.helper.make_node("Identity", [maker.input[0]], list(node.output), name=node.name)]


SCHEME = QuantizationScheme(frozenset({"DequantizeLinear"}), _read_matrix, {"DequantizeLinear": _unrounded})
