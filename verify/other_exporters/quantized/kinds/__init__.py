"""How graphs keep quantised weights: one file per kind in this folder, found by listing it."""

from __future__ import annotations

from functools import cache

import onnx

from llmconv.errors import UnsupportedInput
from llmconv.plugins import plugins
from llmconv.runtime.onnxruntime.guard import nodes
from llmconv.verify.other_exporters.quantized.constants import Constants
from llmconv.verify.other_exporters.quantized.quantized_matrix import Kind, Stored

UNREAD = {"MatMulBnb4", "QMoE", "MoE", "QLinearMatMul", "QGemm", "QAttention", "ConvInteger", "QLinearConv"}
"""Operators on quantised weights of which no file here knows the layout."""


@cache
def kinds() -> dict[str, Kind]:
    """The rows of this folder, by operator."""
    return {operator: row for row in plugins(__name__, "KIND", Kind).values() for operator in row.operators}


def quantized_operators(model: onnx.ModelProto) -> list[str]:
    """Operators of a graph that have quantised weights, each once."""
    found = dict.fromkeys(node.op_type for node in nodes(model))
    return [name for name in found if name in kinds() or name in UNREAD]


def stored_weights(model: onnx.ModelProto, constants: Constants) -> list[Stored]:
    """Every quantised matrix of a graph, each once.

    Raises:
        UnsupportedInput: one is kept in a way that no file here knows.
    """
    found: dict[str, Stored] = {}
    for node in nodes(model):
        if node.op_type in UNREAD:
            raise UnsupportedInput(
                f"`{node.op_type}` keeps its weights in a way that is not known here",
                hint="verify the graph from before it was quantised",
            )
        stored = kinds()[node.op_type].stored(node, constants) if node.op_type in kinds() else None
        if stored:
            found[f"{stored.name} {stored.looked_up}"] = stored
    return list(found.values())
