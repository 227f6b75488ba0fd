"""Shape inference goes on behind onnxruntime's own operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, shape_inference

from llmconv.verify.audit.decisions import in_standard_operators

MICROSOFT = "com.microsoft"


def graph(**attributes: Any) -> onnx.ModelProto:
    """`norm(x + x · W)`, and the sum; W is [6, 4]."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "length", 4])
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("product", "normed", "sum")]
    weights = [numpy_helper.from_array(np.zeros((6, 4), "f4"), "W"), numpy_helper.from_array(np.ones(4, "f4"), "gamma")]
    nodes = [
        helper.make_node("FusedMatMul", ["x", "W"], ["product"], domain=MICROSOFT, **attributes),
        helper.make_node(
            "SkipSimplifiedLayerNormalization", ["x", "x", "gamma"], ["normed", "", "", "sum"], domain=MICROSOFT
        ),
    ]
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(helper.make_graph(nodes, "graph", [x], outputs, weights), opset_imports=opsets)


def axes(model: onnx.ModelProto) -> dict[str, list[str | int]]:
    """The axes that inference finds for the outputs."""
    in_standard_operators(model.graph)
    inferred = shape_inference.infer_shapes(model).graph.output
    shapes = {
        port.name: port.type.tensor_type.shape.dim for port in inferred if port.type.tensor_type.HasField("shape")
    }
    return {name: [dim.dim_param or dim.dim_value for dim in shape] for name, shape in shapes.items()}


def test_products_with_a_transposed_matrix_and_norms_of_sums_have_axes() -> None:
    assert axes(graph(transB=1)) == {
        "product": ["batch", "length", 6],
        "normed": ["batch", "length", 4],
        "sum": ["batch", "length", 4],
    }


@pytest.mark.parametrize("name", ["transA", "transBatchA", "transBatchB"])
def test_another_transposition_stays_unknown(name: str) -> None:
    assert "product" not in axes(graph(transB=1, **{name: 1}))
