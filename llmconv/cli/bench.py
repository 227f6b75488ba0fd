"""llmconv bench: prompts and steps over lengths and batch sizes, beside other exports and runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmconv.cli import options
from llmconv.errors import OutputFailed, UsageProblem
from llmconv.progress import say

if TYPE_CHECKING:
    from llmconv.bench import Measurement


class IntegerList(click.ParamType):  # type: ignore[type-arg] # generic for the type checker alone
    """`128,512`: whole numbers of at least 1."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """A tuple of them."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            numbers = (0,)
        if min(numbers) < 1:
            self.fail(f"`{value}` is no list of whole numbers such as 128,512", param, ctx)
        return numbers


@click.command("bench")
@click.argument("folder")
@click.option(
    "--against",
    multiple=True,
    metavar="CANDIDATE",
    help="FOLDER of another export, or RUNTIME:FOLDER (packed, torch, optimum, genai), or RUNTIME alone for the first "
    "folder. May be repeated.",
)
@click.option(
    "--lengths", type=IntegerList(), default=(), help="Tokens per prompt. [default: 128,512,2048,8192 that fit]"
)
@click.option("--batch-sizes", type=IntegerList(), default=(1,), help="Prompts side by side. [default: 1]")
@click.option("--new-tokens", type=click.IntRange(2), default=32, show_default=True, help="After each prompt.")
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="Rounds, after one to warm up.")
@click.option("--threads", type=click.IntRange(0), default=0, help="Of every candidate; 0 for one per core.")
@click.option(
    "--python",
    "pythons",
    multiple=True,
    metavar="RUNTIME=PATH",
    help="An interpreter that has the runtime, such as optimum=PATH.",
)
@click.option("--csv", "csv_file", type=options.Output(), help="Write the figures there.")
@click.option("--plot", "plot_file", type=options.Output(), help="Draw the curves there, as .png, .svg or .pdf.")
@options.as_json
@options.talk
@click.pass_context
def command(
    ctx: click.Context,
    folder: str,
    against: tuple[str, ...],
    lengths: tuple[int, ...],
    batch_sizes: tuple[int, ...],
    new_tokens: int,
    repeat: int,
    threads: int,
    pythons: tuple[str, ...],
    csv_file: Path | None,
    plot_file: Path | None,
    as_json: bool,
) -> None:
    """Measure prompts and steps of graphs over lengths and batch sizes.

    Candidates take turns, each in a process of its own, all with as many threads. A table of medians, least and most
    goes to stdout. Exit code 1: candidates gave different tokens.
    """
    from llmconv.bench import BenchCandidate, bench
    from llmconv.bench.plot import require_plotting, write_plot
    from llmconv.bench.table import table, write_csv

    _require_places(csv_file, plot_file)
    if plot_file:
        require_plotting(plot_file)
    interpreters = _interpreters(pythons)
    first = BenchCandidate.parse(folder, None, interpreters)
    result = bench(
        first,
        against=[BenchCandidate.parse(text, first.folder, interpreters) for text in against],
        lengths=lengths,
        batch_sizes=batch_sizes,
        new_tokens=new_tokens,
        repeat=repeat,
        threads=threads,
        on_cell=_say_cell,
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


def _require_places(csv_file: Path | None, plot_file: Path | None) -> None:
    """Before anything is measured."""
    from llmconv.files.safe_folder import require_plain

    if csv_file and csv_file == plot_file:
        raise UsageProblem(f"`--csv` and `--plot` are both `{csv_file}`", hint="give each a name of its own")
    for file in filter(None, (csv_file, plot_file)):
        if not file.parent.is_dir():
            raise OutputFailed(f"`{file}` lies in no folder", hint=f"make the folder `{file.parent}` first")
        require_plain(file)


def _interpreters(given: tuple[str, ...]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    from llmconv.bench.runtimes import RUNTIMES

    for text, (runtime, _, path) in zip(given, pairs, strict=True):
        if path and runtime not in RUNTIMES:
            raise UsageProblem(f"`--python {text}` names no runtime", hint=f"one of: {', '.join(RUNTIMES)}")
        if not runtime or not path:
            raise click.UsageError(f"`{text}` is no RUNTIME=PATH")
    return {runtime: path for runtime, _, path in pairs}


def _say_cell(cell: Measurement) -> None:
    say(f"{cell.candidate}, batch {cell.batch}, {cell.length} tokens: {cell.error or 'done'}")
