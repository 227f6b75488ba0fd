"""Layouts of quantized weights that are correct but slow are named; those of llmconv are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from llmconv.export import export
from llmconv.tensors import Array
from llmconv.verify import verify, verify_graphs
from llmconv.verify.other_exporters.quantized.audit import slow_layouts
from llmconv.verify.other_exporters.quantized.quantized_matrix import Constants
from tests.conftest import save_tiny

Small = Callable[[str], Path]
CODES: Array = np.full((16, 2, 16), 0x88, np.uint8)
SCALES: Array = np.ones((16, 2), np.float32)
ZEROS: Array = np.full((16, 1), 0x88, np.uint8)


def notes(nodes: list[onnx.NodeProto], **stored: Array) -> list[str]:
    """The notes on a graph of these nodes and initializers."""
    values = [numpy_helper.from_array(array, name) for name, array in stored.items()]
    model = helper.make_model(helper.make_graph(nodes, "g", [], [], values))
    return slow_layouts(model, Constants(model, Path()))


def product(*more: str, **changes: int) -> onnx.NodeProto:
    fields: dict[str, Any] = {"K": 64, "N": 16, "bits": 4, "block_size": 32, "accuracy_level": 4} | changes
    return helper.make_node("MatMulNBits", ["x", "codes", "scales", *more], ["y"], domain="com.microsoft", **fields)


def test_level_4_with_packed_zero_points_is_fast() -> None:
    assert notes([product("zeros")], codes=CODES, scales=SCALES, zeros=ZEROS) == []
    assert notes([product(bits=8)], codes=np.zeros((16, 2, 32), np.uint8), scales=SCALES) == []


def test_level_0_is_slower() -> None:
    (note,) = notes([product(accuracy_level=0), product(accuracy_level=0)], codes=CODES, scales=SCALES)
    assert note.startswith("2 MatMulNBits have accuracy_level 0, and take 2 to 3 times as long")


def test_8_bits_below_level_4_are_dequantized() -> None:
    (note,) = notes([product(bits=8, accuracy_level=1)], codes=CODES, scales=SCALES)
    assert "of 8 bits have accuracy_level 1, so onnxruntime's CPU dequantizes" in note


def test_zero_points_of_floats_are_dequantized() -> None:
    (note,) = notes([product("zeros")], codes=CODES, scales=SCALES, zeros=np.full((16, 2), 8, np.float32))
    assert "zero points of floats, so onnxruntime's CPU dequantizes" in note


def test_reordered_groups_are_dequantized() -> None:
    groups: Array = np.zeros(64, np.int32)
    (note,) = notes([product("", "groups")], codes=CODES, scales=SCALES, groups=groups)
    assert "have `g_idx`, so onnxruntime's CPU dequantizes" in note


def test_a_lookup_in_a_reshaped_initializer_is_copied() -> None:
    shape = np.array([16, 32])
    reshape = helper.make_node("Reshape", ["codes", "shape"], ["table"])
    lookup = helper.make_node(
        "GatherBlockQuantized", ["table", "ids", "scales", "zeros"], ["y"], domain="com.microsoft"
    )
    zeros: Array = np.full((16, 1), 0x88, np.uint8)
    (note,) = notes([reshape, lookup], codes=CODES, scales=SCALES, shape=shape, zeros=zeros)
    assert "GatherBlockQuantized read a reshaped initializer" in note
    lookup.input[0] = "codes"
    assert notes([lookup], codes=CODES.reshape(16, 32), scales=SCALES, zeros=zeros) == []
    (note,) = notes(
        [helper.make_node("GatherBlockQuantized", ["codes", "ids", "scales"], ["y"])], codes=CODES, scales=SCALES
    )
    assert "kernels of CUDA took 0" in note


@pytest.mark.parametrize(
    ("axis", "block", "transposed", "is_fused"),
    [(0, 32, False, True), (1, 32, True, False), (1, 0, False, True), (0, 0, True, False), (1, 32, False, False)],
)
def test_dequantization_is_fused_in_one_layout(axis: int, block: int, transposed: bool, is_fused: bool) -> None:
    options: dict[str, int] = {"axis": axis} | ({"block_size": block} if block else {})
    nodes = [helper.make_node("DequantizeLinear", ["codes", "scales"], ["w"], None, None, None, None, **options)]
    nodes += [helper.make_node("Transpose", ["w"], ["t"])] if transposed else []
    nodes.append(helper.make_node("MatMul", ["x", "t" if transposed else "w"], ["y"]))
    scales: Array = np.ones((64,) if not block else (2, 64) if axis == 0 else (64, 2), np.float32)
    found = notes(nodes, codes=np.zeros((64, 64), np.int8), scales=scales)
    assert [note.startswith("1 DequantizeLinear are in a layout") for note in found] == ([] if is_fused else [True])


@pytest.mark.slow
def test_the_report_of_a_graph_has_them(small: Small, quantized: Callable[[str, str], Path]) -> None:
    graph = quantized("llama", "4 bits")
    report = verify_graphs([graph], reference=small("llama"), scenario=["prefill, 7 tokens"])
    assert any(f"{graph.name}: 15 MatMulNBits have accuracy_level 0" in note for note in report.notes)
    assert report.verdict == "pass"


@pytest.mark.slow
def test_a_tied_embedding_that_is_left_in_floats_is_named(small: Small, quantized: Callable[[str, str], Path]) -> None:
    graph = quantized("qwen2", "4 bits, accuracy level 4")
    report = verify_graphs([graph], reference=small("qwen2"), scenario=["prefill, 7 tokens"])
    assert any("the embedding and the head, is stored as codes and again as floats" in note for note in report.notes)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt2"])
def test_graphs_of_llmconv_have_none(model_type: str, tmp_path: Path) -> None:
    model = save_tiny(model_type, tmp_path / "model")
    export(model, tmp_path / "out", incremental=True, quant="int4")
    report = verify(tmp_path / "out", reference=model, scenario=["prefill, 7 tokens"])
    assert report.verdict == "pass"
    assert not [
        note for note in report.notes if "MatMulNBits have" in note or "GatherBlock" in note or "floats" in note
    ]
