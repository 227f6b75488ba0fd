"""Lines of the command: one per scenario, more for failures and skipped checks."""

from __future__ import annotations

from llmconv.verify import Check
from llmconv.verify.report.progress_lines import ScenarioLines, lines_of_scenario

KEY = Check("left padding", "prefill.onnx", "present.0.key", sigma=1.2, row_sigma=1.5, max_abs=2e-7)
LOGITS = Check("left padding", "prefill.onnx", "logits", sigma=1.02, row_sigma=1.7, max_abs=3e-7)
FAILED = Check("left padding", "prefill.onnx", "present.1.key", sigma=9.5, row_sigma=12.0, verdict="fail", steps=3)
SKIPPED = Check("left padding", "decode.onnx", "logits", verdict="skip", detail="the graph takes 1 sequence")


def test_a_scenario_that_passes_is_one_line_with_its_largest_values() -> None:
    assert lines_of_scenario([KEY, LOGITS]) == [
        "PASSED | left padding | 2 outputs | sigma 1.20 | worst row 1.70 | max abs 3.0e-07"
    ]


def test_a_scenario_that_differs_shows_the_outputs_that_do() -> None:
    first, second = lines_of_scenario([KEY, FAILED, LOGITS])
    assert first.startswith("FAILED | left padding | 1 of 3 outputs differ | sigma 9.50")
    assert second.startswith("FAILED | left padding, step 0 | prefill.onnx present.1.key | sigma 9.50")


def test_skipped_checks_are_printed_once_with_the_reason() -> None:
    again = Check("left padding", "prefill.onnx", "logits", verdict="skip", detail=SKIPPED.detail)
    assert lines_of_scenario([SKIPPED, again]) == [
        "SKIPPED | left padding | decode.onnx, prefill.onnx | the graph takes 1 sequence"
    ]


def test_a_scenario_with_skipped_parts_passes_and_reports_them() -> None:
    assert [line.split(" | ")[0] for line in lines_of_scenario([KEY, SKIPPED])] == ["PASSED", "SKIPPED"]


def test_checks_without_a_run_print_their_findings() -> None:
    weights = [Check("weights", name, "", detail="39 tensors") for name in ("prefill.onnx", "decode.onnx")]
    assert lines_of_scenario(weights) == ["PASSED | weights | 39 tensors"]


def test_a_scenario_is_printed_when_the_next_one_starts_and_the_last_one_at_the_end() -> None:
    lines = ScenarioLines()
    assert lines.add([KEY]) == []
    assert lines.add([LOGITS]) == []
    (first,) = lines.add([Check("right padding", "prefill.onnx", "logits", sigma=1.0)])
    assert first.startswith("PASSED | left padding | 2 outputs")
    assert lines.close() == ["PASSED | right padding | 1 output | sigma 1.00 | worst row 0.00 | max abs 0.0e+00"]
    assert lines.close() == []


def test_a_scenario_of_one_of_several_graphs_names_it() -> None:
    lines = ScenarioLines()
    lines.add([Check("structure", name, "") for name in ("prefill.onnx", "decode.onnx")])
    lines.add([KEY, LOGITS])
    assert lines.close() == [
        "PASSED | left padding | prefill.onnx | 2 outputs | sigma 1.20 | worst row 1.70 | max abs 3.0e-07"
    ]
