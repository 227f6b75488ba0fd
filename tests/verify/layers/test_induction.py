"""Verification by induction over layers: what it runs, what it shows, and which faults it finds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from onnx import helper, numpy_helper
from safetensors.torch import load_file, save_file

from llmconv.export.exporter import export
from llmconv.verify import Report, verify
from llmconv.verify.layers.induction import LayerChoice
from llmconv.verify.layers.layer_checks import NAME, Drift, statements
from llmconv.verify.report.files import write_report
from tests.builders.layered_models import LAYERED, change_layer, load, rename, save, save_layered, shuffle
from tests.conftest import save_tiny
from tests.verify.layers.conftest import Layered, induction

SLOW = ("mamba", "lfm2", "gpt2", "olmo2")

QUICK = ("prefill, 7 tokens",)
"""One scenario, for tests of single layers."""


def inducted(folder: Path, **options: Any) -> Report:
    """The report of an induction that runs one scenario."""
    return verify(folder, **{"method": "induction", "scenario": QUICK, "record": False, **options})


def run_layers(report: Report) -> list[str]:
    """The layers that ran by themselves, by the names of their checks."""
    outputs = [check.output for check in report.checks if check.name == "layers by themselves"]
    return [name.removeprefix("hidden state after layer ") for name in outputs if "after layer" in name]


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Changes the stored tensors of a folder, the manifest's checksums aside."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    manifest = json.loads((folder / "llmconv.json").read_text())
    manifest.pop("files", None)
    (folder / "llmconv.json").write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def shown(layered: Layered) -> Report:
    """The report of the tiny llama."""
    return inducted(layered("llama"))


@pytest.mark.slow
def test_a_correct_graph_is_shown(shown: Report) -> None:
    assert (shown.verdict, shown.exit_code, shown.method) == ("pass", 0, "induction")
    assert [one.name for one in shown.statements] == ["structure", "weights", "composition", "base", "step"]
    assert all(one.shown for one in shown.statements)
    assert "rounding errors that grow from layer to layer" in shown.summary()


@pytest.mark.one_row_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gemma3_text", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_other_families_are_shown(model_type: str, layered: Layered) -> None:
    assert inducted(layered(model_type)).verdict == "pass"


@pytest.mark.slow
def test_names_and_order_of_nodes_do_not_change_the_verdict(copied: Layered, layered: Layered) -> None:
    folder = copied("llama")
    model = load(folder)
    rename(model, 0)
    shuffle(model, 0)
    save(model, folder)
    report = inducted(folder, reference=layered("llama"), allow_changed=True)
    assert (report.verdict, report.method) == ("pass", "induction")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "layers"), [("all", ["0", "1", "2", "3"]), ("sampled:2", ["0", "1", "3"]), ("classes", ["0"])]
)
def test_the_chosen_layers_run_by_themselves(choice: str, layers: list[str], layered: Layered) -> None:
    report = inducted(layered("llama"), layers=choice)
    assert report.verdict == "pass", report.lines()
    assert run_layers(report) == layers
    left = [text for text in report.unseen if text.endswith("whose weights alone were audited")]
    assert left == (
        [f"wrong numbers of {4 - len(layers)} layer{'s' * (len(layers) < 3)}, whose weights alone were audited"]
        if layers[3:] == []
        else []
    )


def test_more_samples_than_layers_are_all_layers() -> None:
    assert LayerChoice("sampled:9").numbers(4, (0,)) == (0, 1, 2, 3)


@pytest.mark.slow
def test_a_changed_node_fails_in_its_layer_and_is_named(copied: Layered, layered: Layered) -> None:
    folder = copied("llama")
    model = load(folder)
    node = change_layer(model, 2)
    save(model, folder)
    report = inducted(folder, reference=layered("llama"), allow_changed=True)
    assert report.verdict == "fail" and report.where
    assert report.where.layer == 2 and node in report.where.text


@pytest.mark.slow
def test_a_past_that_comes_back_changed_fails_in_its_layer(copied: Layered, layered: Layered) -> None:
    folder = copied("llama")
    model = load(folder)
    joined = next(
        node for node in model.graph.node if "past_key_values.2.key" in node.input and node.op_type == "Concat"
    )
    at = list(model.graph.node).index(joined)
    joined.input[list(joined.input).index("past_key_values.2.key")] = "changed"
    scale = numpy_helper.from_array(np.array(1.001, np.float32), "scale")
    model.graph.initializer.append(scale)
    model.graph.node.insert(at, helper.make_node("Mul", ["past_key_values.2.key", "scale"], ["changed"]))
    save(model, folder)
    report = inducted(folder, reference=layered("llama"), allow_changed=True)
    failed = [check for check in report.checks if check.verdict == "fail" and check.name == NAME]
    assert {check.output for check in failed if "the past differs" in check.detail} == {"present.2.key"}
    assert report.where and report.where.layer == 2


@pytest.mark.slow
def test_exchanged_weights_of_two_layers_are_named(copied: Layered, layered: Layered) -> None:
    folder = copied("llama")
    model = load(folder)
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (1, 2)]
    one, other = (next(t for t in model.graph.initializer if t.name == name) for name in names)
    one.name, other.name = names[1], names[0]
    save(model, folder)
    report = inducted(folder, reference=layered("llama"), allow_changed=True)
    (weights,) = [check for check in report.checks if check.name == "weights" and check.graph == "model.onnx"]
    assert weights.verdict == "fail" and all(name in weights.detail for name in names)
    assert report.where and report.where.layer in (1, 2)


def test_nan_in_one_layer_is_reported_at_that_layer(copied: Layered) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.mlp.up_proj.weight"][0, 0] = float("nan")

    folder = copied("llama")
    change_weights(folder, spoil)
    report = inducted(folder)
    assert any("model.layers.2.mlp.up_proj.weight" in note for note in report.notes), report.notes


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama stored and exported in float16; do not write into it."""
    folder = save_tiny("llama", tmp_path_factory.mktemp("half") / "llama")
    tensors = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    export(folder, unified=True, precision="float16")
    return folder


