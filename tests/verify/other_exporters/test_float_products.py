"""Without the rounding of activations, a product of codes with zero points is as exact as one of floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic

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
    assert error(model, x, exact) < 2 * floats  # by CPU, onnxruntime's products of floats have 1 to 1.8 times the error


@pytest.fixture(scope="module")
def two_products(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    """`x @ w` and `exp(x) @ w`, quantized by `quantize_dynamic`."""
    folder = tmp_path_factory.mktemp("dynamic")
    weight = numpy_helper.from_array(np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32), "w")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], name="first"),
        helper.make_node("Exp", ["x"], ["e"]),
        helper.make_node("MatMul", ["e", "w"], ["z"], name="second"),
    ]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, None]) for name in "xyz"]
    opsets = [helper.make_opsetid("", 21)]
    model = helper.make_model(helper.make_graph(nodes, "g", ports[:1], ports[1:], [weight]), opset_imports=opsets)
    model.ir_version = 10
    onnx.save(model, folder / "float.onnx")
    quantize_dynamic(folder / "float.onnx", folder / "codes.onnx", op_types_to_quantize=["MatMul"])
    return onnx.load(folder / "codes.onnx")


def second_product(model: onnx.ModelProto) -> tuple[onnx.NodeProto, onnx.NodeProto, dict[str, str]]:
    """The product of `exp(x)`, the node that multiplies its scales, and the names of the other activation's outputs."""
    first, second = (node for node in model.graph.node if node.op_type == "DynamicQuantizeLinear")
    product = next(
        node for node in model.graph.node if node.op_type == "MatMulInteger" and node.input[2] in second.output
    )
    scales = next(node for node in model.graph.node if node.op_type == "Mul" and second.output[1] in node.input)
    return product, scales, dict(zip(second.output, first.output, strict=True))


def test_a_rounded_activation_is_restored(two_products: onnx.ModelProto) -> None:
    model = onnx.ModelProto.FromString(two_products.SerializeToString())
    assert remove_rounding(model, Constants(model, Path())) == ["DynamicQuantizeLinear", "MatMulInteger"]
    x = np.random.default_rng(1).normal(size=(5, 16)).astype(np.float32)
    stored = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    codes, zero, scale = (stored[f"w_{name}"] for name in ("quantized", "zero_point", "scale"))
    weight = (codes.astype(np.float32) - zero.astype(np.float32)) * scale
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for found, activation in zip(session.run(None, {"x": x}), (x, np.exp(x)), strict=True):
        np.testing.assert_allclose(found, activation @ weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fault", ["no zero point", "another zero point", "another scale"])
def test_a_product_without_its_own_scale_and_zero_point_stays(fault: str, two_products: onnx.ModelProto) -> None:
    """Without the rounding such a graph would compute the right product, which it does not."""
    model = onnx.ModelProto.FromString(two_products.SerializeToString())
    product, scales, others = second_product(model)
    if fault == "no zero point":
        product.input[2] = ""
    elif fault == "another zero point":
        product.input[2] = others[product.input[2]]
    else:
        at = 0 if scales.input[0] in others else 1
        scales.input[at] = others[scales.input[at]]
    wrong = onnx.ModelProto.FromString(model.SerializeToString())
    remove_rounding(model, Constants(model, Path()))
    x = np.random.default_rng(1).normal(size=(5, 16)).astype(np.float32)
    both = (ort.InferenceSession(one.SerializeToString(), providers=["CPUExecutionProvider"]) for one in (wrong, model))
    shipped, unrounded = (session.run(["z"], {"x": x})[0] for session in both)
    np.testing.assert_array_equal(unrounded, shipped)
