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
"""Options that are only for `--graph`, and options that are only for FOLDER."""
COST_OPTIONS = "`--text`, `--max-divergence` and `--min-agreement`"


@click.command("verify")
@click.argument("folder", required=False)
@click.option(
    "--graph",
    "graphs",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Graph of any exporter, instead of FOLDER; give it twice for prefill and decode.",
)
@click.option(
    "--input-map",
    metavar="NAME",
    help="Input names of --graph: auto (default), genai, llmconv, mobius, optimum, transformers, or a JSON file.",
)
@click.option("--reference", metavar="PATH", help="Hugging Face folder of the model. Default: as recorded at export.")
@click.option(
    "--suite",
    type=click.Choice(["quick", "full"]),
    default="quick",
    show_default=True,
    help="Which set of scenarios to run.",
)
@click.option("--scenario", "only", multiple=True, metavar="NAME", help="Run only this scenario. May be repeated.")
@click.option(
    "--text",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Text to measure the loss of a quantized --graph on. Default: random tokens.",
)
@click.option(
    "--max-divergence", type=click.FloatRange(0), metavar="NATS", help="Fail if the mean KL divergence exceeds this."
)
@click.option(
    "--min-agreement",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="Fail if fewer likeliest tokens agree than this.",
)
@click.option(
    "--repeat", type=click.IntRange(1), default=1, help="Number of runs of every call, which must agree bit for bit."
)
@click.option(
    "--report", "report_folder", type=options.Output(), help="Folder for the report as JSON, JUnit, Markdown and HTML."
)
@click.option("--github", is_flag=True, help="Also print failures as annotations of GitHub Actions.")
@click.option(
    "--bisect", is_flag=True, help="Find the first node that differs; list nodes that the model does not have."
)
@click.option("--minimize", type=options.Output(), help="Write the smallest failing subgraph to a new folder.")
@click.option("--threads", type=click.IntRange(0), default=0, help="Threads of onnxruntime; 0 for one per core.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="Time limit for a run of a small graph; larger models and prompts get more.  [default: 60]",
)
@click.option(
    "--low-memory/--no-low-memory",
    default=None,
    help="Load one layer of the model at a time, or all. Default: all, if memory suffices.",
)
@click.option("--allow-changed", is_flag=True, help="Note graphs that were changed after export, instead of failing.")
@options.trust_remote_code
@options.as_json
@partial(
    options.talk,
    quiet="Print only the verdict.",
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

    With --graph instead of FOLDER, verifies a graph of another exporter: optimum-onnx, the ONNX Runtime GenAI builder,
    transformers' exporter, mobius-onnx. A graph with quantized weights is compared with the model on the same weights,
    and the loss against the full model is reported: divergence, agreement of likeliest tokens, perplexity on --text.

    Prints a line per scenario, and the outputs that differ.

    Exit code 0: equal up to rounding. 1: a difference was found. 5: nothing could be compared.
    """
    from llmconv.runtime import SessionSettings
    from llmconv.verify.report.files import require_place, write_report
    from llmconv.verify.report.github import annotation_lines

    _require_fitting(folder, graphs, asked)
    if report_folder:
        require_place(report_folder)
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
    """A function that prints checks: a line per finished scenario, or each check; without checks, the rest."""
    from llmconv.verify.report.progress_lines import ScenarioLines
    from llmconv.verify.results.report import lines_of

    scenarios = ScenarioLines()

    def show(checks: list[Check]) -> None:
        for line in lines_of(checks) if every else scenarios.see(checks) if checks else scenarios.close():
            click.echo(line)

    return show


def _verified(
    folder: str | None, graphs: tuple[Path, ...], asked: dict[str, Any], *, settings: SessionSettings, show: Show | None
) -> Report:
    """The report; `asked` are the options that the library has under the same names."""
    from llmconv.verify import verify, verify_graphs

    of_both = {name: value for name, value in asked.items() if name not in {*OF_GRAPHS, *OF_FOLDER}}
    given = {**of_both, "settings": settings, "on_checks": show}
    if folder is None:
        return verify_graphs(graphs, **{name: asked[name] for name in OF_GRAPHS if asked[name] is not None}, **given)
    return verify(folder, **{name: asked[name] for name in OF_FOLDER}, **given)


def _require_fitting(folder: str | None, graphs: tuple[Path, ...], asked: dict[str, Any]) -> None:
    """Raises UsageProblem if options exclude each other."""
    if (folder is None) is not bool(graphs):
        raise UsageProblem(
            "give either FOLDER or `--graph FILE`", hint="FOLDER is the folder that `llmconv export` wrote"
        )
    if asked["input_map"] and not graphs:
        raise UsageProblem(
            "`--input-map` describes a `--graph`", hint="leave it out: FOLDER records the names of its graphs' inputs"
        )
    searches = asked["bisect"] or asked["minimize"] is not None
    if asked["low_memory"] and (graphs or searches or asked["repeat"] > 1):
        raise UsageProblem(
            "`--low-memory` needs FOLDER, and runs every call once without a search",
            hint="leave out `--low-memory`, or `--graph`, `--repeat`, `--bisect` and `--minimize`",
        )
    if graphs and asked["allow_changed"]:
        raise UsageProblem("`--allow-changed` needs FOLDER", hint="leave it out: a `--graph` has no recorded checksum")
    if folder is not None and any(asked[name] is not None for name in COST):
        raise UsageProblem(f"{COST_OPTIONS} are for a `--graph` with quantized weights", hint="leave them out")
