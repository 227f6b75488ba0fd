"""llmconv verify: the graphs of a folder against the eager model."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmconv.cli import options
from llmconv.errors import UsageProblem
from llmconv.progress import is_quiet, say

if TYPE_CHECKING:
    from llmconv.runtime import SessionSettings
    from llmconv.verify import Check, Report

COST = ("text", "max_divergence", "min_agreement")
OF_GRAPHS, OF_FOLDER = ("input_map", *COST), ("low_memory", "allow_changed")
"""Options that only graphs of any exporter, and only a folder of llmconv's, take."""
COST_OPTIONS = "`--text`, `--max-divergence` and `--min-agreement`"


@click.command("verify")
@click.argument("folder", required=False)
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
@click.option("--reference", metavar="PATH", help="HF folder of the model; default: as recorded.")
@click.option(
    "--suite", type=click.Choice(["quick", "full"]), default="quick", show_default=True, help="Which scenarios to run."
)
@click.option("--scenario", "only", multiple=True, metavar="NAME", help="This scenario only; may be repeated.")
@click.option(
    "--text",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Text that the cost of a quantised --graph is measured on; default: random tokens.",
)
@click.option(
    "--max-divergence", type=click.FloatRange(0), metavar="NATS", help="Fail if the mean KL divergence exceeds this."
)
@click.option(
    "--min-agreement", type=click.FloatRange(0, 1), metavar="SHARE", help="Fewer equal likeliest tokens fail."
)
@click.option("--repeat", type=click.IntRange(1), default=1, help="Run every call so often; all must give equal bits.")
@click.option("--report", "report_folder", type=options.Output(), help="Write JSON, JUnit, Markdown, HTML.")
@click.option("--github", is_flag=True, help="Print failures as annotations of GitHub Actions, too.")
@click.option(
    "--bisect",
    is_flag=True,
    help="Name the first node that differs; list those that the model does not have.",
)
@click.option("--minimize", type=options.Output(), help="Write the smallest failing piece to a new folder.")
@click.option("--threads", type=click.IntRange(0), default=0, help="Of onnxruntime; 0 for one per core.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="That a run of a small graph may take; more weights and tokens may take more.  [default: 60]",
)
@click.option(
    "--low-memory/--no-low-memory",
    default=None,
    help="Hold one layer of the model at a time, or all of it. Default: all, where memory suffices.",
)
@click.option("--allow-changed", is_flag=True, help="A graph that was changed after its export is noted, not failed.")
@options.trust_remote_code
@options.as_json
@partial(
    options.talk,
    quiet="Print the verdict's line alone.",
    verbose="Print a line per graph and output; show the traceback of an error.",
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    folder: str | None,
    graphs: tuple[Path, ...],
    threads: int,
    timeout: float | None,
    report_folder: Path | None,
    github: bool,
    as_json: bool,
    **asked: Any,
) -> None:
    """Compare every output of the graphs in FOLDER with the eager model.

    With --graph instead of FOLDER, those of another exporter's graph: optimum-onnx, the ONNX Runtime GenAI builder,
    transformers' exporter, mobius-onnx. One with quantised weights is compared with the model of the same weights, and
    what they cost is told: divergence from the full model, likeliest tokens, perplexity on --text.

    Prints a line per scenario; where something differs, the outputs that do.

    Exit code 0: equal up to rounding. 1: a difference was found. 5: nothing could be compared.
    """
    from llmconv.runtime import SessionSettings
    from llmconv.verify.report.files import require_writable, write_report
    from llmconv.verify.report.github import annotation_lines

    _require_fitting(folder, graphs, asked)
    if report_folder:
        require_writable(report_folder)
    started = time.perf_counter()
    shown = _printer(every=ctx.meta.get(options.VERBOSE, False))
    quiet = as_json or is_quiet()
    settings = SessionSettings(threads=threads, timeout=timeout)
    report = _verified(folder, graphs, asked, settings=settings, show=None if quiet else shown)
    if report_folder:
        write_report(report, report_folder)
    if as_json:
        options.print_json(report.as_dict())
    else:
        shown([])
        for line in [report.summary()] if quiet else report.closing_lines():
            click.echo(line)
    for line in annotation_lines(report) if github else ():
        click.echo(line, err=as_json)
    say(f"{time.perf_counter() - started:.1f} s" + (f", report in {report_folder}" if report_folder else ""))
    ctx.exit(report.exit_code)


Show = Callable[[list["Check"]], None]


def _printer(*, every: bool) -> Show:
    """Prints checks as they come: a line per scenario when it is over, or each check; given none, what is left."""
    from llmconv.verify.report.progress_lines import ScenarioLines
    from llmconv.verify.results.report import lines_of

    scenarios = ScenarioLines()

    def show(checks: list[Check]) -> None:
        for line in lines_of(checks) if every else scenarios.add(checks) if checks else scenarios.close():
            click.echo(line)

    return show


def _verified(
    folder: str | None,
    graphs: tuple[Path, ...],
    asked: dict[str, Any],
    *,
    settings: SessionSettings,
    show: Show | None,
) -> Report:
    """The report; `asked` are the options that the library takes under the same names."""
    from llmconv.verify import verify, verify_graphs

    of_both = {name: value for name, value in asked.items() if name not in {*OF_GRAPHS, *OF_FOLDER}}
    given = {**of_both, "settings": settings, "on_checks": show}
    if folder is None:
        return verify_graphs(graphs, **{name: asked[name] for name in OF_GRAPHS if asked[name] is not None}, **given)
    return verify(folder, **{name: asked[name] for name in OF_FOLDER}, **given)


def _require_fitting(folder: str | None, graphs: tuple[Path, ...], asked: dict[str, Any]) -> None:
    """Raises UsageProblem where options do not fit each other."""
    if (folder is None) is not bool(graphs):
        raise UsageProblem("give either FOLDER or `--graph FILE`", hint="FOLDER is what `llmconv export` left")
    if asked["input_map"] and not graphs:
        raise UsageProblem("`--input-map` describes a `--graph`", hint="leave it out: FOLDER says what its graphs are")
    searches = asked["bisect"] or asked["minimize"] is not None
    if asked["low_memory"] and (graphs or searches or asked["repeat"] > 1):
        raise UsageProblem(
            "`--low-memory` takes FOLDER, runs every call once, and searches for no node",
            hint="leave out `--low-memory`, or `--graph`, `--repeat`, `--bisect` and `--minimize`",
        )
    if graphs and asked["allow_changed"]:
        raise UsageProblem("`--allow-changed` takes FOLDER", hint="leave it out: nothing is recorded of a `--graph`")
    if folder is not None and any(asked[name] is not None for name in COST):
        raise UsageProblem(f"{COST_OPTIONS} are for a `--graph` with quantised weights", hint="leave them out")
