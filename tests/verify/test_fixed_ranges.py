"""`verify` of graphs with `QuantizeLinear` and `DequantizeLinear` nodes that do more than round: every one is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from llmconv.export import export
from llmconv.verify import verify
from llmconv.verify.other_exporters.run import verify_graphs
from tests.export.quantization.test_smoothing import tiny_talking

FIRST = ("prefill, 7 tokens",)
HUGE = 1e6
"""A scale that turns every value into 0."""

KINDS: dict[str, dict[str, Any]] = {
    "floats": {},
    "int4": {"quant": "int4"},
    "static": {"quant": "a8w8", "calibrate": "default", "static_activations": True},
    "cache": {"kv_cache": "int8"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_talking("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`folders(kind)` is a folder with two graphs."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("folders") / kind
            export(model, made[kind], prefill=True, incremental=True, **KINDS[kind])
        return made[kind]

    return folder


def with_pair(source: Path, target: Path, value: str, down: float, up: float) -> Path:
    """A copy whose decode graph rounds a value with one scale and restores it with another, without checksums."""
    shutil.copytree(source, target)
    graph = onnx.load(target / "decode.onnx", load_external_data=False)
    at, node = next((i, n) for i, n in enumerate(graph.graph.node) if n.output[0] == value or n.name == value)
    value = node.output[0]
    node.output[0] = "exact"
    numbers = {"down": np.float32(down), "up": np.float32(up), "middle": np.uint8(128)}
    graph.graph.initializer.extend(numpy_helper.from_array(np.array(one), name) for name, one in numbers.items())
    graph.graph.node.insert(at + 1, helper.make_node("QuantizeLinear", ["exact", "down", "middle"], ["codes"]))
    graph.graph.node.insert(at + 2, helper.make_node("DequantizeLinear", ["codes", "up", "middle"], [value]))
    onnx.save(graph, target / "decode.onnx")
    manifest = json.loads((target / "llmconv.json").read_text())
    (target / "llmconv.json").write_text(json.dumps({**manifest, "files": {}}))
    return target


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["floats", "int4", pytest.param("static", marks=pytest.mark.slow)])
def test_a_rounding_that_erases_the_logits_of_steps_is_found(
    kind: str, model: Path, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    broken = with_pair(folders(kind), tmp_path / "out", "logits", HUGE, HUGE)
    report = verify(broken, reference=model, scenario=FIRST, allow_changed=True)
    assert "decode.onnx" in {check.graph for check in report.checks if check.verdict == "fail"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["floats", "int4", "cache"])
def test_a_rounding_that_is_restored_with_another_scale_is_found(
    kind: str, model: Path, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    nodes = onnx.load(folders(kind) / "decode.onnx", load_external_data=False).graph.node
    norm = [node.output[0] for node in nodes if node.op_type.endswith(("RMSNormalization", "LayerNormalization"))][-1]
    broken = with_pair(folders(kind), tmp_path / "out", norm, 0.05, 0.15)
    report = verify(broken, reference=model, scenario=FIRST, allow_changed=True)
    assert "decode.onnx" in {check.graph for check in report.checks if check.verdict == "fail"}


@pytest.mark.slow
def test_a_graph_of_another_exporter_that_knows_nothing_of_the_model_is_found(
    model: Path, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    broken = with_pair(folders("floats"), tmp_path / "out", "logits", HUGE, HUGE)
    report = verify_graphs([broken / "decode.onnx"], reference=model, scenario=FIRST)
    assert any("equal probabilities" in check.detail for check in report.checks if check.verdict == "fail")
