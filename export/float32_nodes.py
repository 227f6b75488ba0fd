"""What a half-precision graph computes in float32, as transformers does: norms, rotary angles, routers, scans."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import onnx

from llmconv.export.graph_spec import FLOAT32
from llmconv.export.targets.element_types import TypedNode, typed_nodes

MOVING = {
    *("Cast", "CastLike", "Concat", "Constant", "ConstantOfShape", "Expand", "Gather", "GatherElements", "GatherND"),
    *("Identity", "Pad", "Reshape", "ScatterElements", "ScatterND", "Shape", "Slice", "Split", "Squeeze"),
    *("Transpose", "Unsqueeze", "Where"),
}
"""Operators that compute no number."""

FUNCTIONS = "functions"
"""Stands for the module of nodes in the graph's functions."""

LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")
"""Number of a layer in the name of a module."""


def float32_fields(model: onnx.ModelProto, precision: str) -> dict[str, Any]:
    """The field `float32` of a graph's manifest entry: the operators that compute in float32, by module.

    All layers count as one, `model.layers.*`. An operator that only computes in float32 inside, such as
    `RMSNormalization` with `stash_type`, is not listed. A graph in float32 has no such field.

    Args:
        model: the graph, without its weights.
        precision: what the graph computes in.
    """
    if precision == FLOAT32:
        return {}
    found: dict[str, set[str]] = defaultdict(set)
    for node in typed_nodes(model):
        if node.operator not in MOVING and _is_in_float32(node):
            module = node.name.rpartition("/")[0]
            found[LAYER.sub("*", module) or FUNCTIONS].add(node.operator)
    return {"float32": {module: sorted(operators) for module, operators in sorted(found.items())}}


def _is_in_float32(node: TypedNode) -> bool:
    return FLOAT32 in node.inputs or any(FLOAT32 in kinds for kinds in node.bound.values())
