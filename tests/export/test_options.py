"""Options of the graphs: written files, manifest entries, refusals, and reproducible bytes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import CliRunner

from llmconv.checkpoint import open_checkpoint
from llmconv.cli import main
from llmconv.errors import UsageProblem
from llmconv.export import export
from llmconv.output.manifest import read_manifest
from llmconv.verify import verify
from tests.builders.layered_models import LAYERED
from tests.conftest import save_tiny

Deep = Callable[[str], Path]


def ports(path: Path) -> dict[str, list[str | int]]:
    """Axes of every input and output of a graph."""
    graph = onnx.load(path, load_external_data=False).graph
    return {
        port.name: [axis.dim_param or axis.dim_value for axis in port.type.tensor_type.shape.dim]
        for port in [*graph.input, *graph.output]
    }


@pytest.mark.slow
def test_last_logits_are_one_row_and_recorded(llama: Path) -> None:
    export(llama, last_logits=True)
    assert ports(llama / "decode.onnx")["logits"] == ["batch_size", 1, 96]
    assert read_manifest(llama).graphs["prefill"]["last_logits"] is True


@pytest.mark.slow
def test_tokens_and_scores_replace_logits(llama: Path) -> None:
    export(llama, postprocess="topk:4")
    found = ports(llama / "prefill.onnx")
    assert "logits" not in found
    assert found["tokens"] == found["scores"] == ["batch_size", "sequence_length", 4]
    assert read_manifest(llama).graphs["prefill"]["outputs"][:2] == ["tokens", "scores"]


@pytest.mark.slow
def test_stages_share_the_layers_and_the_weights(llama: Path) -> None:
    export(llama, incremental=True, stages=3)
    stages = read_manifest(llama).graphs["decode"]["stages"]
    assert [stage["file"] for stage in stages] == [f"decode-{number}-of-3.onnx" for number in (1, 2, 3)]
    weights = [
        {tensor.name for tensor in onnx.load(llama / stage["file"], load_external_data=False).graph.initializer}
        & set(open_checkpoint(llama))
        for stage in stages
    ]
    assert set().union(*weights) == set(open_checkpoint(llama))
    assert sum(len(names) for names in weights) == len(open_checkpoint(llama))


@pytest.mark.slow
def test_a_stage_takes_the_hidden_state_and_its_own_cache(llama: Path) -> None:
    export(llama, incremental=True, stages=2)
    found = ports(llama / "decode-2-of-2.onnx")
    assert found["hidden_states.4"] == ["batch_size", "sequence_length", 64]
    assert "input_ids" not in found
    assert {name.split(".")[1] for name in found if name.startswith("past")} == {"4", "5", "6", "7"}
    onnx.checker.check_model(str(llama / "decode-2-of-2.onnx"), full_check=True)


@pytest.mark.slow
def test_a_cache_that_a_later_stage_reads_is_returned_by_its_own_stage(tmp_path: Path) -> None:
    """The last two layers share the keys and values of the first two."""
    save_tiny("gemma3n_text", tmp_path / "model", **LAYERED["gemma3n_text"])
    export(tmp_path / "model", tmp_path / "out", prefill=False, incremental=True, stages=2)
    first = onnx.load(tmp_path / "out" / "decode-1-of-2.onnx", load_external_data=False).graph
    returned = [port.name for port in first.output]
    assert len(set(returned)) == len(returned)
    assert {name for name in returned if name.startswith("present")} == {
        f"present.{layer}.{kind}" for layer in (0, 1) for kind in ("key", "value")
    }
    report = verify(tmp_path / "out", reference=tmp_path / "model", scenario=("decode chain, 16 steps",))
    assert report.verdict == "pass", report.lines()


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"precision": "float16"}], ids=["float32", "float16"])
def test_layers_that_share_caches_and_sparse_activations_are_exported(options: dict[str, Any], tmp_path: Path) -> None:
    """As in Gemma 3n: the last layers share caches, and the first keep only the largest activations."""
    config = {**LAYERED["gemma3n_text"], "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0]}
    save_tiny("gemma3n_text", tmp_path / "model", **config)
    export(tmp_path / "model", tmp_path / "out", prefill=False, incremental=True, **options)
    report = verify(tmp_path / "out", reference=tmp_path / "model", scenario=("left padding",))
    assert report.verdict == "pass", report.lines()


@pytest.mark.slow
def test_a_whole_graph_replaces_its_stages(llama: Path) -> None:
    export(llama, incremental=True, stages=2)
    export(llama, incremental=True, overwrite=True)
    assert [path.name for path in llama.glob("*.onnx")] == ["decode.onnx"]
    assert not any("-of-" in name for name in read_manifest(llama).files)


@pytest.mark.slow
def test_existing_stages_need_overwrite(llama: Path) -> None:
    export(llama, incremental=True, stages=2)
    result = CliRunner().invoke(main, ["export", str(llama), "--incremental", "--stages", "2"])
    assert result.exit_code == 3 and "decode-1-of-2.onnx` already exists" in result.stderr


@pytest.mark.quick_rows("9")
@pytest.mark.parametrize("stages", [0, 9])
def test_every_stage_needs_a_layer(llama: Path, stages: int) -> None:
    with pytest.raises(UsageProblem, match="8 layers"):
        export(llama, stages=stages, dry_run=True)


@pytest.mark.slow
def test_opset_21_has_none_of_the_newer_operators(llama: Path) -> None:
    export(llama, incremental=True, opset=21)
    model = onnx.load(llama / "decode.onnx", load_external_data=False)
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 21)]
    assert not {"Attention", "RMSNormalization", "RotaryEmbedding"} & {node.op_type for node in model.graph.node}
    onnx.checker.check_model(str(llama / "decode.onnx"), full_check=True)


def test_contradictions_are_refused_before_anything_is_written(llama: Path) -> None:
    before = sorted(path.name for path in llama.iterdir())
    result = CliRunner().invoke(main, ["export", str(llama), "--postprocess", "topk:1000"])
    assert result.exit_code == 2 and "vocabulary of 96" in result.stderr and "hint: " in result.stderr
    assert sorted(path.name for path in llama.iterdir()) == before


@pytest.mark.slow
def test_other_processes_write_the_same_bytes(llama: Path, tmp_path: Path) -> None:
    given = ["--stages", "2", "--last-logits", "--postprocess", "topk:3", "--opset", "21"]
    contents = []
    for seed in ("1", "2"):
        folder = Path(shutil.copytree(llama, tmp_path / f"copy-{seed}"))
        command = [sys.executable, "-m", "llmconv", "export", str(folder), *given, "-q"]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True)
        contents.append({path.name: path.read_bytes() for path in folder.glob("*.onnx")})
    assert len(contents[0]) == 4 and contents[0] == contents[1]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"opset": 21, "last_logits": True, "postprocess": "argmax"}])
def test_names_are_unique_and_readable(llama: Path, options: dict[str, Any]) -> None:
    export(llama, incremental=True, **options)
    graph = onnx.load(llama / "decode.onnx", load_external_data=False).graph
    names = [node.name for node in graph.node]
    outputs = [name for node in graph.node for name in node.output]
    assert len(set(names)) == len(names) and len(set(outputs)) == len(outputs)
    assert "model.layers.7.self_attn.q_proj/Gemm" in names
    assert not [name for name in names if name.startswith(("_", "node_", "val_", "/"))]


@pytest.mark.slow
def test_the_command_lists_every_stage(llama: Path) -> None:
    result = CliRunner().invoke(main, ["export", str(llama), "--incremental", "--stages", "2", "--json"])
    assert json.loads(result.stdout)["graphs"] == {"decode": ["decode-1-of-2.onnx", "decode-2-of-2.onnx"]}


@pytest.mark.parametrize("cache", [{"shapes": "static", "max_seq_len": 64}, {"cache": "shared-buffer"}])
def test_a_cache_of_fixed_length_requires_opset_24(llama: Path, cache: dict[str, Any]) -> None:
    with pytest.raises(UsageProblem, match="opset 23") as refusal:
        export(llama, opset=23, **cache)
    assert "24" in refusal.value.hint
