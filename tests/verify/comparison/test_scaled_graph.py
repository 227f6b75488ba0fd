"""Graphs that compute as if weights were scaled: the same bits as on scaled weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from llmconv.tensors import Array
from llmconv.verify.comparison.layer_by_layer import scale

RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((6, 6)).astype(np.float32)
VALUES = RNG.standard_normal((3, 6)).astype(np.float32)
BIAS = RNG.standard_normal(6).astype(np.float32)


def node(op: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    """A node of one output."""
    return helper.make_node(op, inputs.split(), [output], **attributes)


GRAPHS = {
    "product": [node("MatMul", "x w", "p"), node("Add", "p b", "y")],
    "transposed": [node("Transpose", "w", "t", perm=[1, 0]), node("MatMul", "x t", "y")],
    "gemm": [node("Gemm", "x w b", "y", transB=1, alpha=0.5)],
    "rows": [node("Gather", "w i", "y")],
    "tied": [node("Gather", "w i", "h"), node("Transpose", "w", "t", perm=[1, 0]), node("MatMul", "h t", "y")],
    "other users": [node("Exp", "w", "e"), node("MatMul", "x e", "p"), node("MatMul", "p w", "y")],
    "two of them": [node("MatMul", "w w", "v"), node("MatMul", "x v", "y")],
    "cast": [node("Cast", "h", "c", to=TensorProto.FLOAT), node("MatMul", "x c", "y")],
}


def made(nodes: list[onnx.NodeProto], weight: Array, short: Array) -> onnx.ModelProto:
    """A graph of these nodes with the weight `w`, and the same in float16 as `h`."""
    tensors = {"w": weight, "h": short, "b": BIAS, "i": np.array([0, 5, 2])}
    used = {name for one in nodes for name in one.input} - {name for one in nodes for name in one.output}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["a", "b"])],
        [numpy_helper.from_array(array, name) for name, array in tensors.items() if name in used],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    copied: onnx.ModelProto = onnx.ModelProto.FromString(model.SerializeToString())
    return copied


SMALL = 1e-3 * WEIGHT.astype(np.float16)
"""So small that times 1/32 float16 cannot hold them exactly."""


def test_a_weight_that_is_cast_is_not_rounded_again() -> None:
    nodes = [node("Cast", "h", "c", to=TensorProto.FLOAT), node("Exp", "c", "e"), node("MatMul", "x e", "y")]
    model = made(nodes, WEIGHT, SMALL)
    scale(model, {"h": 1 / 32})
    exact = VALUES @ np.exp(SMALL.astype(np.float32) / 32)
    assert np.allclose(ran(model), exact, rtol=1e-6, atol=1e-6)
    assert not any(one.attribute[0].i == TensorProto.FLOAT16 for one in model.graph.node if one.op_type == "Cast")


def ran(model: onnx.ModelProto) -> Array:
    """What it gives."""
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    result: Array = session.run(None, {"x": VALUES})[0]
    return result


@pytest.mark.parametrize("at_weights", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_scaling_gives_the_bits_of_scaled_weights(name: str, at_weights: bool) -> None:
    short = WEIGHT.astype(np.float16)
    model = made(GRAPHS[name], WEIGHT, short)
    scale(model, {"w": 0.25, "h": 0.25}, at_weights=at_weights)
    onnx.checker.check_model(model)
    assert np.array_equal(ran(model), ran(made(GRAPHS[name], WEIGHT / 4, short / np.float16(4))))


def test_a_weight_with_other_users_is_scaled_itself() -> None:
    model = made(GRAPHS["other users"], WEIGHT, WEIGHT)
    scale(model, {"w": 0.25})
    assert [tensor.name for tensor in model.graph.initializer if tensor.name.startswith("w:un")] == ["w:unscaled"]


def test_each_row_can_have_its_own_factor() -> None:
    factors = np.array([1.0, 4, 1, 1, 2, 1]).reshape(-1, 1)
    model = made(GRAPHS["product"], WEIGHT, WEIGHT)
    scale(model, {"w": factors})
    assert np.array_equal(ran(model), ran(made(GRAPHS["product"], WEIGHT * factors.astype(np.float32), WEIGHT)))


def test_factors_of_one_change_nothing() -> None:
    model = made(GRAPHS["tied"], WEIGHT, WEIGHT)
    before = model.SerializeToString()
    scale(model, {"w": 1.0})
    assert model.SerializeToString() == before
