"""`llmconv from-hf`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llmconv.cli import options
from llmconv.cli.command_group import Command
from llmconv.cli.options import option


@click.command(name="from-hf", cls=Command)
@click.argument("model")
@options.output
@options.shares
@option(
    "--to FORMAT", "Training format to write; see `llmconv formats`.", required=True, shell_complete=options.formats
)
@option("--shards", "Number of tensor-parallel parts.", click.IntRange(1), show_default=True, default=1)
@option(
    "--dtype",
    "Element type of the floating-point weights; q8_0 and q4_0: blocks of GGUF.",
    options.ElementType(["keep", "float32", "float16", "bfloat16", "q8_0", "q4_0"]),
    default="keep",
)
@options.overwrite
@options.resume
@options.dry_run
@options.as_json
@options.talk
def command(model: str, as_json: bool, dry_run: bool, output: Path, to: str, **choices: Any) -> None:
    """Convert the Hugging Face folder MODEL into the training checkpoint OUT.

    `to-hf` converts OUT back to the same tensors, bit for bit. A model that the format does not support is refused.
    """
    from llmconv.convert.from_hugging_face import from_hf

    plan = from_hf(model, output, to=to, dry_run=dry_run, **choices)
    if as_json:
        options.print_json({"format": to, **options.as_result(plan, output, dry_run)})
    else:
        options.print_plan(plan, output, dry_run)
