"""`com.microsoft.GatherBlockQuantized`: an embedding whose rows are quantized in blocks.

Layout (onnxruntime, docs/ContribOperators.md): codes int4 or uint4, or uint8 with several codes of `bits` bits, along
the last axis; scales and zero points per block along `quantize_axis`. Without zero points they are 0, for uint8 codes
`2 ** (bits - 1)`.
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

DEFAULTS = {"bits": 4, "block_size": 128, "gather_axis": 0, "quantize_axis": 1}


def _read_matrix(node: onnx.NodeProto, constants: Constants) -> QuantizedMatrix | None:
    fields = {**DEFAULTS, **attributes(node)}
    data, scales = constants.array(node.input[0]), constants.array(node.input[2])
    block, bits = fields["block_size"], fields["bits"]
    if data is None or scales is None or fields["gather_axis"] or fields["quantize_axis"] not in (1, -1) or not block:
        raise unreadable(
            node, "gathers along an axis other than the first, or has blocks along an axis other than the last"
        )
    packed = data.dtype == np.uint8 and bits < 8 and _is_bytes(scales, data, bits, block)
    rows = data.shape[0]
    raw = data.reshape(rows, -1)
    columns = raw.shape[1] * 8 // bits if packed else raw.shape[1]
    zeros = _zeros(node, constants, bits, packed or bits == 8, (rows, scales.size // rows))

    def codes(start: int, stop: int) -> Array:
        return unpacked(raw[start:stop], bits) if packed else raw[start:stop]

    return QuantizedMatrix(
        name=constants.initializer(node.input[0]),
        kind=f"GatherBlockQuantized, {bits} bits, blocks of {block}",
        shape=(rows, columns),
        codes=codes,
        scale=scales.reshape(rows, -1),
        zero=zeros,
        repeat=(1, block),
        scales=constants.initializer(node.input[2]),
        looked_up=True,
        multiplied=False,
        largest=(1 << bits) - 1 if packed or data.dtype == np.uint8 else None,
        symmetric=not input_name(node, 3),
    )


def _is_bytes(scales: Array, data: Array, bits: int, block: int) -> bool:
    """Whether bytes contain several codes; INT4 and UINT4 tensors are unpacked already."""
    rows = data.shape[0]
    return bool(-(-(data.size // rows * 8 // bits) // block) == scales.size // rows)


def _zeros(node: onnx.NodeProto, constants: Constants, bits: int, raw: bool, shape: tuple[int, int]) -> Array:
    name = input_name(node, 3)
    zeros = constants.array(name) if name else None
    if zeros is None:
        return np.full(shape, 1 << (bits - 1) if raw else 0, dtype=np.float32)
    if zeros.size != shape[0] * shape[1]:
        zeros = unpacked(zeros.reshape(shape[0], -1), bits)[:, : shape[1]]
    return zeros.astype(np.float32).reshape(shape)


SCHEME = QuantizationScheme(frozenset({"GatherBlockQuantized"}), _read_matrix, {})
