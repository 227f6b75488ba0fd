"""The forms of a report: lines, JSON, JUnit, Markdown, HTML; hostile names in all of them."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from llmconv.errors import MalformedInput, OutOfMemory, OutputFailed
from llmconv.verify import Check, Report
from llmconv.verify.bisect.first_wrong_node import localize
from llmconv.verify.report.files import today, write_report
from llmconv.verify.report.html import heat_map
from llmconv.verify.results import problem_of

HOSTILE = 'x"><script>alert(1)</script>\x1b[31m\x00|`a`'
PASSED = Check("prefill, 7 tokens", "decode.onnx", "logits", sigma=1.02, row_sigma=1.5, max_abs=3.1e-07)
FAILED = Check(
    "decode chain, 16 steps",
    "decode.onnx",
    "present.1.key",
    sigma=2000.0,
    max_abs=0.5,
    verdict="fail",
    step=7,
    steps=17,
)


def report_of(*checks: Check, folder: str = "model") -> Report:
    """A report with these checks."""
    return Report(folder, folder, "quick", list(checks), localize(checks))


@pytest.mark.parametrize(
    ("checks", "verdict", "code"),
    [
        ((PASSED,), "pass", 0),
        ((PASSED, FAILED), "fail", 1),
        ((), "inconclusive", 5),
        ((Check("structure", "decode.onnx", ""),), "inconclusive", 5),
        ((Check("batch of 3", "decode.onnx", "logits", verdict="skip"),), "inconclusive", 5),
        ((PASSED, Check("batch of 3", "prefill.onnx", "logits", verdict="skip")), "inconclusive", 5),
    ],
)
def test_nothing_compared_is_never_a_pass(checks: tuple[Check, ...], verdict: str, code: int) -> None:
    report = report_of(*checks)
    assert (report.verdict, report.exit_code, bool(report)) == (verdict, code, verdict == "pass")


def test_a_line_starts_with_the_verdict_and_names_step_and_sigma() -> None:
    lines = report_of(PASSED, FAILED).lines()
    assert lines[0] == (
        "PASSED | prefill, 7 tokens | decode.onnx logits | sigma 1.02 | worst row 1.50 | max abs 3.1e-07"
    )
    assert lines[1].startswith("FAILED | decode chain, 16 steps, step 7 | decode.onnx present.1.key | sigma 2000")
    assert lines[2].startswith("WHERE | decode chain, 16 steps, decode.onnx, step 7: layer 1, keys only")
    assert lines[-1].startswith("FAIL: 1 checks passed, 1 differ, 0 skipped, largest sigma 2000")


def test_outputs_of_the_cache_share_a_line_while_they_pass() -> None:
    caches = [Check("batch of 3", "decode.onnx", f"present.{i}.key", sigma=1 + i / 10) for i in range(3)]
    assert [line for line in report_of(*caches).lines() if line.startswith("PASSED")] == [
        "PASSED | batch of 3 | decode.onnx present, 3 outputs | sigma 1.20 | worst row 0.00 | max abs 0.0e+00"
    ]


def test_a_hostile_name_reaches_the_terminal_without_control_characters() -> None:
    text = "\n".join(report_of(Check(HOSTILE, HOSTILE, HOSTILE, verdict="fail", detail=HOSTILE)).lines())
    assert "\x1b" not in text
    assert "\x00" not in text


def test_the_json_has_the_contract_s_fields() -> None:
    content = json.loads(json.dumps(report_of(PASSED, FAILED).as_dict(), allow_nan=False))
    assert content["verdict"] == "fail"
    assert content["where"]["layer"] == 1
    assert {"name", "graph", "output", "sigma", "max_abs", "verdict"} <= set(content["checks"][0])


def test_infinity_is_text_in_json() -> None:
    check = Check("prefill", "decode.onnx", "logits", sigma=float("inf"), verdict="fail")
    assert json.loads(json.dumps(report_of(check).as_dict(), allow_nan=False))["checks"][0]["sigma"] == "inf"


def test_the_four_files_are_written_and_the_junit_counts_add_up(tmp_path: Path) -> None:
    skipped = Check("holes", "decode.onnx", "logits", verdict="skip", detail="why")
    write_report(report_of(PASSED, FAILED, skipped), tmp_path / "new" / "report")
    files = sorted(path.name for path in (tmp_path / "new" / "report").iterdir())
    assert files == ["junit.xml", "report.html", "report.json", "summary.md"]
    suite = ElementTree.parse(tmp_path / "new" / "report" / "junit.xml").getroot()
    assert [suite.get(key) for key in ("tests", "failures", "skipped")] == ["3", "1", "1"]
    assert len(suite.findall(".//failure")) == len(suite.findall(".//skipped")) == 1


def test_an_empty_report_is_an_error_in_junit(tmp_path: Path) -> None:
    write_report(report_of(), tmp_path)
    assert ElementTree.parse(tmp_path / "junit.xml").getroot().get("errors") == "1"


class Tags(HTMLParser):
    """Collects what a browser would act upon."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in {"src", "href"} or name.startswith("on")]


