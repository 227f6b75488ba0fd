"""`llmconv to-hf`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llmconv.cli import options
from llmconv.cli.help_page import Command


@click.command(name="to-hf", cls=Command)
@click.argument("source")
@options.converts
@options.shares
@click.option("--from", "format", metavar="FORMAT", help="Training format. [default: detected by content]")
@click.option(
    "--config",
    multiple=True,
    metavar="PATH",
    help="JSON or YAML file with configuration fields to add. May be repeated; later ones win.",
)
@click.option("--tokenizer", metavar="PATH", help="Tokenizer file or folder to use instead.")
@click.option(
    "--base", metavar="PATH", help="Model that training started from, if SOURCE contains only the trained weights."
)
@click.option("--drop", is_flag=True, help="Leave out parts that transformers does not support.")
@click.option(
    "--qkv-layout",
    type=click.Choice(["plain", "interleaved"]),
    help="Order of fused matrices in a MindFormers file: plain up to 1.4, interleaved since 1.5.",
)
@click.option(
    "--adapter",
    type=click.Choice(["merge", "split"]),
    help="Merge the LoRA adapter of a training run into its weights, or write it separately. [default: merge]",
)
@click.option(
    "--strategy",
    metavar="PATH",
    help="Strategy file or folder of a MindFormers run.  [default: next to the rank folders]",
)
@click.option("--root", metavar="KEYS", help="Model in a distributed checkpoint that has several, such as a.b.")
@click.option(
    "--code",
    metavar="FOLDER",
    help="Folder with the model's own Python files and its config.json, if they are elsewhere.",
)
@click.option(
    "--trust-remote-code",
    is_flag=True,
    help="Copy the model's own Python code, and run it to check the weights; only if you trust it.",
)
def command(source: str, as_json: bool, dry_run: bool, output: Path, **choices: Any) -> None:
    """Convert the training checkpoint SOURCE into the Hugging Face folder OUT.

    SOURCE is a file or folder; its format is detected by its content. Nothing in it is executed without
    --trust-remote-code. A Hugging Face folder is rewritten with --dtype or --max-shard-size.
    """
    from llmconv.convert.to_hf import to_hf

    plan = to_hf(source, output, dry_run=dry_run, **choices)
    if as_json:
        detected = {"format": plan.checkpoint.format, "source_type": plan.checkpoint.source_type or None}
        options.print_json({**detected, **options.as_result(plan, output, dry_run)})
    else:
        options.print_plan(plan, output, dry_run)
