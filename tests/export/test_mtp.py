"""`export --mtp`: what the graphs take and return, and what is refused before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from llmconv.errors import InputRefused, UnsupportedInput, UsageProblem
from llmconv.export import export
from llmconv.output.manifest import read_manifest
from tests.builders.mtp_models import save_with_head
from tests.builders.tiny_models import save_tiny


@pytest.mark.slow
def test_the_head_is_a_graph_of_its_own_and_the_others_return_what_it_reads(tmp_path: Path) -> None:
    save_with_head(tmp_path / "model", "glm4_moe")
    export(tmp_path / "model", tmp_path / "out", mtp=True, graph_name=["mtp=head.onnx"])
    graphs = read_manifest(tmp_path / "out").graphs
    assert [entry["file"] for entry in graphs.values()] == ["prefill.onnx", "decode.onnx", "head.onnx"]
    assert all(entry["outputs"][:2] == ["logits", "last_hidden_state"] for entry in graphs.values())
    assert graphs["mtp"]["inputs"][2:4] == ["position_ids", "previous_hidden_state"]
    mapped = onnx.load(tmp_path / "out" / "head.onnx", load_external_data=False).graph.initializer
    names = {tensor.name for tensor in mapped if tensor.external_data}
    assert {"model.layers.2.eh_proj.weight", "lm_head.weight", "model.embed_tokens.weight"} <= names


@pytest.mark.parametrize(
    "options",
    [{"quant": "int8"}, {"embeds": True}, {"stages": 2}, {"target": "ort-cpu"}, {"layout": "genai"}, {"task": "embed"}],
    ids=lambda options: next(iter(options)),
)
def test_options_of_other_graphs_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="not supported with `--(mtp|task embed)`"):
        export(tmp_path, tmp_path / "out", mtp=True, **options)


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="no MTP head"):
        export(save_tiny(tmp_path / "llama", "llama"), mtp=True)


def test_a_head_that_transformers_does_not_compute_is_refused_by_name(tmp_path: Path) -> None:
    save_with_head(tmp_path / "model", "qwen3_5_text")
    with pytest.raises(UnsupportedInput, match="does not compute the MTP head of `qwen3_5_text`"):
        export(tmp_path / "model", mtp=True)
    assert not list((tmp_path / "model").glob("*.onnx"))


def test_a_config_without_the_layer_is_refused(tmp_path: Path) -> None:
    save_with_head(tmp_path / "model", "deepseek_v3", num_nextn_predict_layers=0)
    with pytest.raises(InputRefused, match="declares no MTP layer"):
        export(tmp_path / "model", mtp=True)
