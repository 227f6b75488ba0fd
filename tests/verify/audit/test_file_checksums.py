"""A graph that was changed after its export fails by its sha256, with another message than changed weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.output.manifest import MANIFEST, file_entry, graph_entries, read_manifest
from llmconv.verify import Check, verify
from llmconv.verify.audit.weights import audit_graph_files
from llmconv.verify.reference.eager import Eager
from tests.builders.mutants.surgery import users

Tiny = Callable[[str], Path]


def audit(folder: Path, *, allow_changed: bool = False) -> tuple[list[Check], list[str]]:
    """The check of the graph files alone."""
    return audit_graph_files(folder, graph_entries(folder), {}, allow_changed=allow_changed)


def changed(path: Path) -> None:
    """Adds a word to a graph that changes nothing it computes."""
    model = onnx.load(path, load_external_data=False)
    model.doc_string = "edited"
    onnx.save(model, path)


@pytest.fixture
def folder(exported: Tiny, tmp_path: Path) -> Path:
    """A copy of the tiny llama's graphs and weights."""
    return Path(shutil.copytree(exported("llama"), tmp_path / "llama"))


def test_graphs_as_they_were_exported_pass(folder: Path) -> None:
    checks, notes = audit(folder)
    assert [(check.graph, check.verdict) for check in checks] == [("prefill.onnx", "pass"), ("decode.onnx", "pass")]
    assert notes == []


@pytest.mark.slow
def test_a_changed_graph_fails_although_it_computes_the_same(folder: Path, eager: Callable[[str], Eager]) -> None:
    changed(folder / "prefill.onnx")
    report = verify(folder, eager=eager("llama"), scenario=["prefill, 3 tokens"])
    failed = [check for check in report.checks if check.verdict == "fail"]
    assert [(check.name, check.graph) for check in failed] == [("graph file", "prefill.onnx")]
    assert failed[0].detail == (
        "graph changed: `prefill.onnx` is not the graph that was exported (its sha256 differs); "
        "export again, or pass `--allow-changed` to verify it as it is"
    )
    assert report.exit_code == 1


@pytest.mark.slow
def test_an_allowed_change_of_a_graph_is_a_note_and_its_outputs_decide(
    folder: Path, eager: Callable[[str], Eager]
) -> None:
    changed(folder / "prefill.onnx")
    report = verify(folder, eager=eager("llama"), scenario=["prefill, 3 tokens"], allow_changed=True)
    assert report.verdict == "pass"
    note = "graph changed: `prefill.onnx` is not the graph that was exported (its sha256 differs); allowed"
    assert note in report.notes


@pytest.mark.slow
def test_changed_weights_are_reported_as_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    manifest = read_manifest(folder)
    manifest.files[weights.name] = file_entry(weights.read_bytes())
    (folder / MANIFEST).write_bytes(manifest.encode())
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    lines = verify(folder, scenario=["prefill, 3 tokens"]).lines()
    assert "FAILED | weights | model.safetensors | weights changed since the manifest was written" in lines
    assert not any("graph changed" in line for line in lines)


@pytest.mark.slow
def test_the_scenarios_run_on_a_changed_graph_and_its_node_is_named(
    folder: Path, eager: Callable[[str], Eager]
) -> None:
    model = onnx.load(folder / "prefill.onnx", load_external_data=False)
    attention = users(model, "Attention")[1]
    next(item for item in attention.attribute if item.name == "scale").f *= 1.01
    onnx.save(model, folder / "prefill.onnx")
    report = verify(folder, eager=eager("llama"), scenario=["prefill, 3 tokens"], bisect=True)
    assert report.where and report.where.node == attention.name
    assert any(check.name == "graph file" and check.verdict == "fail" for check in report.checks)


def test_every_stage_of_a_graph_is_checked(optioned: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(optioned("llama", stages=2), tmp_path / "stages"))
    changed(folder / "decode-2-of-2.onnx")
    checks, _ = audit(folder)
    assert [(c.graph, c.verdict) for c in checks] == [
        ("prefill-*-of-2.onnx", "pass"),
        ("decode-*-of-2.onnx", "fail"),
    ]
    assert "`decode-2-of-2.onnx`" in checks[1].detail


def test_a_graph_without_a_recorded_sha256_is_a_note(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["files"]["decode.onnx"]["sha256"]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    checks, notes = audit(folder)
    assert [check.graph for check in checks] == ["prefill.onnx"]
    assert notes == ["`decode.onnx` has no sha256 in `llmconv.json`: a change after its export cannot be detected"]


def test_a_folder_without_a_manifest_is_a_note(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    assert audit(folder) == ([], ["no `llmconv.json`: changes of the graphs after their export cannot be detected"])


@pytest.mark.slow
def test_the_command_line_allows_a_changed_graph(folder: Path) -> None:
    changed(folder / "decode.onnx")
    asked = ["verify", str(folder), "--scenario", "prefill, 3 tokens"]
    assert CliRunner().invoke(main, asked).exit_code == 1
    allowed = CliRunner().invoke(main, [*asked, "--allow-changed"])
    assert allowed.exit_code == 0 and "NOTE | graph changed: `decode.onnx`" in allowed.stdout


def test_graphs_of_other_exporters_have_no_record_to_change(folder: Path) -> None:
    result = CliRunner().invoke(main, ["verify", "--graph", str(folder / "decode.onnx"), "--allow-changed"])
    assert result.exit_code == 2 and "`--allow-changed` applies to FOLDER only" in result.stderr
