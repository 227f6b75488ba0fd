"""`llmconv from-hf`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llmconv.cli import options
from llmconv.cli.command_group import Command
from llmconv.cli.options import option

GGUF_MIXTURES = ("q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0")


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
    "Element type of the floating-point weights; from q8_0 on: llama.cpp's mixtures of types of GGUF.",
    options.ElementType(["keep", "float32", "float16", "bfloat16", *GGUF_MIXTURES]),
    default="keep",
)
@option("--imatrix FILE", "Importance matrix of llama.cpp, for a mixture of fewer bits than q8_0.")
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
