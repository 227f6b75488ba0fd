"""What `verify` and `export --verify` share: the lines of a report; and the verification of a new export."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmconv.addresses import HubAddress, StoreAddress
from llmconv.errors import LlmconvError, UsageProblem, word
from llmconv.files.paths import local_only
from llmconv.progress import status

if TYPE_CHECKING:
    from llmconv.verify import Check, Report

Show = Callable[[list["Check"]], None]


def printer(*, every: bool) -> Show:
    """Prints checks as they are made: a line per finished scenario, or each check; an empty list prints the rest."""
    from llmconv.verify.report.progress_lines import ScenarioLines
    from llmconv.verify.results import lines_of

    scenarios = ScenarioLines()

    def show(checks: list[Check]) -> None:
        for line in lines_of(checks) if every else scenarios.add(checks) if checks else scenarios.close():
            status("")
            click.echo(line)

    return show


def print_report(report: Report, show: Show, *, quiet: bool, where: bool = False) -> None:
    """Prints the last checks and the closing lines of a report; `show` printed the checks so far.

    With `quiet` only the verdict is printed; with `where` also the location of a failure.
    """
    show([])
    for line in report.closing_lines() if not quiet else report.short_lines() if where else [report.summary()]:
        click.echo(line)


def require_verifiable(output: Path | StoreAddress | HubAddress | None, given: Mapping[str, Any]) -> None:
    """Raises UsageProblem, before anything is written, for an export elsewhere, or without graphs or weights."""
    if output is not None and not local_only(output):
        message = f"`--verify` runs the graphs from a local folder, and `{output}` is not on this machine"
        raise UsageProblem(message, hint="leave out `--verify`, or give a local `-o`, and upload the folder afterwards")
    for name, problem in (("dry_run", "writes no graphs"), ("graphs_only", "writes no weights to run the graphs with")):
        if given[name]:
            raise UsageProblem(f"`--{name.replace('_', '-')}` {problem}", hint="leave it out, or leave out `--verify`")


def verify_export(folder: Path, model: str, given: Mapping[str, Any], show: Show | None) -> Report:
    """Verifies a new export with the quick suite, quantized weights with `model`; raises as `verify`."""
    from llmconv.verify import verify
    from llmconv.verify.arguments import CODES

    text = given["calibrate"] if given["kv_cache"] or given["static_activations"] else None
    try:
        return verify(
            folder,
            reference=model if any(folder.glob(CODES)) else None,
            calibrate=None if text == "default" else text,
            trust_remote_code=given["trust_remote_code"],
            on_checks=show,
        )
    except LlmconvError:
        say_it_stays(folder)
        raise


def say_it_stays(folder: Path) -> None:
    """Prints to stderr that an export was kept though it was not found correct."""
    click.echo(f"the export stays in `{folder}`; `llmconv verify {word(folder)}` verifies it again", err=True)
