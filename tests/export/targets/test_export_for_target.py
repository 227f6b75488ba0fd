"""`export --target`: precision, cache, what is recorded, and `--strict-target`."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime
import pytest

from llmconv.errors import InputRefused, UsageProblem
from llmconv.export import export
from llmconv.output.manifest import read_manifest

pytestmark = pytest.mark.slow


def test_webgpu_computes_in_float16_without_grouped_query_attention(llama: Path, tmp_path: Path) -> None:
    export(llama, tmp_path / "out", target="ort-webgpu", incremental=True, strict_target=True)
    entry = read_manifest(tmp_path / "out").graphs["decode"]
    assert (entry["precision"], entry["opset"], "fallback" in entry) == ("float16", 21, False)
    graph = onnx.load(tmp_path / "out" / "decode.onnx", load_external_data=False).graph
    assert not {"GroupQueryAttention", "Attention"} & {node.op_type for node in graph.node}


def test_directml_runs_every_node_of_a_llama(llama: Path, tmp_path: Path) -> None:
    export(llama, tmp_path / "out", target="ort-dml", incremental=True, strict_target=True)
    entry = read_manifest(tmp_path / "out").graphs["decode"]
    assert (entry["precision"], entry["opset"], "fallback" in entry) == ("float16", 21, False)
    onnxruntime.InferenceSession(tmp_path / "out" / "decode.onnx", providers=["CPUExecutionProvider"])


def test_an_explicit_precision_wins(llama: Path) -> None:
    export(llama, target="ort-dml", precision="float32", incremental=True)
    assert "precision" not in read_manifest(llama).graphs["decode"]


def test_what_falls_back_is_listed_and_recorded(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(llama, target="ort-dml", precision="float32", opset=23, incremental=True)
    assert "no kernel in `ort-dml` for `Attention` (float32): 8 nodes of decode.onnx" in capsys.readouterr().err
    fallback = read_manifest(llama).graphs["decode"]["fallback"]
    assert {"Attention", "RMSNormalization"} <= {one["operator"] for one in fallback}


def test_strict_refuses_and_writes_nothing(llama: Path) -> None:
    before = sorted(llama.iterdir())
    with pytest.raises(InputRefused, match="no kernel in `ort-dml` for `RMSNormalization`|for .*`Attention`"):
        export(llama, target="ort-dml", precision="float32", opset=23, incremental=True, strict_target=True)
    assert sorted(llama.iterdir()) == before


def test_strict_needs_a_target_to_compare_with(llama: Path) -> None:
    with pytest.raises(UsageProblem, match="kernels of one provider"):
        export(llama, strict_target=True)


def test_an_unknown_target_is_refused(llama: Path) -> None:
    with pytest.raises(UsageProblem) as refused:
        export(llama, target="ort-tpu")
    assert "ort-cuda" in str(refused.value.hint)


def test_half_precision_over_float32_weights_is_refused_in_place(llama: Path) -> None:
    with pytest.raises(InputRefused) as refused:
        export(llama, target="ort-webgpu")
    assert "--precision float32" in str(refused.value.hint)