def test_the_page_runs_no_script_and_uses_no_network_whatever_the_names(tmp_path: Path) -> None:
    checks = [Check(HOSTILE, HOSTILE, f"present.{i}.key", sigma=9.0, verdict="fail", detail=HOSTILE) for i in range(3)]
    write_report(report_of(*checks, folder=HOSTILE), tmp_path)
    page = Tags()
    page.feed((tmp_path / "report.html").read_text())
    assert "script" not in page.tags
    assert not page.links
    assert "svg" in page.tags
    ElementTree.parse(tmp_path / "junit.xml")


def test_markdown_cells_contain_no_markup(tmp_path: Path) -> None:
    write_report(report_of(Check(HOSTILE, "g", "logits", verdict="fail")), tmp_path)
    row = next(line for line in (tmp_path / "summary.md").read_text().splitlines() if line.startswith("| fail"))
    assert "<script>" not in row
    assert "\\|" in row


def test_failures_come_first_in_the_summary(tmp_path: Path) -> None:
    write_report(report_of(PASSED, replace(FAILED, detail="holds another matrix")), tmp_path)
    rows = [line for line in (tmp_path / "summary.md").read_text().splitlines() if line.startswith("|")]
    assert rows[2].startswith("| fail |") and rows[2].endswith("| holds another matrix |")


def test_code_in_a_note_is_formatted_as_code(tmp_path: Path) -> None:
    report = report_of(PASSED)
    report.notes.append("changed since `<b>`")
    write_report(report, tmp_path)
    assert "changed since <code>&lt;b&gt;</code>" in (tmp_path / "report.html").read_text()


def test_a_verdict_without_measurements_has_no_largest_sigma() -> None:
    report = report_of(Check("weights", "decode.onnx", "", detail="39 tensors"))
    assert report.summary() == "INCONCLUSIVE: 1 checks passed, 0 differ, 0 skipped"


def test_files_and_weights_have_no_sigma_in_the_summary(tmp_path: Path) -> None:
    write_report(report_of(Check("weights", "model.safetensors", "", detail="sha256 as in the manifest")), tmp_path)
    row = next(line for line in (tmp_path / "summary.md").read_text().splitlines() if line.startswith("| pass"))
    assert "0.00" not in row and row.endswith("| sha256 as in the manifest |")


def test_the_date_of_a_report_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    write_report(report_of(PASSED), tmp_path)
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert json.loads(texts["report.json"])["date"] == "2023-11-14T22:13:20Z"
    assert "2023-11-14 22:13:20 UTC" in texts["report.html"]
    assert 'timestamp="2023-11-14T22:13:20"' in texts["junit.xml"]
    assert "2023-11-14T22:13:20Z" in texts["summary.md"]
    assert "date" not in report_of(PASSED).as_dict()


@pytest.mark.parametrize("said", ["", "soon", "9" * 30])
def test_without_such_a_time_the_date_is_now(said: str) -> None:
    before = datetime.now(UTC).strftime("%Y-%m-%d")
    assert today({"SOURCE_DATE_EPOCH": said} if said else {}) >= before


