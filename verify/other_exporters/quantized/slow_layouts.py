"""Layouts of quantized weights that are correct, but slow or large in onnxruntime; each is a note in the report.

Measured on x86-64 with onnxruntime 1.31 (one token, matrices of 2048 x 2048): 4 bits take 0.11 ms at accuracy level 4,
0.27 ms at level 0, and 15 to 30 ms where the kernel does not pack the codes and dequantizes the matrix at every call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx

from llmconv.runtime.onnxruntime.guard import nodes
from llmconv.verify.other_exporters.content_matching import InitializerContent
from llmconv.verify.other_exporters.quantized.constants import Constants
from llmconv.verify.other_exporters.quantized.quantized_matrix import attributes, input_name
from llmconv.verify.other_exporters.quantized.tensor_matching import MatchedMatrix

EVERY_CALL = "so onnxruntime's CPU dequantizes the whole matrix at every call"
LEVEL, INT8 = "accuracy_level", 4
ZEROS, GROUPS = 3, 4
"""Indices of inputs of MatMulNBits."""
PRODUCTS = {"MatMul", "Gemm", "FusedMatMul"}


def slow_layouts(model: onnx.ModelProto, constants: Constants) -> list[str]:
    """A note for every kind of slow or large layout, with the number of its nodes."""
    found = Counter(note for node in nodes(model) for note in _notes(node, constants))
    return [f"{count} {note}" for note, count in found.items()]


def _notes(node: onnx.NodeProto, constants: Constants) -> Iterator[str]:
    if node.op_type == "MatMulNBits":
        yield from _block_product_notes(node, constants)
    elif node.op_type == "GatherBlockQuantized":
        maker = constants.makers.get(node.input[0])
        if maker is not None and maker.op_type == "Reshape":
            yield "GatherBlockQuantized read a reshaped initializer, of which onnxruntime makes a copy in memory"
    elif node.op_type == "DequantizeLinear" and not _is_fused(node, constants):
        yield (
            f"DequantizeLinear are in a layout that onnxruntime does not fuse with the product, {EVERY_CALL}; "
            "it fuses [K, N] weights with blocks along K or a scale per column, directly before MatMul"
        )


def _block_product_notes(node: onnx.NodeProto, constants: Constants) -> Iterator[str]:
    fields = attributes(node)
    level, bits = fields.get(LEVEL, 0), fields.get("bits", 4)
    zeros = constants.array(input_name(node, ZEROS)) if input_name(node, ZEROS) else None
    if input_name(node, GROUPS):
        yield f"MatMulNBits have `g_idx`, {EVERY_CALL}"
    if zeros is not None and zeros.dtype != np.uint8:
        yield f"MatMulNBits have zero points of floats, {EVERY_CALL}"
    if bits == 8 and level < INT8:
        yield f"MatMulNBits of 8 bits have {LEVEL} {level}, {EVERY_CALL}; give them {INT8}"
    elif level < INT8:
        yield f"MatMulNBits have {LEVEL} {level}, and take 2 to 3 times as long for one token as with {INT8} on CPUs"


def _is_fused(node: onnx.NodeProto, constants: Constants) -> bool:
    """Whether onnxruntime fuses a dequantized matrix with the products that use it; True for anything else."""
    data, scale = node.input[0], constants.initializer(node.input[1])
    users = constants.users.get(node.output[0], [])
    multiplies = any(user.op_type in PRODUCTS for user in constants.after(node.output[0]))
    if not constants.initializer(data) or not scale or len(constants.shape(data)) != 2 or not multiplies:
        return True
    fields = {"axis": 1, "block_size": 0, **attributes(node)}
    if not constants.shape(scale):
        return True  # one scale for the matrix, which other fusions handle
    directly = all(
        (user.op_type == "MatMul" or (user.op_type == "Gemm" and not attributes(user).get("transB", 0)))
        and user.input[1] == node.output[0]
        for user in users
    )
    return directly and fields["axis"] % 2 == (0 if fields["block_size"] else 1)


def float_copies(
    contents: Mapping[str, InitializerContent],
    quantized: Sequence[MatchedMatrix],
    model: onnx.ModelProto,
    *,
    tied: bool,
) -> list[str]:
    """Notes on an embedding or head in floats (`contents`), in a model where both are one matrix (`tied`)."""
    if not tied or not quantized:
        return []
    codes = {name for one in quantized for name in one.names}
    found = []
    for name, content in contents.items():
        kinds = {node.op_type for node in nodes(model) if name in node.input}
        if content.whole in codes:
            found.append(f"`{content.whole}`, the embedding and the head, is stored as codes and again as floats")
        elif content.whole and "Gather" in kinds and len(content.shape) > 1 and kinds & {*PRODUCTS, "Transpose"}:
            found.append(f"`{content.whole}`, the embedding and the head, is stored as floats, which each token reads")
    return found
