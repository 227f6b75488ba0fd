"""Writes a report as report.json, junit.xml, summary.md and report.html; all are escaped and work offline.

Annotations of GitHub Actions, `::error title=…::…`, show failures next to the change. A step shows at most ten of each
kind, so the last one contains the number of the others. Source: docs.github.com, "Workflow commands for GitHub
Actions".
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from llmconv.argument_checks import checked
from llmconv.files.paths import Written
from llmconv.files.safe_folder import Folder, folder_made, require_writable, unwritable
from llmconv.verify.report.html import render_html
from llmconv.verify.results import LINE_LIMIT, NAME_LIMIT, SUMMARY_LIMIT, Check, Report, check_line, clean
from llmconv.verify.sigma import sigma_text

XML_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 does not allow, section 2.2."""

MARKDOWN_ROWS = 200  # maximum number of rows; a CI step summary is limited to 1 MiB
COLUMNS = ("verdict", "scenario", "graph", "output", "sigma", "worst row", "max abs", "detail")
NAMES = ("report.json", "junit.xml", "summary.md", "report.html")


@checked
def write_report(report: Report, folder: Written, date: str = "") -> None:
    """Writes the four files into `folder`, which is created if needed; OutputFailed if one cannot be written."""
    folder, date = Path(folder), date or today()
    texts = [render(report, date) for render in (render_json, render_junit, render_markdown, render_html)]
    files = dict(zip(NAMES, texts, strict=True))
    try:
        with folder_made(folder), Folder.open(folder) as home:
            home.sweep()
            home.write_together({name: text.encode("utf-8", "replace") for name, text in files.items()})
    except OSError as error:
        raise unwritable(folder, error) from error


def today(environment: Mapping[str, str] = os.environ) -> str:
    """The time in UTC, such as `2026-11-23T08:15:00Z`: SOURCE_DATE_EPOCH (seconds since 1970) if set, else now.

    https://reproducible-builds.org/specs/source-date-epoch/
    """
    moment = datetime.now(UTC)
    with suppress(ValueError, OverflowError, OSError):
        moment = datetime.fromtimestamp(int(environment.get("SOURCE_DATE_EPOCH", "")), UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def reporter(folder: str | Path | None) -> Callable[[Report], Report]:
    """A function that writes a report (nothing if `folder` is None) and returns it; whether it can is checked now.

    Raises InputRefused, OutputFailed: as `require_writable`.
    """
    if folder is None:
        return lambda report: report
    home = Path(folder)
    require_writable(home, NAMES)

    def written(report: Report) -> Report:
        write_report(report, home)
        return report

    return written


def render_json(report: Report, date: str) -> str:
    return json.dumps({**report.as_dict(), "date": date}, indent=2) + "\n"


def render_junit(report: Report, date: str) -> str:
    """JUnit XML with one test case per check: class is scenario and graph, name is the output."""
    counts = {verdict: sum(check.verdict == verdict for check in report.checks) for verdict in ("fail", "skip")}
    suite = ElementTree.Element(
        "testsuite",
        name=_xml(f"llmconv verify {report.folder}"),
        tests=str(len(report.checks)),
        failures=str(counts["fail"]),
        skipped=str(counts["skip"]),
        errors="0",
        timestamp=date.removesuffix("Z"),
    )
    for check in report.checks:
        _add_case(suite, check)
    if report.verdict == "inconclusive":
        suite.set("errors", "1")
        case = ElementTree.SubElement(suite, "testcase", classname="verdict", name="anything compared")
        ElementTree.SubElement(case, "error", message="; ".join(_xml(note) for note in report.notes))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _add_case(suite: ElementTree.Element, check: Check) -> None:
    case = ElementTree.SubElement(
        suite, "testcase", classname=_xml(f"{check.name}.{check.graph}"), name=_xml(check.output or check.name)
    )
    properties = ElementTree.SubElement(case, "properties")
    for name in ("sigma", "row_sigma", "max_abs", "divergence", "agreement"):
        value = getattr(check, name)
        ElementTree.SubElement(properties, "property", name=name, value=str(value))
    if check.verdict == "fail":
        sigmas = f"sigma {sigma_text(check.sigma)}, worst row {sigma_text(check.row_sigma)}"
        message = f"step {check.step}, {sigmas} {check.detail}"
        ElementTree.SubElement(case, "failure", message=_xml(message))
    elif check.verdict == "skip":
        ElementTree.SubElement(case, "skipped", message=_xml(check.detail))


def _xml(text: str) -> str:
    return XML_ILLEGAL.sub("?", text)


def render_markdown(report: Report, date: str = "") -> str:
    """Markdown with the verdict, the location of a fault, and the worst checks of every scenario, failed ones first."""
    lines = [
        f"# {report.verdict.upper()}: {_cell(report.folder)}",
        "",
        _cell(report.summary(), SUMMARY_LIMIT) + (f", {date}" if date else ""),
        "",
    ]
    lines += [f"**Where:** {_cell(report.where.text, LINE_LIMIT)}", ""] if report.where else []
    lines += [f"* {_cell(note, LINE_LIMIT)}" for note in [*report.copy_lines(), *report.notes]] + [""]
    lines += _statements(report)
    if report.quantization:
        points = [f"* {_cell(line, LINE_LIMIT)}" for line in report.quantization.lines()]
        lines += ["**Quantization:**", "", *points, ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    shown = sorted(report.highlights(), key=lambda check: check.verdict != "fail")
    lines += [_row(check) for check in shown[:MARKDOWN_ROWS]]
    lines += ["", f"and {len(shown) - MARKDOWN_ROWS} more rows in report.json"] if len(shown) > MARKDOWN_ROWS else []
    return "\n".join(lines) + "\n"


def _statements(report: Report) -> list[str]:
    if not report.statements:
        return []
    rows = [f"| {one.word} | {_cell(one.name)} | {_cell(one.text, LINE_LIMIT)} |" for one in report.statements]
    return ["**What was shown:**", "", "| | part | statement |", "|---|---|---|", *rows, ""]


def _row(check: Check) -> str:
    numbers = [sigma_text(check.sigma), sigma_text(check.row_sigma), f"{check.max_abs:.1e}"]
    numbers = numbers if check.is_measured else [""] * 3
    cells = [check.verdict, check.name, check.graph, check.output, *numbers, check.detail]
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str, limit: int = NAME_LIMIT) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|!~&@])", r"\\\1", clean(text, limit))


LIMIT = 9  # one less than the maximum of a step


def annotation_lines(report: Report) -> list[str]:
    """One line per failed group of outputs, and lines for the location of a fault and for an inconclusive verdict."""
    failed = [check for check in report.highlights() if check.verdict == "fail"]
    where = report.where.text if report.where else ""
    lines = [_command("error", f"llmconv verify {report.folder}", where)] if where else []
    room = LIMIT - len(lines)
    lines += [_command("error", check.name, check_line(check, check.output)) for check in failed[:room]]
    if len(failed) > room:
        lines.append(_command("error", "llmconv verify", f"and {len(failed) - room} more, see the report"))
    if report.verdict == "inconclusive":
        lines.append(_command("warning", "llmconv verify", "; ".join([report.summary(), *report.notes])))
    return lines


def _command(kind: str, title: str, message: str) -> str:
    escaped = _data(title).replace(":", "%3A").replace(",", "%2C")
    return f"::{kind} title={escaped}::{_data(message)}"


def _data(text: str) -> str:
    """An escaped message, which cannot start another command."""
    return clean(text, SUMMARY_LIMIT).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