def test_one_graph_under_two_names_is_shown_once(tmp_path: Path) -> None:
    report = report_of(PASSED, replace(PASSED, graph="prefill.onnx", detail="the same bytes as decode.onnx"))
    report.copies = {"prefill.onnx": "decode.onnx"}
    write_report(report, tmp_path)
    page, table = ((tmp_path / name).read_text() for name in ("report.html", "summary.md"))
    assert page.count("sigma by scenario and layer") == 1 and "decode.onnx = prefill.onnx" in page
    assert "are the same bytes" in page and "are the same bytes" in table
    assert len([line for line in table.splitlines() if line.startswith("| pass")]) == 1
    assert len(json.loads((tmp_path / "report.json").read_text())["checks"]) == 2


def test_what_was_not_found_is_never_cut(tmp_path: Path) -> None:
    faults = [f"a wrong number in place {number}" for number in range(30)]
    report = report_of(replace(PASSED, name="a scenario with a long name " * 6))
    report.unseen = [*faults, faults[0]]
    write_report(report, tmp_path)
    page, table = ((tmp_path / name).read_text() for name in ("report.html", "summary.md"))
    said = "could not have found: " + "; ".join(faults)
    assert report.summary().endswith(said) and said in page and said in table


def test_the_label_of_the_logits_has_room_beside_many_layers() -> None:
    checks = [replace(PASSED, output=f"present.{layer}.key") for layer in range(30)]
    labels = re.findall(r'<text x="([0-9.]+)" y="16" text-anchor="middle">(\w+)</text>', heat_map([*checks, PASSED]))
    places = {text: float(x) for x, text in labels}
    last = max(float(x) for x, text in labels if text != "logits")
    assert places["logits"] - last > 30 and places["logits"] + 20 < 900


def test_the_page_begins_with_folder_versions_and_machine(tmp_path: Path) -> None:
    report = report_of(PASSED, folder="my-model")
    report.versions = {"llmconv": "9.8.7"}
    write_report(report, tmp_path)
    banner = (tmp_path / "report.html").read_text().split("<h2>")[0]
    assert "<h1>PASS: my-model</h1>" in banner and "llmconv 9.8.7; " in banner


def test_the_page_says_what_no_number_of_threads_means(tmp_path: Path) -> None:
    report = report_of(PASSED)
    report.settings = {"threads": 0, "optimization": "all", "repeat": 1}
    write_report(report, tmp_path)
    assert "threads: one per core, optimization: all, repeat: 1" in (tmp_path / "report.html").read_text()


def test_a_report_that_cannot_be_written_is_an_output_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputFailed, match="cannot write the report"):
        write_report(report_of(PASSED), tmp_path / "file")


def test_the_report_of_a_real_run_has_every_output(clean_report: Report) -> None:
    outputs = {check.output for check in clean_report.checks if check.graph == "decode.onnx" and check.output}
    assert outputs == {"logits", *(f"present.{i}.{part}" for i in range(4) for part in ("key", "value"))}


def test_a_report_replaces_links_in_its_folder_and_follows_none(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("dear")
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "report.html").symlink_to(tmp_path / "victim")
    write_report(report_of(PASSED), tmp_path / "report")
    assert (tmp_path / "victim").read_text() == "dear"
    assert not (tmp_path / "report" / "report.html").is_symlink()


def test_a_disk_that_fills_up_leaves_no_partial_report(small_disk: Path) -> None:
    free = shutil.disk_usage(small_disk).free
    (small_disk / "other").write_bytes(bytes(free - 12_288))
    with pytest.raises(OutputFailed, match="No space left"):
        write_report(report_of(PASSED), small_disk / "report")
    assert os.listdir(small_disk) == ["other"]


def test_the_last_line_of_a_failure_names_the_check_that_failed() -> None:
    changed = Check("weights", "model.safetensors", "", verdict="fail", detail="weights changed")
    assert (
        report_of(PASSED, changed).summary().endswith("0 skipped, first weights | model.safetensors | weights changed")
    )


def test_an_error_of_memory_is_no_verdict_on_a_graph() -> None:
    assert problem_of(MalformedInput("a node fails", hint="")) == "a node fails"
    with pytest.raises(OutOfMemory):
        problem_of(OutOfMemory("no room", hint=""))
