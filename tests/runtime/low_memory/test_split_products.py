"""A graph whose large products are split gives the numbers of the graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper
from safetensors.torch import save_file

from llmconv.files.safetensors_file import read_header
from llmconv.runtime.low_memory.pieced_graph import dependent_values, split_products
from llmconv.tensors import Array

ROWS, COLUMNS = 11, 8
LIMIT = 3 * COLUMNS * 4
"""Blocks of three rows, the last of two."""


def graph(folder: Path, dtype: torch.dtype, *, cast: bool, transposed: bool = True) -> onnx.ModelProto:
    """`Gemm(x, matrix)` with a stored matrix, through a `Cast` if wanted."""
    torch.manual_seed(0)
    shape = (ROWS, COLUMNS) if transposed else (COLUMNS, ROWS)
    save_file({"matrix": torch.randn(shape).to(dtype)}, folder / "model.safetensors")
    place = read_header(folder / "model.safetensors").tensors["matrix"]
    kind = TensorProto.BFLOAT16 if dtype is torch.bfloat16 else TensorProto.FLOAT
    matrix = onnx.TensorProto(name="matrix", data_type=kind, dims=shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "model.safetensors"), ("offset", place.offset), ("length", place.nbytes)):
        matrix.external_data.add(key=key, value=str(value))
    nodes = [helper.make_node("Cast", ["matrix"], ["wide"], to=TensorProto.FLOAT)] if cast else []
    nodes.append(helper.make_node("Gemm", ["x", "wide" if cast else "matrix"], ["y"], transB=int(transposed)))
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [5, size]) for name, size in (("x", 8), ("y", 11))]
    body = helper.make_graph(nodes, "product", ports[:1], ports[1:], [matrix])
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def result(model: onnx.ModelProto, folder: Path) -> Array:
    """What onnxruntime computes."""
    onnx.save(model, folder / "model.onnx")
    session = ort.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).standard_normal((5, COLUMNS)).astype(np.float32)
    return np.asarray(session.run(["y"], {"x": x})[0])


@pytest.mark.parametrize(
    ("dtype", "cast"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)], ids=str
)
def test_numbers_are_those_of_the_whole_product(dtype: torch.dtype, cast: bool, tmp_path: Path) -> None:
    model = graph(tmp_path, dtype, cast=cast)
    wanted = result(model, tmp_path)
    split_products(model, LIMIT)
    assert [node.op_type for node in model.graph.node].count("Gemm") == 4
    assert np.allclose(result(model, tmp_path), wanted, rtol=1e-6, atol=1e-6)


def test_no_block_is_larger_than_the_limit(tmp_path: Path) -> None:
    model = graph(tmp_path, torch.bfloat16, cast=True)
    split_products(model, LIMIT)
    read = {name for node in model.graph.node for name in node.input}
    blocks = [list(tensor.dims) for tensor in model.graph.initializer if tensor.name in read]
    assert blocks == [[3, COLUMNS], [3, COLUMNS], [3, COLUMNS], [2, COLUMNS]]


@pytest.mark.parametrize("options", [{"limit": 1 << 20}, {"transposed": False}], ids=str)
def test_other_products_stay_whole(options: dict[str, int], tmp_path: Path) -> None:
    model = graph(tmp_path, torch.float32, cast=False, transposed=bool(options.get("transposed", True)))
    before = model.SerializeToString(deterministic=True)
    split_products(model, options.get("limit", LIMIT))
    assert model.SerializeToString(deterministic=True) == before


def test_a_block_that_no_input_decides_is_computed_once_for_all_calls() -> None:
    """The head of 8 B in 8 bits was dequantized for each of 64 calls, and all of these were held: 8 GB."""
    made = onnx.parser.parse_graph(
        """
        g (float[N, 4] x, int64[M] at) => (float[N, R] y, float[M, 4] z, int64[M] zeros)
        <float[6, 4] w, int64[1] zero = {0}, int64[3] places = {0, 1, 2}> {
            nothing = Constant <value: tensor = int64 {0}> ()
            size = Size (x)
            none = Mul (size, nothing)
            indices = Add (places, none)
            block = Gather (w, indices)
            turned = Transpose <perm = [1, 0]> (block)
            y = MatMul (x, turned)
            z = Gather (w, at)
            zeros = Mul (at, nothing)
        }
        """
    )
    assert dependent_values(onnx.helper.make_model(made)) == {"x", "at", "size", "y", "z", "zeros"}
