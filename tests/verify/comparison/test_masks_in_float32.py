"""Copies that compute in float32: a mask still hides a key, a number stays what it is; what is rounded there."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from llmconv.verify.comparison.half_precision import KnownConstants, round_every_value, widen

LOWEST = float(np.finfo(np.float32).min)


def masked(scores: str, mask: str, *, scaled: bool = False) -> list[onnx.NodeProto]:
    """Nodes that add a mask to scores and hide keys, with a product between if `scaled`."""
    product = [helper.make_node("Mul", ["sum", "share"], ["product"])] if scaled else []
    last = helper.make_node("Softmax", ["product" if scaled else "sum"], ["y"])
    return [helper.make_node("Add", [scores, mask], ["sum"]), *product, last]


def lowest_after(*nodes: onnx.NodeProto, rounded: bool = False) -> float:
    """The constant of -65504 after a graph was widened, in which `Where` makes `mask` of it."""
    where = helper.make_node("Where", ["seen", "zero", "low"], ["mask"])
    tensors = {"zero": np.zeros(1, np.float16), "low": np.full(1, -65504, np.float16), "share": np.ones(1, np.float16)}
    graph = helper.make_graph(
        [where, *nodes],
        "g",
        [
            helper.make_tensor_value_info("seen", TensorProto.BOOL, ["n"]),
            helper.make_tensor_value_info("scores", TensorProto.FLOAT16, ["n"]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, ["n"])],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    model = helper.make_model(graph)
    if rounded:
        round_every_value(model, TensorProto.FLOAT16)
    else:
        widen(model, TensorProto.FLOAT16, KnownConstants())
    low = next(tensor for tensor in model.graph.initializer if tensor.name == "low")
    return float(numpy_helper.to_array(low)[0])


@pytest.mark.parametrize("arranging", ["Identity", "Cast"])
def test_a_mask_that_is_added_to_scores_is_widened(arranging: str) -> None:
    attributes: dict[str, Any] = {"to": TensorProto.FLOAT16} if arranging == "Cast" else {}
    arranged = helper.make_node(arranging, ["mask"], ["m"], **attributes)
    assert lowest_after(arranged, *masked("scores", "m")) == LOWEST


def test_a_number_that_is_computed_with_is_not() -> None:
    scaled = helper.make_node("Mul", ["mask", "share"], ["m"])
    assert lowest_after(scaled, *masked("scores", "m")) == -65504


def test_a_sum_that_is_computed_with_is_not_a_mask_either() -> None:
    assert lowest_after(*masked("scores", "mask", scaled=True)) == -65504


def test_a_mask_that_nothing_reads_is_not_widened() -> None:
    assert lowest_after(helper.make_node("Softmax", ["scores"], ["y"])) == -65504


def test_a_mask_that_a_branch_reads_is_not_widened() -> None:
    branch = helper.make_graph(
        [helper.make_node("Mul", ["mask", "share"], ["m"])],
        "branch",
        [],
        [helper.make_tensor_value_info("m", TensorProto.FLOAT16, ["n"])],
    )
    chosen = helper.make_node("If", ["seen"], ["other"], then_branch=branch, else_branch=branch)
    assert lowest_after(chosen, *masked("scores", "mask")) == -65504


def test_one_other_use_is_enough() -> None:
    other = helper.make_node("Mul", ["scores", "low"], ["s"])
    assert lowest_after(other, *masked("s", "mask")) == -65504


def test_a_copy_that_rounds_keeps_the_number_which_would_be_infinite() -> None:
    assert lowest_after(*masked("scores", "mask"), rounded=True) == -65504


def test_an_output_that_nothing_reads_is_not_rounded() -> None:
    """CUDA's norms do not compute the statistics that they may return."""
    outputs = ["y", "mean", "deviation", "sum"]
    norm = helper.make_node("SkipSimplifiedLayerNormalization", ["x", "x", "scale"], outputs, domain="com.microsoft")
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["n"]) for name in ("x", "y")]
    scale = numpy_helper.from_array(np.ones(4, np.float16), "scale")
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([norm], "g", ports[:1], ports[1:], [scale])
    model = helper.make_model(graph, opset_imports=opsets)
    round_every_value(model, TensorProto.FLOAT16)
    rounded = next(node for node in model.graph.node if node.op_type == norm.op_type)
    assert rounded.output[0] != "y"
    assert list(rounded.output[1:]) == outputs[1:]
