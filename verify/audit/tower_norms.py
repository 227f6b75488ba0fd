"""The epsilons of the norms in a vision graph: small changes of them hide in the rounding of the features."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from llmconv.runtime.onnxruntime.guard import nodes
from llmconv.verify.results.report import Check

NAME = "norms of the vision tower"
FIELDS = ("eps", "epsilon", "variance_epsilon")
"""Attributes of torch's and transformers' norms."""

NORMS = re.compile(r"Norm(alization)?$")
DEFAULT = 1e-5
"""What the operators of norms add without the attribute (ONNX, Operators.md)."""

INVERSE_ROOT = -0.5

DECODER = re.compile(r"(^|\.)(language_model|text_model)(\.|$)")


def check_tower_norms(name: str, graph: onnx.ModelProto, model: Any) -> Check:
    """A check that each norm in a graph adds the epsilon of its module, or of some norm if it has no module's name.

    Args:
        name: of the graph.
        graph: the graph of a vision tower, whose nodes are named after modules.
        model: the eager model.
    """
    known = _epsilons(model)
    for node, value in _used(graph):
        module = node.partition("/")[0]
        if np.float32(value) not in ({known[module]} if module in known else set(known.values())):
            return Check(
                NAME, name, "", verdict="fail", detail=f"`{node}` adds the epsilon {value:g}, the model does not"
            )
    return Check(NAME, name, "", verdict="pass")


def _epsilons(model: Any) -> dict[str, Any]:
    """The epsilon of each module with one, in float32, without those of the decoder."""
    return {
        name: np.float32(value)
        for name, module in model.named_modules()
        if not DECODER.search(name)
        for value in (getattr(module, field, None) for field in FIELDS)
        if isinstance(value, float)
    }


def _used(graph: onnx.ModelProto) -> Iterator[tuple[str, float]]:
    """Names of nodes and the epsilons that they add: an attribute, its default, or a constant under a root."""
    constants = {tensor.name: tensor for tensor in graph.graph.initializer if not tensor.external_data}
    makers = {output: node for node in nodes(graph) for output in node.output}
    for node in nodes(graph):
        if NORMS.search(node.op_type):
            yield node.name, next((one.f for one in node.attribute if one.name == "epsilon"), DEFAULT)
        added = makers.get(node.input[0]) if _takes_root(node, constants) else None
        for name in added.input if added is not None and added.op_type == "Add" else ():
            if name in constants:
                yield node.name, _first(constants[name])


def _takes_root(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> bool:
    """Whether a node is a square root, or the inverse of one as a power."""
    is_power = node.op_type == "Pow" and node.input[1] in constants
    return node.op_type == "Sqrt" or (is_power and _first(constants[node.input[1]]) == INVERSE_ROOT)


def _first(tensor: onnx.TensorProto) -> float:
    return float(numpy_helper.to_array(tensor).reshape(-1)[0])
