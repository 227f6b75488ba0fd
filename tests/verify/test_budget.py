"""verify --budget: the mandatory scenarios run, others are listed as skipped, exit codes stay what they are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llmconv.cli import main
from llmconv.output.manifest import graph_entries
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.verify import Report, verify, verify_graphs
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.float_folder import Compared
from llmconv.verify.graph_folder import _models
from llmconv.verify.reference.eager import ComputedModel, Eager
from llmconv.verify.results import Check
from llmconv.verify.scenarios.selection import CORE, CORE_STREAMED, Budget, Selection
from tests.builders.clocks import FakeClock
from tests.builders.mutants.mutants import MUTANTS, Mutant

Tiny = Callable[[str], Path]
AT_ONCE = 1e-6
"""Seconds that are over before anything has run."""
QUICK = [scenario.name for scenario in Selection().scenarios()]


def run(*arguments: object) -> Result:
    """The command's result."""
    return CliRunner().invoke(main, ["verify", *map(str, arguments)])


def compared(checks: list[Check]) -> set[str]:
    """Names of the quick scenarios of which an output was compared."""
    return {check.name for check in checks if check.is_measured and check.name in QUICK}


@pytest.mark.slow
def test_the_command_runs_the_core_and_lists_the_rest(exported: Tiny, tmp_path: Path) -> None:
    result = run(exported("llama"), "--budget", "0.001s", "--report", tmp_path)
    content = json.loads((tmp_path / "report.json").read_text())
    *lines, last = result.stdout.splitlines()
    assert result.exit_code == 0
    assert [row["name"] for row in content["budget"]["ran"]] == list(CORE)
    assert content["settings"]["budget"] == content["budget"]["seconds"] == 0.001
    assert "SKIPPED | batch of 6 | prefill.onnx, decode.onnx | not run: the budget of 0.001 s was used" in lines
    assert any(line.startswith("NOTE | the mandatory scenarios ended") for line in lines)
    assert last.startswith("PASS: ") and f"{len(content['budget']['not_run'])} scenarios left out by the budget" in last


@pytest.mark.slow
def test_a_long_budget_leaves_nothing_out(exported: Tiny, eager: Callable[[str], Eager], clean_report: Report) -> None:
    report = verify(exported("llama"), eager=eager("llama"), budget=3600)
    assert report.budget and report.budget["not_run"] == []
    assert {check.name for check in report.checks} == {check.name for check in clean_report.checks}
    assert not report.unseen and not report.notes[1:]


def test_without_a_budget_the_report_has_none(clean_report: Report) -> None:
    content = clean_report.as_dict()
    assert "budget" not in content and "budget" not in content["settings"]


@pytest.mark.slow
def test_scaled_weights_are_skipped_and_named_as_unseen(exported: Tiny, eager: Callable[[str], Eager]) -> None:
    report = verify(exported("llama"), eager=eager("llama"), budget=AT_ONCE)
    skipped = {check.name for check in report.checks if check.verdict == "skip"}
    assert {"prefill, 7 tokens, louder weights", "batch of 3, fainter weights"} <= skipped
    assert "a norm's epsilon of another value or in another place" in report.unseen
    assert compared(report.checks) == set(CORE)
    assert report.verdict == "pass"


def run_with(budget: Budget, folder: Path, known: Eager) -> list[Check]:
    """The checks of the scenarios of a folder."""
    entries = graph_entries(folder)
    verified = VerifiedFolder(folder, entries, _models(folder, entries), SessionSettings())
    report = Report("model", "model", "quick")
    compared = Compared(verified, ComputedModel(folder), report, Selection(budget=budget), None, layered=False)
    return [check for checks in compared.run(known) for check in checks]


@pytest.mark.slow
def test_with_equal_times_two_runs_select_the_same(exported: Tiny, eager: Callable[[str], Eager]) -> None:
    first, second = (Budget(25, FakeClock(tick=1)) for _ in range(2))
    checks = run_with(first, exported("llama"), eager("llama"))
    assert checks == run_with(second, exported("llama"), eager("llama"))
    assert first.ran == second.ran
    assert set(CORE) < compared(checks) < set(QUICK)
    assert first.left.keys() == {name for name in first.left if name not in compared(checks)}


@pytest.mark.slow
def test_a_fault_fails_under_any_budget(exported: Tiny, broken: Callable[[str, Mutant], Path]) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name.startswith("attention scale"))
    result = run(broken("llama", mutant), "--reference", exported("llama"), "--budget", "0.001", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["where"]["layer"] == 2


def test_a_graph_of_another_exporter_takes_a_budget(exported: Tiny, eager: Callable[[str], Eager]) -> None:
    graph = exported("llama") / "decode.onnx"
    report = verify_graphs([graph], eager=eager("llama"), budget=AT_ONCE)
    assert compared(report.checks) == set(CORE)
    assert "fainter weights" not in " ".join(check.name for check in report.checks if check.is_measured)
    assert report.verdict == "pass"


def test_layer_by_layer_the_scenarios_are_chosen_before_the_run(exported: Tiny) -> None:
    report = verify(exported("llama"), low_memory=True, budget=AT_ONCE)
    assert compared(report.checks) == set(CORE_STREAMED)
    reason = next(check.detail for check in report.checks if check.name == "batch of 6")
    assert reason == "not run: by estimate, the budget of 1e-06 s has no room for it"
    assert report.verdict == "pass"


@pytest.mark.slow
def test_layer_by_layer_with_enough_time_everything_runs(exported: Tiny) -> None:
    report = verify(exported("llama"), low_memory=True, budget=3600)
    assert report.budget and report.budget["not_run"] == []
    assert "batch of 3, fainter weights" in {check.name for check in report.checks if check.is_measured}


@pytest.mark.parametrize("text", ["0", "-1s", "5 apples", "nan", "1e400s", "", "60s\n--"])
def test_a_bad_budget_is_one_line_and_a_hint(text: str, exported: Tiny) -> None:
    result = run(exported("llama"), f"--budget={text}")
    error, _, hint = result.stderr.rstrip().splitlines()
    assert result.exit_code == 2 and not result.stdout
    assert "invalid budget" in error and hint.startswith("hint: ")


def test_selected_scenarios_are_refused(exported: Tiny) -> None:
    result = run(exported("llama"), "--budget", "60s", "--scenario", "left padding")
    assert result.exit_code == 2
    assert "`--budget` excludes `--scenario`" in result.stderr and "hint: " in result.stderr


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_the_core_catches_all_that_a_scenario_catches(
    model_type: str, exported: Tiny, eager: Callable[[str], Eager], broken: Callable[[str, Mutant], Path]
) -> None:
    missed = []
    for mutant in MUTANTS:
        if model_type in mutant.families and mutant.name != "low bit of one weight flipped":  # rounding, for a run
            folder = broken(model_type, mutant)
            report = verify(folder, reference=exported(model_type), eager=eager(model_type), budget=AT_ONCE)
            failed = {check.name for check in report.checks if check.verdict == "fail"}
            missed += [] if failed & set(CORE) else [mutant.name]
            shutil.rmtree(folder)
    assert missed == []
