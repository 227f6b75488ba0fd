"""`verify` of graphs with ranges of activations: right ones pass, and every wrong constant is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from llmconv.errors import UsageProblem
from llmconv.export import export
from llmconv.verify import verify
from tests.export.quantization.test_smoothing import tiny_talking, uneven
from tests.verify.test_quantized_folder import damaged

SCALE, ZERO = "model.layers.1.self_attn.q_proj.weight.input_scale", "model.layers.1.self_attn.q_proj.weight.input_zero"
OTHER = "model.layers.2.self_attn.q_proj.weight.input_scale"
FIRST = ("prefill, 7 tokens",)


@pytest.fixture(scope="module")
def model(talking: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with outliers, which are smoothed."""
    return uneven(talking, tmp_path_factory.mktemp("uneven") / "llama")


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its graph."""
    return exported(model, tmp_path_factory.mktemp("static") / "out")


def exported(model: Path, folder: Path) -> Path:
    export(model, folder, incremental=True, quant="a8w8", calibrate="default", static_activations=True)
    return folder


def edited(folder: Path, target: Path, edit: Callable[[onnx.GraphProto], None]) -> Path:
    broken = damaged(folder, target, "model.norm.weight", lambda values: values)
    model = onnx.load(broken / "decode.onnx", load_external_data=False)
    edit(model.graph)
    onnx.save(model, broken / "decode.onnx")
    return broken


def number(graph: onnx.GraphProto, name: str) -> onnx.TensorProto:
    found: onnx.TensorProto = next(one for one in graph.initializer if one.name == name)
    return found


def a_larger_scale(graph: onnx.GraphProto) -> None:
    tensor = number(graph, SCALE)
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.05), SCALE))


def a_percent_less(graph: onnx.GraphProto) -> None:
    tensor = number(graph, SCALE)
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(0.99), SCALE))


def a_zero_point_one_off(graph: onnx.GraphProto) -> None:
    tensor = number(graph, ZERO)
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + np.uint8(1), ZERO))


def a_scale_of_another_layer(graph: onnx.GraphProto) -> None:
    number(graph, SCALE).CopyFrom(numpy_helper.from_array(numpy_helper.to_array(number(graph, OTHER)), SCALE))


def another_scale_to_restore(graph: onnx.GraphProto) -> None:
    next(node for node in graph.node if node.op_type == "DequantizeLinear" and SCALE in node.input).input[1] = OTHER


def no_rounding(graph: onnx.GraphProto) -> None:
    rounding = next(node for node in graph.node if node.op_type == "QuantizeLinear" and SCALE in node.input)
    restoring = next(node for node in graph.node if rounding.output[0] in node.input)
    for node in graph.node:
        for at, name in enumerate(node.input):
            if name == restoring.output[0]:
                node.input[at] = rounding.input[0]


FAULTS = [
    a_larger_scale,
    a_percent_less,
    a_zero_point_one_off,
    a_scale_of_another_layer,
    another_scale_to_restore,
    no_rounding,
]


def test_verify_accepts_it(model: Path, folder: Path) -> None:
    report = verify(folder, reference=model)
    assert report.verdict == "pass", report.closing_lines()
    assert any(check.name == "activation ranges" for check in report.checks)


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gpt2", "phi3", "gemma2", "bloom"])
def test_verify_accepts_other_families(model_type: str, tmp_path: Path) -> None:
    source = tiny_talking(model_type, tmp_path)
    report = verify(exported(source, tmp_path / "out"), reference=source, scenario=FIRST)
    assert report.verdict == "pass", report.closing_lines()


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: Callable[[onnx.GraphProto], None], model: Path, folder: Path, tmp_path: Path) -> None:
    report = verify(edited(folder, tmp_path / "out", fault), reference=model, scenario=FIRST, allow_changed=True)
    assert "activation ranges" in [check.name for check in report.checks if check.verdict == "fail"]


def test_another_text_than_that_of_the_export_is_refused(model: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("Another text. " * 100)
    with pytest.raises(UsageProblem, match="is not the text on which the ranges were measured"):
        verify(folder, reference=model, calibrate=tmp_path / "other.txt")
