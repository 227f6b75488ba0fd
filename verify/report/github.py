"""Annotations of GitHub Actions: what fails appears beside the change, `::error title=…::…`.

A step shows ten of each kind and drops the rest without a word, so the last one tells how many there are more.
Source: docs.github.com, "Workflow commands for GitHub Actions".
"""

from __future__ import annotations

from llmconv.verify.results.report import Report, check_line, clean

LIMIT = 9
"""One less than a step shows."""


def annotation_lines(report: Report) -> list[str]:
    """One line per failed group of outputs, and one for the verdict where that is no pass."""
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
    """A message: nothing in it begins another command."""
    return clean(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
