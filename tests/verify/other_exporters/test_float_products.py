"""Without the rounding of activations, a product of codes with zero points is as exact as one of floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from llmconv.tensors import Array
from llmconv.verify.other_exporters.quantized import schemes
from llmconv.verify.other_exporters.quantized.dequantized_reference import remove_rounding
from llmconv.verify.other_exporters.quantized.quantized_matrix import Constants, unpacked

ROWS = 48


def graph(columns: int, bits: int, *, bias: bool) -> onnx.ModelProto:
    """A product with random codes, scales and zero points."""
    rng, blocks = np.random.default_rng(columns), -(-columns // 32)
    codes = rng.integers(0, 256, (ROWS, blocks, 4 * bits), dtype=np.uint8)
    scales = rng.uniform(0.001, 0.02, (ROWS, blocks)).astype(np.float32)
    zeros = rng.integers(0, 256, (ROWS, -(-blocks * bits // 8)), dtype=np.uint8)
    stored: dict[str, Array] = {
        "codes": codes,
        "scales": scales,
        "zeros": zeros,
        "bias": rng.normal(size=ROWS).astype(np.float32),
    }
    inputs = ["x", "codes", "scales", "zeros", *(["", "bias"] if bias else [])]
    sizes: dict[str, Any] = {"K": columns, "N": ROWS, "bits": bits, "block_size": 32, "accuracy_level": 4}
    node = helper.make_node("MatMulNBits", inputs, ["y"], domain="com.microsoft", **sizes)
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, None]) for name in ("x", "y")]
    values = [numpy_helper.from_array(array, name) for name, array in stored.items() if name in inputs]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph([node], "g", ports[:1], ports[1:], values), opset_imports=opsets)


def error(model: onnx.ModelProto, x: Array, exact: Array) -> float:
    model.ir_version = 10
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return float(np.sqrt(np.mean((session.run(None, {"x": x})[0] - exact) ** 2)))


@pytest.mark.parametrize(
    ("columns", "bits", "bias", "part"),
    [
        (1536, 4, True, schemes.PART),
        (96, 4, False, 700),  # seven rows at a time
        (80, 4, True, 700),
        (1536, 8, False, schemes.PART),
        (80, 8, True, 96),
        (96, 2, False, 1000),
    ],
)
def test_its_error_is_that_of_floats(
    columns: int, bits: int, bias: bool, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemes, "PART", part)
    model = graph(columns, bits, bias=bias)
    x = np.random.default_rng(1).normal(size=(33, columns)).astype(np.float32)
    stored = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    codes = unpacked(stored["codes"], bits).astype(np.float32)
    zeros = unpacked(stored["zeros"], bits)[:, : codes.shape[1], None].astype(np.float32)
    weights = ((codes - zeros) * stored["scales"][..., None]).reshape(ROWS, -1)[:, :columns]
    exact = x.astype(np.float64) @ weights.T.astype(np.float64) + stored.get("bias", 0.0)
    floats = float(np.sqrt(np.mean((x @ weights.T + stored.get("bias", np.float32(0)) - exact) ** 2)))
    assert remove_rounding(model, Constants(model, Path())) == ["MatMulNBits"]
    assert "MatMulNBits" not in {node.op_type for node in model.graph.node}
    assert error(model, x, exact) < 1.5 * floats
