"""Small graphs by hand, for passes alone, and a plain way to run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import helper, numpy_helper

FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64


def port(name: str, axes: Sequence[str | int], kind: int = FLOAT) -> onnx.ValueInfoProto:
    """An input or output."""
    return helper.make_tensor_value_info(name, kind, axes)


def graph(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: dict[str, NDArray[Any]],
) -> ir.Model:
    """A model of opset 23; nodes get the names of their first outputs."""
    for node in nodes:
        node.name = node.name or node.output[0]
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    made = helper.make_graph(nodes, "graph", inputs, outputs, tensors)
    opsets = [helper.make_opsetid("", 23)]
    return ir.from_proto(helper.make_model(made, opset_imports=opsets, ir_version=10))


def run(model: ir.Model, **feeds: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Outputs by name."""
    import onnxruntime  # noqa: PLC0415 - slow to import

    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([arg.name for arg in session.get_outputs()], session.run(None, feeds), strict=True))


def head(bias: bool = False) -> ir.Model:
    """`hidden` `[b, s, 4]` -> Gemm on 6 rows -> halved and capped `logits` `[b, s, 6]`, as an exported head is."""
    rng = np.random.default_rng(0)
    names = ["flat", "weight", "bias"] if bias else ["flat", "weight"]
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["cast"], to=FLOAT),
        helper.make_node("Unsqueeze", ["cast", "last"], ["column"]),
        helper.make_node("MatMul", ["column", "table"], ["hidden"]),
        helper.make_node("Reshape", ["hidden", "matrix"], ["flat"]),
        helper.make_node("Gemm", names, ["product"], transB=1),
        helper.make_node("Shape", ["input_ids"], ["tokens"]),
        helper.make_node("Concat", ["tokens", "width"], ["full"], axis=0),
        helper.make_node("Reshape", ["product", "full"], ["rows"]),
        helper.make_node("Div", ["rows", "two"], ["halved"]),
        helper.make_node("Tanh", ["halved"], ["logits"]),
    ]
    constants = {
        "last": np.array([2]),
        "table": rng.normal(size=(1, 4)).astype(np.float32),
        "matrix": np.array([-1, 4]),
        "weight": rng.normal(size=(6, 4)).astype(np.float32),
        "bias": rng.normal(size=6).astype(np.float32),
        "width": np.array([6]),
        "two": np.array(2, np.float32),
    }
    ports = [port("input_ids", ["b", "s"], INT64)], [port("logits", ["b", "s", 6])]
    return graph(nodes, *ports, constants if bias else {k: v for k, v in constants.items() if k != "bias"})
