"""`llmconv bench`."""

from __future__ import annotations

from typing import Any

import click

from llmconv.cli import options
from llmconv.cli.command_group import Command
from llmconv.cli.options import option
from llmconv.errors import UsageProblem
from llmconv.progress import say


class IntegerList(click.ParamType):  # type: ignore[type-arg] # generic for the type checker alone
    """`128,512`: a list of positive integers."""

    name = "integers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            numbers = (0,)
        if min(numbers) < 1:
            self.fail(f"invalid list of integers `{value}`: give for example 128,512", param, ctx)
        return numbers


@click.command("bench", cls=Command)
@click.argument("folder")
@option(
    "--against CANDIDATE",
    "Compare with FOLDER, with RUNTIME:FOLDER (packed, lookup, torch, optimum, genai), or with RUNTIME for the same "
    "folder. May be repeated.",
    multiple=True,
)
@option("--lengths", "Prompt lengths. [default: 128,512,2048,8192 that fit]", IntegerList(), default=())
@option("--batch-sizes", "Numbers of prompts per batch. [default: 1]", IntegerList(), default=(1,))
@option("--new-tokens", "New tokens per prompt.", click.IntRange(2), show_default=True, default=32)
@option("--repeat", "Rounds, after a warm-up.", click.IntRange(1), show_default=True, default=3)
@option("--threads", "Threads per candidate; 0 for one per core.", click.IntRange(0), default=0)
@option(
    "--provider NAME",
    "Provider of onnxruntime: cpu, cuda, …; torch uses the device of that name, genai its own configuration.",
    default="cpu",
)
@option(
    "--python pythons RUNTIME=PATH", "Python interpreter that has the runtime, such as optimum=PATH.", multiple=True
)
@option("--csv csv_file", "Write the figures to this file.", options.Output())
@option("--plot plot_file", "Plot the figures to a .png, .svg or .pdf file.", options.Output())
@options.as_json
@options.talk
@click.pass_context
def command(
    ctx: click.Context, /, folder: str, against: tuple[str, ...], pythons: tuple[str, ...], as_json: bool, **given: Any
) -> None:
    """Measure prefill and decode speed over prompt lengths and batch sizes.

    Candidates take turns, each in its own process, all with the same number of threads. Prints a table of medians with
    minimum and maximum. Exit code 1: candidates gave different tokens.
    """
    from llmconv.bench import BenchCandidate, bench
    from llmconv.bench.bench import RUNTIMES, require_plotting, table, write_csv, write_plot
    from llmconv.interpreters import parse_interpreters

    csv_file, plot_file = given.pop("csv_file"), given.pop("plot_file")
    # checks the output files before anything is measured
    from llmconv.files.safe_folder import require_parents, require_plain

    if csv_file and csv_file == plot_file:
        raise UsageProblem(f"`--csv` and `--plot` are both `{csv_file}`", hint="give two different names")
    for file in filter(None, (csv_file, plot_file)):
        require_parents(file)
        require_plain(file)
    if plot_file:
        require_plotting(plot_file)
    interpreters = parse_interpreters(pythons, RUNTIMES)
    first = BenchCandidate.parse(folder, None, interpreters)
    result = bench(
        first,
        against=[BenchCandidate.parse(text, first.folder, interpreters) for text in against],
        **given,
        on_cell=lambda cell: say(f"{cell.candidate}, batch {cell.batch}, {cell.length} tokens: {cell.error or 'done'}"),
    )
    if as_json:
        options.print_json(result.as_dict())
    else:
        click.echo(table(result))
    if csv_file:
        write_csv(result, csv_file)
    if plot_file:
        write_plot(result, plot_file)
    ctx.exit(0 if result.agrees else 1)
