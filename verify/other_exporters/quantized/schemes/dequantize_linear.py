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
PLACES = (("axis", 1), ("block_size", 0))
"""Attributes that say which scale belongs to an element, and their default."""


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
    """Replaces a rounded activation by the activation, if the pair of nodes is no more than a rounding."""
    maker = constants.makers.get(node.input[0])
    if maker is None or maker.op_type != "QuantizeLinear" or constants.array(maker.input[0]) is not None:
        return None
    if not _is_inverse(maker, node, constants):
        return None
    return [onnx.helper.make_node("Identity", [maker.input[0]], list(node.output), name=node.name)]


def _is_inverse(rounding: onnx.NodeProto, restoring: onnx.NodeProto, constants: Constants) -> bool:
    """Whether both nodes have the same constant scales, which are positive, and the same constant zero points."""
    both = rounding, restoring
    scales, zeros = (
        [constants.array(name) if (name := input_name(node, at)) else None for node in both] for at in (1, 2)
    )
    if scales[0] is None or scales[1] is None or not (np.isfinite(scales[0]) & (scales[0] > 0)).all():
        return False
    if any(zero is None and input_name(node, 2) for node, zero in zip(both, zeros, strict=True)):
        return False
    places = [[attributes(node).get(name, default) for name, default in PLACES] for node in both]
    return np.array_equal(scales[0], scales[1]) and _equal(*zeros) and places[0] == places[1]


def _equal(zero: Array | None, other: Array | None) -> bool:
    """Whether two zero points are the same; a missing one is 0."""
    ours, theirs = (np.zeros(()) if one is None else one for one in (zero, other))
    return bool(np.array_equal(ours, theirs) or not (ours.any() or theirs.any()))


SCHEME = QuantizationScheme(frozenset({"DequantizeLinear"}), _read_matrix, {"DequantizeLinear": _unrounded})
