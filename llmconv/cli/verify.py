"""llmconv verify: the graphs of a folder against the eager model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmconv.cli import options
from llmconv.progress import say

if TYPE_CHECKING:
    from llmconv.verify import Check


@click.command("verify")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--reference", type=click.Path(path_type=Path), help="HF folder of the model; default: as recorded.")
@click.option("--suite", type=click.Choice(["quick", "full"]), default="quick", show_default=True, help="How much.")
@click.option("--report", "report_folder", type=click.Path(path_type=Path), help="Write JSON, JUnit, Markdown, HTML.")
@click.option("--bisect", is_flag=True, help="After a failure, name the first node that differs.")
@click.option("--minimize", type=click.Path(path_type=Path), help="Write the smallest failing piece to a new folder.")
@click.option("--threads", type=click.IntRange(0), default=0, help="Of onnxruntime; 0 for one per core.")
@options.trust_remote_code
@options.as_json
@options.talk
@click.pass_context
def command(
    ctx: click.Context,
    folder: Path,
    reference: Path | None,
    suite: str,
    report_folder: Path | None,
    bisect: bool,
    minimize: Path | None,
    threads: int,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Compare every output of the graphs in FOLDER with the eager model.

    Exit code 0: equal up to rounding. 1: a difference was found. 5: nothing could be compared.
    """
    from llmconv.runtime import SessionSettings
    from llmconv.verify import verify
    from llmconv.verify.report import lines_of
    from llmconv.verify.report_files import write_report

    def show(checks: list[Check]) -> None:
        for line in lines_of(checks):
            click.echo(line)

    started = time.perf_counter()
    report = verify(
        folder,
        reference=reference,
        suite=suite,
        settings=SessionSettings(threads=threads),
        on_checks=None if as_json else show,
        trust_remote_code=trust_remote_code,
        bisect=bisect,
        minimize=minimize,
    )
    if report_folder:
        write_report(report, report_folder)
    if as_json:
        options.print_json(report.as_dict())
    else:
        for line in report.closing_lines():
            click.echo(line)
    say(f"{time.perf_counter() - started:.1f} s" + (f", report in {report_folder}" if report_folder else ""))
    ctx.exit(report.exit_code)
