"""Graphs without weights: a folder that the model's own files complete."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.convert.to_hugging_face import to_hf
from llmconv.errors import InputRefused, UsageProblem
from llmconv.export import export
from llmconv.verify import verify


@pytest.fixture
def sharded(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    """A Llama in several shards."""
    to_hf(tiny("llama"), tmp_path / "model", dtype="float32", max_shard_size="100KB")
    return tmp_path / "model"


@pytest.mark.slow
def test_the_graphs_are_those_of_an_export_into_the_model_folder(sharded: Path, tmp_path: Path) -> None:
    export(sharded, tmp_path / "out", graphs_only=True)
    export(sharded)
    for name in ("prefill.onnx", "decode.onnx"):
        assert (tmp_path / "out" / name).read_bytes() == (sharded / name).read_bytes()


@pytest.mark.slow
def test_the_folder_has_everything_but_the_weights(sharded: Path, tmp_path: Path) -> None:
    files = {path.name for path in sharded.iterdir()} | {"prefill.onnx", "decode.onnx"}
    exported = export(sharded, tmp_path / "out", graphs_only=True)
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert files - left == set(exported.missing) == {path.name for path in sharded.glob("*.safetensors")}
    assert exported.weight_bytes_written == 0


@pytest.mark.slow
def test_the_graphs_are_right_once_the_weights_are_there(sharded: Path, tmp_path: Path) -> None:
    for name in export(sharded, tmp_path / "out", graphs_only=True).missing:
        shutil.copy(sharded / name, tmp_path / "out")
    assert verify(tmp_path / "out", scenario=["rows exchanged"])


@pytest.mark.slow
def test_the_manifest_records_the_files_that_belong_there(sharded: Path, tmp_path: Path) -> None:
    exported = export(sharded, tmp_path / "out", graphs_only=True)
    options = json.loads((tmp_path / "out/llmconv.json").read_text())["steps"][-1]["options"]
    assert options["graphs_only"] is True
    assert options["weights"] == exported.missing


def test_the_command_says_what_to_put_there(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["export", str(tiny("llama")), "-o", str(tmp_path / "out"), "--graphs-only"])
    assert result.exit_code == 0, result.output
    assert "before they are run, put the model's weights next to them: `model.safetensors`" in result.stderr


@pytest.mark.slow
def test_a_dry_run_writes_nothing(sharded: Path, tmp_path: Path) -> None:
    exported = export(sharded, tmp_path / "out", graphs_only=True, dry_run=True)
    assert "prefill.onnx" in exported.files and not any(name.endswith(".safetensors") for name in exported.files)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_resume_accepts_a_complete_folder(sharded: Path, tmp_path: Path) -> None:
    export(sharded, tmp_path / "out", graphs_only=True)
    export(sharded, tmp_path / "out", graphs_only=True, resume=True)
    with pytest.raises(InputRefused, match="already exists"):
        export(sharded, tmp_path / "out", graphs_only=True)


@pytest.mark.parametrize(
    "options", [{"quant": "int8"}, {"kv_cache": "int8"}, {"max_shard_size": "1GB"}], ids=["quant", "cache", "size"]
)
def test_options_that_need_the_weights_are_refused(tmp_path: Path, options: Any) -> None:
    with pytest.raises(UsageProblem, match="--graphs-only"):
        export(tmp_path, tmp_path / "out", graphs_only=True, **options)


def test_without_a_new_folder_it_has_no_effect(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="`--graphs-only` has no effect"):
        export(tmp_path, graphs_only=True)


def test_weights_of_another_dtype_cannot_be_mapped(sharded: Path, tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="the weights are float32, so graphs that compute in float16") as caught:
        export(sharded, tmp_path / "out", graphs_only=True, precision="float16")
    assert "leave out `--graphs-only`" in caught.value.hint
