"""`llmconv verify` as a person runs it: exit codes, lines, JSON, bad input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner, Result

from llmconv.cli import main
from llmconv.verify.comparison.run import AS_RUN
from tests.builders.mutants.mutants import MUTANTS
from tests.verify.conftest import decode_only


def run(*arguments: object) -> Result:
    """The command's result."""
    return CliRunner().invoke(main, ["verify", *map(str, arguments)])


@pytest.mark.slow
def test_a_correct_folder_exits_0_and_writes_the_report(exported: Callable[[str], Path], tmp_path: Path) -> None:
    result = run(exported("llama"), "--report", tmp_path / "report")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [
        line for line in lines if "decode chain" in line and line.startswith("PASSED | decode chain, 16 steps | 27 o")
    ]
    # that of last logits has a line of its own
    named = [tuple(part for part in line.split(" | ")[1:3] if "outputs" not in part) for line in lines[:-1]]
    assert len(named) == len({*named}), "a line per scenario"
    assert lines[-1].startswith("PASS: ")
    assert (tmp_path / "report" / "report.html").is_file()


@pytest.mark.slow
def test_a_mutant_exits_1_with_the_location(broken: Callable[..., Path], exported: Callable[[str], Path]) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name.startswith("attention scale"))
    result = run(broken("llama", mutant), "--reference", exported("llama"), "--json")
    content = json.loads(result.stdout)
    assert result.exit_code == 1
    assert (content["verdict"], content["where"]["layer"]) == ("fail", 2)


def test_a_folder_without_graphs_is_refused(tiny: Callable[[str], Path]) -> None:
    result = run(tiny("llama"), "--json")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "no graphs in `" in result.stderr and "hint: make them: `llmconv export " in result.stderr


ONE = ("--scenario", "left padding")


@pytest.mark.slow
def test_quiet_prints_only_the_verdict(exported: Callable[[str], Path]) -> None:
    result = run(exported("llama"), *ONE, "-q")
    (line,) = result.stdout.splitlines()
    assert line.startswith("PASS: ") and not result.stderr


@pytest.mark.slow
def test_verbose_is_a_line_per_graph_and_kind_of_output(exported: Callable[[str], Path]) -> None:
    lines = run(exported("llama"), *ONE, "-v").stdout.splitlines()
    found = [line for line in lines if line.startswith("PASSED | left padding | ")]
    assert [line.split(" | ")[2] for line in found] == [
        f"{graph} {what}"
        for graph in ("prefill.onnx", "decode.onnx", f"prefill.onnx{AS_RUN}")
        for what in ("logits", "present, 8 outputs")
    ]


def test_a_report_below_a_file_is_refused_before_anything_runs(exported: Callable[[str], Path]) -> None:
    result = run(exported("llama"), "--report", "/dev/null/report")
    assert result.exit_code == 3
    assert "/dev/null" in result.stderr and "hint: " in result.stderr and not result.stdout


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    result = run(tmp_path / "none")
    assert result.exit_code == 3
    assert "does not exist" in result.stderr and "hint: " in result.stderr


def test_a_graph_that_maps_a_file_elsewhere_is_refused(exported: Callable[[str], Path], tmp_path: Path) -> None:
    folder = decode_only(exported("llama"), tmp_path / "hostile")
    model = onnx.load(folder / "decode.onnx", load_external_data=False)
    mapped = next(tensor for tensor in model.graph.initializer if tensor.external_data)
    mapped.external_data[0].value = "../../etc/passwd"
    onnx.save(model, folder / "decode.onnx")
    result = run(folder)
    assert result.exit_code == 3
    assert "which is not a plain file name" in result.stderr


def test_a_graph_that_does_not_run_is_a_difference(exported: Callable[[str], Path], tmp_path: Path) -> None:
    folder = decode_only(exported("llama"), tmp_path / "cut")
    model = onnx.load(folder / "decode.onnx", load_external_data=False)
    del model.graph.node[-3:]
    onnx.save(model, folder / "decode.onnx")
    result = run(folder)
    assert result.exit_code == 1
    assert "FAILED | structure | decode.onnx | onnxruntime cannot open" in result.stdout


def test_a_file_that_is_not_a_graph_is_refused(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "noise"
    shutil.copytree(tiny("llama"), folder)
    (folder / "model.onnx").write_bytes(b"\xff" * 100)
    result = run(folder)
    assert result.exit_code == 3
    assert "`model.onnx` is not an ONNX file" in result.stderr


@pytest.mark.parametrize("options", [["--suite", "quickest"], ["--nonsense"]])
def test_a_wrong_option_exits_2(options: list[str], tmp_path: Path) -> None:
    assert run(tmp_path, *options).exit_code == 2


@pytest.mark.slow
def test_one_scenario_is_run_alone(exported: Callable[[str], Path]) -> None:
    content = json.loads(run(exported("llama"), "--scenario", "left padding", "--json").stdout)
    ran = {check["name"] for check in content["checks"]} - {
        "graph file",
        "structure",
        "weights",
        "decisions",
        "prefill and decode agree",
    }
    assert ran == {"left padding"}
    assert list(content["settings"]["seeds"]) == ["left padding"]


def test_an_unknown_scenario_exits_2(exported: Callable[[str], Path]) -> None:
    result = run(exported("llama"), "--scenario", "left pading")
    assert result.exit_code == 2
    assert "left padding" in result.stderr


@pytest.mark.slow
def test_the_number_of_runs_is_recorded(exported: Callable[[str], Path]) -> None:
    result = run(exported("llama"), "--scenario", "left padding", "--repeat", "3", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["settings"]["repeat"] == 3


def test_failures_are_annotated_for_github(broken: Callable[..., Path], exported: Callable[[str], Path]) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name.startswith("attention scale"))
    given = [broken("llama", mutant), "--reference", exported("llama"), "--scenario", "batch of 3", "--github"]
    lines = [line for line in run(*given).stdout.splitlines() if line.startswith("::")]
    assert lines[0].startswith("::error title=llmconv verify mutant::batch of 3")
