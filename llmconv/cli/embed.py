"""`llmconv embed`."""

from __future__ import annotations

from typing import Any

import click

from llmconv.cli import options
from llmconv.cli.command_group import Command
from llmconv.cli.options import option, refuse_file_name
from llmconv.errors import UsageProblem


@click.command("embed", cls=Command)
@click.argument("model", metavar="FOLDER")
@click.argument("texts", metavar="[TEXT]...", nargs=-1)
@option("--text-file FILE", "File with one text per line; - for standard input.")
@option("--prompt-name NAME", "The model's own prompt to put in front, such as query.")
@option("--batch-size", "Number of texts per run.", click.IntRange(1), show_default=True, default=8)
@option("--output-file FILE", "Write a .npy array, or JSON lines, instead of stdout.", options.Output())
@option("--overwrite", "Replace the output file.")
@options.session
@options.as_json
@options.talk
def command(model: str, texts: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Print the embedding of each text.

    FOLDER has the graph that `llmconv export --task` wrote. Each line of the output is a JSON object with `text` and
    `embedding`; with a classifier `logits` of its classes, with a reranker `score`. A .npy file has one row per text,
    in float32.
    """
    from llmconv.embedding import embed

    if as_json and given["output_file"]:
        raise UsageProblem("`--json` prints to stdout, and `--output-file` writes a file", hint="give one of them")
    for text in texts:
        refuse_file_name(text, "text", "--text-file")
    found = embed(model, texts, **given)
    if as_json:
        options.print_json({"role": found.role, "results": found.rows()})
    elif not given["output_file"]:
        click.echo(found.lines(), nl=False)