@pytest.mark.slow
def test_half_precision_is_shown(half: Path) -> None:
    report = inducted(half, layers="sampled:1")
    assert (report.verdict, report.method) == ("pass", "induction"), report.lines()


@pytest.mark.slow
def test_an_overflow_of_half_precision_in_one_layer_is_reported_at_that_layer(half: Path, tmp_path: Path) -> None:
    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.mlp.up_proj.weight"] *= 1e4
        tensors["model.layers.2.mlp.down_proj.weight"] *= 1e4

    folder = shutil.copytree(half, tmp_path / "half")
    change_weights(folder, enlarge)
    report = inducted(folder)
    failed = [check for check in report.checks if check.verdict == "fail"]
    assert "hidden state after layer 2" in {check.output for check in failed}, report.lines()
    assert report.where and report.where.layer == 2


@pytest.mark.slow
def test_layers_that_share_caches_are_run_whole(layered: Layered) -> None:
    report = inducted(layered("gemma3n_text"))
    assert (report.verdict, report.method, report.statements) == ("pass", "whole", [])
    assert any(note.startswith("the whole model is run, without induction: ") for note in report.notes)


@pytest.mark.slow
def test_two_layers_that_differ_are_run_whole(tmp_path: Path) -> None:
    changes = {**LAYERED["gemma3_text"], "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    folder = save_layered("gemma3_text", tmp_path / "two", changes)
    report = inducted(folder)
    assert (report.verdict, report.method) == ("pass", "whole")
    assert "the whole model is run, without induction: no two of its layers are alike" in report.notes


@pytest.mark.slow
def test_a_scenario_that_does_not_apply_leaves_a_statement_open(layered: Layered) -> None:
    report = inducted(layered("llama"), scenario=("sliding window crossed",))
    assert [one.name for one in report.statements if not one.shown] == ["base"]
    assert (report.verdict, report.exit_code) == ("inconclusive", 5)


@pytest.mark.slow
def test_a_graph_that_no_scenario_ran_leaves_a_statement_open(layered: Layered) -> None:
    report = inducted(layered("llama"))
    report.checks = [check for check in report.checks if not check.is_measured or check.name.startswith("layers")]
    found = statements(induction(layered("llama")), report, Drift([1.0], [1.0]))
    assert {one.name for one in found if not one.shown} == {"base"}


def test_reports_contain_the_statements(shown: Report, tmp_path: Path) -> None:
    write_report(shown, tmp_path)
    content = json.loads((tmp_path / "report.json").read_text())
    assert [one["name"] for one in content["statements"]] == [one.name for one in shown.statements]
    for name in ("summary.md", "report.html"):
        text = (tmp_path / name).read_text()
        assert "What was shown" in text and "each initializer is the tensor of the model in its place" in text
    assert ElementTree.parse(tmp_path / "junit.xml").getroot().get("failures") == "0"
    assert "SHOWN | base | layer 0 (one of each class)" in "\n".join(shown.closing_lines())
