"""`DequantizeLinear` on constants: one scale for the matrix, for every row or column, or for every block.

`y = (x - zero point) * scale` (ONNX, docs/Operators.md, DequantizeLinear; `block_size` since opset 21). The constant
may lie behind a `Gather`, whose rows are then dequantised. Behind a `QuantizeLinear` it restores a rounded activation.
"""

from __future__ import annotations

import onnx

from llmconv.tensors import Array
from llmconv.verify.other_exporters.quantized.constants import Constants
from llmconv.verify.other_exporters.quantized.quantized_matrix import (
    Kind,
    Stored,
    attributes,
    given,
    grids,
    rows_of,
    unknown,
)

LOOKUPS = {"Gather"}


def _stored(node: onnx.NodeProto, constants: Constants) -> Stored | None:
    maker = constants.makers.get(node.input[0])
    lookup = maker is not None and maker.op_type in LOOKUPS
    source = maker.input[0] if maker is not None and lookup else node.input[0]
    data = constants.array(source)
    if data is None or data.ndim < 2:
        return None  # an activation, or a bias that the float audit says nothing of
    fields = {"axis": 1, "block_size": 0, **attributes(node)}
    home, scale, zero = constants.home(source), node.input[1], given(node, 2)
    shape = constants.shape(source)
    scales, zeros, repeat = grids(node, constants, scale, zero, shape, fields["axis"], fields["block_size"])
    if lookup and (scales.size > 1 or attributes(maker).get("axis", 0)):  # type: ignore[arg-type]
        raise unknown(node, "dequantises looked-up rows by more than one scale")
    used = {other.op_type for other in constants.after(node.output[0])}
    return Stored(
        name=home,
        kind=f"DequantizeLinear, {_scales_said(scales, fields['block_size'])}",
        shape=(shape[0], shape[1]),
        codes=rows_of(data, shape),
        scale=scales,
        zero=zeros,
        repeat=repeat,
        scales=constants.home(scale),
        looked_up=lookup or bool(used & LOOKUPS),
        multiplied=not lookup and bool(used - LOOKUPS),
    )


def _scales_said(scales: Array, block: int) -> str:
    return "one scale" if scales.size == 1 else f"blocks of {block}" if block else "a scale per row or column"


def _plain(node: onnx.NodeProto, constants: Constants) -> list[onnx.NodeProto] | None:
    """A rounded activation is the activation."""
    maker = constants.makers.get(node.input[0])
    if maker is None or maker.op_type != "QuantizeLinear" or constants.array(maker.input[0]) is not None:
        return None
    return [onnx.helper.make_node("Identity", [maker.input[0]], list(node.output), name=node.name)]


KIND = Kind(frozenset({"DequantizeLinear"}), _stored, {"DequantizeLinear": _plain})
