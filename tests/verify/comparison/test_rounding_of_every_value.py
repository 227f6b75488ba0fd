"""Copies that round after every node keep their rounding when onnxruntime opens them."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import helper

from llmconv.runtime.onnxruntime.session_settings import HALF_PRECISION, SessionSettings
from llmconv.verify.comparison.half_precision import round_every_value


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_are_rounded_to_the_dtype_of_the_graph(dtype: str) -> None:
    kind = HALF_PRECISION[dtype]
    ports = [helper.make_tensor_value_info(name, kind, [2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Mul", ["x", "x"], ["y"])], "square", ports[:1], ports[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    settings = SessionSettings(change=lambda path, model: round_every_value(model, kind))
    settings.prepare(Path("square.onnx"), model, settings.options())
    casts = [helper.get_attribute_value(node.attribute[0]) for node in model.graph.node if node.op_type == "Cast"]
    assert casts.count(kind) == 2
