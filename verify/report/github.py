"""Annotations of GitHub Actions, `::error title=…::…`, which show failures next to the change.

A step shows at most ten annotations of each kind, so the last one contains the number of the others.
Source: docs.github.com, "Workflow commands for GitHub Actions".
"""

from __future__ import annotations

from llmconv.verify.results.report import SUMMARY_LIMIT, Report, check_line, clean

LIMIT = 9
"""One less than the maximum of a step."""


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
    return f"::{kind} title={_property(title)}::{_data(message)}"


def _data(text: str) -> str:
    """An escaped message, which cannot start another command."""
    return clean(text, SUMMARY_LIMIT).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
