"""`export --quant a8w8 --calibrate --static-activations`: products of standard QDQ with ranges of the text."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from llmconv.errors import UnsupportedInput, UsageProblem
from llmconv.export import export
from llmconv.export.quantization.selection import ActivationRange
from tests.builders.talking import save_letters
from tools.tiny_models import depth, save_tiny


@pytest.fixture(scope="module")
def graph(talking: Path, tmp_path_factory: pytest.TempPathFactory) -> onnx.GraphProto:
    """The graph of a Llama."""
    folder = tmp_path_factory.mktemp("static") / "out"
    export(talking, folder, unified=True, quant="a8w8", calibrate="default", static_activations=True)
    return onnx.load(folder / "model.onnx", load_external_data=False).graph


def test_products_are_standard_operators(graph: onnx.GraphProto) -> None:
    found = Counter(node.op_type for node in graph.node)
    assert not found["DynamicQuantizeMatMul"] and found["MatMulNBits"] == 4 + 1


def test_products_of_one_input_share_its_rounding(graph: onnx.GraphProto) -> None:
    found = Counter(node.op_type for node in graph.node)
    assert found["QuantizeLinear"] == 3 * 4 and found["DequantizeLinear"] == (3 + 6) * 4


def test_matrices_are_dequantized_by_column(graph: onnx.GraphProto) -> None:
    makers = {node.output[0]: node for node in graph.node}
    products = [node for node in graph.node if node.op_type == "MatMul" and node.input[1] in makers]
    matrices = [makers[node.input[1]] for node in products]
    assert len(matrices) == 6 * 4 and {node.op_type for node in matrices} == {"DequantizeLinear"}
    assert {attribute.i for node in matrices for attribute in node.attribute if attribute.name == "axis"} == {1}


def test_scales_and_zero_points_are_scalars_in_the_graph(graph: onnx.GraphProto) -> None:
    tensors = {one.name: one for one in graph.initializer}
    node = next(node for node in graph.node if node.op_type == "QuantizeLinear")
    scale, zero = (numpy_helper.to_array(tensors[name]) for name in node.input[1:])
    assert scale.dtype == np.float32 and zero.dtype == np.uint8 and scale.shape == zero.shape == ()


@pytest.mark.parametrize(
    ("low", "high", "zero"), [(-1.0, 3.0, 64), (1.0, 2.0, 0), (-2.0, -1.0, 255), (-51.0, 204.0, 51), (0.0, 0.0, 0)]
)
def test_a_range_contains_zero(low: float, high: float, zero: int) -> None:
    assert ActivationRange.of(low, high).zero == zero


def test_another_preset_is_refused(talking: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="applies to `--quant a8w8` only"):
        export(talking, tmp_path / "out", quant="int8", calibrate="default", static_activations=True)


def test_a_text_is_needed(talking: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="needs a text") as caught:
        export(talking, tmp_path / "out", quant="a8w8", static_activations=True)
    assert "--calibrate default" in (caught.value.hint or "")


@pytest.mark.slow
def test_experts_are_refused(tmp_path: Path) -> None:
    save_tiny("mixtral", tmp_path / "model", depth("mixtral"))
    save_letters(tmp_path / "model")
    with pytest.raises(UnsupportedInput, match="of routed experts"):
        export(tmp_path / "model", tmp_path / "out", quant="a8w8", calibrate="default", static_activations=True)
    assert not (tmp_path / "out").exists()
