"""llmconv verify: the graphs of a folder against the eager model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmconv.cli import options
from llmconv.errors import UsageProblem
from llmconv.progress import say

if TYPE_CHECKING:
    from llmconv.verify import Check


@click.command("verify")
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@click.option(
    "--graph",
    "graphs",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A graph of any exporter in the place of FOLDER; twice for those of prompt and steps.",
)
@click.option(
    "--input-map",
    metavar="NAME",
    help="How it names its inputs: auto (default), genai, llmconv, mobius, optimum, transformers, a JSON file.",
)
@click.option("--reference", type=click.Path(path_type=Path), help="HF folder of the model; default: as recorded.")
@click.option("--suite", type=click.Choice(["quick", "full"]), default="quick", show_default=True, help="How much.")
@click.option("--report", "report_folder", type=click.Path(path_type=Path), help="Write JSON, JUnit, Markdown, HTML.")
@click.option("--threads", type=click.IntRange(0), default=0, help="Of onnxruntime; 0 for one per core.")
@options.trust_remote_code
@options.as_json
@options.talk
@click.pass_context
def command(
    ctx: click.Context,
    folder: Path | None,
    graphs: tuple[Path, ...],
    input_map: str | None,
    reference: Path | None,
    suite: str,
    report_folder: Path | None,
    threads: int,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Compare every output of the graphs in FOLDER with the eager model; of another exporter's graph with `--graph`.

    Exit code 0: equal up to rounding. 1: a difference was found. 5: nothing could be compared.
    """
    from llmconv.runtime import SessionSettings
    from llmconv.verify import verify, verify_graphs
    from llmconv.verify.report import lines_of
    from llmconv.verify.report_files import write_report

    def show(checks: list[Check]) -> None:
        for line in lines_of(checks):
            click.echo(line)

    if (folder is None) is not bool(graphs):
        raise UsageProblem("give either FOLDER or `--graph FILE`", hint="FOLDER is what `llmconv export` left")
    if input_map and not graphs:
        raise UsageProblem("`--input-map` describes a `--graph`", hint="leave it out: FOLDER says what its graphs are")
    started = time.perf_counter()
    options_of_both: dict[str, Any] = {
        "reference": reference,
        "suite": suite,
        "settings": SessionSettings(threads=threads),
        "on_checks": None if as_json else show,
        "trust_remote_code": trust_remote_code,
    }
    if folder is None:
        report = verify_graphs(graphs, input_map=input_map or "auto", **options_of_both)
    else:
        report = verify(folder, **options_of_both)
    if report_folder:
        write_report(report, report_folder)
    if as_json:
        options.print_json(report.as_dict())
    else:
        for line in report.closing_lines():
            click.echo(line)
    say(f"{time.perf_counter() - started:.1f} s" + (f", report in {report_folder}" if report_folder else ""))
    ctx.exit(report.exit_code)
