"""The epsilons of the norms in a vision graph: small changes of them hide in the rounding of the features."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from llmconv.verify.results.report import Check

NAME = "norms of the vision tower"
FIELDS = ("eps", "epsilon", "variance_epsilon")
"""Attributes of torch's and transformers' norms."""


DECODER = re.compile(r"(^|\.)(language_model|text_model)(\.|$)")


def check_tower_norms(name: str, graph: onnx.ModelProto, model: Any) -> Check:
    """A check that every epsilon in a graph is one of the model's norms.

    Args:
        name: of the graph.
        graph: the graph of a vision tower.
        model: the eager model.
    """
    known = {np.float32(value) for value in _epsilons(model)}
    odd = next(((node, value) for node, value in _used(graph) if np.float32(value) not in known), None)
    if odd is None:
        return Check(NAME, name, "", verdict="pass")
    return Check(NAME, name, "", verdict="fail", detail=f"`{odd[0]}` has the epsilon {odd[1]:g}, no norm of the model")


def _epsilons(model: Any) -> Iterator[float]:
    """Those of all modules but the decoder's."""
    for name, module in model.named_modules():
        for field in () if DECODER.search(name) else FIELDS:
            value = getattr(module, field, None)
            if isinstance(value, float):
                yield value


def _used(graph: onnx.ModelProto) -> Iterator[tuple[str, float]]:
    """Names of nodes and the epsilons that they add: an attribute, or a constant under a square root."""
    constants = {tensor.name: tensor for tensor in graph.graph.initializer if not tensor.external_data}
    makers = {output: node for node in graph.graph.node for output in node.output}
    for node in graph.graph.node:
        yield from ((node.name, one.f) for one in node.attribute if one.name == "epsilon")
        added = makers.get(node.input[0]) if node.op_type == "Sqrt" else None
        for name in added.input if added is not None and added.op_type == "Add" else ():
            if name in constants:
                yield node.name, float(numpy_helper.to_array(constants[name]).reshape(-1)[0])
