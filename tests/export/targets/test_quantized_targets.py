"""Quantized graphs for a target: which nodes its provider has no kernel for, and what its kernels refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

from llmconv.export import export
from llmconv.verify import verify
from tests.conftest import save_tiny


def exported(kind: str, target: str, home: Path, quant: str = "int4") -> Path:
    """The quantized graphs of a tiny model for a target."""
    folder = save_tiny(kind, home / kind)
    return export(folder, home / target, quant=quant, target=target, incremental=True).folder


def fallback(folder: Path) -> set[str]:
    """Operators without a kernel, as the manifest has them."""
    entry: dict[str, Any] = json.loads((folder / "llmconv.json").read_text())["graphs"]["decode"]
    return {each["operator"] for each in entry.get("fallback", ())}


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "missing"),
    [("ort-cuda", set()), ("ort-webgpu", set()), ("ort-dml", {"com.microsoft:GatherBlockQuantized"})],
)
def test_the_report_names_quantized_operators_without_a_kernel(target: str, missing: set[str], tmp_path: Path) -> None:
    folder = exported("gemma2", target, tmp_path)  # its embedding is tied, so it is looked up in codes
    quantized = {"com.microsoft:GatherBlockQuantized", "com.microsoft:MatMulNBits"}
    assert fallback(folder) & quantized == missing


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("target", ["ort-cuda", "ort-dml"])
def test_only_directml_gets_products_without_bias(target: str, tmp_path: Path) -> None:
    folder = exported("qwen2", target, tmp_path)
    nodes = onnx.load(folder / "decode.onnx", load_external_data=False).graph.node
    most = max(len(node.input) for node in nodes if node.op_type == "MatMulNBits")
    assert most == (6 if target == "ort-cuda" else 4)  # the last input is the bias


@pytest.mark.slow
def test_a_bias_outside_of_the_product_gives_the_same_result(tmp_path: Path) -> None:
    folder = exported("qwen2", "ort-dml", tmp_path)
    report = verify(folder, reference=tmp_path / "qwen2", scenario=["prefill, 7 tokens"])
    assert report.verdict == "pass", report.closing_lines()


@pytest.mark.slow
def test_prompts_and_steps_of_a_shared_cache_are_one_graph_for_one_session_that_packs_the_codes(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "llama")
    out = export(
        folder, tmp_path / "out", quant="int4", target="ort-cpu", cache="shared-buffer", prefill=True, incremental=True
    ).folder
    assert (out / "prefill.onnx").read_bytes() == (out / "decode.onnx").read_bytes()
