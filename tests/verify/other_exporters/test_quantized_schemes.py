"""Quantized matrices are read as onnxruntime dequantizes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from llmconv.errors import UnsupportedInput
from llmconv.tensors import Array
from llmconv.verify.other_exporters.quantized.quantized_matrix import Constants, QuantizedMatrix
from llmconv.verify.other_exporters.quantized.schemes import quantized_matrices

RNG = np.random.default_rng(0)
ROWS, COLUMNS = 6, 40


def graph_of(
    node: onnx.NodeProto, tensors: dict[str, Array | TensorProto], kind: int = TensorProto.FLOAT
) -> onnx.ModelProto:
    """A graph of one node with constants; its input, if any, is `x`."""
    initializers = []
    for name, values in tensors.items():
        made = values if isinstance(values, TensorProto) else numpy_helper.from_array(values, name)
        made.name = name
        initializers.append(made)
    given = [helper.make_tensor_value_info("x", kind, None)] if "x" in node.input else []
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "one", given, outputs, initializers)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def run(model: onnx.ModelProto, **inputs: Array) -> Array:
    """What onnxruntime computes."""
    found: Array = ort.InferenceSession(model.SerializeToString()).run(None, inputs)[0]
    return found


def read(model: onnx.ModelProto) -> QuantizedMatrix:
    """The one matrix."""
    (stored,) = quantized_matrices(model, Constants(model, Path()))
    return stored


def nbits(bits: int, zeros: str, **more: Any) -> onnx.ModelProto:
    """A product with 6 x 40 weights in blocks of 16, the last of which is half empty."""
    blocks, per_byte = 3, 8 // bits
    codes = RNG.integers(0, 256, (ROWS, blocks, 16 // per_byte), dtype=np.uint8)
    tensors: dict[str, Array | TensorProto] = {"b": codes, "s": RNG.random((ROWS, blocks), dtype=np.float32) + 0.1}
    if zeros == "packed":
        tensors["z"] = RNG.integers(0, 256, (ROWS, -(-blocks // per_byte)), dtype=np.uint8)
    elif zeros == "float":
        tensors["z"] = RNG.random((ROWS, blocks), dtype=np.float32) * 5
    names = ["x", "b", "s", *(["z"] if zeros else [])]
    fields = {"K": COLUMNS, "N": ROWS, "bits": bits, "block_size": 16, **more}
    return graph_of(helper.make_node("MatMulNBits", names, ["y"], domain="com.microsoft", **fields), tensors)


@pytest.mark.parametrize(
    ("bits", "zeros"), [(4, ""), (4, "packed"), (4, "float"), (8, ""), (8, "packed"), (2, ""), (2, "packed")]
)
def test_a_product_with_packed_codes_is_one_with_these_floats(bits: int, zeros: str) -> None:
    model = nbits(bits, zeros)
    product = run(model, x=np.eye(COLUMNS, dtype=np.float32))
    np.testing.assert_allclose(read(model).read().T, product, rtol=1e-6, atol=1e-6)


def test_codes_in_groups_are_refused() -> None:
    model = nbits(4, "packed")
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(COLUMNS, dtype=np.int32), "g"))
    model.graph.node[0].input.append("g")
    with pytest.raises(UnsupportedInput, match="has reordered groups"):
        read(model)


@pytest.mark.parametrize("dtype", ["UINT4", "INT4", "UINT8", "UINT8 whole"])
@pytest.mark.parametrize("zeros", [False, True])
def test_a_quantized_embedding_looks_up_these_floats(dtype: str, zeros: bool) -> None:
    low, high = {"INT4": (-8, 8), "UINT8 whole": (0, 256)}.get(dtype, (0, 16))
    codes, points = (RNG.integers(low, high, (ROWS, size)) for size in (32, 2))
    tensors: dict[str, Array | TensorProto]
    if dtype == "UINT8":  # two codes in a byte
        tensors = {"d": _packed(codes), "z": _packed(points)}
    elif dtype == "UINT8 whole":
        tensors = {"d": codes.astype(np.uint8), "z": points.astype(np.uint8)}
    else:
        kind = getattr(TensorProto, dtype)
        tensors = {
            "d": helper.make_tensor("d", kind, codes.shape, codes.ravel().tolist()),
            "z": helper.make_tensor("z", kind, points.shape, points.ravel().tolist()),
        }
    tensors["s"] = RNG.random((ROWS, 2), dtype=np.float32) + 0.1
    names = ["d", "x", "s", *(["z"] if zeros else [])]
    fields: dict[str, Any] = {
        "block_size": 16,
        "bits": 8 if "whole" in dtype else 4,
        "quantize_axis": 1,
        "gather_axis": 0,
    }
    node = helper.make_node("GatherBlockQuantized", names, ["y"], domain="com.microsoft", **fields)
    model = graph_of(node, {name: tensors[name] for name in names if name != "x"}, TensorProto.INT64)
    stored = read(model)
    np.testing.assert_array_equal(stored.read(), run(model, x=np.arange(ROWS)))
    assert stored.looked_up and not stored.multiplied


@pytest.mark.parametrize(("bits", "value"), [(4, 0x88), (8, 0x80), (4, 0x77), (8, 0)])
def test_zero_points_of_one_number_count_as_none_if_it_is_the_middle_code(bits: int, value: int) -> None:
    tensors: dict[str, Array | TensorProto] = {
        "d": RNG.integers(0, 256, (ROWS, 4 * bits), dtype=np.uint8),
        "s": RNG.random((ROWS, 2), dtype=np.float32) + 0.1,
        "size": np.array([ROWS, bits // 4]),
    }
    fields: dict[str, Any] = {"block_size": 16, "bits": bits, "quantize_axis": 1, "gather_axis": 0}
    node = helper.make_node("GatherBlockQuantized", ["d", "x", "s", "z"], ["y"], domain="com.microsoft", **fields)
    model = graph_of(node, tensors, TensorProto.INT64)
    number = numpy_helper.from_array(np.array([value], np.uint8))
    model.graph.node.insert(0, helper.make_node("ConstantOfShape", ["size"], ["z"], value=number))
    stored = read(model)
    np.testing.assert_array_equal(stored.read(), run(model, x=np.arange(ROWS)))
    assert stored.symmetric == (value in (0x88, 0x80))


def _packed(codes: Array) -> Array:
    low, high = codes[:, ::2], codes[:, 1::2]
    both: Array = (low | (high << 4)).astype(np.uint8)
    return both


@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        ((), {}),
        ((COLUMNS,), {"axis": 1}),
        ((ROWS,), {"axis": 0}),
        ((ROWS, 3), {"axis": 1, "block_size": 16}),
        ((1, COLUMNS), {"axis": 0, "block_size": 6}),
        ((2, COLUMNS), {"axis": -2, "block_size": 4}),
    ],
)
@pytest.mark.parametrize("dtype", ["INT8", "UINT4"])
def test_dequantized_constants_are_these_floats(shape: tuple[int, ...], fields: dict[str, Any], dtype: str) -> None:
    kind = getattr(TensorProto, dtype)
    codes, points = (RNG.integers(0, 16, size) for size in ((ROWS, COLUMNS), shape))
    tensors: dict[str, Array | TensorProto] = {
        "d": helper.make_tensor("d", kind, codes.shape, codes.ravel().tolist()),
        "s": np.asarray(RNG.random(shape) + 0.1, dtype=np.float32),
        "z": helper.make_tensor("z", kind, shape, np.ravel(points).tolist()),
    }
    model = graph_of(helper.make_node("DequantizeLinear", ["d", "s", "z"], ["y"], **fields), tensors)
    np.testing.assert_array_equal(read(model).read(), run(model))


def test_codes_of_four_bits_are_read_from_external_data(tmp_path: Path) -> None:
    codes = RNG.integers(-8, 8, (ROWS, COLUMNS))
    tensors: dict[str, Array | TensorProto] = {
        "d": helper.make_tensor("d", TensorProto.INT4, codes.shape, _packed(codes & 15).tobytes(), raw=True),
        "s": np.float32(0.5) * np.ones((), dtype=np.float32),
    }
    model = graph_of(helper.make_node("DequantizeLinear", ["d", "s"], ["y"]), tensors)
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    bare = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    (stored,) = quantized_matrices(bare, Constants(bare, tmp_path))
    np.testing.assert_array_equal(stored.read(), codes * np.float32(0.5))


def test_an_unknown_layout_is_named() -> None:
    node = helper.make_node("MatMulBnb4", ["x", "b", "s"], ["y"], domain="com.microsoft")
    with pytest.raises(UnsupportedInput, match="`MatMulBnb4` stores its weights in an unsupported format"):
        read(graph_of(node, {}))
