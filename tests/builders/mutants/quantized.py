"""Mutants of quantized weights: faults of a quantizer, or in the packing of its codes, in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper

from llmconv.tensors import Array

Edit = Callable[[onnx.ModelProto], None]
LAYER = "layers.1"
"""Where the fault is."""


@dataclass(frozen=True)
class QuantizedMutant:
    """A fault.

    Attributes:
        name: for people.
        of: the quantizer in `QUANTIZERS` whose graph it is in.
        edit: makes it.
        tensor: the name that the audit must give; empty where every matrix is some tensor, in the wrong place.
    """

    name: str
    of: str
    edit: Edit
    tensor: str = f"model.{LAYER}.mlp.down_proj.weight"


def tensor_of(model: onnx.ModelProto, *parts: str) -> onnx.TensorProto:
    """The first initializer in whose name all parts are."""
    found: onnx.TensorProto = next(one for one in model.graph.initializer if all(part in one.name for part in parts))
    return found


def changed_values(*parts: str, by: Callable[[Array], Array]) -> Edit:
    """Other values in one initializer."""

    def edit(model: onnx.ModelProto) -> None:
        tensor = tensor_of(model, *parts)
        values = np.ascontiguousarray(by(numpy_helper.to_array(tensor).copy()))
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))

    return edit


def _exchanged(values: Array) -> Array:
    """Rows 3 and 4 in each other's place."""
    values[[3, 4]] = values[[4, 3]]
    return values


def _columns_exchanged(values: Array) -> Array:
    values[:, [3, 4]] = values[:, [4, 3]]
    return values


def _nibbles(values: Array) -> Array:
    other: Array = (values << 4) | (values >> 4)
    return other


def _next_block(values: Array) -> Array:
    return np.roll(values, 1, axis=1)


def _zero_more(values: Array) -> Array:
    """Both zero points of every byte one larger, where there is room."""
    low, high = values & 0xF, values >> 4
    more: Array = np.minimum(low + 1, 15) | (np.minimum(high + 1, 15) << 4)
    return more


def _one_zero_more(values: Array) -> Array:
    """That of one block."""
    values.reshape(-1)[5] += 1
    return values


def _one_more(values: Array) -> Array:
    more: Array = values + values.dtype.type(1)
    return more


def _a_fifth_more(values: Array) -> Array:
    more: Array = values * values.dtype.type(1.2)
    return more


def _a_hundredth_more(values: Array) -> Array:
    more: Array = values * values.dtype.type(1.01)
    return more


def _next_row(values: Array) -> Array:
    return np.roll(values, 1, axis=0)


def row_of_another_layer(model: onnx.ModelProto) -> None:
    """Codes and scales of row 7 are those of layer 0."""
    for part in ("Q", "scales"):
        mine, other = (tensor_of(model, layer, "down_proj", part) for layer in (LAYER, "layers.0"))
        values = numpy_helper.to_array(mine).copy()
        values[7] = numpy_helper.to_array(other)[7]
        mine.CopyFrom(numpy_helper.from_array(values, mine.name))


def scales_of_another_tensor(model: onnx.ModelProto) -> None:
    """The scales of layer 0."""
    mine, other = (tensor_of(model, layer, "down_proj", "scales") for layer in (LAYER, "layers.0"))
    mine.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(other), mine.name))


def layers_exchanged(model: onnx.ModelProto) -> None:
    """Two layers multiply by each other's matrices, codes and scales."""
    swap = {"layers.0": "layers.1", "layers.1": "layers.0"}
    for node in model.graph.node:
        if "MatMulNBits" in node.op_type and "down_proj" in node.input[1]:
            layer = next(layer for layer in swap if layer in node.input[1])
            node.input[1:3] = [name.replace(layer, swap[layer]) for name in node.input[1:3]]


def layer_twice(model: onnx.ModelProto) -> None:
    """Both layers multiply by the matrix of layer 0."""
    for node in model.graph.node:
        if node.op_type == "MatMulNBits" and "down_proj" in node.input[1]:
            node.input[1:3] = [name.replace("layers.1", "layers.0") for name in node.input[1:3]]


PART = (LAYER, "down_proj")
FOUR, ZEROS, QDQ = "4 bits", "4 bits with zero points", "4 bits, QDQ"
INT8 = "dynamic int8"
QUANTIZED_MUTANTS = [
    QuantizedMutant("scales of two rows exchanged", FOUR, changed_values(*PART, "scales", by=_exchanged)),
    QuantizedMutant("scales of another layer", FOUR, scales_of_another_tensor),
    QuantizedMutant("zero points off by one", ZEROS, changed_values(*PART, "zero_points", by=_zero_more)),
    QuantizedMutant("one zero point off by one", ZEROS, changed_values(*PART, "zero_points", by=_one_zero_more)),
    QuantizedMutant("nibbles exchanged", FOUR, changed_values(*PART, "Q4", by=_nibbles)),
    QuantizedMutant("codes of the next block", FOUR, changed_values(*PART, "Q4", by=_next_block)),
    QuantizedMutant("a row of another layer", FOUR, row_of_another_layer),
    QuantizedMutant("two rows exchanged", FOUR, changed_values(*PART, "Q4", by=_exchanged)),
    QuantizedMutant("two rows exchanged, 8 bits", "8 bits", changed_values(*PART, "Q8", by=_exchanged)),
    QuantizedMutant("zero point off by one, int8", INT8, changed_values(*PART, "zero_point", by=_one_more)),
    QuantizedMutant("scale a fifth larger, int8", INT8, changed_values(*PART, "scale", by=_a_fifth_more)),
    QuantizedMutant(
        "scales of two rows exchanged, QDQ", QDQ, changed_values(*PART, "DQ_scales", by=_columns_exchanged)
    ),
    QuantizedMutant("scales one row further on", FOUR, changed_values(*PART, "scales", by=_next_row)),
    QuantizedMutant(
        "scales one row further on, with zero points", ZEROS, changed_values(*PART, "scales", by=_next_row)
    ),
    QuantizedMutant("scale one hundredth larger, int8", INT8, changed_values(*PART, "scale", by=_a_hundredth_more)),
    QuantizedMutant("two layers exchanged", FOUR, layers_exchanged, ""),
    QuantizedMutant("one layer twice", FOUR, layer_twice, ""),
]
