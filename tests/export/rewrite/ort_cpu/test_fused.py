"""Graphs of `--target ort-cpu`: fewer nodes, the same outputs, and unknown patterns are unchanged."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from llmconv.export import export
from llmconv.verify import verify
from tests.conftest import CONFIGS
from tests.export.conftest import DEPTH

Tiny = Callable[[str], Path]
QUICK = ("llama",)
FAMILIES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CONFIGS]


def operators(path: Path) -> Counter[str]:
    """How many nodes there are of each operator."""
    return Counter(node.op_type for node in onnx.load(path, load_external_data=False).graph.node)


@pytest.fixture
def made(deep: Tiny, tmp_path: Path) -> Callable[..., Path]:
    """`made(model_type, **options)` is a copy of the model with all three graphs for onnxruntime's CPU provider."""

    def make(model_type: str, **options: str) -> Path:
        ignored = shutil.ignore_patterns("*.onnx", "llmconv.json")
        folder = Path(shutil.copytree(deep(model_type), tmp_path / "_".join([model_type, *options]), ignore=ignored))
        export(folder, prefill=True, incremental=True, unified=True, target="ort-cpu", **options)  # type: ignore[arg-type]
        return folder

    return make


@pytest.mark.one_row_in(8)
@pytest.mark.slow
@pytest.mark.parametrize("cache", ["growing", pytest.param("shared-buffer", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_output_equals_the_eager_model(model_type: str, cache: str, made: Callable[..., Path]) -> None:
    report = verify(made(model_type, cache=cache))
    assert report.verdict == "pass", report.closing_lines()


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(("graph", "rotations"), [("model", 2 * DEPTH), ("decode", 0)])
def test_a_llama_layer_has_one_fused_operator_per_part(graph: str, rotations: int, made: Callable[..., Path]) -> None:
    found = operators(made("llama", cache="shared-buffer") / f"{graph}.onnx")
    assert found["GroupQueryAttention"] == DEPTH
    assert found["RotaryEmbedding"] == rotations
    assert found["FusedMatMul"] == 7 * DEPTH + 1
    assert found["SkipSimplifiedLayerNormalization"] + found["RMSNormalization"] == 2 * DEPTH + 1
    assert found["Gemm"] == found["Transpose"] == 0


def test_standard_operators_are_the_default(deep: Tiny) -> None:
    model = onnx.load(deep("llama") / "model.onnx", load_external_data=False)
    assert [opset.domain for opset in model.opset_import] == [""]
