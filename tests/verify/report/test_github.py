"""Annotations of GitHub Actions: few, and without commands in their text."""

from __future__ import annotations

from llmconv.verify import Check, Report
from llmconv.verify.bisect.first_wrong_node import localize
from llmconv.verify.report.files import LIMIT, annotation_lines


def report_of(*checks: Check) -> Report:
    """A report with these checks."""
    return Report("model", "model", "quick", list(checks), localize(checks))


def test_a_pass_gives_no_annotation() -> None:
    assert annotation_lines(report_of(Check("prefill", "decode.onnx", "logits", sigma=1.0))) == []


def test_a_failure_starts_with_its_location() -> None:
    first, second = annotation_lines(report_of(Check("prefill", "decode.onnx", "present.2.key", 99.0, verdict="fail")))
    assert first.startswith("::error title=llmconv verify model::prefill, decode.onnx, step 0: layer 2")
    assert "sigma 99.00" in second


def test_the_tenth_annotation_counts_the_others() -> None:
    lines = annotation_lines(report_of(*(Check(f"s{i}", "g", "logits", 9.0, verdict="fail") for i in range(50))))
    assert len(lines) == LIMIT + 1
    assert lines[-1].endswith("and 42 more, see the report")


def test_nothing_compared_is_a_warning() -> None:
    (line,) = annotation_lines(report_of())
    assert line.startswith("::warning title=llmconv verify::INCONCLUSIVE")


def test_a_hostile_name_does_not_start_a_command() -> None:
    name = "a\n::set-output name=x::y\r,:%"
    lines = annotation_lines(report_of(Check(name, name, "logits", 9.0, verdict="fail", detail=name)))
    assert all("\n" not in line and "\r" not in line for line in lines)
    title = lines[1].removeprefix("::error title=").partition("::")[0]
    assert ":" not in title and "," not in title and "%25" in title
