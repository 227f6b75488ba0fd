"""Names of graph files: recorded, found by every command, and refused where something else refers to graphs by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from llmconv.errors import InputRefused, UsageProblem
from llmconv.export import export
from llmconv.runtime import OrtRunner
from llmconv.verify import verify

NAMES = ("prefill=prompt.onnx", "decode=step.onnx")


@pytest.fixture
def model(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    """A Llama without graphs."""
    return Path(shutil.copytree(tiny("llama"), tmp_path / "model"))


@pytest.mark.slow
def test_graphs_with_names_of_their_own_are_found_and_verified(model: Path) -> None:
    made = export(model, graph_name=NAMES)
    assert sorted(path.name for path in model.glob("*.onnx")) == ["prompt.onnx", "step.onnx"]
    assert set(made.graphs) == {"prefill", "decode"}
    OrtRunner.from_folder(model)
    report = verify(model, scenario=("prefill, 7 tokens",))
    assert report.verdict == "pass"
    assert {"prompt.onnx", "step.onnx"} <= {check.graph for check in report.checks}


def test_another_name_replaces_the_graph_only_with_overwrite(model: Path) -> None:
    export(model)
    with pytest.raises(InputRefused, match="decode.onnx` already exists"):
        export(model, graph_name="decode=step.onnx", incremental=True)
    export(model, graph_name="decode=step.onnx", incremental=True, overwrite=True)
    assert sorted(path.name for path in model.glob("*.onnx")) == ["prefill.onnx", "step.onnx"]


@pytest.mark.slow
def test_stages_are_named_after_the_graph(model: Path, tmp_path: Path) -> None:
    export(model, tmp_path / "out", graph_name=NAMES, stages=2)
    assert (tmp_path / "out" / "step-1-of-2.onnx").is_file()


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["decode=../step.onnx"], "a name without a folder"),
        (["decode=step.bin"], "must end in `.onnx`"),
        (["decode=.onnx"], "must end in `.onnx`"),
        (["decode=vision.onnx"], "the name of another graph"),
        (["decode=Vision.onnx"], "the name of another graph"),
        ([f"decode={'a' * 300}.onnx"], "at most 200 bytes"),
        (["decode=Prefill.onnx"], "two graphs would have the name"),
        (["unified=model.onnx"], "no graph `unified` is exported"),
        (["decode"], "is not ROLE=FILE"),
        (["vision=tower.onnx"], "the name `vision.onnx` is fixed"),
        (["decode=a.onnx", "decode=b.onnx"], "given twice"),
        (["decode=prefill.onnx"], "two graphs would have the name"),
    ],
)
def test_names_that_no_graph_can_have_are_refused(model: Path, names: Sequence[str], problem: str) -> None:
    with pytest.raises(UsageProblem, match=problem):
        export(model, graph_name=names)
    assert not list(model.glob("*.onnx"))


def test_a_layout_of_a_client_keeps_its_names(model: Path) -> None:
    with pytest.raises(UsageProblem, match="the layout `genai` has names of its own"):
        export(model, graph_name=NAMES, layout="genai")
