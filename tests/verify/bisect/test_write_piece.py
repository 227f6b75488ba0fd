"""`--minimize`: the piece fails by itself, from its folder alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from llmconv.errors import UsageProblem
from llmconv.verify import Report, verify
from llmconv.verify.bisect.first_wrong_node import archive
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results import Where
from tests.builders.mutants.mutants import Mutant
from tests.verify.bisect.test_bisect import LAYER_2, MASKED, failing, mutant_named, searched

Broken = Callable[[str, Mutant], Path]


@pytest.fixture
def minimized(broken: Broken, eager: Callable[[str], Eager], tmp_path: Path) -> Callable[[str, Where], Path]:
    """`minimized(mutant's name, where it fails)` is the folder of its smallest piece, for the tiny llama."""

    def folder(name: str, where: Where) -> Path:
        searched(broken("llama", mutant_named(name)), eager("llama"), where, tmp_path / "piece")
        return tmp_path / "piece"

    return folder


def run_alone(folder: Path) -> np.ndarray:
    """What onnxruntime makes of the piece and its inputs."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(folder / "piece.onnx", options, providers=["CPUExecutionProvider"])
    with np.load(folder / "inputs.npz") as inputs:
        (found,) = session.run(None, dict(inputs))
    return np.asarray(found)


@pytest.mark.quick_rows("causal mask too narrow-where3-ops3", "two pasts swapped-where4-ops4")
@pytest.mark.parametrize(
    ("name", "where", "ops"),
    [
        ("one norm's epsilon times ten", MASKED, ["RMSNormalization"]),
        ("square weight transposed", LAYER_2, ["Gemm"]),
        ("attention scale 1 % off in one layer", LAYER_2, ["Attention"]),
        ("causal mask too narrow", MASKED, ["Less"]),
        ("two pasts swapped", failing("chunked prefill, every split of 9 tokens", 1, "present.1.key", 1), ["Concat"]),
    ],
)
def test_the_piece_is_one_node_and_fails_from_its_folder_alone(
    name: str, where: Where, ops: list[str], minimized: Callable[[str, Where], Path]
) -> None:
    folder = minimized(name, where)
    assert [node.op_type for node in onnx.load(folder / "piece.onnx").graph.node] == ops
    with np.load(folder / "expected.npz") as expected, np.load(folder / "found.npz") as found:
        again = run_alone(folder)
        assert np.array_equal(again, found["found"])
        difference = np.abs(again.astype(np.float64) - expected["expected"])[expected["counts"]].max()
    assert difference > 3 * json.loads((folder / "piece.json").read_text())["noise"] / 10


@pytest.mark.slow
def test_the_readme_s_program_prints_sigma(
    minimized: Callable[[str, Where], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = minimized("one norm's epsilon times ten", MASKED)
    program = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(folder)
    assert program
    exec(program[1], {})
    printed = float(capsys.readouterr().out.rpartition("sigma ")[2])
    assert printed == pytest.approx(json.loads((folder / "piece.json").read_text())["sigma"], rel=1e-3)


def test_a_folder_that_is_not_empty_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageProblem, match="is not empty"):
        verify(tmp_path, minimize=tmp_path)


def test_nothing_is_left_next_to_the_folder(minimized: Callable[[str, Where], Path]) -> None:
    folder = minimized("one norm's epsilon times ten", MASKED)
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_exchanged_output_names_leave_no_piece(broken: Broken, eager: Callable[[str], Eager], tmp_path: Path) -> None:
    report: Report = searched(
        broken("llama", mutant_named("two present names swapped")), eager("llama"), MASKED, tmp_path / "piece"
    )
    assert not (tmp_path / "piece").exists()
    assert report.notes[-1].endswith("no piece of the graph fails by itself")


def test_an_archive_allows_any_name_and_is_reproducible(tmp_path: Path) -> None:
    arrays = {"file": np.arange(3), "../a/b:0": np.ones((2, 0))}
    (tmp_path / "a.npz").write_bytes(archive(arrays))
    with np.load(tmp_path / "a.npz") as found:
        assert found.keys() == arrays.keys()
    assert archive(arrays) == archive(arrays)
