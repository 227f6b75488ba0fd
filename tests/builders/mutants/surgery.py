"""Finding and changing places in a graph: initializers, constants, nodes, wires."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from llmconv.runtime.onnxruntime.guard import external_fields
from llmconv.tensors import Array


def initializer(model: onnx.ModelProto, name: str) -> onnx.TensorProto | None:
    """The initializer of that name."""
    return next((tensor for tensor in model.graph.initializer if tensor.name == name), None)


def weight_names(model: onnx.ModelProto, pattern: str) -> list[str]:
    """Initializers whose name matches."""
    return [tensor.name for tensor in model.graph.initializer if re.search(pattern, tensor.name)]


def constants(model: onnx.ModelProto) -> Iterator[tuple[onnx.TensorProto, Array]]:
    """The initializers that are kept inline, with their values."""
    for tensor in model.graph.initializer:
        if not tensor.external_data:
            yield tensor, numpy_helper.to_array(tensor)


def constant_value(model: onnx.ModelProto, name: str) -> Array | None:
    """The value of an inline initializer or of a Constant node."""
    node = maker(model, name)
    if node is not None and node.op_type == "Constant":
        return numpy_helper.to_array(node.attribute[0].t)
    tensor = initializer(model, name)
    return None if tensor is None or tensor.external_data else numpy_helper.to_array(tensor)


def float_type(model: onnx.ModelProto) -> np.dtype[Any]:
    """What the graph computes in: the type of its cache."""
    past = next(port for port in model.graph.input if port.name.startswith("past_key_values"))
    return np.dtype(helper.tensor_dtype_to_np_dtype(past.type.tensor_type.elem_type))


def is_float(value: Array) -> bool:
    """Whether it is of a floating-point type, bfloat16 included."""
    return value.dtype.kind == "f" or value.dtype.name == "bfloat16"


def users(model: onnx.ModelProto, op: str) -> list[onnx.NodeProto]:
    """Nodes of one operator."""
    return [node for node in model.graph.node if node.op_type == op]


def maker(model: onnx.ModelProto, output: str) -> onnx.NodeProto | None:
    """The node that makes a value."""
    return next((node for node in model.graph.node if output in node.output), None)


def layer_of(node: onnx.NodeProto) -> int:
    """The layer that a node's scope or weights name, -1 for none."""
    for text in (node.name, *node.input):
        found = re.search(r"\b(?:layers|h)\.(\d+)\b", text)
        if found:
            return int(found.group(1))
    return -1


def add_constant(model: onnx.ModelProto, value: Array | np.generic) -> str:
    """A new inline initializer's name."""
    name = f"mutant_{len(model.graph.initializer)}"
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    return name


def insert(model: onnx.ModelProto, before: onnx.NodeProto, op: str, inputs: list[str]) -> str:
    """A new node in front of another; its output's name."""
    output = f"mutant_value_{len(model.graph.node)}"
    index = next(index for index, node in enumerate(model.graph.node) if node is before or node == before)
    model.graph.node.insert(index, helper.make_node(op, inputs, [output], name=output))
    return output


def replace_input(node: onnx.NodeProto, old: str, new: str) -> None:
    """Rewires one node."""
    for index, name in enumerate(node.input):
        if name == old:
            node.input[index] = new


def norms(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The nodes that are norms."""
    return [node for kind in ("LayerNormalization", "RMSNormalization") for node in users(model, kind)]


def attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto | None:
    """A node's attribute."""
    return next((item for item in node.attribute if item.name == name), None)


def make_inline(model: onnx.ModelProto, name: str, folder: Path, change: Callable[[Array], Array]) -> bool:
    """Replaces a mapped weight by a changed copy inside the graph."""
    tensor = initializer(model, name)
    assert tensor is not None
    fields = external_fields(tensor)
    raw = (folder / fields["location"]).read_bytes()[int(fields["offset"]) :][: int(fields["length"])]
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    values = np.frombuffer(raw, dtype).reshape(tuple(tensor.dims)).astype(np.float32)
    changed = np.ascontiguousarray(change(values)).astype(dtype)
    tensor.CopyFrom(numpy_helper.from_array(changed, name))
    return True
