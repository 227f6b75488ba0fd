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

COST_OPTIONS = "`--text`, `--max-divergence` and `--min-agreement`"


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
@click.option("--scenario", "only", multiple=True, metavar="NAME", help="This scenario only; may be repeated.")
@click.option(
    "--text",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Text that the cost of a quantised --graph is measured on; default: random tokens.",
)
@click.option("--max-divergence", type=click.FloatRange(0), metavar="NATS", help="A larger mean cost fails, in KL.")
@click.option(
    "--min-agreement", type=click.FloatRange(0, 1), metavar="SHARE", help="Fewer equal likeliest tokens fail."
)
@click.option("--repeat", type=click.IntRange(1), default=1, help="Run every call so often; all must give equal bits.")
@click.option("--report", "report_folder", type=click.Path(path_type=Path), help="Write JSON, JUnit, Markdown, HTML.")
@click.option("--github", is_flag=True, help="Print failures as annotations of GitHub Actions, too.")
@click.option("--bisect", is_flag=True, help="After a failure, name the first node that differs.")
@click.option("--minimize", type=click.Path(path_type=Path), help="Write the smallest failing piece to a new folder.")
@click.option("--threads", type=click.IntRange(0), default=0, help="Of onnxruntime; 0 for one per core.")
@click.option("--low-memory", is_flag=True, help="Hold no more of the model than one layer: slower, for large models.")
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
    only: tuple[str, ...],
    text: Path | None,
    max_divergence: float | None,
    min_agreement: float | None,
    repeat: int,
    report_folder: Path | None,
    github: bool,
    bisect: bool,
    minimize: Path | None,
    threads: int,
    low_memory: bool,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Compare every output of the graphs in FOLDER with the eager model.

    With --graph instead of FOLDER, those of another exporter's graph: optimum-onnx, the ONNX Runtime GenAI builder,
    transformers' exporter, mobius-onnx. One with quantised weights is compared with the model of the same weights, and
    what they cost is told: divergence from the full model, likeliest tokens, perplexity on --text.

    Exit code 0: equal up to rounding. 1: a difference was found. 5: nothing could be compared.
    """
    from llmconv.runtime import SessionSettings
    from llmconv.verify import verify, verify_graphs
    from llmconv.verify.github import annotation_lines
    from llmconv.verify.report import lines_of
    from llmconv.verify.report_files import write_report

    def show(checks: list[Check]) -> None:
        for line in lines_of(checks):
            click.echo(line)

    _require_fitting(
        folder, graphs, input_map, searches=bisect or minimize is not None, low_memory=low_memory, repeat=repeat
    )
    cost: dict[str, Any] = {"text": text, "max_divergence": max_divergence, "min_agreement": min_agreement}
    if folder is not None and any(value is not None for value in cost.values()):
        raise UsageProblem(f"{COST_OPTIONS} are for a `--graph` with quantised weights", hint="leave them out")
    started = time.perf_counter()
    options_of_both: dict[str, Any] = {
        "reference": reference,
        "suite": suite,
        "only": only,
        "repeat": repeat,
        "settings": SessionSettings(threads=threads),
        "on_checks": None if as_json else show,
        "trust_remote_code": trust_remote_code,
        "bisect": bisect,
        "minimize": minimize,
    }
    if folder is None:
        report = verify_graphs(graphs, input_map=input_map or "auto", **cost, **options_of_both)
    else:
        report = verify(folder, low_memory=low_memory, **options_of_both)
    if report_folder:
        write_report(report, report_folder)
    if as_json:
        options.print_json(report.as_dict())
    else:
        for line in report.closing_lines():
            click.echo(line)
    for line in annotation_lines(report) if github else ():
        click.echo(line, err=as_json)
    say(f"{time.perf_counter() - started:.1f} s" + (f", report in {report_folder}" if report_folder else ""))
    ctx.exit(report.exit_code)


def _require_fitting(
    folder: Path | None,
    graphs: tuple[Path, ...],
    input_map: str | None,
    *,
    searches: bool,
    low_memory: bool,
    repeat: int,
) -> None:
    """Raises UsageProblem where options do not fit each other."""
    if (folder is None) is not bool(graphs):
        raise UsageProblem("give either FOLDER or `--graph FILE`", hint="FOLDER is what `llmconv export` left")
    if input_map and not graphs:
        raise UsageProblem("`--input-map` describes a `--graph`", hint="leave it out: FOLDER says what its graphs are")
    if low_memory and (graphs or searches or repeat > 1):
        raise UsageProblem(
            "`--low-memory` takes FOLDER, runs every call once, and searches for no node",
            hint="leave out `--low-memory`, or `--graph`, `--repeat`, `--bisect` and `--minimize`",
        )
