"""What a run did, as a table for the terminal, Markdown for a page, and JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmconv.files.safe_folder import replace_file
from llmconv.steps.execution import FAILED, LEFT, REPORT_FILES, Outcome
from llmconv.version import __version__

COLUMNS = ("step", "status", "time", "why")


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """That of the step that failed; 0 if none did."""
    return next((one.exit_code for one in outcomes if one.status == FAILED), 0)


def as_dict(file: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The content of `--json` and of `run.json`."""
    steps = [
        {
            "name": one.step.name,
            "command": one.step.line,
            "status": one.status,
            "reason": one.reason,
            "seconds": round(one.seconds, 3),
            "exit_code": one.exit_code,
            **({"verdict": one.verdict} if one.verdict else {}),
        }
        for one in outcomes
    ]
    return {"llmconv": __version__, "file": file, "exit_code": exit_code(outcomes), "steps": steps}


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each step, in columns."""
    rows = [COLUMNS, *(_row(one) for one in outcomes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(one: Outcome) -> tuple[str, str, str, str]:
    seconds = f"{one.seconds:.1f} s" if one.seconds else ""
    failure = f"exit code {one.exit_code}" if one.status == FAILED else ""
    verdict = f"verdict: {one.verdict}" if one.verdict and one.status != LEFT else ""
    return one.step.name, one.status, seconds, "; ".join(filter(None, (failure or one.reason, verdict)))


def markdown(file: str, outcomes: Sequence[Outcome]) -> str:
    """The table and the commands, for the summary of a CI job."""
    code = exit_code(outcomes)
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(_row(one) for one in outcomes)]
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
    commands = [one.step.line for one in outcomes]
    result = f"failed with exit code {code}" if code else "all steps are done"
    return "\n".join([f"# {file}: {result}", "", *lines, "", "```sh", *commands, "```", ""])


def write(folder: Path, file: str, outcomes: Sequence[Outcome]) -> None:
    """Writes the files of `REPORT_FILES` into `folder`; `file` is the name of the run file."""
    texts = json.dumps(as_dict(file, outcomes), indent=2) + "\n", markdown(file, outcomes)
    for name, text in zip(REPORT_FILES, texts, strict=True):
        replace_file(folder / name, text.encode())
