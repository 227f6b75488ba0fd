"""The report as files: report.json, junit.xml, summary.md and report.html, all escaped, none needs a network."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

from llmconv.calls import checked
from llmconv.errors import OutputFailed
from llmconv.folder import Folder
from llmconv.paths import Written
from llmconv.verify.html import render_html
from llmconv.verify.report import LINE_LIMIT, NAME_LIMIT, Check, Report, clean

XML_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 does not allow, section 2.2."""

MARKDOWN_ROWS = 200
"""A CI step summary holds 1 MiB; a reader holds less."""

COLUMNS = ("verdict", "scenario", "graph", "output", "sigma", "worst row", "max abs", "detail")


NAMES = ("report.json", "junit.xml", "summary.md", "report.html")
ANOTHER = "give another folder to `--report`"
ROOM = 1 << 20
"""Bytes that a report may take."""


@checked
def write_report(report: Report, folder: Written) -> None:
    """Writes the four files into `folder`, which is made if need be.

    Raises:
        OutputFailed: a file cannot be written.
    """
    folder = Path(folder)
    texts = (render_json(report), render_junit(report), render_markdown(report), render_html(report))
    files = dict(zip(NAMES, texts, strict=True))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with Folder.open(folder) as home:
            home.sweep()
            home.write_together({name: text.encode("utf-8", "replace") for name, text in files.items()})
    except OSError as error:
        raise OutputFailed(f"cannot write the report to `{folder}`: {error.strerror}", hint=ANOTHER) from error


def check_report(folder: Path) -> None:
    """Refuses before anything is compared a folder to which the report could not be written.

    Raises:
        InputRefused: something in the way is neither a file nor a link.
        OutputFailed: it may not be written to, or its disk is full.
    """
    home = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(place))
    problem = "" if home.is_dir() else f"`{home}` is not a folder"
    if not problem and not os.access(home, os.W_OK | os.X_OK):
        problem = f"`{home}` may not be written to"
    if not problem and shutil.disk_usage(home).free < ROOM:
        problem = "no space left"
    if problem:
        raise OutputFailed(f"cannot write the report to `{folder}`: {problem}", hint=ANOTHER)
    if home == folder.absolute():
        with Folder.open(folder) as opened:
            for name in NAMES:
                opened.require_replaceable(name)


def render_json(report: Report) -> str:
    """As `llmconv verify --json` prints it."""
    return json.dumps(report.as_dict(), indent=2) + "\n"


def render_junit(report: Report) -> str:
    """One test case per check: class is scenario and graph, name is the output."""
    counts = {verdict: sum(check.verdict == verdict for check in report.checks) for verdict in ("fail", "skip")}
    suite = ElementTree.Element(
        "testsuite",
        name=_xml(f"llmconv verify {report.folder}"),
        tests=str(len(report.checks)),
        failures=str(counts["fail"]),
        skipped=str(counts["skip"]),
        errors="0",
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
        message = f"step {check.step}, sigma {check.sigma:.2f}, worst row {check.row_sigma:.2f} {check.detail}"
        ElementTree.SubElement(case, "failure", message=_xml(message))
    elif check.verdict == "skip":
        ElementTree.SubElement(case, "skipped", message=_xml(check.detail))


def _xml(text: str) -> str:
    return XML_ILLEGAL.sub("?", text)


def render_markdown(report: Report) -> str:
    """Verdict, where to look, and the worst of every scenario, first of those that differ."""
    lines = [f"# {report.verdict.upper()}: {_cell(report.folder)}", "", _cell(report.summary()), ""]
    lines += [f"**Where:** {_cell(report.where.text, LINE_LIMIT)}", ""] if report.where else []
    lines += [f"* {_cell(note, LINE_LIMIT)}" for note in report.notes] + [""]
    if report.quantization:
        lines += ["**Quantisation:**", "", *(f"* {_cell(line)}" for line in report.quantization.lines()), ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    shown = sorted(report.highlights(), key=lambda check: check.verdict != "fail")
    lines += [_row(check) for check in shown[:MARKDOWN_ROWS]]
    lines += ["", f"and {len(shown) - MARKDOWN_ROWS} more rows in report.json"] if len(shown) > MARKDOWN_ROWS else []
    return "\n".join(lines) + "\n"


def _row(check: Check) -> str:
    cells = [check.verdict, check.name, check.graph, check.output, f"{check.sigma:.2f}", f"{check.row_sigma:.2f}"]
    return "| " + " | ".join(_cell(cell) for cell in [*cells, f"{check.max_abs:.1e}", check.detail]) + " |"


def _cell(text: str, limit: int = NAME_LIMIT) -> str:
    """Text that Markdown does not interpret."""
    return re.sub(r"([\\`*_{}\[\]<>#|!~&@])", r"\\\1", clean(text, limit))
