"""A cache of integer codes: `GroupQueryAttention` rounds new keys and values, and attends over code * scale.

Source: onnxruntime docs/ContribOperators.md (`k_scale`, `v_scale`, `k_quant_type`, `kv_cache_bit_width`).
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from llmconv.errors import UnsupportedInput
from llmconv.export.node_editor import constant
from llmconv.runtime.cache_names import is_past
from llmconv.tensors import Array

PAST = (3, 4)
"""Indices of the inputs with past keys and values; the outputs 1 and 2 are the present ones."""

SCALES = (12, 13)
"""Indices of the inputs with scales of keys and of values."""

TYPES, BITS = ("k_quant_type", "v_quant_type"), "kv_cache_bit_width"
"""Attributes of the operator."""


def quantize_cache(model: ir.Model, scales: Mapping[str, Array]) -> None:
    """Makes every cache input and output of a graph with a shared buffer int8, in place.

    Scales are float32 [1, kv_heads, 1, head_dim], by name of the cache input.
    """
    graph = model.graph
    attention = [node for node in graph if node.op_type == "GroupQueryAttention"]
    for node in attention:
        node.resize_inputs(max(len(node.inputs), SCALES[-1] + 1))
        for at, (past, scale) in enumerate(zip(PAST, SCALES, strict=True)):
            port = node.inputs[past]
            assert port is not None and port.name is not None
            node.replace_input_with(scale, constant(graph, f"{port.name}.scale", scales[port.name]))
            port.type = node.outputs[1 + at].type = ir.TensorType(ir.DataType.INT8)
        node.attributes.update({name: ir.AttrString(name, "PER_CHANNEL") for name in TYPES})
        node.attributes[BITS] = ir.AttrInt64(BITS, 8)


def require_grouped_query(model: ir.Model, family: object) -> None:
    """Raises UnsupportedInput if another operator than `GroupQueryAttention` reads the shared buffer."""
    graph = model.graph
    for port in graph.inputs:
        read = [(use.node.op_type, use.idx) for use in port.uses()] if is_past(port.name or "") else []
        if any(operator != "GroupQueryAttention" or at not in PAST for operator, at in read):
            raise UnsupportedInput(
                f"the attention of `{family}` is not a GroupQueryAttention, the only operator for `--kv-cache int8`",
                hint="leave out `--kv-cache`",
            )
