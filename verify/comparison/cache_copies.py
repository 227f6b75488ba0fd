"""Graphs whose cache contains integer codes: their scales, and copies in memory with a cache of floats.

One copy attends over exact keys and values, and must equal the model. The other rounds new keys and values to
code * scale with standard operators before it attends, and must equal the shipped graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from llmconv.runtime.extra_inputs import is_past, is_present
from llmconv.runtime.onnxruntime.guard import attribute_values, is_external, refill
from llmconv.tensors import Array

OPERATOR = "GroupQueryAttention"
NEW, PAST, ROTATED, SCALES = (1, 2), (3, 4), "do_rotary", (12, 13)
"""Indices of inputs, of keys and of values: new ones, past, scales; an attribute: new keys are not those written."""

TYPES = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL"}
BITS = "kv_cache_bit_width"
LEAST, LARGEST = -128.0, 127.0


def has_codes(model: onnx.ModelProto) -> bool:
    return any(port.type.tensor_type.elem_type in (TensorProto.INT8, TensorProto.UINT8) for port in _cache(model))


def cache_scales(model: onnx.ModelProto) -> tuple[dict[str, Array], list[str]]:
    """Scales float32 [1, kv_heads, 1, head_dim] by name of the cache input, and what is wrong with them."""
    inline = {t.name: t for t in model.graph.initializer if not is_external(t)}
    ports = {port.name: port for port in _cache(model)}
    scales: dict[str, Array] = {}
    kinds = {name: port.type.tensor_type.elem_type for name, port in ports.items()}
    problems = [f"`{name}` is not int8" for name, kind in kinds.items() if kind != TensorProto.INT8]
    for node in attention_nodes(model):
        inputs = [*node.input, *[""] * (SCALES[1] + 1 - len(node.input))]
        problems += _attribute_problems(node)
        for past, scale in zip(PAST, SCALES, strict=True):
            name, tensor = inputs[past], inline.get(inputs[scale])
            found = None if tensor is None else numpy_helper.to_array(tensor)
            shape = [dim.dim_value for dim in ports[name].type.tensor_type.shape.dim] if name in ports else []
            wanted = (1, shape[1], 1, shape[3]) if len(shape) == 4 else ()
            if found is None or found.dtype != np.float32 or found.shape != wanted:
                problems.append(f"`{node.name}` has no scales for every channel of `{name}`")
            elif not (np.isfinite(found) & (found > 0)).all():
                problems.append(f"scales of `{name}` are not positive numbers")
            else:
                scales[name] = found
    unread = [name for name in ports if is_past(name) and name not in scales]
    return scales, problems + [f"`{name}` has no scales" for name in unread]


def to_floats(model: onnx.ModelProto) -> None:
    for port in _cache(model):
        port.type.tensor_type.elem_type = TensorProto.FLOAT
    dropped: set[str] = set()
    for node in attention_nodes(model):
        refill(node.attribute, [one for one in node.attribute if one.name not in {*TYPES, BITS}])
        inputs = list(node.input)
        dropped |= set(inputs[SCALES[0] :])
        del inputs[SCALES[0] :]
        while inputs and not inputs[-1]:
            inputs.pop()
        node.input[:] = inputs
    refill(model.graph.initializer, [tensor for tensor in model.graph.initializer if tensor.name not in dropped])


def to_rounded_floats(path: Path, model: onnx.ModelProto) -> None:
    """Gives a graph a cache of float32 numbers that are code * scale, in place; `path` is not read."""
    scales, _ = cache_scales(model)
    to_floats(model)
    nodes: list[onnx.NodeProto] = []
    for number, node in enumerate(model.graph.node):
        copy = onnx.NodeProto.FromString(node.SerializeToString())
        if node.op_type == OPERATOR:
            for new, past in zip(NEW, PAST, strict=True):
                copy.input[new] = f"rounded/{number}/{new}"
                nodes += _rounding(model.graph, node.input[new], copy.input[new], scales[node.input[past]])
        nodes.append(copy)
    refill(model.graph.node, nodes)


def _rounding(graph: onnx.GraphProto, value: str, rounded: str, scale: Array) -> Iterator[onnx.NodeProto]:
    """Nodes that round `[batch, tokens, kv_heads * head_dim]` to multiples of the scale."""
    constants = {"scale": scale.reshape(-1), "least": np.float32(LEAST), "largest": np.float32(LARGEST)}
    for name, number in constants.items():
        graph.initializer.append(numpy_helper.from_array(np.asarray(number, np.float32), f"{rounded}/{name}"))
    names = {name: f"{rounded}/{name}" for name in constants}
    yield helper.make_node("Div", [value, names["scale"]], [f"{rounded}/ratio"])
    yield helper.make_node("Round", [f"{rounded}/ratio"], [f"{rounded}/nearest"])
    yield helper.make_node("Clip", [f"{rounded}/nearest", names["least"], names["largest"]], [f"{rounded}/code"])
    yield helper.make_node("Mul", [f"{rounded}/code", names["scale"]], [rounded])


def _cache(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    ports = [*model.graph.input, *model.graph.output]
    return [port for port in ports if is_past(port.name) or is_present(port.name)]


def attention_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == OPERATOR]


def _attribute_problems(node: onnx.NodeProto) -> list[str]:
    found = attribute_values(node)
    wrong = [name for name, kind in TYPES.items() if found.get(name) != kind.encode()]
    wrong += [BITS] if found.get(BITS) != 8 else []
    wrong += [ROTATED] if found.get(ROTATED) else []
    return [
        f"`{node.name}` has the attribute `{name}` = {found.get(name)!r}, which verify cannot judge" for name in wrong
    ]
