"""Graphs of MTP heads: a right one passes, and no fault of the head or of the hidden state that it reads does."""

from __future__ import annotations

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
from llmconv.verify.graph_folder import GraphFolder
from llmconv.verify.other_exporters.quantized_verdict import QuantizationOptions
from llmconv.verify.results import WHOLE, Check
from llmconv.verify.scenarios.selection import Selection
from llmconv.verify.verification import Session
from tests.builders.mtp_models import save_with_head, to_float8
from tests.builders.slow_rows import slow_but

Change = Callable[[onnx.GraphProto], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mtp") / "model"
    save_with_head(made, "glm4_moe")
    export(made, unified=True, mtp=True)
    return made


def judged(folder: Path) -> list[Check]:
    """The checks of the MTP head alone."""
    session = Session.of(Selection("quick", [], 1), None, None, bisect=False, minimize=None)
    report = session.new_report(folder.name)
    opened = GraphFolder.open(folder, None, report, session, allow_changed=True, trusted=False)
    assert opened
    report.method = WHOLE
    head = opened.mtp_head()
    assert head
    return [check for checks in head.checks(QuantizationOptions()) for check in checks]


def named(graph: onnx.GraphProto, end: str) -> Any:
    return next(node for node in graph.node if node.name.endswith(end))


def norms_exchanged(graph: onnx.GraphProto) -> None:
    first, second = (named(graph, f"{norm}/RMSNormalization") for norm in ("enorm", "hnorm"))
    first.input[1], second.input[1] = second.input[1], first.input[1]


def halves_exchanged(graph: onnx.GraphProto) -> None:
    joined = named(graph, "layers.0/Concat")
    first, second = joined.input
    joined.input[0], joined.input[1] = second, first


def read_as(name: str, op: str, number: int) -> Change:
    """A graph that reads an input after an operation with a number."""

    def change(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            node.input[:] = ["changed" if one == name else one for one in node.input]
        graph.initializer.append(numpy_helper.from_array(np.array(number, np.int64), "number"))
        graph.node.insert(0, helper.make_node(op, [name, "number"], ["changed"]))

    return change


def without_last_norm(graph: onnx.GraphProto) -> None:
    norm = next(node for node in graph.node if "last_hidden_state" in node.output)
    norm.output[0] = "normed"
    for node in graph.node:
        node.input[:] = ["normed" if one == "last_hidden_state" else one for one in node.input]
    graph.node.append(helper.make_node("Identity", [norm.input[0]], ["last_hidden_state"]))


FAULTS: dict[str, tuple[str, Change]] = {
    "enorm and hnorm exchanged": ("mtp.onnx", norms_exchanged),
    "halves of eh_proj exchanged": ("mtp.onnx", halves_exchanged),
    "positions of other distances": ("mtp.onnx", read_as("position_ids", "Mul", 2)),
    "padding ignored": ("mtp.onnx", read_as("attention_mask", "Max", 1)),
    "its hidden state before the norm": ("mtp.onnx", without_last_norm),
    "the hidden state of the model before the norm": ("model.onnx", without_last_norm),
}


@pytest.mark.parametrize("fault", slow_but(FAULTS, "enorm and hnorm exchanged"))
def test_a_fault_fails(fault: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "changed")
    name, change = FAULTS[fault]
    model = onnx.load(tmp_path / "changed" / name, load_external_data=False)
    change(model.graph)
    onnx.save(model, tmp_path / "changed" / name)
    failed = [check for check in judged(tmp_path / "changed") if check.verdict == "fail"]
    assert {check.name for check in failed} == {"MTP head"} and failed[0].graph == name
    assert max(check.sigma for check in failed) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3", "mellum"])
def test_a_right_export_passes_and_is_recorded(kind: str, tmp_path: Path) -> None:
    save_with_head(tmp_path / kind, kind)
    export(tmp_path / kind, mtp=True)
    report = verify(tmp_path / kind)
    assert report.verdict == "pass", report.checks
    assert {"mtp.onnx", "mtp.onnx, as run"} <= {check.graph for check in report.checks if check.name == "MTP head"}
    assert '"mtp.onnx": "' in (tmp_path / kind / "llmconv.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["glm4_moe"])
def test_a_head_of_codes_is_compared_with_the_values_of_the_codes(kind: str, tmp_path: Path) -> None:
    save_with_head(tmp_path / kind, kind)
    to_float8(tmp_path / kind)
    export(tmp_path / kind, tmp_path / "made", unified=True, mtp=True)
    report = verify(tmp_path / "made", reference=tmp_path / kind)
    assert report.verdict == "pass" and {check.verdict for check in report.checks if check.name == "MTP head"} == {
        "pass"
    }
    path = tmp_path / "made/mtp.onnx"
    graph = onnx.load(path, load_external_data=False)
    norms_exchanged(graph.graph)
    onnx.save(graph, path)
    assert verify(tmp_path / "made", reference=tmp_path / kind, allow_changed=True).verdict == "fail"


def test_selected_scenarios_leave_the_head_out_and_say_so(folder: Path) -> None:
    report = verify(folder, scenario="batch of 3", record=False)
    assert report.verdict == "pass"
    assert "faults of the MTP head (`--scenario` leaves it out)" in report.unseen
